"""Where numbers go: metrics.jsonl, complete, and TensorBoard, a view of it that opens on the story."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from mmqk.store import MetricsWriter, parse_tag


class RunLogger(Logger):
    """Writes every number to the run's metrics.jsonl, one line a step."""

    def __init__(self, path):
        super().__init__()
        self._path = path
        self._writer: MetricsWriter | None = None

    @property
    def name(self) -> str:
        return "mmqk"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None, "every number of a run belongs to a step"
        if self._writer is None:
            self._writer = MetricsWriter(self._path)
        self._writer.write(step, metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The configuration is in run.json and config.yaml already."""

    @rank_zero_only
    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


# Statistics drawn for every modality side by side, and how they are combined over layers.
CHARTS = {
    "Attention logits": ("attn_logit_absmax", ("max",)),
    "Attention logits, signed": ("attn_logit_max", ("max",)),
    "Attention entropy": ("attn_entropy", ("median",)),
    "Query norm": ("q_norm", ("max", "median")),
    "Key norm": ("k_norm", ("max", "median")),
    "Value norm": ("v_norm", ("max",)),
    "Residual norm": ("resid_norm", ("max",)),
    "Attention output": ("attn_out_norm", ("max",)),
    "MLP output": ("mlp_out_norm", ("max",)),
}
# Statistics of the whole layer, drawn as single lines.
OF_LAYER = {"qk_clip_logit": ("max",), "qk_clip_gamma": ("min",)}
SCALARS = {
    "Loss": "loss",
    "Validation loss": "val_loss",
    "Last-layer output norm": "final_norm",
    "log Z": "log_z",
}
REDUCERS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "median": statistics.median}


def over_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Per-layer series as their extremes and medians over layers: ``q_norm/image/max``; the rest is kept."""
    kept: dict[str, float] = {}
    layers: dict[str, list[float]] = {}
    wanted = {**OF_LAYER, **{statistic: reducers for statistic, reducers in CHARTS.values()}}
    for name, value in metrics.items():
        parsed = parse_tag(name)
        if parsed.layer is None:
            kept[name] = value
        elif parsed.statistic in wanted and parsed.head is None:
            layers.setdefault(name.rpartition("/")[0], []).append(value)
    for series, values in layers.items():
        for reducer in wanted[series.split("/")[0]]:
            kept[f"{series}/{reducer}"] = REDUCERS[reducer](values)
    return kept


class StoryLogger(TensorBoardLogger):
    """TensorBoard with text beside image: maximum and median over layers, one event a step.

    Args:
        folder: the run folder; events are written straight into it.
        modalities: names of the vocabulary blocks, in order.
        layers: also write every per-layer series.
        resumed_at: step a resumed run goes on from; what an earlier process drew after it is discarded.
    """

    def __init__(
        self, folder, modalities: tuple[str, ...], layers: bool = False, resumed_at: int | None = None
    ):
        purge = None if resumed_at is None else resumed_at + 1
        super().__init__(save_dir=str(folder), name="", version="", default_hp_metric=False, purge_step=purge)
        self._modalities, self._layers, self._has_layout = modalities, layers, False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._has_layout:
            self.experiment.add_custom_scalars(custom_scalars(self._modalities))
            self._has_layout = True
        shown = dict(metrics) if self._layers else over_layers(metrics)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in shown.items()]
        # One protobuf a step: 27 times cheaper than add_scalar for each of 500 values.
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)

    def save(self) -> None:
        """Events only: the configuration stands in config.yaml, not in an hparams.yaml beside it."""
        self.experiment.flush()


def custom_scalars(modalities: tuple[str, ...]) -> dict[str, dict[str, list]]:
    """The layout of the custom-scalars page: one chart a statistic, every modality in it."""
    names = "|".join([*modalities, *(f"{a}-{b}" for a in modalities for b in modalities)])
    by_layer = {
        f"{title} ({reducer} over layers)": ["Multiline", [rf"{statistic}/({names})/{reducer}$"]]
        for title, (statistic, reducers) in CHARTS.items()
        for reducer in reducers
    }
    scalars = {title: ["Multiline", [rf"^{name}/({names})$"]] for title, name in SCALARS.items()}
    return {"Norm competition": by_layer, "Loss and output": scalars}
