"""QK-Clip: after an update, W_q and W_k of heads whose largest attention logit passed a threshold are scaled down.

Shapes are in the names: B batch, T tokens (C of them in a chunk), S the same tokens as keys, H heads, G heads of
keys, K head width, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from mmqk.data.batch import TokenBatch
from mmqk.distributed import largest as largest_of
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.backends import visible_keys
from mmqk.model.norms import at_least_fp32
from mmqk.model.transformer import Block
from mmqk.store import tag
from mmqk.training.step.optimizers import OptimConfig

CHUNK_ELEMENTS = 2**24


def check_qk_clip(optim: OptimConfig, model: ModelConfig) -> None:
    """Raise ValueError where the size of W_q and W_k does not reach the logits, so that clipping it does nothing."""
    if optim.qk_clip is None:
        return
    if model.qk_norm.kind != "none":
        raise ValueError(
            f"optim.qk_clip scales W_q and W_k, which model.qk_norm.kind {model.qk_norm.kind} divides out again:"
            " leave one of them out."
        )
    if model.weight_reparam == "sigma":
        raise ValueError(
            "optim.qk_clip scales W_q and W_k, which model.weight_reparam sigma divides out again: leave one of them"
            " out."
        )


@torch.no_grad()
def largest_logits(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    scale: float,
    valid_BT: Tensor,
    document_BT: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """The largest signed `scale * q.k` of each head over every visible pair, exact, a chunk of queries at a time.

    Args:
        q_BHTK: Queries as they enter the dot product; keys likewise, a shared head once for every query head.
        k_BHSK: Keys.
        scale: Factor on the dot products.
        valid_BT: False at padding, whose pairs do not count.
        document_BT: A token sees only tokens of its own document number; None is one document a row.
        window: A token sees this many tokens, itself included; 0 for all.

    Returns:
        largest_H, at least fp32; -inf where there is no pair, NaN where a visible logit is NaN.
    """
    B, H, T, _ = q_BHTK.shape
    causal = visible_keys(T, q_BHTK.device, window, document_BT)
    visible_B1TS = causal & valid_BT[:, None, :, None] & valid_BT[:, None, None, :]
    chunk = max(1, CHUNK_ELEMENTS // (B * H * T))
    with torch.autocast(q_BHTK.device.type, enabled=False):
        q, k = scale * at_least_fp32(q_BHTK), at_least_fp32(k_BHSK)
        largest_H = q.new_full((H,), -torch.inf)
        for start in range(0, T, chunk):
            rows, keys = slice(start, start + chunk), slice(min(T, start + chunk))
            logits_BHCS = q[:, :, rows] @ k[:, :, keys].transpose(-1, -2)
            seen_BHCS = logits_BHCS.masked_fill(~visible_B1TS[:, :, rows, keys], -torch.inf)
            largest_H = torch.maximum(largest_H, seen_BHCS.amax((0, 2, 3)))
    return largest_H


def gamma_of(largest_H: Tensor, threshold: float) -> Tensor:
    """`min(1, threshold / S_h)` (Kimi K2, arXiv 2507.20534).

    It is 1 where S_h is not finite: such a run is diverging anyway, and a weight of 0 or NaN would hide how.
    """
    above_H = (largest_H > threshold) & torch.isfinite(largest_H)
    return torch.where(above_H, threshold / largest_H, 1.0)


class QKClip:
    """Collects the largest logits while a step's forwards run, and clips after its update.

    Nothing lives from one step to the next, so there is nothing to save.

    Args:
        model: Its weights are clipped in place.
        threshold: tau, on the raw logits: after their scale, before cap and mask.
    """

    def __init__(self, model: EarlyFusionTransformer, threshold: float) -> None:
        self.model, self.threshold = model, threshold
        self._largest: dict[int, Tensor] = {}

    def sink(self, batch: TokenBatch) -> Callable[[str, int, Tensor], None]:
        """The sink of a forward over `batch`: the largest logits of all micro-batches so far are kept."""
        queries: dict[int, Tensor] = {}
        scale, window_of = self.model.attn_scale_value, self.model.config.window_of

        def sink(site: str, layer: int, tensor: Tensor) -> None:
            if site == "q":
                queries[layer] = tensor.detach()
            elif site == "k":
                found_H = largest_logits(
                    queries.pop(layer),
                    tensor.detach(),
                    scale,
                    batch.valid_BT,
                    batch.document_BT,
                    window_of(layer),
                )
                self.see(layer, found_H)

        return sink

    def see(self, layer: int, largest_H: Tensor) -> None:
        """The largest logits of a forward's layer, where somebody else knows them."""
        before_H = self._largest.get(layer)
        self._largest[layer] = largest_H if before_H is None else torch.maximum(before_H, largest_H)

    def measured(self) -> Tensor:
        """By layer, the largest logit of its heads, then by layer the smallest gamma: (2L,), on the device.

        Of all ranks, which clip alike from here on; a collective call.
        """
        largest_LH = largest_of(
            torch.stack([self._largest[layer] for layer in range(len(self.model.blocks))])
        )
        self._largest = dict(enumerate(largest_LH))
        return torch.cat([largest_LH.amax(1), gamma_of(largest_LH, self.threshold).amin(1)])

    def values(self, measured: list[float]) -> dict[str, float]:
        """`QKClip.measured` as tags; a layer without a visible pair is an absent key."""
        largest, gammas = measured[: len(measured) // 2], measured[len(measured) // 2 :]
        values: dict[str, float] = {}
        for layer, (logit, gamma) in enumerate(zip(largest, gammas, strict=True)):
            if logit != -math.inf:
                values |= {tag("qk_clip_logit", layer=layer): logit, tag("qk_clip_gamma", layer=layer): gamma}
        return values

    @torch.no_grad()
    def clip(self, hold: Tensor | None = None) -> None:
        """Scale the weights by what was collected, and forget it; call it after the optimizer's update.

        Args:
            hold: True on the device where the weights must stay as they are.
        """
        for layer, largest_H in self._largest.items():
            if hold is not None:
                largest_H = largest_H.masked_fill(hold, -torch.inf)
            attention = cast(Block, self.model.blocks[layer]).attention
            clip_heads(attention.w_q, attention.w_k, gamma_of(largest_H, self.threshold), attention.kv_heads)
        self._largest.clear()


@torch.no_grad()
def clip_heads(w_q: nn.Module, w_k: nn.Module, gamma_H: Tensor, kv_heads: int) -> None:
    """Scale W_q and W_k, every copy of them, so that the logits of head h shrink by gamma_h.

    With keys of its own a head takes sqrt(gamma_h) on either side. Where heads share a key head, W_k stays as it is
    and each query head takes all of its gamma: shrinking shared keys would mean to lengthen the queries of heads
    that were not clipped, step after step. Nothing ever grows, and a factor of 1 changes no bit.
    """
    if kv_heads == len(gamma_H):
        scale_rows(w_k, gamma_H.sqrt())
        scale_rows(w_q, gamma_H.sqrt())
    else:
        scale_rows(w_q, gamma_H)


def scale_rows(layer: nn.Module, factor_H: Tensor) -> None:
    """Multiply the rows of each head in every matrix of `layer`, in at least fp32."""
    for matrix in layer.modules():
        if isinstance(matrix, nn.Linear):
            matrix.weight.mul_(factor_H.repeat_interleave(len(matrix.weight) // len(factor_H))[:, None])
