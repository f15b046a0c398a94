"""Which query meets which key, by modality: worked out once for a probed batch and used by every layer.

Shapes: B batch, H heads, T query tokens (C of them in a chunk), S key tokens, M modalities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from mmqk.monitors.reduce import selection

# Entropy is left out where a row can see fewer keys than this: it is bounded by their number.
FEWEST_KEYS = 8
CHUNK_ELEMENTS = 2**24  # logits of all heads at a time
KEPT_ELEMENTS = (
    2**26
)  # pairs whose index is kept for the next layer; of more it is made again, to save memory


def visible_pairs(valid_BT: Tensor, document_BT: Tensor | None = None, window: int = 0) -> Tensor:
    """(B, T, S) bool: pairs that causal attention uses, padding left out on both sides; window 0 is none."""
    T = valid_BT.shape[1]
    causal_TS = torch.ones(T, T, dtype=torch.bool, device=valid_BT.device).tril()
    if window:
        causal_TS = causal_TS.triu(1 - window)
    visible_BTS = causal_TS & valid_BT[:, :, None] & valid_BT[:, None, :]
    if document_BT is not None:
        visible_BTS = visible_BTS & (document_BT[:, :, None] == document_BT[:, None, :])
    return visible_BTS


@dataclass(frozen=True)
class Chunk:
    """A slice of queries.

    Attributes:
        rows: of the queries.
        visible_BCS: which keys each may see.
        sees_BCM: how many keys of each modality it sees, fp32.
        queries_MBC: queries of each modality, of those that see at least 8 keys.
        index: for each query and key modality, in that order, the places of its visible pairs in (B, C, S) flattened.
    """

    rows: slice
    visible_BCS: Tensor
    sees_BCM: Tensor
    queries_MBC: Tensor
    index: list[Tensor]


@dataclass(frozen=True)
class Pairs:
    """Of one batch.

    Args:
        modality_BT: of each token; a number outside 0 to M - 1 belongs to none.
        visible_BTS: which keys each query may see.
        n_modalities: M.
        n_heads: H, which decides how many queries a chunk has.
        collective: whether every rank works on pairs of its own at the same time, to be merged.
    """

    modality_BT: Tensor
    visible_BTS: Tensor
    n_modalities: int
    n_heads: int
    collective: bool = False

    @cached_property
    def of_MBT(self) -> Tensor:
        """Tokens of each modality, padding or not."""
        return selection(
            self.modality_BT, torch.ones_like(self.modality_BT, dtype=torch.bool), self.n_modalities
        )

    @cached_property
    def of_key_BSM(self) -> Tensor:
        """The same, fp32, as a matrix to multiply with."""
        return self.of_MBT.permute(1, 2, 0).float()

    @cached_property
    def count_MM(self) -> Tensor:
        """Visible pairs of one head by query and key modality."""
        sees_BTM = (self.visible_BTS.float() @ self.of_key_BSM).double()
        return torch.einsum("btm,btc->mc", self.of_key_BSM.double(), sees_BTM).long()

    @cached_property
    def count_everywhere_MM(self) -> Tensor:
        """The same over all ranks, if the pairs are collective."""
        count_MM = self.count_MM.clone()
        if self.collective and dist.is_available() and dist.is_initialized():
            dist.all_reduce(count_MM)
        return count_MM

    @property
    def chunks(self) -> Iterable[Chunk]:
        """All queries, in slices of at most 2^24 logits."""
        return self._kept if self.visible_BTS.numel() <= KEPT_ELEMENTS else self._made()

    @cached_property
    def _kept(self) -> list[Chunk]:
        return list(self._made())

    def _made(self) -> Iterator[Chunk]:
        B, T, _ = self.visible_BTS.shape
        size = max(1, CHUNK_ELEMENTS // (B * self.n_heads * T))
        for start in range(0, T, size):
            yield self._chunk(slice(start, start + size))

    def _chunk(self, rows: slice) -> Chunk:
        visible_BCS = self.visible_BTS[:, rows]
        sees_BCM = visible_BCS.float() @ self.of_key_BSM
        of_query_MBC = self.of_MBT[:, :, rows]
        index = [
            (visible_BCS & query_BC[:, :, None] & key_BS[:, None, :]).flatten().nonzero()[:, 0]
            for query_BC in of_query_MBC
            for key_BS in self.of_MBT
        ]
        enough_BC = sees_BCM.sum(-1) >= FEWEST_KEYS
        return Chunk(rows, visible_BCS, sees_BCM, of_query_MBC & enough_BC, index)
