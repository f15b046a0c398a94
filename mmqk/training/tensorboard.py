"""Writes a selection of the values to TensorBoard: few tags, charts of all modalities, and alarms."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from mmqk.monitors import summary
from mmqk.store import Alarm, naming, parsed_tag, read_alarms

PAGES: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"))
_TAGS = [tag for charts in PAGES.values() for tag in charts.values()]
# Statistics without layers.
_WHOLE = {statistic for tag in _TAGS if "/" not in tag for statistic in tag.split("|")} | {"lr"}


def over_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the tags of the charts: statistics by layer are reduced over layers, as in ``q_norm/image/max``.

    For two modalities these are at most 60 tags; metrics.jsonl has all values.
    """
    kept = {}
    for name, value in metrics.items():
        parsed = parsed_tag(name)
        if parsed.statistic in _WHOLE and parsed.head is None and parsed.layer is None:
            kept[name] = value
    return kept | summary.over_layers(metrics)


def custom_scalars(modalities: tuple[str, ...]) -> dict[str, dict[str, list]]:
    """Return the layout of the custom-scalars page: one chart per statistic with all modalities."""
    names = "|".join(modalities)

    def pattern(tag: str) -> str:
        statistics, slash, reducer = tag.partition("/")
        return rf"^({statistics})(/({names})(-({names}))?)?{slash}{reducer}$"

    return {
        page: {title: ["Multiline", [pattern(tag)]] for title, tag in charts.items()} for page, charts in PAGES.items()
    }


class StoryLogger(TensorBoardLogger):
    """Writes extremes and medians over layers to TensorBoard, with all modalities in one chart.

    A run writes one event run: TensorBoard selects none if there are more than 40.

    It also writes alarms as text, and their number.

    Args:
        folder: The run folder.
        modalities: Names of the vocabulary blocks, in order.
        layers: Whether to write all tags, including those by layer and head.
        resumed_at: Step of a resume. TensorBoard discards the events of earlier processes after this step, or all
            events of earlier processes if ``resumed_at`` is None.
    """

    def __init__(self, folder, modalities: tuple[str, ...], layers: bool = False, resumed_at: int | None = None):
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
        with naming(self._folder / "events.out.tfevents"):
            self.experiment._get_file_writer().add_summary(Summary(value=scalars), step)


def _silence_writer_thread() -> None:
    """Do not print a disk error of TensorBoard's writer thread, because the next write raises the error again."""
    from tensorboard.summary.writer import event_file_writer

    class Worker(event_file_writer._AsyncWriterThread):
        def run(self) -> None:
            with contextlib.suppress(OSError):
                super().run()

    if event_file_writer._AsyncWriterThread.__module__ != __name__:
        event_file_writer._AsyncWriterThread = Worker
