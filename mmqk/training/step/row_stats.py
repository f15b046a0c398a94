"""What attention's kernel says of every row in every step: the largest logit and the log-sum-exp, by modality.

Shapes are in the names: B batch, T tokens, H heads, L layers, M modalities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmqk.data.batch import TokenBatch
from mmqk.distributed import largest, summed
from mmqk.model import Rows
from mmqk.monitors.measures.reduce import selection
from mmqk.store import tag


class RowLog:
    """Collects the rows of a step's micro-batches, by layer and modality of the query; padding does not count.

    Nothing is computed beside what the kernel has stored, and nothing waits for the device.

    Args:
        modalities: Their names.
    """

    def __init__(self, modalities: Sequence[str]) -> None:
        self.modalities = tuple(modalities)
        self._max_LM: Tensor | None = None
        self._sums_LM: Tensor | None = None

    @torch.no_grad()
    def see(self, rows: Sequence[Rows], batch: TokenBatch) -> Tensor:
        """Add a forward's rows, one for each layer; returns the largest logits by head, largest_LH."""
        own_MBT = selection(batch.modality_BT, batch.valid_BT, len(self.modalities))
        max_LBHT, lse_LBHT = (torch.stack([getattr(r, name) for r in rows]) for name in Rows._fields)
        max_MLH = torch.stack(
            [max_LBHT.masked_fill(~own_BT[:, None], -math.inf).amax((1, 3)) for own_BT in own_MBT]
        )
        lse_LM = torch.stack(
            [lse_LBHT.masked_fill(~own_BT[:, None], 0.0).sum((1, 2, 3)) for own_BT in own_MBT], 1
        )
        count_1M = own_MBT.sum((1, 2))[None] * max_LBHT.shape[2]
        max_LM, sums_LM = max_MLH.amax(2).T, torch.cat([lse_LM, count_1M.to(lse_LM)])
        if self._max_LM is None or self._sums_LM is None:
            self._max_LM, self._sums_LM = max_LM, sums_LM
        else:
            self._max_LM, self._sums_LM = torch.maximum(self._max_LM, max_LM), self._sums_LM + sums_LM
        return max_MLH.amax(0)

    def measured(self) -> Tensor:
        """The largest logits, then the mean log-sum-exps, by layer and modality: (2LM,). Forgets them.

        Of all ranks; a collective call.
        """
        assert self._max_LM is not None and self._sums_LM is not None
        max_LM, sums = largest(self._max_LM.contiguous()), summed(self._sums_LM.contiguous())
        self._max_LM = self._sums_LM = None
        return torch.cat([max_LM.flatten(), (sums[:-1] / sums[-1:]).flatten()])

    def values(self, measured: Sequence[float]) -> dict[str, float]:
        """`measured` as tags; a modality without a query is an absent key."""
        half, M = len(measured) // 2, len(self.modalities)
        found: dict[str, float] = {}
        for i, (largest_logit, lse) in enumerate(zip(measured[:half], measured[half:], strict=True)):
            layer, name = i // M, self.modalities[i % M]
            if largest_logit != -math.inf:
                found[tag("attn_row_max", name, layer=layer)] = largest_logit
                found[tag("attn_row_lse", name, layer=layer)] = lse
        return found
