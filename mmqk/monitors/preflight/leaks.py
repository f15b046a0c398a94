"""Leaks: tokens whose output depends on tokens that they must not see.

Each check replaces some tokens and compares the output of others. Shapes: B batch, T tokens, n added padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmqk.monitors.preflight.context import IGNORED, Check, Context, Finding, NotChecked, judged, mapped

ADDED = 3  # tokens of padding that the checks add to each sequence


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
    text = f"outputs before token {place} change by {worst:.2g} if later tokens change (rounding {context.noise:.1g})"
    advice = "hide later tokens in the attention mask; look for shifts and convolutions that read ahead"
    return judged(worst > context.noise, worst, text, advice)


def sequences(context: Context) -> Finding:
    """The other sequences of a batch must not change an output."""
    if len(context.ids_BT) < 2:
        raise NotChecked("the batch has one sequence")
    row_B1 = torch.arange(len(context.ids_BT), device=context.ids_BT.device)[:, None].expand(
        context.ids_BT.shape
    )
    worst = context.change(row_B1 == 0, (row_B1 > 0) & context.valid_BT)
    text = f"outputs of other sequences change by {worst:.2g} if sequence 0 changes (rounding {context.noise:.1g})"
    advice = "look for statistics over the batch, a wrong reshape, or a mask that mixes rows"
    return judged(worst > context.noise, worst, text, advice)


def documents(context: Context) -> Finding:
    """One packed document must not change another. Odd documents are changed, then even ones."""
    document_BT = context.document_BT
    if document_BT is None:
        raise NotChecked("the batch has no document ids and no position_ids that restart")
    worst = 0.0
    is_odd_BT = (document_BT - document_BT[:, :1]) % 2 == 1
    for part in (is_odd_BT, ~is_odd_BT):
        worst = max(worst, context.change(~part & context.valid_BT, part & context.valid_BT))
    text = (
        f"outputs of a document change by {worst:.2g} if another one changes (rounding {context.noise:.1g})"
    )
    advice = (
        "pass a mask of pairs, or position_ids without a 2-D attention_mask and with use_cache=False "
        "(transformers#46634)"
    )
    return judged(worst > context.noise, worst, text, advice)


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
    text = f"outputs change by {worst:.2g} if padding has another id (rounding {context.noise:.1g})"
    advice = (
        "pass attention_mask to every attention layer; keep padding out of pooling and of norms over tokens"
    )
    return judged(worst > context.noise, worst, text, advice)


def padding_right(context: Context) -> Finding:
    """More padding on the right must change nothing."""
    return _more_padding(context, (0, ADDED), "pass attention_mask to every attention layer")


def padding_left(context: Context) -> Finding:
    """Padding on the left must change nothing."""
    advice = (
        "pad on the right, or pass position_ids that leave out padding, and attention_mask to every layer"
    )
    return _more_padding(context, (ADDED, 0), advice)


def _more_padding(context: Context, sides: tuple[int, int], advice: str) -> Finding:
    if context.document_BT is not None:
        raise NotChecked("the batch is packed")
    mask = context.inputs.get("attention_mask")
    if mask is not None and mask.shape != context.ids_BT.shape:
        raise NotChecked(f"attention_mask has shape {tuple(mask.shape)}, not (B, T)")
    if mask is None and not context.takes("attention_mask"):
        raise NotChecked("the model takes no attention_mask")
    args, kwargs = context.call
    if mask is None:
        kwargs = {**kwargs, "attention_mask": torch.ones_like(context.ids_BT)}
    shape, pad = context.ids_BT.shape, _padding_id(context)

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
    worst = context.largest(change)
    text = f"outputs change by {worst:.2g} with {ADDED} more tokens of padding (rounding {context.noise:.1g})"
    return judged(worst > context.noise, worst, text, advice)


def _padding_id(context: Context) -> int:
    if not context.valid_BT.all():
        return int(context.ids_BT[~context.valid_BT][0])
    config = getattr(context.root, "config", None)
    known = getattr(config, "pad_token_id", None)
    return int(context.pool(0)[0]) if known is None else int(known)


CHECKS: dict[str, Check] = {
    "causality": causality,
    "other sequences": sequences,
    "documents": documents,
    "id of padding": padding_ids,
    "padding on the right": padding_right,
    "padding on the left": padding_left,
}
