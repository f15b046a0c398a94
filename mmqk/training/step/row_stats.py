"""Softmax statistics of the attention kernel in every step: largest logit and log-sum-exp, by modality.

Shapes are in the names: B batch, T tokens, H heads, L layers, M modalities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmqk.data.batch import TokenBatch
from mmqk.distributed import largest, summed
from mmqk.model import RowStats
from mmqk.monitors.formulas.reduce import selection
from mmqk.store import tag


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
