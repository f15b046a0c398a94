"""Computes statistics from the attention calls that `Capture` intercepts in a third-party model.

A call is self-attention if queries and keys have the same origin (`origins`), else cross-attention. It is measured if
the origin belongs to the main side or to a declared side (`sides`); otherwise it is left out with a reason.

Shapes: B batch, H heads, T query tokens, S key tokens, K head_dim, M modalities, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmqk.monitors.adapters.adapter import Adapter
from mmqk.monitors.collect import WEIGHT_ROWS, matrix_sums, mean_of_matrices
from mmqk.monitors.measures.attention import attention_statistics
from mmqk.monitors.measures.growth import attention_rank
from mmqk.monitors.measures.pairs import Pairs
from mmqk.monitors.measures.reduce import Moments
from mmqk.monitors.probe import NORMS
from mmqk.monitors.record import Probe
from mmqk.monitors.third_party.calls import Call, Elsewhere, Unread
from mmqk.monitors.third_party.layers import layer_of, number
from mmqk.monitors.third_party.origins import Origin
from mmqk.monitors.third_party.sides import Side, cross_part, joined, of_cross
from mmqk.monitors.third_party.stream import Stream
from mmqk.store.tags import tag

_LAYER_TAG = re.compile(r"/layer(\d+)(?=/|$)")
# Largest difference between the weights that a call returned and the softmax of its logits.
_SAME_WEIGHTS = 0.02


@dataclass
class Section:
    """One attention call, or one site of an adapter.

    Until the end of the forward, the index in `Boundary.sections` stands for the layer number in tags.

    Attributes:
        path: path of the module.
        call: True for an attention call, False for an adapter's site.
        left_out: why the call was not measured; None if it was.
        elsewhere: whether it was left out because its tokens are those of no declared side.
        no_weights: why the call has no entropy, mass and rank; None if it has them.
        cross: whether it is measured cross-attention, with statistics named ``cross_...``.
        number: number of the call in the forward, from 1; 0 for an adapter's site.
    """

    path: str
    call: bool = True
    left_out: str | None = None
    elsewhere: bool = False
    no_weights: str | None = None
    cross: bool = False
    number: int = 0


class Boundary:
    """Adds the statistics of attention calls and of an adapter's sites to the `Collector` of each side.

    Args:
        main: the tokens that ``modality`` describes.
        others: the declared sides.
        adapter: further sites to measure, or None.
        collective: whether every rank probes at the same time.
    """

    def __init__(
        self,
        main: Side,
        others: Sequence[Side] = (),
        adapter: Adapter | None = None,
        collective: bool = False,
    ):
        self.main, self.sides, self.collective = main, [main, *others], collective
        self.modality_BT, self.valid_BT = main.tokens
        self.device = self.modality_BT.device
        self.adapter = adapter
        self.sections: list[Section] = []
        self.main_calls: list[int] = []  # numbers of the measured self-attention calls of the main side
        self.called = 0
        self.main_seen = main.inputs is None  # whether any tensor had the main side's origin
        self._crossed: dict[tuple[str, str], tuple[Side, Side, Side]] = {}
        self._before: dict[Any, dict[str, Tensor]] = {}  # attn_in, q_raw and k_raw of layers whose call follows

    # Sides of a tensor

    def may_be_main(self, origin: Origin | None) -> bool:
        """Whether the positions of a tensor may be the main side's tokens; True if its origin is unknown."""
        return origin is None or self.main.inputs is None or self.main.inputs <= origin.inputs

    def is_stream(self, x: Tensor, origin: Origin | None) -> bool:
        """Whether a tensor is (B, T, D) of the main side's tokens."""
        shaped = x.ndim == 3 and x.shape[:2] == self.modality_BT.shape and x.is_floating_point()
        return shaped and origin is not None and self.may_be_main(origin)

    def see_ids(self, ids: Tensor, origin: Origin | None) -> None:
        """Pass the ids that an embedding reads to their side; they may differ from the input (shifted labels)."""
        self.main_seen = self.main_seen or self.main.takes(origin)
        for side in self.sides:
            if side.takes(origin):
                side.see_ids(ids)

    def _tokens_of(self, call: Call | Unread, over: tuple[Origin | None, Origin | None]) -> tuple[Side, Side]:
        """The sides of the queries and of the keys.

        Raises:
            Elsewhere: the tokens are those of no declared side.
            Unread: the queries or keys have no known origin.
        """
        q, k = over
        self.main_seen = self.main_seen or self.main.takes(q)
        if q is None or k is None:
            raise Unread("its queries or keys cannot be traced to an input of the forward")
        if self.main.inputs is None and q.inputs == k.inputs and isinstance(call, Call):
            shape = call.q_BHTK.shape
            if len(shape) == 4 and (shape[0], shape[2]) == tuple(self.modality_BT.shape):
                self.main.inputs = q.inputs
        of_q, of_k = (next((side for side in self.sides if side.takes(x)), None) for x in (q, k))
        if q.inputs != k.inputs:
            if of_q is None or of_k is None or of_q is of_k:
                hint = "" if len(self.sides) > 1 else "; declare the other side with sides="
                raise Elsewhere(f"cross-attention from {q} to {k}{hint}")
            return of_q, of_k
        if of_q is None or of_k is None:
            raise Elsewhere(f"attention over the tokens of {q}; modality describes {self.main.source}")
        return of_q, of_k

    # Attention calls

    def see_call(self, path: str, call: Call | Unread, over: tuple[Origin | None, Origin | None]) -> int:
        """Measure one attention call, or record why it is left out. A call that one rank leaves out, all leave out.

        The statistics are computed in fp32, even if the forward runs under autocast.

        Returns:
            The number of the call.
        """
        self.called += 1
        with torch.autocast(self.device.type, enabled=False):
            self._see_call(path, call, over)
        return self.called

    def _see_call(self, path: str, call: Call | Unread, over: tuple[Origin | None, Origin | None]) -> None:
        section, pairs, side = Section(path, number=self.called), None, self.main
        self.sections.append(section)
        try:
            of_q, of_k = self._tokens_of(call, over)
            side, section.cross = of_q, of_q is not of_k
            if isinstance(call, Unread):
                raise call
            if section.cross:
                side, call = self._across(call, of_q, of_k)
            pairs = self._pairs_of(call, side)
            section.no_weights = call.no_weights or self._differs(call, pairs)
        except Unread as unread:
            section.left_out, section.elsewhere = str(unread), isinstance(unread, Elsewhere)
        shaped = isinstance(call, Call) and call.shaped is not None
        counts_M2, shaped = self._agree(section, pairs, shaped, len(side.names) ** 2)
        if pairs is not None and section.left_out is None:
            assert isinstance(call, Call)
            # Set here: a rank that reuses the pairs of an earlier layer would skip the collective call.
            vars(pairs)["counts_everywhere"] = counts_M2
            self._measure(path, call, side, pairs, section.no_weights is None, shaped)
            if side is self.main:
                self.main_calls.append(section.number)

    def _across(self, call: Call, of_q: Side, of_k: Side) -> tuple[Side, Call]:
        """Cross-attention as self-attention over the concatenated tokens of both sides."""
        q, k = call.q_BHTK, call.k_BGSK
        if q.ndim != 4 or k.ndim != 4:
            raise Unread(f"queries {tuple(q.shape)} and keys {tuple(k.shape)}")
        for side, x in ((of_q, q), (of_k, k)):
            side.see_shape(x)
        key = of_q.name, of_k.name
        if key not in self._crossed:
            self._crossed[key] = joined(of_q, of_k), of_q, of_k
        return self._crossed[key][0], of_cross(call)

    def _agree(self, section: Section, pairs: Pairs | None, shaped: bool, n: int) -> tuple[list[int], bool]:
        """Merge over ranks: pair counts, ``shaped``, and whether any rank leaves out the call or its weights."""
        if not self.collective:
            return ([0] * n if pairs is None else pairs.count_MM.flatten().tolist()), shaped
        sums = torch.zeros(n + 3, dtype=torch.long, device=self.device)
        if pairs is not None:
            sums[:n] = pairs.count_MM.flatten()
        flags = [section.left_out is not None, section.no_weights is not None, shaped]
        sums[n:] = torch.tensor(flags, device=sums.device)
        dist.all_reduce(sums)
        *counts_M2, left_out, no_weights, any_shaped = sums.tolist()
        section.left_out = section.left_out or ("left out on another rank" if left_out else None)
        section.no_weights = section.no_weights or ("no weights on another rank" if no_weights else None)
        return counts_M2, bool(any_shaped)

    def _pairs_of(self, call: Call, side: Side) -> Pairs:
        q, k = call.q_BHTK, call.k_BGSK
        if q.ndim != 4 or k.ndim != 4 or q.shape[1] % k.shape[1]:
            raise Unread(f"queries {tuple(q.shape)} and keys {tuple(k.shape)}")
        side.see_shape(q)
        modality_BT, valid_BT = side.tokens
        B, T = modality_BT.shape
        if q.shape[0] != B or q.shape[2] != T or k.shape[2] != T:
            raise Elsewhere(
                f"{q.shape[0]} sequences of {q.shape[2]} queries and {k.shape[2]} keys; modality describes {B} of {T}"
            )
        visible_BTS = valid_BT[:, :, None].expand(B, T, T)
        if call.mask is not None:
            if call.mask.shape[1] > 1 and not (call.mask == call.mask[:, :1]).all():
                raise Unread("a mask that differs between heads")
            visible_BTS = visible_BTS & call.mask[:, 0]
        for pairs in side.pairs:
            if pairs.n_heads == q.shape[1] and torch.equal(pairs.visible_BTS, visible_BTS):
                return pairs
        side.pairs.append(Pairs(modality_BT, visible_BTS, len(side.names), q.shape[1]))
        return side.pairs[-1]

    def _measure(self, path: str, call: Call, side: Side, pairs: Pairs, weights: bool, shaped: bool) -> None:
        layer, q, k = len(self.sections) - 1, call.q_BHTK, call.expanded(call.k_BGSK)
        before = self._before.pop(layer_of(path), {}) if side is self.main else {}
        collector = side.collector
        for name, width in (("q", q.shape[-1]), ("k", k.shape[-1])):
            raw_BTD = before.get(f"{name}_raw")
            if raw_BTD is not None:
                by_head = raw_BTD.unflatten(-1, (-1, width)).transpose(1, 2)
                collector.norms(NORMS[f"{name}_raw"], layer, by_head)
                if "attn_in" in before:
                    collector.gains(f"{name}_weight_gain", layer, before["attn_in"], raw_BTD)
        for site, tensor in (("q", q), ("k", k), ("v", call.v_BGSK)):
            collector.norms(NORMS[site], layer, tensor)
        collector.attention(layer, q, k, call.scale, pairs, call.softcap, softmax=weights and not shaped)
        if weights and shaped:
            self._weights(layer, call, side, pairs)

    def _differs(self, call: Call, pairs: Pairs) -> str | None:
        """A reason if the weights that the call returned differ from the softmax of its logits; else None."""
        if call.weights_BHTS is None:
            return None
        sees_TS = pairs.visible_BTS[0]
        for head in range(call.q_BHTK.shape[1]):
            z_TS = call.logits(head, slice(0, 1))[0].masked_fill(~sees_TS, -torch.inf)
            error_TS = (z_TS.softmax(-1) - call.weights_BHTS[0, head].float()).abs()
            if (error_TS[sees_TS.any(-1)] > _SAME_WEIGHTS).any():
                return "its weights are not the softmax of its logits"
        return None

    def _weights(self, layer: int, call: Call, side: Side, pairs: Pairs) -> None:
        """Statistics of the weights of a call with a bias or a score_mod.

        `attention_statistics` takes q and k. Pass the identity as q and the softmax's input, transposed, as k: their
        dot products are the softmax's input.
        """
        B, T, _ = pairs.visible_BTS.shape
        one, eye_BHTT = pairs.one_head, torch.eye(T, device=self.device).expand(B, 1, T, T)
        over_heads: dict[str, Moments] = {}
        ranks_1B = []
        for head in range(call.q_BHTK.shape[1]):
            z_BTS = call.logits(head).masked_fill(~pairs.visible_BTS, 0.0)
            z_BHST = z_BTS.transpose(1, 2)[:, None]
            of_head = attention_statistics(eye_BHTT, z_BHST, 1.0, one)
            parts = {name: getattr(of_head, name) for name in WEIGHT_ROWS.values()}
            parts |= {f"mass{b}": mass for b, mass in enumerate(of_head.mass)}
            over_heads = {name: over_heads[name] + x if over_heads else x for name, x in parts.items()}
            ranks_1B.append(attention_rank(eye_BHTT, z_BHST, 1.0, pairs.visible_BTS, reach=pairs.reach))
        probe = side.collector.probe
        for statistic, name in WEIGHT_ROWS.items():
            tags = [tag(statistic, query, layer=layer) for query in side.names]
            probe.add_moments(tags, None, over_heads[name])
        for b, key in enumerate(side.names):
            mass = over_heads[f"mass{b}"]
            probe.add(
                [tag("attn_mass", query, key, layer=layer) for query in side.names],
                {"sum": mass.sum, "count": mass.count, "pairs": pairs.count_MM[:, b].float()},
                lambda raw: (raw["sum"] / raw["count"], raw["count"] * (raw["pairs"] > 0)),
            )
        probe.add(
            [tag("attn_rank", layer=layer)],
            matrix_sums(torch.cat(ranks_1B), pairs.seen_B),
            mean_of_matrices,
        )

    # Sites of an adapter

    def see_module(self, path: str, module_input: Tensor | None, output: Tensor | None) -> None:
        """Measure the adapter's sites at this module."""
        if self.adapter is None:
            return
        for site in self.adapter.at(path):
            tensor = site.tensor(module_input, output)
            if tensor is None or tensor.ndim < 3 or tensor.shape[:2] != self.modality_BT.shape:
                continue
            if site.name in ("attn_in", "q_raw", "k_raw"):
                self._before.setdefault(layer_of(path), {})[site.name] = tensor
            if site.name == "final":
                self.main.collector.final(tensor)
            elif site.name not in ("q_raw", "k_raw"):
                self.sections.append(Section(path, call=False))
                self.main.collector.norms(NORMS[site.name], len(self.sections) - 1, tensor)

    # After the forward

    def output(self, logits_BTV: Tensor, target_mask_BT: Tensor) -> None:
        """Statistics of the output softmax, with the vocabulary sorted into one block for each modality."""
        V, names, modalities = logits_BTV.shape[-1], self.main.names, self.main.modalities
        assert modalities is not None
        of_id_V = modalities.of_ids(torch.arange(V, device=logits_BTV.device))
        sizes = torch.bincount(of_id_V, minlength=len(names)).tolist()
        if 0 in sizes:
            return
        order_V = of_id_V.argsort(stable=True)
        if not torch.equal(order_V, torch.arange(V, device=order_V.device)):
            logits_BTV = logits_BTV.index_select(-1, order_V)
        target_BT = self.modality_BT.roll(-1, 1)
        vocab_sizes = dict(zip(names, sizes, strict=True))
        self.main.collector.output(logits_BTV.float(), target_BT, target_mask_BT, vocab_sizes)

    def see_stream(self, stream: Stream) -> None:
        """Norms of the detected residual stream and sublayer outputs, except those that the adapter names."""
        named = {site.name for site in self.adapter.sites} if self.adapter is not None else set()
        for i, section in enumerate(self.sections):
            for name, lengths_BT1 in stream.layers.get(section.number, {}).items():
                if section.call and name not in named:
                    self.main.collector.norms(NORMS[name], i, lengths_BT1)
        if stream.final is not None and "final" not in named:
            self.main.collector.final(stream.final)

    def finished(self) -> Probe:
        """The probe of all sides, with the layer numbers in the tags."""
        measured = [s for s in self.sections if s.call and s.left_out is None and not s.cross]
        numbers = number([section.path for section in measured])
        of_call = {id(section): n for section, n in zip(measured, numbers, strict=True)}
        of_layer = {layer_of(section.path): n for section, n in zip(measured, numbers, strict=True)}
        final = []
        for section in self.sections:
            place = layer_of(section.path)
            in_path = 0 if place is None else place[1]
            final.append(of_call.get(id(section), of_layer.get(place, in_path)))
        probe = self.main.collector.probe
        for side in self.sides[1:]:
            probe.parts += side.collector.probe.parts if side.ready else []
        for side, of_q, of_k in self._crossed.values():
            probe.parts += [cross_part(part, of_q.names, of_k.names) for part in side.collector.probe.parts]
        for part in probe.parts:
            part.tags[:] = [_LAYER_TAG.sub(lambda m: f"/layer{final[int(m[1])]:02d}", t) for t in part.tags]
        return probe
