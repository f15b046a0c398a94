"""Loggers that write all values to metrics.jsonl, W&B and MLflow, and a selection of them to TensorBoard."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from mmqk import store
from mmqk.monitors.formulas.reduce import over_layers
from mmqk.store import Alarm, MetricsWriter, UserError, naming, parse_tag, read_alarms
from mmqk.store.errors import reason_of
from mmqk.store.metrics import METRICS_NAME

if TYPE_CHECKING:
    from mmqk.config import RunConfig


class RunLogger(Logger):
    """Writes all values to metrics.jsonl, one line per step, or passes them to W&B or MLflow. An alarm of an earlier
    step adds another line for that step.

    Args:
        path: metrics.jsonl. The first rank opens it with the first values.
        integration: Gets the values instead.
    """

    def __init__(self, path: Path, integration: Integration | None = None):
        super().__init__()
        self._path, self._integration = path, integration
        self._writer: MetricsWriter | Integration | None = integration
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
            self._writer = self._integration or MetricsWriter(self._path)
        self._writer.write(step, metrics)

    @rank_zero_only
    def log_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Log ``alarm/<name>``, the number of series in which this alarm begins at a step, and flush."""
        began = [(alarm.step, alarm.name) for alarm in alarms]
        self._alarms.update(began)
        for step, name in sorted(set(began), reverse=True):  # the current step comes first
            self.log_metrics({store.tag("alarm", name): self._alarms[step, name]}, step)
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


LOGGERS_NAME = "loggers.json"
_MOST_METRICS = 1000  # maximum per request to MLflow
# MLflow's status for each status of a run.
_MLFLOW_STATUS = {"completed": "FINISHED", "interrupted": "KILLED"}


def last_logged(run: RunConfig) -> int:
    """Return the last step in metrics.jsonl, or -1 if there is none. Call it before a resume removes the steps after
    its checkpoint."""
    if not {"wandb", "mlflow"} & set(run.logging):
        return -1
    lines = store.read_metrics(run.out / METRICS_NAME)
    return lines[-1]["step"] if lines else -1


def open_integrations(run: RunConfig, logged: int) -> list[RunLogger]:
    """Open and return the loggers of ``run.logging`` other than TensorBoard. Call it only in the first process of a
    run.

    ``loggers.json`` stores the ids of the W&B run and the MLflow run, so that a resume continues these runs, and the
    last step that each run may have received. A resume repeats the steps after its checkpoint, but does not log a
    step twice. MLflow reports the last step that it has received. W&B in offline mode cannot report this step, so
    after a kill the W&B run may lack the last steps.

    Args:
        run: The resolved configuration.
        logged: The result of `last_logged`.

    Raises:
        UserError: a logger cannot start.
    """
    path = run.out / LOGGERS_NAME
    known: dict[str, Any] = store.read_json(path) or {}
    opened = []
    for name in (name for name in run.logging if name in _OPEN):
        before, (start, advice) = known.get(name, {}), _OPEN[name]
        try:
            logger, run_id, last = start(run, before.get("id"))
        except Exception as error:  # wandb, mlflow and their transports raise different errors
            raise UserError(f"logging: {name} cannot start ({reason_of(error)}): {advice}.") from error
        step = -1 if not before else max(before.get("step", -1), logged) if last is None else last
        known[name] = {"id": run_id, "step": step}
        store.write_json(path, known)
        opened.append(RunLogger(run.out / METRICS_NAME, Integration(run.out, name, logger, step)))
    return opened


