"""Visible pairs of query and key by modality, computed once for a probed batch and used by every layer.

Shapes: B batch, H heads, T query tokens (C of them in a chunk), S key tokens, M modalities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmqk.distributed import summed
from mmqk.model.backends import visible_keys
from mmqk.monitors.measures.reduce import selection

# Rows with fewer visible keys have no entropy statistic, since log of their number bounds the entropy.
FEWEST_KEYS = 8
CHUNK_ELEMENTS = 2**24  # logits of all heads at a time
KEPT_ELEMENTS = (
    2**26
)  # pairs whose chunks are kept for the next layer; of more they are made again, to save memory
# In place of -inf at hidden keys: its exp is 0, and its product with 0 is 0.
HIDDEN = -1e30
ROW_BLOCKS, FEWEST_ROWS = 8, 32  # slices of `Pairs.reach`: at most so many, and not smaller


def visible_pairs(valid_BT: Tensor, document_BT: Tensor | None = None, window: int = 0) -> Tensor:
    """(B, T, S) bool: visible pairs of causal attention, without padding queries and keys; window 0 is no window."""
    causal = visible_keys(valid_BT.shape[1], valid_BT.device, window, document_BT)
    return (causal & valid_BT[:, None, :, None] & valid_BT[:, None, None, :])[:, 0]


@dataclass(frozen=True)
class Mask:
    """Overwrites the values of hidden pairs, NaN included; fp32, in place.

    It uses bit operations: `masked_fill_` takes five times as long, and a product would keep NaN.
    """

    keep: Tensor  # int32, all bits where visible, none elsewhere
    fill: Tensor  # 0 where visible, HIDDEN elsewhere

    @classmethod
    def of(cls, visible: Tensor) -> Mask:
        fill = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, HIDDEN)
        return cls(-visible.int(), fill)

    def zero_(self, x: Tensor) -> Tensor:
        """Set hidden pairs to 0."""
        x.view(torch.int32).bitwise_and_(self.keep)
        return x

    def hide_(self, x: Tensor) -> Tensor:
        """Set hidden pairs to `HIDDEN`, for a softmax."""
        return self.zero_(x).add_(self.fill)


@dataclass(frozen=True)
class Chunk:
    """A slice of queries, and the first S keys, which include all keys that they see.

    A row has F statistics: four of the logits, M offsets, three of the weights, and M masses.

    Attributes:
        rows: the slice of queries.
        of_key_BMS: keys of each modality, fp32, as a matrix to multiply with.
        mask: of what is visible, (B, C, S).
        sees_BMC: how many keys of each modality a query sees, fp32.
        n_BMC: the same with 1 in place of 0, as a divisor.
        share_BMC: the same as a share of all keys that the query sees.
        queries_MBC: queries of each modality.
        selected_FMBC: queries whose rows count: they see at least 8 keys, and for an offset at least 1 of its block.
        count_FM: number of these queries.
        places: indices of the visible pairs in flattened (B, C, S), by query modality, then by key modality.
    """

    rows: slice
    of_key_BMS: Tensor
    mask: Mask
    sees_BMC: Tensor
    n_BMC: Tensor
    share_BMC: Tensor
    queries_MBC: Tensor
    selected_FMBC: Tensor
    count_FM: Tensor
    places: list[Tensor]


@dataclass(frozen=True)
class Pairs:
    """The pairs of one batch.

    Args:
        modality_BT: modality of each token; a number outside 0 to M - 1 is no modality.
        visible_BTS: which keys each query may see.
        n_modalities: M.
        n_heads: H, which decides how many queries a chunk has.
        collective: whether every rank measures its own pairs at the same time, to merge them.
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
    def of_key_BMS(self) -> Tensor:
        """`of_MBT` in fp32, to multiply with."""
        return self.of_MBT.transpose(0, 1).float()

    @cached_property
    def count_MM(self) -> Tensor:
        """Visible pairs of one head by query and key modality."""
        sees_BMT = (self.of_key_BMS @ self.visible_BTS.float().mT).double()
        return torch.einsum("bmt,bct->mc", self.of_key_BMS.double(), sees_BMT).long()

    @cached_property
    def counts_everywhere(self) -> list[int]:
        """`count_MM` on the host, flattened; summed over ranks if the pairs are collective."""
        count_MM = self.count_MM.clone()
        if self.collective:
            count_MM = summed(count_MM)
        return count_MM.flatten().tolist()

    @cached_property
    def seen_B(self) -> Tensor:
        """Sequences with a visible pair, which are those with more than padding."""
        return self.visible_BTS.any((1, 2))

    @cached_property
    def reach(self) -> list[tuple[slice, int]]:
        """Slices of queries, each with the number of first keys that include all keys it sees."""
        seen_TS = self.visible_BTS.any(0)
        T, S = seen_TS.shape
        size = max(FEWEST_ROWS, -(-T // ROW_BLOCKS))
        last_T = (seen_TS * torch.arange(1, S + 1, device=seen_TS.device)).amax(1)
        last = torch.stack([rows.amax() for rows in last_T.split(size)]).tolist()
        return [(slice(i * size, (i + 1) * size), n) for i, n in enumerate(last)]

    @cached_property
    def one_head(self) -> Pairs:
        """The same pairs for one head at a time."""
        return replace(self, n_heads=1)

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
        S = max(max(n, 1) for part, n in self.reach if part.start < rows.stop and rows.start < part.stop)
        visible_BCS, of_key_BMS = self.visible_BTS[:, rows, :S], self.of_key_BMS[:, :, :S]
        sees_BMC = of_key_BMS @ visible_BCS.float().mT
        queries_MBC, M = self.of_MBT[:, :, rows], self.n_modalities
        counted_MBC = queries_MBC & (sees_BMC.sum(1) >= FEWEST_KEYS)
        sees_any_MBC = sees_BMC.transpose(0, 1) > 0
        selected_FMBC = torch.stack(
            [counted_MBC] * 4 + [counted_MBC & sees_BC for sees_BC in sees_any_MBC] + [counted_MBC] * (3 + M)
        )
        return Chunk(
            rows=rows,
            of_key_BMS=of_key_BMS,
            mask=Mask.of(visible_BCS),
            sees_BMC=sees_BMC,
            n_BMC=sees_BMC.clamp_min(1),
            share_BMC=sees_BMC / sees_BMC.sum(1, keepdim=True).clamp_min(1),
            queries_MBC=queries_MBC,
            selected_FMBC=selected_FMBC,
            count_FM=selected_FMBC.sum((2, 3)).float(),
            places=[
                (visible_BCS & query_BC[:, :, None] & key_BS[:, None, :]).flatten().nonzero()[:, 0]
                for query_BC in queries_MBC
                for key_BS in self.of_MBT[:, :, :S]
            ],
        )
