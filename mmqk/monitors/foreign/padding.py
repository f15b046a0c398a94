"""Finds the padding of a batch: the mask among the model's inputs, also one with an entry for each pair of tokens.

Shapes: B batch, H heads, T query tokens, S key tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch
from torch import Tensor

from mmqk.monitors.foreign.calls import MASKED
from mmqk.monitors.foreign.inputs import Inputs, find_ids, tensors


def padding_mask(inputs: Inputs, source: Collection[str] | None) -> Tensor | None:
    """Return the mask (B, T) of the padding of the inputs ``source``; None if there is none.

    The mask is decoder_attention_mask for decoder_input_ids and labels, attention_mask for the token ids, and
    NAME_attention_mask for another input NAME or NAME_ids. A mask with an entry for each pair of tokens is reduced to
    tokens (`tokens_of_pairs`).
    """
    name, ids = "attention_mask", find_ids(inputs)
    if source is not None and len(source) == 1:
        (of,) = source
        if of == "labels" or of.startswith("decoder_"):
            name = "decoder_attention_mask"
        elif ids is not None and ids[0] != of:
            name = f"{of.removesuffix('_ids')}_attention_mask"
    mask = dict(tensors(inputs)).get(name)
    if mask is None or mask.ndim not in (3, 4):
        return mask
    visible_BTS = visible_of(mask).any(1) if mask.ndim == 4 else visible_of(mask)
    if visible_BTS.shape[1] == 1:
        valid_BT = visible_BTS[:, 0]
    elif visible_BTS.shape[1] != visible_BTS.shape[2]:
        return mask
    else:
        valid_BT, is_unclear = tokens_of_pairs(visible_BTS)
        if is_unclear:
            warnings.warn(
                f"mmqk: {name} has shape {tuple(mask.shape)}, and no other token sees some tokens, which may be "
                "padding but are counted: in the modality function, return -1 for padding",
                stacklevel=6,
            )
    return valid_BT.expand(len(ids[1]), -1) if ids is not None and len(valid_BT) == 1 else valid_BT


def visible_of(mask: Tensor) -> Tensor:
    """Return True where a mask of 1 and 0, or of 0 and large negative numbers, lets tokens be seen."""
    is_additive = mask.is_floating_point() and not (mask > 0).any()
    return mask > (MASKED if is_additive else 0)


def tokens_of_pairs(visible_BTS: Tensor) -> tuple[Tensor, bool]:
    """Return which tokens are no padding (B, T), and whether the mask may have padding that it does not tell apart.

    A token that no token sees, or that sees only itself and is seen only by itself, is padding. A token that only
    itself sees may be padding or the last token of a document. It is unclear if a later token sees earlier ones.
    """
    T = visible_BTS.shape[1]
    itself = torch.eye(T, dtype=torch.bool, device=visible_BTS.device)
    seen_BT = (visible_BTS & ~itself).any(1)
    sees_BT = (visible_BTS & ~itself).any(2)
    valid_BT = seen_BT | (visible_BTS & itself).any(1) & sees_BT
    position_S = torch.arange(T, device=visible_BTS.device)
    first_BT = torch.where(visible_BTS, position_S, T).amin(2)  # first key that a query sees
    later_BT = torch.full_like(first_BT, T)  # smallest one of all later queries
    later_BT[:, :-1] = first_BT.flip(1).cummin(1).values.flip(1)[:, 1:]
    return valid_BT, bool((valid_BT & ~seen_BT & (later_BT < position_S)).any())
