"""One attention call of somebody else's model, read from the arguments it was made with.

Shapes: B batch, H heads of queries, G heads of keys, T query tokens, S key tokens, K head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# An additive mask of this or less is a mask and not a bias: exp of it is 0 in every precision.
MASKED = -9999.0


class Unread(Exception):
    """A call whose queries and keys cannot be told; the message says why, to follow a layer's name."""


@dataclass
class Call:
    """What one attention call works on.

    Attributes:
        q_BHTK: queries as they enter the dot product.
        k_BGSK: keys likewise.
        v_BGSK: values; their last axis may differ.
        scale: factor on the dot product.
        mask: bool, broadcasts to (B, H, T, S), True where a query sees a key; None for all.
        softcap: between the raw logits and what follows.
        shaped: raw logits of one head (B, T, S) and its number to what the softmax takes; None where that is the same.
        unsaid: why nothing can be said of the weights; None where it can.
        weights_BHTS: the weights that the call itself gave, to check against.
    """

    q_BHTK: Tensor
    k_BGSK: Tensor
    v_BGSK: Tensor
    scale: float
    mask: Tensor | None = None
    softcap: float | None = None
    shaped: Callable[[Tensor, int], Tensor] | None = None
    unsaid: str | None = None
    weights_BHTS: Tensor | None = None

    def expanded(self, tensor_BGSK: Tensor) -> Tensor:
        """Keys or values with a shared head once for every query head, (B, H, S, K)."""
        times = self.q_BHTK.shape[1] // tensor_BGSK.shape[1]
        return tensor_BGSK if times == 1 else tensor_BGSK.repeat_interleave(times, 1)

    def logits(self, head: int, rows: slice = slice(None)) -> Tensor:
        """What the softmax of one head takes, before the mask, fp32, (B, T, S)."""
        q, k = self.q_BHTK[rows, head].float(), self.expanded(self.k_BGSK)[rows, head].float()
        z_BTS = self.scale * q @ k.transpose(-1, -2)
        if self.softcap is not None:
            z_BTS = self.softcap * torch.tanh(z_BTS / self.softcap)
        return z_BTS if self.shaped is None else self.shaped(z_BTS, head)

    def output(self) -> Tensor:
        """The attention itself, dense, (B, H, T, K): for kernels that refuse fp32. A row that sees nothing gives 0."""
        v_BHSK, out = self.expanded(self.v_BGSK).float(), []
        for head in range(self.q_BHTK.shape[1]):
            z_BTS = self.logits(head)
            if self.mask is not None:
                z_BTS = z_BTS.masked_fill(~of_head(self.mask, head), -torch.inf)
            out.append(torch.nan_to_num(z_BTS.softmax(-1)) @ v_BHSK[:, head])
        return torch.stack(out, 1).to(self.v_BGSK.dtype)


