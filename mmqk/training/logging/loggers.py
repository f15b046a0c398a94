"""Loggers that write all values to metrics.jsonl, and a selection of them to TensorBoard."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from mmqk.store import Alarm, MetricsWriter, naming, read_alarms, tag
from mmqk.training.logging.dashboard import custom_scalars, over_layers
from mmqk.training.logging.hparams import outcome


class RunLogger(Logger):
    """Writes all values to metrics.jsonl, one line per step; an alarm of an earlier step adds another line
    for that step."""

    def __init__(self, path):
        super().__init__()
        self._path = path
        self._writer: Any = None
        self._alarms: Counter[tuple[int, str]] = Counter()

    @property
    def name(self) -> str:
        return "mmqk"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None, "every value of a run belongs to a step"
        if self._writer is None:
            self._writer = self._open()
        self._writer.write(step, metrics)

    def _open(self) -> Any:
        return MetricsWriter(self._path)

    @rank_zero_only
    def log_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Log ``alarm/<name>``, the number of series in which this alarm begins at a step, and flush."""
        began = [(alarm.step, alarm.name) for alarm in alarms]
        self._alarms.update(began)
        for step, name in sorted(set(began), reverse=True):  # the current step comes first
            self.log_metrics({tag("alarm", name): self._alarms[step, name]}, step)
        self.save()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: run.json and config.yaml have the configuration."""

    @rank_zero_only
    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class StoryLogger(TensorBoardLogger):
    """Writes extremes and medians over layers to TensorBoard, with all modalities in one chart.

    A run writes one event run: TensorBoard selects none if there are more than 40.

    It also writes alarms as text, and their number. At the end of the run, it writes the outcome as a row of the
    HParams page.

    Args:
        folder: The run folder.
        modalities: Names of the vocabulary blocks, in order.
        layers: Whether to write all tags, including those by layer and head.
        resumed_at: Step of a resume. TensorBoard discards the events of earlier processes after this step, or all
            events of earlier processes if ``resumed_at`` is None.
    """

    def __init__(
        self, folder, modalities: tuple[str, ...], layers: bool = False, resumed_at: int | None = None
    ):
        _silence_writer_thread()
        purge = 0 if resumed_at is None else resumed_at + 1  # without a checkpoint, the run starts again
        super().__init__(save_dir=str(folder), name="", version="", default_hp_metric=False, purge_step=purge)
        self._folder, self._resumed_at = Path(folder), resumed_at
        self._modalities, self._layers, self._begun = modalities, layers, False
        self._step = self._alarms = 0

    @property
    def experiment(self) -> Any:
        """TensorBoard's writer. The first access opens the event file."""
        with naming(self._folder / "events.out.tfevents"):
            return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self._begin(step)
        self._step = max(step, self._step)
        self._scalars(dict(metrics) if self._layers else over_layers(metrics), step)

    @rank_zero_only
    def log_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Write the alarms as text under ``alarm/<name>``, and their number."""
        for step, found in groupby(sorted(alarms, key=lambda alarm: alarm.step), lambda alarm: alarm.step):
            by_name: dict[str, list[str]] = {}
            for alarm in found:
                self._alarms += 1
                by_name.setdefault(alarm.name, []).append(alarm.sentence)
            for name, sentences in by_name.items():
                self.experiment.add_text(f"alarm/{name}", "\n".join(f"- {s}" for s in sentences), step)
            self._scalars({"alarms": self._alarms}, step)

    def save(self) -> None:
        """Flush the events. Do not write hparams.yaml, because config.yaml has the configuration."""
        with naming(self._folder / "events.out.tfevents"):
            self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._begun:
            self._scalars({"alarms": self._alarms}, self._step)
        elif self._resumed_at is not None and status == "success":  # the run was killed after its last checkpoint
            self._begin(self._resumed_at)
        if self._begun:
            for summary in outcome(self._folder, self._modalities):
                self._write(summary, None)
        with naming(self._folder / "events.out.tfevents"):
            super().finalize(status)

    def _begin(self, step: int) -> None:
        """Write the layout, and count the alarms of a resumed run."""
        if self._begun:
            return
        self._begun = True
        self.experiment.add_custom_scalars(custom_scalars(self._modalities))
        if self._resumed_at is not None:
            self._alarms = sum(alarm.step <= self._resumed_at for alarm in read_alarms(self._folder))
        else:
            self._scalars({"alarms": 0}, step)

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One protobuf per step is 27 times cheaper than add_scalar for each of 500 values.
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Summary(value=scalars), step)

    def _write(self, summary: Any, step: int | None) -> None:
        with naming(self._folder / "events.out.tfevents"):
            self.experiment._get_file_writer().add_summary(summary, step)


def _silence_writer_thread() -> None:
    """Do not print a disk error of TensorBoard's writer thread, because the next write raises the error again."""
    from tensorboard.summary.writer import event_file_writer

    class Worker(event_file_writer._AsyncWriterThread):
        def run(self) -> None:
            with contextlib.suppress(OSError):
                super().run()

    if event_file_writer._AsyncWriterThread.__module__ != __name__:
        event_file_writer._AsyncWriterThread = Worker
