"""One attention call of somebody else's model, read from the arguments it was made with: torch's and transformers'.

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


class Elsewhere(Unread):
    """A call among other tokens than those of the modalities: cross-attention, the encoder of an image."""


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
        shaped: raw logits of one head (B, T, S) and its number to what the softmax takes; None where it is the same.
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
        """The attention itself, dense, (B, H, T, K): for kernels that refuse fp32; 0 in a row that sees nothing."""
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
    call.mask = flex.create_mask(block_mask[-1], B, H, T, S, device=device)
    if getattr(score_mod, "__name__", "") == "_identity":
        return call
    call.mask = call.mask & flex.create_mask(score_mod, B, H, T, S, device=device)
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
