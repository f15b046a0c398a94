"""Reads an attention call of a third-party model from the arguments of the attention function.

This file reads torch's scaled_dot_product_attention, varlen_attn and flex_attention, the flash_attn package, the
eager and flash attention of transformers, and the dense attention of mmqk's own model. A reader gets the arguments by
the names that the function gives them.

Shapes: B batch, H query heads, G key heads, T query tokens, S key tokens, K head_dim. Packed calls have one axis for
all B * T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmqk.monitors.formulas.reduce import HIDDEN

# Values of an additive mask up to this one hide a key; larger values are a bias. It is above the usual -1e4, which
# bf16 rounds to -9984. Logits can outgrow a value above `HIDDEN`, so the key then gets attention (`Call.masked`).
MASKED = -9900.0


class NotMeasured(Exception):
    """Raised for an attention call that cannot be measured; the message gives the reason and is printed."""


class OtherTokens(NotMeasured):
    """Raised for an attention call over tokens that belong to no declared side, as in cross-attention or an image
    encoder."""


@dataclass
class Call:
    """Inputs of one attention call.

    Attributes:
        q_BHTK: queries of the dot product, after QK-Norm and RoPE.
        k_BGSK: keys of the dot product.
        v_BGSK: values; the size of their last axis may differ from K.
        scale: factor on the dot product.
        mask: bool, broadcasts to (B, H, T, S), True where a query sees a key; None if every query sees every key.
        masked: bool, broadcasts to (B, H, T, S), True where an added finite value hides a key; None if there is none.
        softcap: cap c on the logits z: c tanh(z / c); None for no cap.
        score_mod: function of (logits of one head (B, T, S), head number) that adds a bias and the finite values of a
            mask, or applies the score_mod of flex_attention, after the cap and before the softmax; None if there is
            none.
        sink_H: logit of each head's sink, which takes weight in the softmax but has no value vector; or None.
        no_weights: why the attention weights cannot be computed; None if they can.
        weights_BHTS: the weights that the call returned, to compare with the computed ones; None if it returned none.
    """

    q_BHTK: Tensor
    k_BGSK: Tensor
    v_BGSK: Tensor
    scale: float
    mask: Tensor | None = None
    masked: Tensor | None = None
    softcap: float | None = None
    score_mod: Callable[[Tensor, int], Tensor] | None = None
    sink_H: Tensor | None = None
    no_weights: str | None = None
    weights_BHTS: Tensor | None = None

    def expanded(self, tensor_BGSK: Tensor) -> Tensor:
        """Return the keys or values (B, H, S, K): each key head repeated for every query head that shares it."""
        times = self.q_BHTK.shape[1] // tensor_BGSK.shape[1]
        return tensor_BGSK if times == 1 else tensor_BGSK.repeat_interleave(times, 1)

    def softmax_input(self, head: int, rows: slice = slice(None)) -> Tensor:
        """Return the input of one head's softmax, before the mask: fp32, (B, T, S)."""
        q, k = self.q_BHTK[rows, head].float(), self.expanded(self.k_BGSK)[rows, head].float()
        z_BTS = self.scale * q @ k.transpose(-1, -2)
        if self.softcap is not None:
            z_BTS = self.softcap * torch.tanh(z_BTS / self.softcap)
        return z_BTS if self.score_mod is None else self.score_mod(z_BTS, head)

    def weights(self, head: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """Return the weights of one head's keys (B, T, S), with the mask exactly as it is given, and the weight of
        its sink (B, T), or None.

        The weights are NaN in a row in which every key has -inf.
        """
        z_BTS = self.softmax_input(head, rows)
        if self.mask is not None:
            has_weight = of_head(self.mask, head)
            if self.masked is not None:
                has_weight = has_weight | of_head(self.masked, head)
            z_BTS = z_BTS.masked_fill(~has_weight[rows], -torch.inf)
        if self.sink_H is None:
            return z_BTS.softmax(-1), None
        sink_BT1 = self.sink_H[head].float().expand(*z_BTS.shape[:-1], 1)
        weight_BTX = torch.cat([z_BTS, sink_BT1], -1).softmax(-1)
        return weight_BTX[..., :-1], weight_BTX[..., -1]

    def set_sinks(self, sinks: Any) -> None:
        """Set the logits of the sinks, if there are any; only one sink per query head can be measured."""
        if isinstance(sinks, Tensor) and sinks.numel() == self.q_BHTK.shape[1]:
            self.sink_H = sinks.detach().flatten()
        elif sinks is not None:
            self.no_weights = "it has attention sinks, but not one for each head"

    def see_only(self, visible: Tensor) -> None:
        """Hide the keys where ``visible``, which broadcasts to (B, H, T, S), is False."""
        self.mask = visible if self.mask is None else visible & self.mask

    def output(self) -> Tensor:
        """Return the output of dense attention, (B, H, T, K), in place of kernels that refuse fp32.

        It is 0 in a row without visible keys.
        """
        v_HBSK = self.expanded(self.v_BGSK).float().transpose(0, 1)
        out = [torch.nan_to_num(self.weights(head)[0]) @ v_BSK for head, v_BSK in enumerate(v_HBSK)]
        return torch.stack(out, 1).to(self.v_BGSK.dtype)


def of_head(tensor: Tensor, head: int) -> Tensor:
    """Return one head, (B or 1, T, S), of a tensor that broadcasts to (B, H, T, S)."""
    return tensor[:, head if tensor.shape[1] > 1 else 0]


def same_document(document_BT: Tensor) -> Tensor:
    """Return (B, T, T) bool: whether two tokens are in the same packed document."""
    return document_BT[:, :, None] == document_BT[:, None]


def documents_of_positions(position_BT: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Return the number of each token's packed document, (B, T): a position below the previous one starts one, unless
    that one is padding (False in ``valid_BT``), after which positions begin."""
    starts_BT = position_BT.diff(dim=1, prepend=position_BT[:, :1]) < 0
    return (starts_BT if valid_BT is None else starts_BT & valid_BT.roll(1, 1)).cumsum(1)


def of_sdpa(query: Tensor, key: Tensor, value: Tensor, split: Callable[[Tensor], Tensor], **of: Any) -> Call:
    """Read a call of `torch.nn.functional.scaled_dot_product_attention`; ``split`` gives a tensor with three axes,
    (B * H, T, K) or (H * B, T, K), the axes (B, H, T, K)."""
    attn_mask = of.get("attn_mask")
    if query.is_nested:
        raise NotMeasured("its queries are a nested tensor")
    if query.ndim == 3:
        if isinstance(attn_mask, Tensor) and attn_mask.ndim == 3 and len(attn_mask) == len(query):
            attn_mask = split(attn_mask)
        query, key, value = split(query), split(key), split(value)
    if query.ndim != 4:
        raise NotMeasured(f"its queries have shape {tuple(query.shape)}")
    call = Call(query, key, value, _scale(query, of.get("scale")))
    T, S = query.shape[2], key.shape[2]
    if of.get("is_causal") or type(attn_mask).__name__ == "CausalBias":
        call.mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril()[None, None]  # upper left
    elif attn_mask is not None:
        set_mask(call, attn_mask)
    return call


def _scale(query: Tensor, given: float | None) -> float:
    return query.shape[-1] ** -0.5 if given is None else float(given)


def set_mask(call: Call, mask: Tensor) -> None:
    """Set the call's mask from a bool or an additive mask; values of an additive mask above `MASKED` are a bias.

    Finite values up to `MASKED` are added too, since logits can outgrow them.
    """
    while mask.ndim < 4:
        mask = mask[None]
    if mask.dtype == torch.bool:
        call.mask = mask
        return
    mask = mask.float()
    call.mask, has_weight = mask > MASKED, mask > HIDDEN
    masked = has_weight & ~call.mask
    call.masked = masked if masked.any() else None
    bias = mask.masked_fill(~has_weight, 0.0)
    if bias.any():
        call.score_mod = lambda z_BTS, head: z_BTS + of_head(bias, head)


def of_flex(query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], **of: Any) -> Call:
    """Read a call of the operator that `flex_attention` calls; the last entry of its block mask is the mask_mod.

    The measured logits are the logits before the score_mod. The score_mod of a logit 0 is read like an additive mask.
    """
    from torch.nn.attention import flex_attention as flex

    (B, H, T, _), S, device = query.shape, key.shape[2], query.device
    call = Call(query, key, value, float(of["scale"]))
    call.mask = flex.create_mask(of["block_mask"][-1], B, H, T, S, device=device)
    if getattr(score_mod, "__name__", "") == "_identity":
        return call
    try:
        # Without this mode, a score_mod that indexes a tensor fails under vmap. The class is private and may move.
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as indexing
    except ImportError:
        indexing = contextlib.nullcontext  # type: ignore[assignment,misc]
    over_s = torch.vmap(score_mod, (0, None, None, None, 0))
    over_ts = torch.vmap(over_s, (0, None, None, 0, None))
    over_bts = torch.vmap(over_ts, (0, 0, None, None, None))

    def of_one_head(z_BTS: Tensor, head: int) -> Tensor:
        h, t, s = (torch.tensor(head, device=device), torch.arange(T, device=device), torch.arange(S, device=device))
        with indexing():
            return over_bts(z_BTS, torch.arange(len(z_BTS), device=device), h, t, s)

    call.score_mod = of_one_head
    added_BHTS = torch.stack([of_one_head(query.new_zeros(B, T, S), head) for head in range(H)], 1)
    masked = call.mask & (added_BHTS <= MASKED) & (added_BHTS > HIDDEN)
    call.masked = masked if masked.any() else None
    call.see_only(added_BHTS > MASKED)
    return call


def of_transformers(query: Tensor, key: Tensor, value: Tensor, **of: Any) -> Call:
    """Read a call of ``eager_attention_forward``, transformers' dense attention function."""
    call = Call(query, key, value, _scale(query, of.get("scaling")), softcap=of.get("softcap"))
    sinks = of.get("s_aux")
    call.set_sinks(getattr(of.get("module"), "sinks", None) if sinks is None else sinks)
    if (mask := of.get("attention_mask")) is not None:
        set_mask(call, mask[..., : key.shape[2]])
    if of.get("position_bias") is not None:
        mask_bias, bias = call.score_mod, of["position_bias"].float()
        call.score_mod = lambda z, head: (mask_bias(z, head) if mask_bias else z) + of_head(bias, head)
    return call


def of_mmqk(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, kind: str = "softmax", **of: Any) -> Call:
    """Read a call of `mmqk.model.backends.attention` with the backend math."""
    of |= {"attention_mask": mask, "scaling": of["scale"], "s_aux": of.get("sink_H")}
    call = of_transformers(query, key, value, **of)
    if kind != "softmax":
        call.no_weights = f"its weights are not a softmax but a {kind}"
    return call


def of_flash(q: Tensor, k: Tensor, v: Tensor, **of: Any) -> Call:
    """Read a call of ``flash_attn::_flash_attn_forward``, the operator of flash_attn_func and its variants, with
    queries (B, T, H, K)."""
    if q.shape[1] != k.shape[1]:
        raise NotMeasured(f"it has {q.shape[1]} queries but {k.shape[1]} keys")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    call = Call(q, k, v, _scale(q, of.get("softmax_scale")), softcap=of.get("softcap") or None)
    T, right = q.shape[2], 0 if of.get("causal") else of.get("window_size_right", -1)
    left, right = (size if size >= 0 else T for size in (of.get("window_size_left", -1), right))
    back_TS = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    if min(left, right) < T:
        call.mask = ((back_TS <= left) & (back_TS >= -right))[None, None]
    if of.get("alibi_slopes") is not None:
        slopes = of["alibi_slopes"].float().reshape(-1, q.shape[1])  # (H,) or (B, H)
        call.score_mod = lambda z_BTS, head: z_BTS - slopes[:, head, None, None] * back_TS.abs()
    return call


def of_flash_varlen(rows: int, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **of: Any) -> Call:
    """Read a call of ``flash_attn::_flash_attn_varlen_forward``, with the packed documents of a batch on one axis."""
    if not rows or len(q) % rows or len(k) != len(q):
        raise NotMeasured(f"its {len(q)} packed tokens cannot be split into {rows} sequences of equal length")
    call = of_flash(*(x.unflatten(0, (rows, -1)) for x in (q, k, v)), **of)
    document_T = torch.bucketize(torch.arange(len(q), device=q.device), cu_seqlens_q, right=True)
    call.see_only(same_document(document_T.view(rows, -1))[:, None])
    return call


def of_torch_varlen(rows: int, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, **of: Any) -> Call:
    """Read a call of ``torch_attn::_varlen_attn``, the operator of `varlen_attn`."""
    left, right = of.get("window_size") or (-1, -1)
    of |= {"softmax_scale": of.get("scale"), "causal": of.get("is_causal")}
    return of_flash_varlen(rows, query, key, value, cu_seq_q, window_size_left=left, window_size_right=right, **of)


def of_transformers_flash(
    module: nn.Module | None, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **of: Any
) -> Call:
    """Read transformers' flash-attention call.

    A mask (B, T) marks padding. A position id below the previous one starts a new document.
    """
    causal, sliding_window = of.get("is_causal"), of.get("sliding_window")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    # The window of transformers counts the token itself; the window of the kernel does not.
    left = sliding_window - 1 if sliding_window else -1
    right = left if left >= 0 and not causal else -1
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    window = {"causal": causal, "window_size_left": left, "window_size_right": right}
    call = of_flash(q, k, v, softmax_scale=of.get("scaling"), softcap=of.get("softcap"), **window)
    call.set_sinks(of.get("s_aux"))
    position_ids, borders = of.get("position_ids"), of.get("cu_seq_lens_q")
    if attention_mask is not None:
        call.see_only(attention_mask.bool()[:, None, None, :])
    elif borders is not None:
        document_T = torch.bucketize(torch.arange(q.shape[1], device=q.device), borders, right=True)
        call.see_only(same_document(document_T[None])[:, None])
    elif position_ids is not None and position_ids.ndim == 2 and len(query) == 1:  # as transformers does
        call.see_only(same_document(documents_of_positions(position_ids))[:, None])
    return call


_OPERATORS: dict[str, Callable[..., Call]] = {
    "aten::scaled_dot_product_attention": of_sdpa,
    "flash_attn::_flash_attn_forward": of_flash,
    "flash_attn::_flash_attn_varlen_forward": of_flash_varlen,
    "torch_attn::_varlen_attn": of_torch_varlen,
}


@cache
def reader_of(func: Any) -> tuple[Callable[..., Call], tuple[str, ...]] | None:
    """Return the function that reads this torch function, and the names of its arguments; None if it is not
    an attention function."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        names = ("query", "key", "value", "score_mod", "block_mask", "scale")
        return (of_flex, names) if func.name() == "flex_attention" else None
    if func is F.scaled_dot_product_attention:
        func = torch.ops.aten.scaled_dot_product_attention
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if not isinstance(func, torch._ops.OpOverload) or func._schema.name not in _OPERATORS:
        return None
    return _OPERATORS[func._schema.name], tuple(x.name for x in func._schema.arguments)
