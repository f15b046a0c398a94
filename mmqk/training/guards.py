"""Guards of a step: AdaGC clips gradients by tensor, SkipStep skips updates, QK-Clip scales weights by the largest
attention logits; and `RowLog`, the softmax statistics that the kernel stores.

None of them synchronizes with the host. Shapes are in the names: P parameter tensors, N steps of a window, B batch,
T tokens (C of them in a chunk), S the same tokens as keys, H heads, G key heads, K head_dim, L layers, M modalities.
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
from mmqk.model.backends import documents_of
from mmqk.model.norms import at_least_fp32
from mmqk.model.transformer import Block
from mmqk.monitors.formulas.reduce import CHUNK_ELEMENTS, selection, visible_pairs
from mmqk.store import tag

ADAGC_DECAY = 0.98
SKIP_WINDOW = 128


class AdaGC:
    """Clips the gradient of each tensor to a multiple of the running mean of its norm (arXiv 2502.11034).

    ```
    g <- g min(1, factor gamma / |g|)        gamma <- 0.98 gamma + 0.02 |g|, with the clipped g
    ```

    During warm-up, no gradient is clipped, and gamma is the smallest norm so far. Norms of 0 are ignored: the tensor
    had no gradient, such as a tensor of a modality that the step did not have.

    Args:
        tensors: Number of parameter tensors.
        factor: Largest norm as a multiple of gamma (1.05 in the paper).
        warmup: Steps of warm-up.
    """

    def __init__(self, tensors: int, factor: float, warmup: int) -> None:
        self.factor, self.warmup = factor, warmup
        self.state = {"gamma_P": torch.full((tensors,), torch.inf, dtype=torch.float32)}  # checkpoints store it

    @torch.no_grad()
    def clip(self, gradients: Sequence[Tensor], norms: Sequence[Tensor], step: int) -> None:
        """Clip the gradients in place. ``norms`` are the gradients' norms; ``step`` counts from 0."""
        norm_P = torch.stack(list(norms)).float()
        before_P = self.state["gamma_P"].to(norm_P.device)
        after_P = torch.minimum(before_P, norm_P)
        if step >= self.warmup:
            gamma_P = torch.where(before_P.isfinite(), before_P, norm_P)
            scale_P = (self.factor * gamma_P / norm_P).clamp(max=1.0).nan_to_num(1.0)
            torch._foreach_mul_(list(gradients), list(scale_P.unbind()))
            after_P = ADAGC_DECAY * gamma_P + (1 - ADAGC_DECAY) * scale_P * norm_P
        self.state["gamma_P"] = torch.where(norm_P > 0, after_P, before_P)


class SkipStep:
    """Skips an update whose loss or gradient norm is far above the mean of the last 128 steps (OLMo-core).

    A step is skipped if its loss or its gradient norm is more than ``sigmas`` standard deviations above the mean of
    the window. The first 64 steps are never skipped. Skipped steps count in the window.

    Args:
        sigmas: Number of standard deviations (6 in OLMo-core).
    """

    def __init__(self, sigmas: float) -> None:
        self.sigmas = sigmas
        self.state = {  # checkpoints store it
            "window_2N": torch.zeros(2, SKIP_WINDOW, dtype=torch.float32),
            "count": torch.zeros((), dtype=torch.int64),
            "skipped": torch.zeros((), dtype=torch.int64),
        }

    @torch.no_grad()
    def skips(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return whether to skip this update, as a boolean tensor, and add the step to the window."""
        value_2 = torch.stack([loss.float(), grad_norm.float()])
        window_2N, count, skipped = (value.to(value_2.device) for value in self.state.values())
        filled_N = torch.arange(SKIP_WINDOW, device=window_2N.device) < count
        n = filled_N.sum().clamp_min(2)
        mean_2 = torch.where(filled_N, window_2N, 0.0).sum(1) / n
        square_2N = torch.where(filled_N, (window_2N - mean_2[:, None]).square(), 0.0)
        limit_2 = mean_2 + self.sigmas * (square_2N.sum(1) / (n - 1)).sqrt()
        skip = (value_2 > limit_2).any() & (count >= SKIP_WINDOW // 2)
        window_2N[:, count % SKIP_WINDOW] = value_2
        self.state = {"window_2N": window_2N, "count": count + 1, "skipped": skipped + skip}
        return skip


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
    visible_B1TS = visible_pairs(valid_BT, document_BT, window)[:, None]
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
        return _by_layer(measured, "qk_clip_logit", "qk_clip_gamma", [()])

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
        self._parts: list[tuple[Tensor, Tensor]] = []  # of each micro-batch: the maxima, and the sums with their counts

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
        self._parts.append((max_MLH.amax(2).T, torch.cat([lse_LM, count_1M.to(lse_LM)])))
        return max_MLH.amax(0)

    def measured(self) -> Tensor:
        """Return the largest logits, then the mean log-sum-exps, by layer and modality over all ranks: (2LM,).

        This is a collective call, and it clears the log.
        """
        maxima, sums = zip(*self._parts, strict=True)
        self._parts = []
        max_LM, total = largest(torch.stack(maxima).amax(0)), summed(sum(sums[1:], sums[0]))
        return torch.cat([max_LM.flatten(), (total[:-1] / total[-1:]).flatten()])

    def values(self, measured: Sequence[float]) -> dict[str, float]:
        """Return `measured` by tag; a modality without a query is left out."""
        return _by_layer(measured, "attn_row_max", "attn_row_lse", [(name,) for name in self.modalities])


def _by_layer(
    measured: Sequence[float], of_logits: str, other: str, modalities: Sequence[tuple[str, ...]]
) -> dict[str, float]:
    """Return the largest logits and another statistic, by layer and modality, as tags; a largest logit of -inf is
    left out, with the other statistic."""
    half, tags = len(measured) // 2, dict[str, float]()
    for i, (logit, value) in enumerate(zip(measured[:half], measured[half:], strict=True)):
        layer, m = divmod(i, len(modalities))
        if logit != -math.inf:
            tags[tag(of_logits, *modalities[m], layer=layer)] = logit
            tags[tag(other, *modalities[m], layer=layer)] = value
    return tags