class Integration:
    """Passes the values of each step, in one call and under the names of metrics.jsonl, to a logger of Lightning.

    If W&B or MLflow raises an error during the run, such as a lost connection, the error is printed and the logger
    gets no further values. The run continues, and metrics.jsonl has all values.

    Args:
        folder: The run folder. If its metrics.jsonl has steps after ``step``, they are logged first.
        name: wandb or mlflow.
        logger: Lightning's logger.
        step: Last step that the logger has received.
    """

    def __init__(self, folder: Path, name: str, logger: Any, step: int):
        self._folder, self._kind, self._logger, self._last = folder, name, logger, step
        self._failed, self._step = False, -1
        self._values: dict[str, float] = {}
        for line in store.read_metrics(folder / METRICS_NAME):
            self.write(line.pop("step"), line)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Collect the values of a step, like `MetricsWriter`; log them when a later step begins or on `flush`."""
        if step != self._step:
            self._emit()
        self._step = step
        self._values.update(values)

    def flush(self) -> None:
        """Log the collected values and save."""
        self._emit()
        self._safely(self._logger.save)

    def close(self) -> None:
        """Flush, and end the run of the logger with the status of this run."""
        self.flush()
        stored = store.read_status(self._folder)
        ended = "failed" if stored is None else stored.status
        if self._kind == "wandb":
            self._safely(lambda: self._logger.experiment.finish(exit_code=int(ended != "completed")))
        else:
            self._safely(lambda: self._logger.finalize(_MLFLOW_STATUS.get(ended, "FAILED")))

    def _emit(self) -> None:
        values, self._values = self._values, {}
        if self._step > self._last:
            rest, most = iter(values.items()), _MOST_METRICS if self._kind == "mlflow" else len(values)
            while part := dict(islice(rest, most)):
                self._safely(partial(self._logger.log_metrics, part, self._step))

    def _safely(self, call: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:
            self._failed = True
            lost = f"{self._kind} gets no further values ({reason_of(error)}); {METRICS_NAME} has all values."
            print(lost, file=sys.stderr)


def _wandb(run: RunConfig, run_id: str | None) -> tuple[Logger, str, None]:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    experiment = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "mmqk"),
        name=_title(run),
        dir=run.out,
        id=run_id,
        resume="allow",
        reinit="create_new",  # do not change a run that the caller has begun
        config=run.nested(),
        settings=wandb.Settings(silent=run.quiet),
    )
    experiment.define_metric("trainer/global_step")  # Lightning logs this metric with every step
    experiment.define_metric("*", step_metric="trainer/global_step")
    return WandbLogger(experiment=experiment), experiment.id, None


def _mlflow(run: RunConfig, run_id: str | None) -> tuple[Logger, str, int | None]:
    import mlflow  # noqa: F401 (the import sets log levels)
    from lightning.pytorch.loggers import MLFlowLogger

    for name in ("alembic", "mlflow", "lightning.pytorch.loggers.mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they print messages while they set up a database
    given = os.environ.get("MLFLOW_TRACKING_URI")
    logger = MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", "mmqk"),
        run_name=_title(run),
        tracking_uri=given or f"sqlite:///{run.out.resolve()}/mlflow.db",
        run_id=run_id,
    )
    last = None
    if run_id is None:
        logger.log_hyperparams(run.nested())
    else:
        logger.experiment.update_run(run_id, status="RUNNING")
        last = max((metric.step for metric in logger.experiment.get_metric_history(run_id, "loss")), default=None)
    assert logger.run_id is not None
    if given is None:  # Lightning sets the variable, but another run in this process must not use it
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    return logger, logger.run_id, last


# Each function returns Lightning's logger, the id of its run, and its last step (None if unknown). Beside it is the
# advice after an error.
_OPEN: dict[str, tuple[Callable[[RunConfig, str | None], tuple[Logger, str, int | None]], str]] = {
    "wandb": (_wandb, "run `wandb login`, set WANDB_MODE=offline, or remove wandb from logging"),
    "mlflow": (_mlflow, "check MLFLOW_TRACKING_URI, or remove mlflow from logging"),
}


def _title(run: RunConfig) -> str:
    """Return the last two parts of the run folder's path: arm and seed in a grid."""
    return "/".join(run.out.resolve().parts[-2:])


# TensorBoard: few tags, charts of all modalities, and alarms --------------------------------------------------

PAGES: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"))
_TAGS = [tag for charts in PAGES.values() for tag in charts.values()]
# Statistics without layers.
_WHOLE = {statistic for tag in _TAGS if "/" not in tag for statistic in tag.split("|")} | {"lr"}


def chart_values(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the tags of the charts: statistics by layer are reduced over layers, as in ``q_norm/image/max``.

    For two modalities these are at most 60 tags; metrics.jsonl has all values.
    """
    parsed = {name: parse_tag(name) for name in metrics}
    kept = {name: metrics[name] for name, tag in parsed.items() if tag.statistic in _WHOLE and tag.layer is None}
    return kept | over_layers(metrics)


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
        self._scalars(dict(metrics) if self._layers else chart_values(metrics), step)

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
