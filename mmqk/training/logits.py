"""The attention logits of every training step: QK-Clip, and the softmax statistics that the kernel stores.

Neither synchronizes with the host. Shapes are in the names: B batch, T tokens (C of them in a chunk), S the same
tokens as keys, H heads, G key heads, K head_dim, L layers, M modalities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mmqk.data.batch import TokenBatch
from mmqk.distributed import largest, summed
from mmqk.model import EarlyFusionTransformer, RowStats
from mmqk.model.backends import documents_of, visible_keys
from mmqk.model.norms import at_least_fp32
from mmqk.model.transformer import Block
from mmqk.monitors.formulas.reduce import selection
from mmqk.store import tag

CHUNK_ELEMENTS = 2**24


@torch.no_grad()
def largest_logits(
    q_BHTK: Tensor, k_BHSK: Tensor, scale: float, valid_BT: Tensor, document_BT: Tensor | None = None, window: int = 0
) -> Tensor:
    """Return the exact largest signed `scale * q.k` of each head over all visible pairs, in chunks of queries.

    Args:
        q_BHTK: Queries as they enter the dot product.
        k_BHSK: Keys as they enter the dot product; shared key heads are repeated for every query head.
        scale: Factor on the dot products.
        valid_BT: False at padding; pairs with padding are excluded.
        document_BT: A query attends only to tokens with its document number; None is one document per row.
        window: A query attends to this many tokens, itself included; 0 for all.

    Returns:
        largest_H, in at least fp32: -inf if there is no visible pair, NaN if a visible logit is NaN.
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
    """Return `min(1, threshold / S_h)`, with the largest logit S_h of head h (Kimi K2, arXiv 2507.20534).

    If S_h is not finite, the result is 1: the run diverges anyway, and weights of 0 or NaN would hide the cause.
    """
    above_H = (largest_H > threshold) & torch.isfinite(largest_H)
    return torch.where(above_H, threshold / largest_H, 1.0)


class QKClip:
    """Collects the largest logits in the forward passes of a step, and clips the weights after the step's update.

    It keeps no state between steps, so checkpoints store nothing for it.

    Args:
        model: The model to clip, in place.
        threshold: tau, for the visible logits after scaling and before the softcap.
    """

    def __init__(self, model: EarlyFusionTransformer, threshold: float) -> None:
        self.model, self.threshold = model, threshold
        self._largest: dict[int, Tensor] = {}

    def observer(self, batch: TokenBatch) -> Callable[[str, int, Tensor], None]:
        """Return an observer that gets q and k in a forward pass over `batch` and finds the largest logits.

        The largest logits are collected over all micro-batches of the step.
        """
        queries: dict[int, Tensor] = {}
        scale, config = self.model.attn_scale_value, self.model.config

        def observer(site: str, layer: int, tensor: Tensor) -> None:
            if not torch.is_grad_enabled():
                return  # ignore the forward pass of a `NormMonitor` probe
            if site == "q":
                queries[layer] = tensor.detach()
            elif site == "k":
                largest_H = largest_logits(
                    queries.pop(layer),
                    tensor.detach(),
                    scale,
                    batch.valid_BT,
                    documents_of(config, config.separates(layer), batch.modality_BT, batch.document_BT),
                    config.window_of(layer),
                )
                self.add(layer, largest_H)

        return observer

    def add(self, layer: int, largest_H: Tensor) -> None:
        """Add the largest logits of one layer in one forward pass."""
        before_H = self._largest.get(layer)
        self._largest[layer] = largest_H if before_H is None else torch.maximum(before_H, largest_H)

    def measured(self) -> Tensor:
        """Return the largest logit of each layer, then the smallest gamma of each layer: (2L,), on the device.

        The maximum is over all ranks, so that all ranks scale by the same factor. This is a collective call.
        """
        largest_LH = largest(torch.stack([self._largest[layer] for layer in range(len(self.model.blocks))]))
        self._largest = dict(enumerate(largest_LH))
        return torch.cat([largest_LH.amax(1), gamma_of(largest_LH, self.threshold).amin(1)])

    def values(self, measured: list[float]) -> dict[str, float]:
        """Return `QKClip.measured` by tag; a layer without a visible pair is left out."""
        half, values = len(measured) // 2, dict[str, float]()
        for layer, (logit, gamma) in enumerate(zip(measured[:half], measured[half:], strict=True)):
            if logit != -math.inf:
                values |= {tag("qk_clip_logit", layer=layer): logit, tag("qk_clip_gamma", layer=layer): gamma}
        return values

    @torch.no_grad()
    def clip(self, skip: Tensor | None = None) -> None:
        """Scale the weights by the collected logits, then clear the logits; call it after the optimizer's update.

        Args:
            skip: A boolean tensor on the device. If it is True, the weights stay unchanged.
        """
        for layer, largest_H in self._largest.items():
            if skip is not None:
                largest_H = largest_H.masked_fill(skip, -torch.inf)
            attention = cast(Block, self.model.blocks[layer]).attention
            clip_heads(attention.w_q, attention.w_k, gamma_of(largest_H, self.threshold), attention.kv_heads)
        self._largest.clear()


