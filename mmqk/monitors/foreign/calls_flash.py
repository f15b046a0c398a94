"""Reads attention calls of the flash_attn package, of torch's varlen_attn, and of transformers' flash attention.

Shapes: B batch, H query heads, G key heads, T tokens, K head_dim; packed calls have one axis for all B * T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmqk.monitors.foreign.calls import Call, NotMeasured


def of_flash(
    rows: int,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    *rest: Any,
    **ignored: Any,
) -> Call:
    """Read a call of ``flash_attn::_flash_attn_forward``, the operator of flash_attn_func and its variants."""
    if q_BTHK.shape[1] != k_BTGK.shape[1]:
        raise NotMeasured(f"it has {q_BTHK.shape[1]} queries but {k_BTGK.shape[1]} keys")
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    call = Call(q, k, v, q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale))
    call.softcap = softcap or None
    T = q.shape[2]
    back_TS = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    if causal:
        window_size_right = 0
    if window_size_left >= 0 or window_size_right >= 0:
        left = window_size_left if window_size_left >= 0 else T
        right = window_size_right if window_size_right >= 0 else T
        call.mask = ((back_TS <= left) & (back_TS >= -right))[None, None]
    if alibi_slopes is not None:
        slopes = alibi_slopes.float().reshape(-1, q.shape[1])  # (H,) or (B, H)
        call.score_mod = lambda z_BTS, head: z_BTS - slopes[:, head, None, None] * back_TS.abs()
    return call


def of_flash_varlen(
    rows: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *rest: Any,
    **named: Any,
) -> Call:
    """Read a call of ``flash_attn::_flash_attn_varlen_forward``, with the packed documents of a batch on one axis."""
    if not rows or len(q) % rows or len(k) != len(q):
        raise NotMeasured(f"its {len(q)} packed tokens cannot be split into {rows} sequences of equal length")
    call = of_flash(rows, *(x.unflatten(0, (rows, -1)) for x in (q, k, v)), *rest, **named)
    document_BT = torch.bucketize(torch.arange(len(q), device=q.device), cu_seqlens_q, right=True).view(
        rows, -1
    )
    same_document = document_BT[:, None, :, None] == document_BT[:, None, None, :]
    call.mask = same_document if call.mask is None else same_document & call.mask
    return call


def of_torch_varlen(
    rows: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *rest: Any,
    **ignored: Any,
) -> Call:
    """Read a call of ``torch_attn::_varlen_attn``, the operator of `varlen_attn` in torch 2.10."""
    left, right = (-1, -1) if window_size is None else window_size
    return of_flash_varlen(
        rows, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        softmax_scale=scale, causal=is_causal, window_size_left=left, window_size_right=right,
    )  # fmt: skip


def of_transformers_flash(
    rows: int,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **ignored: Any,
) -> Call:
    """Read transformers' flash-attention call.

    A mask (B, T) marks padding. A position id below the previous one starts a new document.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # The window of transformers counts the token itself; the window of the kernel does not.
    left = sliding_window - 1 if sliding_window else -1
    right = left if left >= 0 and not causal else -1
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    call = of_flash(rows, q, k, v, 0.0, scaling, causal, left, right, softcap or 0.0)
    call.set_sinks(s_aux)
    visible = None
    if attention_mask is not None:
        visible = attention_mask.bool()[:, None, None, :]
    elif cu_seq_lens_q is not None:
        document_T = torch.bucketize(torch.arange(q.shape[1], device=q.device), cu_seq_lens_q, right=True)
        visible = (document_T[:, None] == document_T)[None, None]
    elif position_ids is not None and position_ids.ndim == 2 and len(query) == 1:  # as transformers does
        document_BT = (position_ids.diff(dim=1, prepend=position_ids[:, :1]) < 0).cumsum(1)
        visible = document_BT[:, None, :, None] == document_BT[:, None, None, :]
    if visible is not None:
        call.mask = visible if call.mask is None else visible & call.mask
    return call
