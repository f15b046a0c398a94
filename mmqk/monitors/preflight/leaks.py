"""Leaks: tokens whose output depends on tokens that they must not see.

Each check replaces some tokens and compares the output of others. Shapes: B batch, T tokens, n added padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmqk.monitors.preflight.context import IGNORED, Context, Finding, NotChecked, judged, mapped

ADDED = 3  # tokens of padding that the checks add to each sequence


def _leak(context: Context, worst: float, outputs: str, cause: str, advice: str) -> Finding:
    """Return a finding that fails if these outputs change by more than the rounding noise."""
    text = f"{outputs} change by {worst:.2g} {cause} (rounding {context.noise:.1g})"
    return judged(worst > context.noise, worst, text, advice)


def causality(context: Context) -> Finding:
    """Later tokens must not change earlier outputs: tried at three places of the sequence."""
    T = context.ids_BT.shape[1]
    worst, place = -1.0, 0
    position_T = torch.arange(T, device=context.ids_BT.device).expand(context.ids_BT.shape)
    can_change_T = (context.other_ids_BT != context.ids_BT).any(0)
    for share in (0.25, 0.5, 0.75):
        # The first token from here on that can change: a look ahead by one token is found too.
        later = [t for t in range(max(1, int(share * T)), T) if can_change_T[t]]
        if later:
            cut = later[0]
            change = context.change(position_T >= cut, (position_T < cut) & context.valid_BT)
            worst, place = max((worst, place), (change, cut))
    if worst < 0:
        raise NotChecked("the batch has no tokens that can be replaced by others of their modality")
    advice = "hide later tokens in the attention mask; look for shifts and convolutions that read ahead"
    return _leak(context, worst, f"outputs before token {place}", "if later tokens change", advice)


def sequences(context: Context) -> Finding:
    """The other sequences of a batch must not change an output."""
    shape = context.ids_BT.shape
    if shape[0] < 2:
        raise NotChecked("the batch has one sequence")
    row_BT = torch.arange(shape[0], device=context.ids_BT.device)[:, None].expand(shape)
    worst = context.change(row_BT == 0, (row_BT > 0) & context.valid_BT)
    advice = "look for statistics over the batch, a wrong reshape, or a mask that mixes rows"
    return _leak(context, worst, "outputs of other sequences", "if sequence 0 changes", advice)


def documents(context: Context) -> Finding:
    """One packed document must not change another.

    The documents of a row are numbered. For each binary digit of the number, the documents with a 1 are changed, then
    those with a 0. Two documents differ in a digit, so each is changed once while the other is not.
    """
    if context.document_BT is None:
        raise NotChecked("the batch has no document ids and no position_ids that restart")
    document_BT, valid_BT, worst = context.document_BT.long(), context.valid_BT, 0.0
    number_BT = document_BT - document_BT.amin(1, keepdim=True)
    for digit in range(int(number_BT.max()).bit_length()):
        is_one_BT = (number_BT >> digit) % 2 == 1
        ones_BT, zeros_BT = is_one_BT & valid_BT, ~is_one_BT & valid_BT
        if ones_BT.any() and zeros_BT.any():
            worst = max(worst, context.change(zeros_BT, ones_BT), context.change(ones_BT, zeros_BT))
    advice = "pass a mask of pairs, or position_ids without a 2-D attention_mask and with use_cache=False"
    advice += " (transformers#46634)"
    return _leak(context, worst, "outputs of a document", "if another one changes", advice)


def padding_ids(context: Context) -> Finding:
    """Another id at padding must change nothing."""
    if context.valid_BT.all():
        raise NotChecked("the batch has no padding")
    pools = [pool for m in range(len(context.modalities.names)) if len(pool := context.pool(m))]
    if not pools:
        raise NotChecked("the batch has no ordinary ids")
    ids_BT = torch.where(context.valid_BT, context.ids_BT, pools[0][-1])
    after = context.output(*context.with_ids(ids_BT))
    worst = context.largest((after - context.base_BTV)[context.valid_BT])
    advice = "pass attention_mask to every attention layer; keep padding out of pooling and of norms over tokens"
    return _leak(context, worst, "outputs", "if padding has another id", advice)


def padding_right(context: Context) -> Finding:
    """More padding on the right must change nothing."""
    return _more_padding(context, (0, ADDED), "pass attention_mask to every attention layer")


def padding_left(context: Context) -> Finding:
    """Padding on the left must change nothing."""
    advice = "pad on the right, or pass position_ids that leave out padding, and attention_mask to every layer"
    return _more_padding(context, (ADDED, 0), advice)


def _more_padding(context: Context, sides: tuple[int, int], advice: str) -> Finding:
    if context.document_BT is not None:
        raise NotChecked("the batch is packed")
    mask, shape = context.inputs.get("attention_mask"), context.ids_BT.shape
    if mask is not None and mask.shape != shape:
        raise NotChecked(f"attention_mask has shape {tuple(mask.shape)}, not (B, T)")
    if mask is None and not context.takes("attention_mask"):
        raise NotChecked("the model takes no attention_mask")
    args, kwargs = context.call
    if mask is None:
        kwargs = {**kwargs, "attention_mask": torch.ones_like(context.ids_BT)}
    pad = _padding_id(context)

    def padded(name: str, x: Tensor) -> Any:
        if x.shape[-1:] != shape[-1:] or x.ndim < 2 or x.is_floating_point():
            return x
        if name == "position_ids":
            added = x[..., -1:] + torch.arange(1, sides[1] + 1, device=x.device)
            return torch.cat([F.pad(x, (sides[0], 0)), added], -1)
        is_ids = x is context.ids_BT
        return F.pad(x, sides, value=pad if is_ids else IGNORED if "label" in name or "target" in name else 0)

    after = context.output(*mapped((args, kwargs), padded))
    change = (after[:, sides[0] : sides[0] + shape[1]] - context.base_BTV)[context.valid_BT]
    return _leak(context, context.largest(change), "outputs", f"with {ADDED} more tokens of padding", advice)


def _padding_id(context: Context) -> int:
    if not context.valid_BT.all():
        return int(context.ids_BT[~context.valid_BT][0])
    known = getattr(getattr(context.root, "config", None), "pad_token_id", None)
    return int(context.pool(0)[0]) if known is None else int(known)
