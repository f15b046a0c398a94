"""Computes the statistics of each site from the tensors of a forward pass, and stores them until they become numbers.

`Collector` serves mmqk's own and third-party models. A `Statistics` stores tensors that merge exactly over ranks, and
computes the number of each tag from them.

Shapes: B batch, T tokens, D width, H heads, K head_dim, M modalities, F statistics of a row of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmqk.distributed import world_size
from mmqk.monitors.formulas import attention as formulas
from mmqk.monitors.formulas.reduce import FEWEST_KEYS, Pairs, Sums, output_statistics, selection, sums
from mmqk.monitors.formulas.weights import matrix_sizes
from mmqk.store.metrics import tag as uncached_tag

# Computes the value of each tag, and the number of values in its mean, from the merged tensors of a part.
Finish = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]


@dataclass
class StatisticPart:
    """Statistics that are computed together.

    Attributes:
        tags: tags of these statistics.
        raw: tensors to merge over ranks, by name. Tensors whose names start with ``max`` are merged by maximum, with
            ``tail`` by concatenation, and all others by sum.
        finish: computes the value and the count of each tag; tags with count 0 are left out.
    """

    tags: list[str]
    raw: dict[str, Tensor]
    finish: Finish


@dataclass
class Statistics:
    """Statistics of one batch, still on the device.

    Attributes:
        parts: the statistics, in the order in which the forward pass computes them.
    """

    parts: list[StatisticPart] = field(default_factory=list)

    def add(self, tags: list[str], raw: dict[str, Tensor], finish: Finish) -> None:
        self.parts.append(StatisticPart(tags, raw, finish))

    def add_values(self, tags: list[str], values: Tensor) -> None:
        """Add numbers that are the same on every rank, such as those of weights."""
        self.add(tags, {"max": values.float()}, lambda raw: (raw["max"], torch.ones_like(raw["max"])))

    def add_means(self, tags: list[str], sums: Sums) -> None:
        """Add one mean for each tag, from its count and sum."""
        raw = {"sum": sums.sum, "count": sums.count}
        self.add(tags, raw, lambda raw: (raw["sum"] / raw["count"], raw["count"]))

    def add_matrices(self, matrices: Iterable[tuple[str, list[str], int, Tensor]]) -> None:
        """Add the norm, spectral norm and stable rank of matrices, each given by name, modality, layer and weight;
        the modality is empty if the modalities share the matrix."""
        tags: list[str] = []
        values: list[Tensor] = []
        for name, modality, layer, weight in matrices:
            tags += [tag(f"{name}_{size}", *modality, layer=layer) for size in ("norm", "spectral", "stable_rank")]
            values += matrix_sizes(weight)
        if values:
            self.add_values(tags, torch.stack(values))

    def merged(self) -> Statistics:
        """Merge the statistics over all ranks and return them. This is a collective call; every rank must have
        the same tags."""
        if (world := world_size()) == 1:
            return self
        for part in self.parts:
            for name, tensor in part.raw.items():
                if name.startswith("tail"):
                    gathered = [torch.empty_like(tensor) for _ in range(world)]
                    dist.all_gather(gathered, tensor.contiguous())
                    part.raw[name] = torch.cat(gathered)
                else:
                    op = dist.ReduceOp.MAX if name.startswith("max") else dist.ReduceOp.SUM
                    dist.all_reduce(tensor, op)
        return self

    def flat(self) -> dict[str, float]:
        """Return ``{tag: number}``, with one transfer to the host."""
        if not self.parts:
            return {}
        finished = [part.finish(part.raw) for part in self.parts]
        values, counts = torch.stack([torch.cat([f[i].float().flatten() for f in finished]) for i in (0, 1)]).tolist()
        tags = [t for part in self.parts for t in part.tags]
        return {t: v for t, v, n in zip(tags, values, counts, strict=True) if n}


# Sites whose L2 norms are measured, as ``q_norm`` (mean) and ``q_norm_max``.
NORM_SITES = ("attn_in", "q_raw", "k_raw", "q", "k", "v", "attn_out", "mlp_out", "resid")
CLOSED = 0.1  # an output gate with a value below this counts as closed

tag = cache(uncached_tag)  # every probe uses the same hundreds of tags


class Collector:
    """Adds the statistics of each site to a `Statistics` during a forward pass.

    Args:
        names: names of the modalities.
        modality_BT: modality of the input token at each position.
        valid_BT: False at padding, which all statistics leave out.
        heads: also add the statistics of attention logits and weights for each head.
    """

    def __init__(self, names: tuple[str, ...], modality_BT: Tensor, valid_BT: Tensor, heads: bool = False):
        self.names, self.heads = names, heads
        self.selected_MBT = selection(modality_BT, valid_BT, len(names))
        self.count_M = self.selected_MBT.sum((1, 2)).float()
        self._statistics = Statistics()
        self._norms: list[tuple[list[str], list[str], Tensor, Tensor, int]] = []

    @property
    def statistics(self) -> Statistics:
        """The statistics added so far."""
        self._add_norms()
        return self._statistics

    def _tags(self, statistic: str, layer: int | None = None, head: int | None = None) -> list[str]:
        return [tag(statistic, name, layer=layer, head=head) for name in self.names]

    def _pair_tags(self, statistic: str, layer: int, head: int | None = None) -> list[str]:
        """Return a tag for each pair of modalities, ordered by query modality, then by key modality."""
        return [tag(statistic, a, b, layer=layer, head=head) for a in self.names for b in self.names]

    def norms(self, site: str, layer: int, tensor: Tensor) -> None:
        """Add mean and maximum over tokens (and heads) of the L2 norm of the last axis; ``tensor`` is (B, [H,] T,
        ...)."""
        norm = torch.linalg.vector_norm(tensor.float(), dim=-1)
        norm_BHT = norm if norm.ndim == 3 else norm[:, None]
        tags = self._tags(f"{site}_norm", layer), self._tags(f"{site}_norm_max", layer)
        self._norms.append((*tags, norm_BHT.sum(1), norm_BHT.amax(1), norm_BHT.shape[1]))

    def gate(self, layer: int, gate_BTHK: Tensor) -> None:
        """Add the mean of an output gate over heads and channels, and the share of its values below `CLOSED`."""
        for statistic, values in (("gate_open", gate_BTHK), ("gate_closed", gate_BTHK < CLOSED)):
            mean_BT = values.float().mean((2, 3))
            self._statistics.add_means(self._tags(statistic, layer), sums(mean_BT, self.selected_MBT))

    def norm_ratios(self, statistic: str, layer: int, before: Tensor, after: Tensor) -> None:
        """Add the mean over tokens of ‖after‖ / ‖before‖, both (B, T, ...). Tokens with ‖before‖ = 0 are skipped."""
        norm_before, norm_after = (torch.linalg.vector_norm(x.float(), dim=-1) for x in (before, after))
        ratios = sums(norm_after / norm_before, self.selected_MBT & (norm_before > 0))
        self._statistics.add_means(self._tags(statistic, layer), ratios)

    def _add_norms(self) -> None:
        """Add the N stored norms, one for each site and layer, in one batch of operations."""
        if not self._norms:
            return
        mean_tags, max_tags, totals, largest, heads = zip(*self._norms, strict=True)
        self._norms.clear()
        selected_MNBT = self.selected_MBT[:, None]
        n_N = torch.tensor(heads, device=selected_MNBT.device, dtype=torch.float32)
        self._statistics.add(
            [t for tags in (mean_tags, max_tags) for names in zip(*tags, strict=True) for t in names],
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

    def final(self, tensor: Tensor) -> None:
        """Add L2 norm and RMS of the input of the final norm, (B, T, D) (Chameleon, Fig. 5a)."""
        norm = sums(tensor.float().norm(dim=-1), self.selected_MBT)
        sqrt_width = tensor.shape[-1] ** 0.5
        self._statistics.add(
            [*self._tags("final_norm"), *self._tags("final_rms")],
            {"sum": norm.sum, "count": norm.count},
            lambda raw: (
                torch.cat([raw["sum"] / raw["count"], raw["sum"] / raw["count"] / sqrt_width]),
                raw["count"].repeat(2),
            ),
        )

    def output(
        self, logits_BTV: Tensor, target_modality_BT: Tensor, target_mask_BT: Tensor, vocab_sizes: Mapping[str, int]
    ) -> None:
        """Add the statistics of the output softmax by the modality of the target."""
        targets_MBT = selection(target_modality_BT, target_mask_BT, len(self.names))
        by_name, block_log_z = output_statistics(logits_BTV, target_modality_BT, targets_MBT, vocab_sizes)
        for name, part in by_name.items():
            self._statistics.add_means(self._tags(name), part)
        for block, part, count in zip(self.names, block_log_z, self.count_M, strict=True):
            self._statistics.add(
                [tag("out_block_log_z", name, block) for name in self.names],
                {"sum": part.sum, "count": part.count, "present": count.view(1)},
                lambda raw: (raw["sum"] / raw["count"], raw["count"] * (raw["present"] > 0)),
            )

    def of_vocabulary(self, tags: list[str], values_M: Tensor) -> None:
        """Add one number for each vocabulary block (the ids of one modality). Every rank must add the same numbers.

        A block is left out if its modality has no token in the batch.
        """
        self._statistics.add(
            tags, {"max": values_M.float(), "present": self.count_M.clone()}, lambda raw: (raw["max"], raw["present"])
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
        sink_H: Tensor | None = None,
    ) -> None:
        """Add the statistics of one attention call: its logits, their variance and growth in parts, and its weights.

        Args:
            layer: layer number.
            q_BHTK: queries of the dot product.
            k_BHSK: keys of the dot product, each key head repeated for every query head that shares it.
            scale: factor on the dot product.
            pairs: visible pairs of query and key.
            softcap: cap on the logits before the softmax, or None.
            softmax: whether the weights are the softmax of these logits; if not, entropy, mass and rank are left out.
            sink_H: logit of each head's sink, or None.
        """
        statistics = formulas.AttentionStatistics(q_BHTK, k_BHSK, scale, pairs, softcap, sink_H)
        self._logits(layer, None, statistics, softmax)
        for head in range(q_BHTK.shape[1]) if self.heads else ():
            q, k = q_BHTK[:, head : head + 1], k_BHSK[:, head : head + 1]
            sink_1 = None if sink_H is None else sink_H[head : head + 1]
            of_head = formulas.AttentionStatistics(q, k, scale, pairs.one_head, softcap, sink_1)
            self._logits(layer, head, of_head, softmax)
        visible_sq_MMH = statistics.square / scale**2
        growth = formulas.logit_growth(q_BHTK, k_BHSK, self.selected_MBT, pairs, visible_sq_MMH)
        self._statistics.add(
            [t for part in formulas.GROWTH_PARTS for t in self._pair_tags(f"logit_{part}", layer)],
            growth,
            lambda raw: (
                formulas.growth_parts(raw).flatten(),
                # If all queries or keys of a head are 0, the logarithm does not exist.
                (raw["visible"] * (raw["dot_sq"] != 0).all(-1)).flatten().repeat(len(formulas.GROWTH_PARTS)),
            ),
        )
        self._statistics.add_means(self._tags("k_common", layer), formulas.common_mode(k_BHSK, self.selected_MBT))
        if softmax:
            if (rank_HB := statistics.rank) is None:
                rank_HB = formulas.attention_rank(q_BHTK, k_BHSK, scale, pairs, softcap, sink_H)
            self._rank(layer, rank_HB, pairs)

    def weights(
        self,
        layer: int,
        weights: Callable[[int], tuple[Tensor, Tensor | None]],
        n_heads: int,
        pairs: Pairs,
        leaks: Mapping[str, Tensor],
    ) -> None:
        """Add the statistics of the weights of a call with a bias, a score_mod, a finite additive mask or a leak.

        Args:
            layer: layer number.
            weights: returns the weights of one head's keys (B, T, S), and that of its sink (B, T) or None.
            n_heads: number of heads.
            pairs: visible pairs of query and key.
            leaks: for each kind of keys that no query should attend to, its keys, bool (B, T, S). Their mass is
                ``attn_mass_KIND``, over all rows. If ``hidden`` is among them, keys that are not visible can have
                weight: they are part of the entropy, of the entropy of the masses as one more block, and of the rank.
        """
        hidden_BTS, T = ~pairs.visible_BTS, pairs.visible_BTS.shape[1]
        reach = [(slice(0, T), T)] if "hidden" in leaks else pairs.reach
        empty_BT1 = hidden_BTS.all(-1, keepdim=True)
        counted_MBT = pairs.token_MBT & (pairs.visible_BTS.sum(-1) >= FEWEST_KEYS)
        of_leaks = {kind: Sums(*self.count_M.new_zeros(2, len(self.names))) for kind in leaks}
        other_key_BS1 = 1 - pairs.key_BMS.sum(1)[..., None]
        sums_FM: list[Tensor] = []
        ranks_1B: list[Tensor] = []
        has_sink = False
        for head in range(n_heads):
            weight_BTS, sink_BT = weights(head)
            has_sink = sink_BT is not None
            visible_BTS = weight_BTS.masked_fill(hidden_BTS, 0.0)
            mass_BMT, others_BT1 = pairs.key_BMS @ visible_BTS.mT, visible_BTS @ other_key_BS1
            masked_BT = weight_BTS.masked_fill(~hidden_BTS, 0.0).sum(-1)
            for kind, keys_BTS in leaks.items():
                mass_BT = weight_BTS.masked_fill(~keys_BTS, 0.0).sum(-1)
                of_leaks[kind] += sums(mass_BT, pairs.token_MBT & ~empty_BT1[..., 0])
            sink_BT = torch.zeros_like(masked_BT) if sink_BT is None else sink_BT
            blocks = [*mass_BMT.unbind(1), others_BT1[..., 0], masked_BT, sink_BT]
            entropy_BT = torch.special.entr(weight_BTS).sum(-1) + torch.special.entr(sink_BT)
            block_BT = torch.special.entr(torch.stack(blocks)).sum(0)
            values = [entropy_BT, block_BT, entropy_BT - block_BT, *mass_BMT.unbind(1), sink_BT]
            # torch.where, because a product would spread a NaN to other modalities.
            sums_FM.append(torch.where(counted_MBT, torch.stack(values)[:, None], 0.0).sum((2, 3)))
            weight_BTS = weight_BTS.masked_fill(empty_BT1, 0.0)
            weight_BTS = weight_BTS / weight_BTS.amax((1, 2), keepdim=True)  # a sink can leave them all near 0
            ranks_1B.append(formulas.participation(weight_BTS[None], reach))
        sum_FM = torch.stack(sums_FM).sum(0)
        count_FM = (counted_MBT.sum((1, 2)).float() * n_heads).expand_as(sum_FM)
        self._rows(layer, None, Sums(count_FM, sum_FM), pairs.count_MM, weights=True)
        for kind, masses in of_leaks.items():
            self._statistics.add_means(self._tags(f"attn_mass_{kind}", layer), masses)
        if has_sink:
            self._statistics.add_means(self._tags("sink_mass", layer), Sums(count_FM[-1].clone(), sum_FM[-1]))
        self._rank(layer, torch.cat(ranks_1B), pairs)

    def _logits(self, layer: int, head: int | None, statistics: formulas.AttentionStatistics, softmax: bool) -> None:
        count_P = statistics.count.flatten().float()
        self._statistics.add(
            [*self._pair_tags("attn_logit_max", layer, head), *self._pair_tags("attn_logit_absmax", layer, head)],
            {"max": torch.stack([statistics.max, statistics.absmax]).flatten(), "count": count_P.repeat(2)},
            lambda raw: (raw["max"], raw["count"]),
        )
        self._statistics.add(
            self._pair_tags("attn_logit_p999", layer, head),
            {"tail": pad_sequence(statistics.tail, padding_value=-torch.inf), "count": count_P},
            lambda raw: (formulas.exceeded_by_one_in_a_thousand(raw["tail"], raw["count"]), raw["count"]),
        )
        self._rows(layer, head, statistics.rows, statistics.count, logits=True, weights=softmax)
        if statistics.sink is not None:
            self._statistics.add_means(self._tags("sink_mass", layer, head), statistics.sink)

    def _rows(
        self, layer: int, head: int | None, rows: Sums, count_MM: Tensor, logits: bool = False, weights: bool = False
    ) -> None:
        """Add the means over rows of the logit statistics, the weight statistics, or both.

        ``rows`` starts with these statistics, in the order of `AttentionStatistics`; further statistics are ignored.
        """
        M, tags = len(self.names), list[str]()
        if logits:
            for statistic in ("mean", "var", "offset_var", "spread_var"):
                tags += self._tags(f"attn_logit_{statistic}", layer, head)
            tags += [tag("attn_logit_offset", a, b, layer=layer, head=head) for b in self.names for a in self.names]
        if weights:
            for statistic in ("attn_entropy", "attn_entropy_block", "attn_entropy_within"):
                tags += self._tags(statistic, layer, head)
            tags += [tag("attn_mass", a, b, layer=layer, head=head) for b in self.names for a in self.names]
        F = len(tags) // M
        pairs_FM = rows.count[:F].clone()
        # A query that sees no key of a modality has mass 0 on this modality. If no query of a modality sees a key of
        # the other one, the mass of this pair is left out.
        if weights:
            pairs_FM[-M:] = count_MM.T
        self._statistics.add(
            tags,
            {"sum": rows.sum[:F], "count": rows.count[:F].clone(), "pairs": pairs_FM},
            lambda raw: (raw["sum"] / raw["count"], raw["count"] * (raw["pairs"] > 0)),
        )

    def _rank(self, layer: int, rank_HB: Tensor, pairs: Pairs) -> None:
        """Add the mean rank over the attention matrices. Sequences that contain only padding are left out."""
        total = torch.where(pairs.nonempty_B, rank_HB, 0.0).sum().view(1)
        count = pairs.nonempty_B.expand_as(rank_HB).sum().float().view(1)
        self._statistics.add_means([tag("attn_rank", layer=layer)], Sums(count, total))