def of_head(tensor: Tensor, head: int) -> Tensor:
    """(B or 1, T, S) of one that broadcasts to (B, H, T, S)."""
    return tensor[:, head if tensor.shape[1] > 1 else 0]


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """(1, 1, T, S): as torch's ``is_causal`` has it, from the upper left corner."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril()[None, None]


def of_sdpa(
    rows: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """Of `torch.nn.functional.scaled_dot_product_attention`.

    Three axes are read as (B * H, T, K), the sequence first, which is how torch's own module lays them out.
    """
    if query.is_nested:
        raise Unread("a nested tensor")
    if query.ndim == 3 and rows and query.shape[0] % rows == 0:
        query, key, value = (x.unflatten(0, (rows, -1)) for x in (query, key, value))
        if isinstance(attn_mask, Tensor) and attn_mask.ndim == 3 and attn_mask.shape[0] > 1:
            attn_mask = attn_mask.unflatten(0, (rows, -1))
    if query.ndim != 4:
        raise Unread(f"queries of shape {tuple(query.shape)}")
    call = Call(query, key, value, query.shape[-1] ** -0.5 if scale is None else float(scale))
    T, S = query.shape[2], key.shape[2]
    if is_causal or type(attn_mask).__name__ == "CausalBias":
        call.mask = causal_mask(T, S, query.device)
    elif attn_mask is not None:
        _mask(call, attn_mask)
    return call


def _mask(call: Call, mask: Tensor) -> None:
    """A bool mask, or one to add, whose finite part is a bias."""
    while mask.ndim < 4:
        mask = mask[None]
    if mask.dtype == torch.bool:
        call.mask = mask
        return
    call.mask = mask > MASKED
    bias = mask.float().masked_fill(~call.mask, 0.0)
    if bias.any():
        call.shaped = lambda z_BTS, head: z_BTS + of_head(bias, head)


def of_flex(
    rows: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *rest: Any,
    **ignored: Any,
) -> Call:
    """Of the operator behind `flex_attention`, whose block mask ends in its mask_mod.

    Raw logits are those before the score_mod; one that returns -inf masks.
    """
    from torch.nn.attention import flex_attention as flex

    (B, H, T, _), S, device = query.shape, key.shape[2], query.device
    call = Call(query, key, value, float(scale))
    call.mask = flex.create_mask(block_mask[-1], B, H, T, S, device=device)  # type: ignore[arg-type]
    if getattr(score_mod, "__name__", "") == "_identity":
        return call
    call.mask = call.mask & flex.create_mask(score_mod, B, H, T, S, device=device)  # type: ignore[arg-type]
    try:
        # Without it an index into a captured tensor fails under vmap. Not public, so it may be elsewhere.
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as indexing
    except ImportError:
        indexing = contextlib.nullcontext  # type: ignore[assignment,misc]
    over_s = torch.vmap(score_mod, (0, None, None, None, 0))
    over_ts = torch.vmap(over_s, (0, None, None, 0, None))
    over_bts = torch.vmap(over_ts, (0, 0, None, None, None))

    def shaped(z_BTS: Tensor, head: int) -> Tensor:
        h, t, s = (
            torch.tensor(head, device=device),
            torch.arange(T, device=device),
            torch.arange(S, device=device),
        )
        with indexing():
            return over_bts(z_BTS, torch.arange(len(z_BTS), device=device), h, t, s)

    call.shaped = shaped
    return call


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
    """Of ``flash_attn::_flash_attn_forward``, the operator behind flash_attn_func and its kin."""
    if q_BTHK.shape[1] != k_BTGK.shape[1]:
        raise Unread(f"{q_BTHK.shape[1]} queries on {k_BTGK.shape[1]} keys")
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
        call.shaped = lambda z_BTS, head: z_BTS - slopes[:, head, None, None] * back_TS.abs()
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
    """Of ``flash_attn::_flash_attn_varlen_forward``: packed documents, all tokens of the batch in one row."""
    if not rows or len(q) % rows or len(k) != len(q):
        raise Unread(f"{len(q)} packed tokens in {rows} sequences")
    call = of_flash(rows, *(x.unflatten(0, (rows, -1)) for x in (q, k, v)), *rest, **named)
    document_BT = torch.bucketize(torch.arange(len(q), device=q.device), cu_seqlens_q, right=True).view(
        rows, -1
    )
    own = document_BT[:, None, :, None] == document_BT[:, None, None, :]
    call.mask = own if call.mask is None else own & call.mask
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
    """Of ``torch_attn::_varlen_attn``, the operator behind `torch.nn.attention.varlen.varlen_attn` (torch 2.10)."""
    left, right = (-1, -1) if window_size is None else window_size
    return of_flash_varlen(
        rows, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        softmax_scale=scale, causal=is_causal, window_size_left=left, window_size_right=right,
    )  # fmt: skip


def of_transformers(
    rows: int,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> Call:
    """Of transformers' attention interface in its dense form (``eager_attention_forward``)."""
    call = Call(query, key, value, query.shape[-1] ** -0.5 if scaling is None else float(scaling))
    call.softcap = softcap
    if s_aux is not None or getattr(module, "sinks", None) is not None:
        call.unsaid = "attention sinks"
    if attention_mask is not None:
        _mask(call, attention_mask[..., : key.shape[2]])
    if position_bias is not None:
        before, bias = call.shaped, position_bias.float()
        call.shaped = lambda z_BTS, head: (before(z_BTS, head) if before else z_BTS) + of_head(bias, head)
    return call


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
    **ignored: Any,
) -> Call:
    """Of transformers' attention interface to flash-attention: a padding mask (B, T), or positions that start anew."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Their window counts the token itself, the kernel's does not.
    left = sliding_window - 1 if sliding_window else -1
    right = left if left >= 0 and not causal else -1
    turned = (x.transpose(1, 2) for x in (query, key, value))
    call = of_flash(rows, *turned, softmax_scale=scaling, causal=causal, window_size_left=left, window_size_right=right,
                    softcap=softcap or 0.0)  # fmt: skip
    if s_aux is not None:
        call.unsaid = "attention sinks"
    own = None
    if attention_mask is not None:
        own = attention_mask.bool()[:, None, None, :]
    elif position_ids is not None and position_ids.ndim == 2:
        document_BT = (position_ids.diff(dim=1, prepend=position_ids[:, :1]) < 0).cumsum(1)
        own = document_BT[:, None, :, None] == document_BT[:, None, None, :]
    if own is not None:
        call.mask = own if call.mask is None else own & call.mask
    return call
