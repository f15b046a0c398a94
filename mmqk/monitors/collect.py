"""Computes the statistics of each site from the tensors of a forward, for mmqk's and third-party models.

Shapes: B batch, T tokens, D width, H heads, K head_dim, M modalities.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmqk.monitors.measures.attention import (
    AttentionStatistics,
    attention_statistics,
    exceeded_by_one_in_a_thousand,
)
from mmqk.monitors.measures.growth import attention_rank, common_mode, logit_growth
from mmqk.monitors.measures.output import output_statistics
from mmqk.monitors.measures.pairs import Pairs
from mmqk.monitors.measures.reduce import moments, selection
from mmqk.monitors.record import Probe
from mmqk.store.tags import tag as uncached_tag

# Of the rows of attention logits, by query modality: statistic -> field of AttentionStatistics.
LOGIT_ROWS = {
    "attn_logit_mean": "mean",
    "attn_logit_var": "variance",
    "attn_logit_offset_var": "offset_variance",
    "attn_logit_spread_var": "spread_variance",
}
WEIGHT_ROWS = {
    "attn_entropy": "entropy",
    "attn_entropy_block": "block_entropy",
    "attn_entropy_within": "within_entropy",
}

tag = cache(uncached_tag)  # every probe uses the same hundreds of tags


class Collector:
    """Adds the statistics of each site to a `Probe` while a forward runs.

    Args:
        names: names of the modalities.
        modality_BT: modality of the input token at each position.
        valid_BT: False at padding, which no statistic counts.
        heads: also add the statistics of attention logits and weights for each head.
    """

    def __init__(self, names: tuple[str, ...], modality_BT: Tensor, valid_BT: Tensor, heads: bool = False):
        self.names, self.heads = names, heads
        self.selected_MBT = selection(modality_BT, valid_BT, len(names))
        self.present_M = self.selected_MBT.sum((1, 2)).float()
        self._probe = Probe(sequences=len(modality_BT))
        self._lengths: list[tuple[list[str], list[str], Tensor, Tensor, int]] = []
        self._gains: list[tuple[list[str], Tensor, Tensor]] = []

    @property
    def probe(self) -> Probe:
        """The statistics so far."""
        self._close()
        return self._probe

    def _tags(self, statistic: str, layer: int | None, head: int | None = None) -> list[str]:
        return [tag(statistic, name, layer=layer, head=head) for name in self.names]

    def _pair_tags(self, statistic: str, layer: int, head: int | None = None) -> list[str]:
        """By query modality, then by key modality."""
        return [tag(statistic, a, b, layer=layer, head=head) for a in self.names for b in self.names]

    def _by_key(self, statistic: str, layer: int, head: int | None) -> list[str]:
        """By key modality, then by query modality."""
        return [tag(statistic, a, b, layer=layer, head=head) for b in self.names for a in self.names]

    def norms(self, statistic: str, layer: int | None, tensor: Tensor) -> None:
        """Mean and maximum over tokens (and heads) of the L2 norm over the last axis; (B, [H,] T, ...)."""
        length = torch.linalg.vector_norm(tensor.float(), dim=-1)
        heads = length.shape[1] if length.ndim == 3 else 1
        total_BT, max_BT = (length.sum(1), length.amax(1)) if length.ndim == 3 else (length, length)
        tags = self._tags(statistic, layer), self._tags(f"{statistic}_max", layer)
        self._lengths.append((*tags, total_BT, max_BT, heads))

    def gains(self, statistic: str, layer: int, before: Tensor, after: Tensor) -> None:
        """Mean over tokens of ‖after‖ / ‖before‖, (B, T, ...) each, without tokens where ‖before‖ is 0."""
        length, longer = (torch.linalg.vector_norm(x.float(), dim=-1) for x in (before, after))
        self._gains.append((self._tags(statistic, layer), longer / length, length > 0))

    def _close(self) -> None:
        """Turn the collected norms and gains into parts, all layers and sites in one batch of operations."""
        selected_MNBT = self.selected_MBT[:, None]
        if self._lengths:
            means, maxima, totals, largest, heads = zip(*self._lengths, strict=True)
            self._lengths.clear()
            n_N = torch.tensor(heads, device=selected_MNBT.device, dtype=torch.float32)
            self._probe.add(
                [t for both in (means, maxima) for names in zip(*both, strict=True) for t in names],
                {
                    "sum": torch.where(selected_MNBT, torch.stack(totals), 0.0).sum((2, 3)),
                    "count": self.selected_MBT.sum((1, 2))[:, None] * n_N,
                    "max": torch.where(selected_MNBT, torch.stack(largest), -torch.inf).amax((2, 3)),
                },
                lambda raw: (
                    torch.cat([(raw["sum"] / raw["count"]).flatten(), raw["max"].flatten()]),
                    raw["count"].flatten().repeat(2),
                ),
            )
        if self._gains:
            tags, ratios, nonzero = zip(*self._gains, strict=True)
            self._gains.clear()
            counted_MNBT = selected_MNBT & torch.stack(nonzero)
            self._probe.add(
                [t for names in zip(*tags, strict=True) for t in names],
                {
                    "sum": torch.where(counted_MNBT, torch.stack(ratios), 0.0).sum((2, 3)),
                    "count": counted_MNBT.sum((2, 3)).float(),
                },
                lambda raw: ((raw["sum"] / raw["count"]).flatten(), raw["count"].flatten()),
            )

    def final(self, tensor: Tensor) -> None:
        """Output of the last layer before the final norm, (B, T, D): L2 and RMS (Chameleon, Fig. 5a)."""
        lengths = moments(tensor.float().norm(dim=-1), self.selected_MBT)
        width = tensor.shape[-1] ** 0.5
        tags = [*self._tags("final_norm", None), *self._tags("final_rms", None)]
        self._probe.add(
            tags,
            {"sum": lengths.sum, "count": lengths.count},
            lambda raw: (
                torch.cat([raw["sum"] / raw["count"], raw["sum"] / raw["count"] / width]),
                raw["count"].repeat(2),
            ),
        )

    def output(
        self,
        logits_BTV: Tensor,
        target_modality_BT: Tensor,
        target_mask_BT: Tensor,
        vocab_sizes: Mapping[str, int],
    ) -> None:
        """Statistics of the output softmax by the modality of the target."""
        targets_MBT = selection(target_modality_BT, target_mask_BT, len(self.names))
        statistics = output_statistics(logits_BTV, target_modality_BT, targets_MBT, vocab_sizes)
        for statistic, part in (
            ("out_log_z", statistics.log_z),
            ("out_logit_mean", statistics.logit_mean),
            ("out_logit_spread", statistics.logit_spread),
            ("out_wrong_mass", statistics.wrong_mass),
        ):
            self._probe.add_moments(self._tags(statistic, None), None, part)
        for block, part in zip(self.names, statistics.block_log_z, strict=True):
            of_block = self.present_M[self.names.index(block)]
            self._probe.add(
                [tag("out_block_log_z", name, block) for name in self.names],
                {"sum": part.sum, "count": part.count, "present": of_block.view(1)},
                lambda raw: (raw["sum"] / raw["count"], raw["count"] * (raw["present"] > 0)),
            )

    def of_vocabulary(self, tags: list[str], values_M: Tensor) -> None:
        """Add one number for each vocabulary block, equal on every rank; skip blocks without a token in the batch."""
        self._probe.add(
            tags,
            {"max": values_M.float(), "present": self.present_M.clone()},
            lambda raw: (raw["max"], raw["present"]),
        )

    def attention(
        self,
        layer: int,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        scale: float,
        pairs: Pairs,
        softcap: float | None = None,
        softmax: bool = True,
    ) -> None:
        """Statistics of one attention call: logits and their variance parts, growth parts, and weights.

        Args:
            layer: layer number.
            q_BHTK: queries of the dot product.
            k_BHSK: keys of the dot product, each key head repeated for every query head that shares it.
            scale: factor on the dot product.
            pairs: visible pairs of query and key.
            softcap: cap on the logits before the softmax, or None.
            softmax: False if the weights are no softmax of these logits; then entropy, mass and rank are not added.
        """
        statistics = self._logits(layer, None, q_BHTK, k_BHSK, scale, pairs, softcap, softmax)
        if self.heads:
            one = pairs.one_head
            for head in range(q_BHTK.shape[1]):
                q, k = q_BHTK[:, head : head + 1], k_BHSK[:, head : head + 1]
                self._logits(layer, head, q, k, scale, one, softcap, softmax)
        seen_sq_MMH = statistics.square / scale**2
        growth = logit_growth(q_BHTK, k_BHSK, self.selected_MBT, pairs, seen_sq_MMH)
        parts = ("q_power", "k_power", "alignment", "masked")
        kind = type(growth)
        self._probe.add(
            [t for part in parts for t in self._pair_tags(f"logit_{part}", layer)],
            dict(vars(growth)),
            lambda raw: (
                torch.stack([*kind(**raw).parts().values()]).flatten(),
                # If all queries or keys of a head are 0, the logarithm does not exist.
                (raw["seen"] * (raw["dot_sq"] != 0).all(-1)).flatten().repeat(len(parts)),
            ),
        )
        self._probe.add_moments(self._tags("k_common", layer), None, common_mode(k_BHSK, self.selected_MBT))
        if softmax:
            rank_HB = statistics.rank
            if rank_HB is None:
                rank_HB = attention_rank(q_BHTK, k_BHSK, scale, pairs.visible_BTS, softcap, pairs.reach)
            self._probe.add(
                [tag("attn_rank", layer=layer)],
                matrix_sums(rank_HB, pairs.seen_B),
                mean_of_matrices,
            )

    def _logits(
        self,
        layer: int,
        head: int | None,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        scale: float,
        pairs: Pairs,
        softcap: float | None,
        softmax: bool,
    ) -> AttentionStatistics:
        statistics = attention_statistics(q_BHTK, k_BHSK, scale, pairs, softcap)
        M, count_P = len(self.names), statistics.count.flatten().float()
        self._probe.add(
            [
                *self._pair_tags("attn_logit_max", layer, head),
                *self._pair_tags("attn_logit_absmax", layer, head),
            ],
            {"max": torch.stack([statistics.max, statistics.absmax]).flatten(), "count": count_P.repeat(2)},
            lambda raw: (raw["max"], raw["count"]),
        )
        self._probe.add(
            self._pair_tags("attn_logit_p999", layer, head),
            {"tail": pad_sequence(statistics.tail, padding_value=-torch.inf), "count": count_P},
            lambda raw: (exceeded_by_one_in_a_thousand(raw["tail"], raw["count"]), raw["count"]),
        )
        # In the order of `AttentionStatistics.rows`; without a softmax there are no weights.
        tags = [t for statistic in LOGIT_ROWS for t in self._tags(statistic, layer, head)]
        tags += self._by_key("attn_logit_offset", layer, head)
        count_FM = statistics.rows.count
        pairs_FM = count_FM.clone()
        if softmax:
            tags += [t for statistic in WEIGHT_ROWS for t in self._tags(statistic, layer, head)]
            tags += self._by_key("attn_mass", layer, head)
            # A query that sees no key of a modality has mass 0 on it; if no query sees one, the tag is left out.
            pairs_FM[-M:] = statistics.count.T
        F = len(tags) // M
        self._probe.add(
            tags,
            {"sum": statistics.rows.sum[:F], "count": count_FM[:F].clone(), "pairs": pairs_FM[:F].clone()},
            lambda raw: (raw["sum"] / raw["count"], raw["count"] * (raw["pairs"] > 0)),
        )
        return statistics


def matrix_sums(value_HB: Tensor, seen_B: Tensor) -> dict[str, Tensor]:
    """Sum and count of one number for each attention matrix, to merge over ranks; skips sequences of padding only."""
    kept = torch.where(seen_B, value_HB, 0.0)
    return {"sum": kept.sum().view(1), "count": seen_B.expand_as(value_HB).sum().float().view(1)}


def mean_of_matrices(raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and count from merged `matrix_sums`."""
    return raw["sum"] / raw["count"], raw["count"]
