"""The pairs of query and key of a probed batch, in chunks of queries. They are computed once and used by every layer.

Shapes: B batch, H heads, T query tokens (C of them in a chunk), S key tokens, M modalities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmqk.model.backends import visible_keys
from mmqk.monitors.formulas.reduce import selection

# Rows with fewer visible keys are left out of row statistics: the log of the number of keys bounds their entropy.
FEWEST_KEYS = 8
CHUNK_ELEMENTS = 2**24  # largest number of logits, over all heads, to compute at a time
CACHED_ELEMENTS = 2**26  # largest number of pairs whose chunks are stored for the next layer
# Used instead of -inf at hidden keys: its exp is 0, and its product with 0 is 0, not NaN.
HIDDEN = -1e30
ROW_BLOCKS, FEWEST_ROWS = 8, 32  # largest number of slices in `Pairs.reach`, and their smallest size


def visible_pairs(valid_BT: Tensor, document_BT: Tensor | None = None, window: int = 0) -> Tensor:
    """Return (B, T, S) bool: visible pairs of causal attention, without pairs with padding; ``window`` 0 means
    no window."""
    causal = visible_keys(valid_BT.shape[1], valid_BT.device, window, document_BT)
    return (causal & valid_BT[:, None, :, None] & valid_BT[:, None, None, :])[:, 0]


@dataclass(frozen=True)
class Mask:
    """Overwrites the values of hidden pairs, including NaN, in fp32 tensors and in place.

    It uses bit operations: `masked_fill_` takes five times as long, and a product would not remove NaN.
    """

    keep: Tensor  # int32, all bits set where visible, no bit elsewhere
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


class Chunk:
    """A slice of queries, and the first S keys, which include all keys that these queries see.

    A row is a query. It has F statistics: four of the logits, M offsets, three of the weights, and M masses
    (`AttentionStatistics`).

    Args:
        pairs: the pairs of the batch.
        rows: slice of the query axis.

    Attributes:
        key_BMS: 1 at the keys of each modality, else 0; fp32, for matrix products.
        mask: hides the pairs that are not visible, (B, C, S).
        visible_BMC: number of keys of each modality that a query sees, fp32.
        divisor_BMC: ``visible_BMC`` with 1 in place of 0, to divide by.
        share_BMC: ``visible_BMC`` as a share of all keys that the query sees.
        queries_MBC: True at the queries of each modality.
        selected_FMBC: for each statistic and query modality, True at the queries that count in the mean of the
            statistic. A query counts if it sees at least 8 keys. For the offset of one key modality, the query must
            also see at least 1 key of this modality.
        count_FM: number of queries that count, by statistic and query modality.
        places: for each combination of query modality and key modality, the indices of its visible pairs in the
            flattened (B, C, S) axes. The key modality changes fastest in the list.
        others: whether the batch has visible keys without a modality.
    """

    def __init__(self, pairs: Pairs, rows: slice) -> None:
        S = max(max(n, 1) for part, n in pairs.reach if part.start < rows.stop and rows.start < part.stop)
        visible_BCS, token_MBS, M = pairs.visible_BTS[:, rows, :S], pairs.token_MBT[:, :, :S], pairs.n_modalities
        self.rows, self.key_BMS, self.mask = rows, pairs.key_BMS[:, :, :S], Mask.of(visible_BCS)
        self.visible_BMC = self.key_BMS @ visible_BCS.float().mT
        self.divisor_BMC = self.visible_BMC.clamp_min(1)
        self.share_BMC = self.visible_BMC / self.visible_BMC.sum(1, keepdim=True).clamp_min(1)
        self.queries_MBC = pairs.token_MBT[:, :, rows]
        counted_MBC = self.queries_MBC & (self.visible_BMC.sum(1) >= FEWEST_KEYS)
        offsets = [counted_MBC & (visible_BC > 0) for visible_BC in self.visible_BMC.unbind(1)]
        self.selected_FMBC = torch.stack([counted_MBC] * 4 + offsets + [counted_MBC] * (3 + M))
        self.count_FM = self.selected_FMBC.sum((2, 3)).float()
        self.places = [
            (visible_BCS & query_BC[:, :, None] & key_BS[:, None, :]).flatten().nonzero()[:, 0]
            for query_BC in self.queries_MBC
            for key_BS in token_MBS
        ]
        self.others = pairs.others


@dataclass(frozen=True)
class Pairs:
    """The pairs of query and key of one batch.

    Args:
        modality_BT: modality of each token; a token with a number outside 0 to M - 1 has no modality.
        visible_BTS: which keys each query may see.
        n_modalities: M.
        n_heads: H; with more heads, a chunk has fewer queries.
    """

    modality_BT: Tensor
    visible_BTS: Tensor
    n_modalities: int
    n_heads: int

    @cached_property
    def token_MBT(self) -> Tensor:
        """True at the tokens of each modality, including padding."""
        return selection(self.modality_BT, torch.ones_like(self.modality_BT, dtype=torch.bool), self.n_modalities)

    @cached_property
    def key_BMS(self) -> Tensor:
        """`token_MBT` in fp32, for matrix products."""
        return self.token_MBT.transpose(0, 1).float()

    @cached_property
    def count_MM(self) -> Tensor:
        """Number of visible pairs of one head, by query and key modality."""
        visible_BMT = (self.key_BMS @ self.visible_BTS.float().mT).double()
        return torch.einsum("bmt,bct->mc", self.key_BMS.double(), visible_BMT).long()

    @cached_property
    def counts_everywhere(self) -> list[int]:
        """`count_MM` on the host, flattened. If all ranks measure together, `Measurement` sets the sum over ranks."""
        return self.count_MM.flatten().tolist()

    @property
    def others(self) -> bool:
        """Whether a key without a modality is visible."""
        return bool(self._on_host[-1])

    @cached_property
    def nonempty_B(self) -> Tensor:
        """Sequences with a visible pair: those that contain more than padding."""
        return self.visible_BTS.any((1, 2))

    @cached_property
    def reach(self) -> list[tuple[slice, int]]:
        """Slices of queries, each with the smallest n such that its queries see only keys among the first n."""
        size = self._block_size
        return [(slice(i * size, (i + 1) * size), n) for i, n in enumerate(self._on_host[:-1])]

    @property
    def _block_size(self) -> int:
        return max(FEWEST_ROWS, -(-self.visible_BTS.shape[1] // ROW_BLOCKS))

    @cached_property
    def _on_host(self) -> list[int]:
        """The numbers of `reach`, then `others`, in one transfer."""
        visible_TS = self.visible_BTS.any(0)
        last_T = (visible_TS * torch.arange(1, visible_TS.shape[1] + 1, device=visible_TS.device)).amax(1)
        others = (self.visible_BTS.any(1) & ~self.token_MBT.any(0)).any()
        return torch.stack([*(rows.amax() for rows in last_T.split(self._block_size)), others.long()]).tolist()

    @cached_property
    def one_head(self) -> Pairs:
        """These pairs with ``n_heads`` 1, for statistics of one head at a time."""
        return replace(self, n_heads=1)

    @property
    def chunks(self) -> Iterable[Chunk]:
        """All queries, in slices of at most 2^24 logits."""
        return self._cached_chunks if self.visible_BTS.numel() <= CACHED_ELEMENTS else self._new_chunks()

    @cached_property
    def _cached_chunks(self) -> list[Chunk]:
        return list(self._new_chunks())

    def _new_chunks(self) -> Iterator[Chunk]:
        B, T, _ = self.visible_BTS.shape
        size = max(1, CHUNK_ELEMENTS // (B * self.n_heads * T))
        for start in range(0, T, size):
            yield Chunk(self, slice(start, start + size))
