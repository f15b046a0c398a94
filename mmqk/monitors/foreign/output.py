"""Finds the logits and the trained targets in the output of a third-party model.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.monitors.foreign.inputs import Inputs, tensors


def find_logits(output: Any, shape: torch.Size, least: int, root: nn.Module) -> Tensor | None:
    """Return the logits (B, T, V) in the output of a model, or None.

    The logits are the tensor named ``logits``, or a tensor whose last axis has as many entries as an
    embedding has rows.

    Args:
        output: the output of the model.
        shape: (B, T).
        least: the smallest possible V.
        root: the model.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    rows = {m.num_embeddings for m in root.modules() if isinstance(m, nn.Embedding)}
    candidates = (
        [named] if isinstance(named, Tensor) else list(output) if isinstance(output, tuple) else [output]
    )
    for x in candidates:
        fits = isinstance(x, Tensor) and x.ndim == 3 and x.shape[:2] == shape and x.is_floating_point()
        if fits and x.shape[-1] >= least and (x is named or x.shape[-1] in rows):
            return x
    return None


def targets_of(output: Any, inputs: Inputs, valid_BT: Tensor) -> Tensor:
    """Return (B, T) bool: positions with a next token that is not padding and, in transformers, has a label."""
    target_mask_BT = valid_BT & valid_BT.roll(-1, 1)
    if type(output).__module__.partition(".")[0] == "transformers":
        for name, x in tensors(inputs):
            if name == "labels" and x.shape == target_mask_BT.shape:
                target_mask_BT = target_mask_BT & (x.to(valid_BT.device).roll(-1, 1) != -100)
    target_mask_BT[:, -1] = False
    return target_mask_BT
