"""A run as a row of TensorBoard's HParams page: configuration, outcome and last losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqk.store import flatten, read_run, read_status

# Fields in which arms usually differ; run.json has all fields.
FIELDS = (
    *("seed", "backend", "trainer.max_steps", "trainer.precision", "model.d_model", "model.n_layers"),
    *("model.n_heads", "model.pre_norm", "model.post_norm", "model.qk_norm.kind", "model.attn_softcap"),
    *("model.attention", "model.residual_dropout", "model.weight_reparam", "loss.z_loss", "optim.lr"),
    *("optim.weight_decay", "optim.warmup_steps", "optim.schedule", "optim.beta2", "optim.eps"),
    *("optim.qk_clip", "optim.split_second_moment", "data.batch_size", "data.seq_len"),
)


def outcome(folder: Path, modalities: Sequence[str]) -> list[Any]:
    """The summaries of a finished run; none for an interrupted run.

    TensorBoard keeps the first row of a folder, so an interruption must not write one.
    """
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status, record = read_status(folder), read_run(folder)
    if status is None or not status.finished or record is None:
        return []
    identity = flatten(record.get("identity") or {})
    # The folder above seed<k> is the arm.
    arm = folder.resolve().parent.name if folder.name.startswith("seed") else folder.resolve().name
    # The page sorts by name and shows the first few.
    row: dict[str, Any] = {
        "arm": arm.rpartition("-")[0] or arm,
        "as ended": status.status,
        "at step": status.step,
    }
    for name, value in identity.items():
        if name in FIELDS or name.startswith("loss.weights."):
            row[name] = value if isinstance(value, bool | int | float | str) else str(value)
    kinds = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    columns = [
        api_pb2.HParamInfo(name=name, type=kinds.get(type(value), api_pb2.DATA_TYPE_FLOAT64))
        for name, value in row.items()
    ]
    last = ["loss", *(f"{loss}/{m}" for loss in ("loss", "val_loss") for m in modalities), "alarms"]
    logits = [f"attn_logit_absmax/{m}-{m}/max" for m in modalities]
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=name)) for name in (*last, *logits)]
    ended = api_pb2.STATUS_SUCCESS if status.status == "completed" else api_pb2.STATUS_FAILURE
    start = plugin_data_pb2.SessionStartInfo()
    for name, value in row.items():
        kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(start.hparams[name], kind, value)
    experiment = api_pb2.Experiment(hparam_infos=columns, metric_infos=metrics)
    return [
        _summary(metadata.EXPERIMENT_TAG, experiment=experiment),
        _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start),
        _summary(
            metadata.SESSION_END_INFO_TAG, session_end_info=plugin_data_pb2.SessionEndInfo(status=ended)
        ),
    ]


def _summary(tag: str, **data: Any) -> Any:
    # Built by hand: the plugin's summaries need TensorFlow.
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    content = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **data)
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString())
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))])
