"""Selects tokens and pairs of tokens by modality, and reduces tensors over them and numbers over layers.

A mean is stored as its count and sum, so that the parts of several chunks, heads or ranks add up exactly. An absent
modality has count 0. The `Pairs` of query and key of a probed batch, in chunks of queries, are computed once and used
by every layer.

Shapes: B batch, H heads, T query tokens (C of them in a chunk), S key tokens, V vocabulary, M modalities.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmqk.model.backends import visible_keys
from mmqk.store.metrics import parse_tag

# Rows with fewer visible keys are left out of row statistics: the log of the number of keys bounds their entropy.
FEWEST_KEYS = 8
CHUNK_ELEMENTS = 2**24  # largest number of logits, over all heads, to compute at a time
CACHED_ELEMENTS = 2**26  # largest number of pairs whose chunks are stored for the next layer
# Used instead of -inf at hidden keys: its exp is 0, and its product with 0 is 0, not NaN.
HIDDEN = -1e30
ROW_BLOCKS, FEWEST_ROWS = 8, 32  # largest number of slices in `Pairs.reach`, and their smallest size


@dataclass(frozen=True)
class Sums:
    """Count and sum of one statistic for each modality, (M,) each, fp32."""

    count: Tensor
    sum: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.count + other.count, self.sum + other.sum)


def selection(modality_BT: Tensor, valid_BT: Tensor, n_modalities: int) -> Tensor:
    """Return (M, B, T) bool: the valid tokens of each modality. A token has at most one modality."""
    modality_M11 = torch.arange(n_modalities, device=modality_BT.device)[:, None, None]
    return (modality_BT == modality_M11) & valid_BT


def sums(values_BHT: Tensor, selected_MBT: Tensor) -> Sums:
    """Return, for each modality, the number and the sum of the selected values.

    Args:
        values_BHT: one value for each head and token; (B, T) if there is one value for each token.
        selected_MBT: True at the selected tokens of each modality.
    """
    values = values_BHT.float() if values_BHT.ndim == 3 else values_BHT.float()[:, None]
    selected_MBHT = selected_MBT[:, :, None].expand(-1, -1, values.shape[1], -1)
    # torch.where, since a product would spread a NaN from another modality's token.
    return Sums(
        count=selected_MBHT.sum(dim=(1, 2, 3)).float(), sum=torch.where(selected_MBHT, values, 0.0).sum(dim=(1, 2, 3))
    )


def sum_of_squares(matrices: Tensor) -> Tensor:
    """Return the sum of squares of each matrix (last two axes). It makes no copy, and sums row by row, which is more
    accurate in fp32."""
    return torch.linalg.vector_norm(matrices, dim=-1).square().sum(-1)


def kind_of(x: Tensor) -> str | None:
    """Return "NaN" or "infinite"; None if all values are finite."""
    if not x.is_floating_point() or torch.isfinite(x).all():
        return None
    return "NaN" if torch.isnan(x).any() else "infinite"


def output_statistics(
    logits_BTV: Tensor, target_modality_BT: Tensor, selected_MBT: Tensor, vocab_sizes: Mapping[str, int]
) -> tuple[dict[str, Sums], list[Sums]]:
    """Return the statistics of the logits that the loss uses (after the final softcap), by modality of the target.

    ``log_z = logit_mean + log V + logit_spread`` separates drift from sharpening.

    Args:
        logits_BTV: in fp32.
        target_modality_BT: modality of each position's target.
        selected_MBT: which targets belong to each modality, from `mmqk.monitors.formulas.reduce.selection`.
        vocab_sizes: number of ids of each modality, in id order.

    Returns:
        By name: out_log_z, the log Z of the softmax, nats; out_logit_mean over the vocabulary, which with log Z is all
        that a constant added to the logits changes; out_logit_spread, log Z - log V - mean logit, 0 for equal logits;
        out_wrong_mass, the probability of ids outside the target's modality. Then, for each modality, the log Z over
        its ids.
    """
    mean_BT = logits_BTV.mean(-1)
    block_BTM = torch.stack([log_z(part) for part in logits_BTV.split(list(vocab_sizes.values()), -1)], -1)
    log_z_BT = block_BTM.logsumexp(-1)
    target_block_BT = block_BTM.gather(-1, target_modality_BT[..., None])[..., 0]  # log Z of the target's modality
    log_v = math.log(logits_BTV.shape[-1])
    values = {
        "out_log_z": log_z_BT,
        "out_logit_mean": mean_BT,
        "out_logit_spread": log_z_BT - log_v - mean_BT,
        "out_wrong_mass": -torch.expm1(target_block_BT - log_z_BT),
    }
    by_name = {name: sums(values_BT, selected_MBT) for name, values_BT in values.items()}
    return by_name, [sums(block_BT, selected_MBT) for block_BT in block_BTM.unbind(-1)]


def log_z(logits_BTV: Tensor) -> Tensor:
    """Return the logsumexp. The fused log_softmax takes half the time of `torch.logsumexp`."""
    return logits_BTV.amax(-1) - torch.log_softmax(logits_BTV, -1).amax(-1)


# Reducers over layers, and the statistics that they reduce.
REDUCERS: dict[str, tuple[Callable[[list[float]], float], str]] = {
    "max": (
        max,
        "attn_logit_absmax q_norm k_norm v_norm attn_logit_offset_var attn_logit_spread_var logit_alignment resid_norm"
        " attn_out_norm mlp_out_norm qk_clip_logit",
    ),
    "median": (statistics.median, "attn_entropy q_norm k_norm attn_logit_mean"),
    "min": (min, "attn_entropy attn_rank qk_clip_gamma"),
}


def over_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the reductions over layers of the statistics in `REDUCERS`; values by head are ignored."""
    layers: dict[str, list[float]] = {}
    for name, value in metrics.items():
        parsed = parse_tag(name)
        if parsed.head is None and parsed.layer is not None:
            layers.setdefault(name.rpartition("/")[0], []).append(value)
    return {  # with a NaN, Python's max would depend on the order of values
        f"{series}/{name}": math.nan if any(map(math.isnan, values)) else float(reduce(values))
        for name, (reduce, reduced) in REDUCERS.items()
        for series, values in layers.items()
        if series.partition("/")[0] in reduced.split()
    }


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
