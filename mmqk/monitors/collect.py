"""From the tensors of a forward to statistics: what is measured at each site, whoever built the model.

Shapes: B batch, T tokens, D width, H heads, K head width, M modalities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mmqk.monitors.attention import attention_statistics, exceeded_by_one_in_a_thousand
from mmqk.monitors.growth import attention_rank, common_mode, logit_growth
from mmqk.monitors.output import output_statistics
from mmqk.monitors.pairs import Pairs
from mmqk.monitors.record import Probe
from mmqk.monitors.reduce import moments, selection
from mmqk.store.tags import tag

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
        self.found = Probe(sequences=len(modality_BT))

    def _tags(self, statistic: str, layer: int | None) -> list[str]:
        return [tag(statistic, name, layer=layer) for name in self.names]

    def norms(self, statistic: str, layer: int | None, tensor: Tensor) -> None:
        """Mean and maximum over tokens (and heads) of the L2 norm over the last axis; (B, [H,] T, ...)."""
        found = moments(tensor.float().norm(dim=-1), self.selected_MBT)
        self.found.add_moments(self._tags(statistic, layer), self._tags(f"{statistic}_max", layer), found)

    def gains(self, statistic: str, layer: int, before: Tensor, after: Tensor) -> None:
        """Mean over tokens of how many times longer a map makes its input; (B, [H,] T, ...) each."""
        length = before.float().norm(dim=-1)
        ratio = after.float().norm(dim=-1) / length
        there = self.selected_MBT if length.ndim == 3 else self.selected_MBT & (length > 0)
        self.found.add_moments(self._tags(statistic, layer), None, moments(ratio, there))

    def final(self, tensor: Tensor) -> None:
        """Output of the last layer before the final norm, (B, T, D): L2 and RMS (Chameleon, Fig. 5a)."""
        found = moments(tensor.float().norm(dim=-1), self.selected_MBT)
        width = tensor.shape[-1] ** 0.5
        tags = [*self._tags("final_norm", None), *self._tags("final_rms", None)]
        self.found.add(
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
            self.found.add_moments(self._tags(statistic, None), None, part)
        for block, part in zip(self.names, found.block_log_z, strict=True):
            tags = [tag("out_block_log_z", name, block) for name in self.names]
            self.found.add_moments(tags, None, part)

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
        self._logits(layer, None, q_BHTK, k_BHSK, scale, pairs, softcap, softmax)
        if self.heads:
            one = replace(pairs, n_heads=1)
            for head in range(q_BHTK.shape[1]):
                q, k = q_BHTK[:, head : head + 1], k_BHSK[:, head : head + 1]
                self._logits(layer, head, q, k, scale, one, softcap, softmax)
        growth = logit_growth(q_BHTK, k_BHSK, self.selected_MBT, pairs)
        pair_tags = [
            [tag(f"logit_{part}", a, b, layer=layer) for a in self.names for b in self.names]
            for part in growth.parts()
        ]
        kind = type(growth)
        self.found.add(
            [t for tags in pair_tags for t in tags],
            dict(vars(growth)),
            lambda raw: (
                torch.cat([part.flatten() for part in kind(**raw).parts().values()]),
                raw["seen"].flatten().repeat(len(pair_tags)),
            ),
        )
        self.found.add_moments(self._tags("k_common", layer), None, common_mode(k_BHSK, self.selected_MBT))
        if softmax:
            rank = attention_rank(q_BHTK, k_BHSK, scale, pairs.visible_BTS, softcap)
            one_rank = torch.ones_like(rank)
            self.found.add(
                [tag("attn_rank", layer=layer)],
                {"sum": rank.view(1), "count": one_rank.view(1)},
                lambda raw: (raw["sum"] / raw["count"], raw["count"]),
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
    ) -> None:
        found = attention_statistics(q_BHTK, k_BHSK, scale, pairs, softcap)

        def pair_tags(statistic: str) -> list[str]:
            return [tag(statistic, a, b, layer=layer, head=head) for a in self.names for b in self.names]

        def query_tags(statistic: str) -> list[str]:
            return [tag(statistic, name, layer=layer, head=head) for name in self.names]

        count = found.count.flatten().float()
        for statistic, value in (("attn_logit_max", found.max), ("attn_logit_absmax", found.absmax)):
            self.found.add(
                pair_tags(statistic),
                {"max": value.flatten(), "count": count.clone()},
                lambda raw: (raw["max"], raw["count"]),
            )
        for name, tail, n in zip(pair_tags("attn_logit_p999"), found.tail, count, strict=True):
            self.found.add(
                [name],
                {"tail": tail, "count": n.view(1).clone()},
                lambda raw: (exceeded_by_one_in_a_thousand(raw["tail"], raw["count"]), raw["count"]),
            )
        rows = {**LOGIT_ROWS, **(WEIGHT_ROWS if softmax else {})}
        for statistic, part in rows.items():
            self.found.add_moments(query_tags(statistic), None, getattr(found, part))
        for b, key in enumerate(self.names):
            offset, mass, pairs_M = found.offset[b], found.mass[b], found.count[:, b].float()
            tags = [tag("attn_logit_offset", query, key, layer=layer, head=head) for query in self.names]
            self.found.add_moments(tags, None, offset)
            if (
                softmax
            ):  # a query that sees none of them puts 0 on them; where no query does, there is nothing to say
                self.found.add(
                    [tag("attn_mass", query, key, layer=layer, head=head) for query in self.names],
                    {"sum": mass.sum, "count": mass.count, "pairs": pairs_M},
                    lambda raw: (raw["sum"] / raw["count"], raw["count"] * (raw["pairs"] > 0)),
                )