@torch.no_grad()
def clip_heads(w_q: nn.Module, w_k: nn.Module, gamma_H: Tensor, kv_heads: int) -> None:
    """Scale W_q and W_k, with all copies by modality, so that the logits of head h shrink by gamma_h.

    With one key head per query head, both sides are scaled by sqrt(gamma_h). With shared key heads W_k is unchanged,
    and the query head is scaled by gamma_h: shrinking shared keys would require longer queries in the heads that were
    not clipped, in every step. No weight ever grows, and a factor of 1 changes no bit.
    """
    if kv_heads == len(gamma_H):
        scale_rows(w_k, gamma_H.sqrt())
        scale_rows(w_q, gamma_H.sqrt())
    else:
        scale_rows(w_q, gamma_H)


def scale_rows(layer: nn.Module, factor_H: Tensor) -> None:
    """Multiply the rows of each head in every matrix of `layer` by its factor, in at least fp32."""
    for matrix in layer.modules():
        if isinstance(matrix, nn.Linear):
            matrix.weight.mul_(factor_H.repeat_interleave(len(matrix.weight) // len(factor_H))[:, None])


class RowLog:
    """Reduces the `RowStats` of a step's micro-batches by layer and modality of the query, without padding.

    It uses only statistics that the kernel has stored, and never synchronizes with the host.

    Args:
        modalities: Names of the modalities.
    """

    def __init__(self, modalities: Sequence[str]) -> None:
        self.modalities = tuple(modalities)
        self._max_LM: Tensor | None = None
        self._sums_LM: Tensor | None = None

    @torch.no_grad()
    def add(self, row_stats: Sequence[RowStats], batch: TokenBatch) -> Tensor:
        """Add the statistics of a forward pass, one per layer; return the largest logit of each head, largest_LH."""
        selected_MBT = selection(batch.modality_BT, batch.valid_BT, len(self.modalities))
        max_LBHT, lse_LBHT = (torch.stack([getattr(r, name) for r in row_stats]) for name in RowStats._fields)
        max_MLH = torch.stack(
            [max_LBHT.masked_fill(~selected_BT[:, None], -math.inf).amax((1, 3)) for selected_BT in selected_MBT]
        )
        lse_LM = torch.stack(
            [lse_LBHT.masked_fill(~selected_BT[:, None], 0.0).sum((1, 2, 3)) for selected_BT in selected_MBT], 1
        )
        count_1M = selected_MBT.sum((1, 2))[None] * max_LBHT.shape[2]
        max_LM, sums_LM = max_MLH.amax(2).T, torch.cat([lse_LM, count_1M.to(lse_LM)])
        if self._max_LM is None or self._sums_LM is None:
            self._max_LM, self._sums_LM = max_LM, sums_LM
        else:
            self._max_LM, self._sums_LM = torch.maximum(self._max_LM, max_LM), self._sums_LM + sums_LM
        return max_MLH.amax(0)

    def measured(self) -> Tensor:
        """Return the largest logits, then the mean log-sum-exps, by layer and modality over all ranks: (2LM,).

        This is a collective call, and it clears the log.
        """
        assert self._max_LM is not None and self._sums_LM is not None
        max_LM, sums = largest(self._max_LM.contiguous()), summed(self._sums_LM.contiguous())
        self._max_LM = self._sums_LM = None
        return torch.cat([max_LM.flatten(), (sums[:-1] / sums[-1:]).flatten()])

    def values(self, measured: Sequence[float]) -> dict[str, float]:
        """Return `measured` by tag; a modality without a query is left out."""
        half, M = len(measured) // 2, len(self.modalities)
        tags: dict[str, float] = {}
        for i, (largest_logit, lse) in enumerate(zip(measured[:half], measured[half:], strict=True)):
            layer, name = i // M, self.modalities[i % M]
            if largest_logit != -math.inf:
                tags[tag("attn_row_max", name, layer=layer)] = largest_logit
                tags[tag("attn_row_lse", name, layer=layer)] = lse
        return tags
