"""Writes a run as a row of TensorBoard's HParams page: configuration, outcome and last losses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqk.store import flatten, read_run, read_status
from mmqk.store.identity import HASH_DIGITS

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
    row: dict[str, Any] = {
        "arm": arm_of(folder),
        "as ended": status.status,
        "at step": status.step,
    }
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
