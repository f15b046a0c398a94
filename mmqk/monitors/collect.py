"""From the tensors of a forward to statistics: what is measured at each site, whoever built the model.

Shapes: B batch, T tokens, D width, H heads, K head width, M modalities.
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
from mmqk.store import tags as tags_module

# Of a row of attention logits, by query modality: statistic -> field of AttentionStatistics.
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

tag = cache(tags_module.tag)  # a probe has hundreds, and every probe the same


class Collector:
    """Adds the statistics of each site to a `Probe` as a forward comes by it.

    Args:
        names: of the modalities.
        modality_BT: of the input token at each position.
        valid_BT: False at padding, which nothing counts.
        heads: also give the statistics of the attention logits for each head.
    """

    def __init__(self, names: tuple[str, ...], modality_BT: Tensor, valid_BT: Tensor, heads: bool = False):
        self.names, self.heads = names, heads
        self.selected_MBT = selection(modality_BT, valid_BT, len(names))
        self.present_M = self.selected_MBT.sum((1, 2)).float()
        self._found = Probe(sequences=len(modality_BT))
        self._lengths: list[tuple[list[str], list[str], Tensor, Tensor, int]] = []
        self._gains: list[tuple[list[str], Tensor, Tensor]] = []

    @property
    def found(self) -> Probe:
        """What was found so far."""
        self._close()
        return self._found

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
        """Mean over tokens of how many times longer a map makes its input, (B, T, ...) each; tokens of 0 left out."""
        length, longer = (torch.linalg.vector_norm(x.float(), dim=-1) for x in (before, after))
        self._gains.append((self._tags(statistic, layer), longer / length, length > 0))

    def _close(self) -> None:
        """Turn what was only collected into parts: a few operations for all layers and sites together."""
        selected_MNBT = self.selected_MBT[:, None]
        if self._lengths:
            means, maxima, totals, largest, heads = zip(*self._lengths, strict=True)
            self._lengths.clear()
            n_N = torch.tensor(heads, device=selected_MNBT.device, dtype=torch.float32)
            self._found.add(
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
            tags, ratios, there = zip(*self._gains, strict=True)
            self._gains.clear()
            counted_MNBT = selected_MNBT & torch.stack(there)
            self._found.add(
                [t for names in zip(*tags, strict=True) for t in names],
                {
                    "sum": torch.where(counted_MNBT, torch.stack(ratios), 0.0).sum((2, 3)),
                    "count": counted_MNBT.sum((2, 3)).float(),
                },
                lambda raw: ((raw["sum"] / raw["count"]).flatten(), raw["count"].flatten()),
            )

    def final(self, tensor: Tensor) -> None:
        """Output of the last layer before the final norm, (B, T, D): L2 and RMS (Chameleon, Fig. 5a)."""
        found = moments(tensor.float().norm(dim=-1), self.selected_MBT)
        width = tensor.shape[-1] ** 0.5
        tags = [*self._tags("final_norm", None), *self._tags("final_rms", None)]
        self._found.add(
            tags,
            {"sum": found.sum, "count": found.count},
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
        blocks: Mapping[str, int],
    ) -> None:
        """The output softmax by the modality of the target."""
        targets_MBT = selection(target_modality_BT, target_mask_BT, len(self.names))
        found = output_statistics(logits_BTV, target_modality_BT, targets_MBT, blocks)
        for statistic, part in (
            ("out_log_z", found.log_z),
            ("out_logit_mean", found.logit_mean),
            ("out_logit_spread", found.logit_spread),
            ("out_wrong_mass", found.wrong_mass),
        ):
            self._found.add_moments(self._tags(statistic, None), None, part)
        for block, part in zip(self.names, found.block_log_z, strict=True):
            of_block = self.present_M[self.names.index(block)]
            self._found.add(
                [tag("out_block_log_z", name, block) for name in self.names],
                {"sum": part.sum, "count": part.count, "present": of_block.view(1)},
                lambda raw: (raw["sum"] / raw["count"], raw["count"] * (raw["present"] > 0)),
            )

    def of_vocabulary(self, tags: list[str], values_M: Tensor) -> None:
        """A number of each vocabulary block, the same on every rank; of a block without a token there is none."""
        self._found.add(
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
        """Everything at the attention boundary: raw logits, how they split, what grew, and the weights.

        Args:
            layer: number of the layer.
            q_BHTK: queries as they enter the dot product.
            k_BHSK: keys likewise, a shared head once for every query head.
            scale: factor on the dot product.
            pairs: who sees whom.
            softcap: between the raw logits and the softmax.
            softmax: False where the weights are not those of a softmax, and so have no entropy, mass or rank.
        """
        found = self._logits(layer, None, q_BHTK, k_BHSK, scale, pairs, softcap, softmax)
        if self.heads:
            one = pairs.one_head
            for head in range(q_BHTK.shape[1]):
                q, k = q_BHTK[:, head : head + 1], k_BHSK[:, head : head + 1]
                self._logits(layer, head, q, k, scale, one, softcap, softmax)
        seen_sq_MMH = found.square / scale**2
        growth = logit_growth(q_BHTK, k_BHSK, self.selected_MBT, pairs, seen_sq_MMH)
        parts = ("q_power", "k_power", "alignment", "masked")
        kind = type(growth)
        self._found.add(
            [t for part in parts for t in self._pair_tags(f"logit_{part}", layer)],
            dict(vars(growth)),
            lambda raw: (
                torch.stack([*kind(**raw).parts().values()]).flatten(),
                # Queries or keys of a head that are all 0 have no logarithm.
                (raw["seen"] * (raw["dot_sq"] != 0).all(-1)).flatten().repeat(len(parts)),
            ),
        )
        self._found.add_moments(self._tags("k_common", layer), None, common_mode(k_BHSK, self.selected_MBT))
        if softmax:
            rank_HB = found.rank
            if rank_HB is None:
                rank_HB = attention_rank(q_BHTK, k_BHSK, scale, pairs.visible_BTS, softcap, pairs.reach)
            self._found.add(
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
        found = attention_statistics(q_BHTK, k_BHSK, scale, pairs, softcap)
        M, count_P = len(self.names), found.count.flatten().float()
        self._found.add(
            [
                *self._pair_tags("attn_logit_max", layer, head),
                *self._pair_tags("attn_logit_absmax", layer, head),
            ],
            {"max": torch.stack([found.max, found.absmax]).flatten(), "count": count_P.repeat(2)},
            lambda raw: (raw["max"], raw["count"]),
        )
        self._found.add(
            self._pair_tags("attn_logit_p999", layer, head),
            {"tail": pad_sequence(found.tail, padding_value=-torch.inf), "count": count_P},
            lambda raw: (exceeded_by_one_in_a_thousand(raw["tail"], raw["count"]), raw["count"]),
        )
        # In the order of `AttentionStatistics.rows`; without a softmax there are no weights to speak of.
        tags = [t for statistic in LOGIT_ROWS for t in self._tags(statistic, layer, head)]
        tags += self._by_key("attn_logit_offset", layer, head)
        count_FM = found.rows.count
        pairs_FM = count_FM.clone()
        if softmax:
            tags += [t for statistic in WEIGHT_ROWS for t in self._tags(statistic, layer, head)]
            tags += self._by_key("attn_mass", layer, head)
            # A query that sees none of them puts 0 on them; where no query sees any, there is nothing to say.
            pairs_FM[-M:] = found.count.T
        F = len(tags) // M
        self._found.add(
            tags,
            {"sum": found.rows.sum[:F], "count": count_FM[:F].clone(), "pairs": pairs_FM[:F].clone()},
            lambda raw: (raw["sum"] / raw["count"], raw["count"] * (raw["pairs"] > 0)),
        )
        return found


def matrix_sums(value_HB: Tensor, seen_B: Tensor) -> dict[str, Tensor]:
    """Of one number for each attention matrix, parts of a `Probe` that add up; padding alone counts for nothing."""
    kept = torch.where(seen_B, value_HB, 0.0)
    return {"sum": kept.sum().view(1), "count": seen_B.expand_as(value_HB).sum().float().view(1)}


def mean_of_matrices(raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean of what `matrix_sums` gave, and how many."""
    return raw["sum"] / raw["count"], raw["count"]
