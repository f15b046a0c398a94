"""Writes a selection of the values to TensorBoard: few tags, charts of all modalities, alarms and the outcome."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from mmqk.monitors import summary
from mmqk.store import Alarm, flatten, naming, parsed_tag, read_alarms, read_run, read_status
from mmqk.store.folder import HASH_DIGITS


class Chart(NamedTuple):
    """One chart of a page: statistics of all modalities, or of pairs of modalities.

    Attributes:
        title: Title of the chart.
        statistics: Names of the statistics.
        reducer: Reduction over layers; None for a statistic without layers.
    """

    title: str
    statistics: tuple[str, ...]
    reducer: str | None = None


PAGES: dict[str, tuple[Chart, ...]] = {
    "Norm competition": (
        Chart("Largest attention logit (max over layers)", ("attn_logit_absmax",), "max"),
        Chart("Attention entropy (median over layers)", ("attn_entropy",), "median"),
        Chart("Attention entropy (min over layers)", ("attn_entropy",), "min"),
        Chart("Query norm (max over layers)", ("q_norm",), "max"),
        Chart("Query norm (median over layers)", ("q_norm",), "median"),
        Chart("Key norm (max over layers)", ("k_norm",), "max"),
        Chart("Key norm (median over layers)", ("k_norm",), "median"),
        Chart("Value norm, not part of the logits (max over layers)", ("v_norm",), "max"),
        Chart("Last-layer output norm", ("final_norm",)),
        Chart("log Z", ("log_z",)),
        Chart("Loss, and its excess where the floor is known", ("loss", "excess")),
        Chart("Validation loss", ("val_loss",)),
    ),
    "Drift, competition, sharpening": (
        Chart("Attention, drift: mean logit (median over layers)", ("attn_logit_mean",), "median"),
        Chart("Attention, competition: variance between blocks (max)", ("attn_logit_offset_var",), "max"),
        Chart("Attention, sharpening: variance within blocks (max)", ("attn_logit_spread_var",), "max"),
        Chart("Output, drift: mean logit", ("out_logit_mean",)),
        Chart("Output, competition: mass on the wrong block", ("out_wrong_mass",)),
        Chart("Output, sharpening: log Z - log V - mean logit", ("out_logit_spread",)),
        Chart("Log alignment of queries and keys (max over layers)", ("logit_alignment",), "max"),
    ),
    "Blocks": (
        Chart("Residual norm (max over layers)", ("resid_norm",), "max"),
        Chart("Attention output (max over layers)", ("attn_out_norm",), "max"),
        Chart("MLP output (max over layers)", ("mlp_out_norm",), "max"),
    ),
}
# Statistics of the whole run, without modalities.
OF_RUN = ("loss", "grad_norm", "lr", "tokens_per_s", "alarms")
RUN_PAGE = {
    "Gradient norm": "grad_norm",
    "Alarms so far": "alarms",
    "Attention rank (min over layers)": "attn_rank/min",
    "Tokens per second": "tokens_per_s",
}

_CHARTS = [chart for charts in PAGES.values() for chart in charts]
_WHOLE = {name for chart in _CHARTS if chart.reducer is None for name in chart.statistics} | set(OF_RUN)


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

    def pattern(chart: Chart) -> str:
        end = "" if chart.reducer is None else f"/{chart.reducer}"
        return rf"^({'|'.join(chart.statistics)})(/({names})(-({names}))?)?{end}$"

    pages = {
        page: {chart.title: ["Multiline", [pattern(chart)]] for chart in charts} for page, charts in PAGES.items()
    }
    pages["Run"] = {title: ["Multiline", [f"^{name}$"]] for title, name in RUN_PAGE.items()}
    return pages


# Fields in which arms usually differ; run.json has all fields.
FIELDS = (
    *("seed", "backend", "trainer.max_steps", "trainer.precision", "model.d_model", "model.n_layers"),
    *("model.n_heads", "model.pre_norm", "model.post_norm", "model.qk_norm.kind", "model.attn_softcap"),
    *("model.attention", "model.residual_dropout", "model.weight_reparam", "loss.z_loss", "optim.lr"),
    *("optim.weight_decay", "optim.warmup_steps", "optim.schedule", "optim.beta2", "optim.eps"),
    *("optim.qk_clip", "optim.split_second_moment", "data.batch_size", "data.seq_len"),
)


def arm_of(folder: Path) -> str:
    """Return the arm in the name ``<arm>-<id>`` of the folder above ``seed<k>``; for a run outside a grid, the name
    of its folder."""
    folder = folder.resolve()
    if not re.fullmatch(r"seed\d+", folder.name):
        return folder.name
    return re.sub(rf"-[0-9a-f]{{{HASH_DIGITS}}}$", "", folder.parent.name)


def outcome(folder: Path, modalities: Sequence[str]) -> list[Any]:
    """Return the summaries of a finished run, or an empty list for an interrupted run.

    TensorBoard keeps the first row of a folder, so an interrupted run must not write one.
    """
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
    from torch.utils.tensorboard.summary import hparams

    status, record = read_status(folder), read_run(folder)
    if status is None or not status.finished or record is None:
        return []
    # The page sorts the columns by name and shows the first few.
    row: dict[str, Any] = {"arm": arm_of(folder), "as ended": status.status, "at step": status.step}
    for name, value in flatten(record.get("identity") or {}).items():
        if name in FIELDS or name.startswith("loss.weights."):
            # torch would write true and false as 1 and 0.
            number = isinstance(value, int | float) and not isinstance(value, bool)
            row[name] = value if number else str(value)
    last = ["loss", *(f"{loss}/{m}" for loss in ("loss", "val_loss") for m in modalities), "alarms"]
    logits = [f"attn_logit_absmax/{m}-{m}/max" for m in modalities]
    experiment, start, end = hparams(row, dict.fromkeys([*last, *logits], 0.0))
    if status.status != "completed":  # torch always writes the status success
        plugin = end.value[0].metadata.plugin_data
        content = plugin_data_pb2.HParamsPluginData.FromString(plugin.content)
        content.session_end_info.status = api_pb2.STATUS_FAILURE
        plugin.content = content.SerializeToString()
    return [experiment, start, end]


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
