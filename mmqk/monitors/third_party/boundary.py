"""From the attention calls of somebody else's model to statistics.

Shapes: B batch, H heads, T query tokens, S key tokens, K head width, M modalities, V vocabulary.
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
# Of the weights that a call gives against those of the logits as they were caught.
_SAME_WEIGHTS = 0.02


@dataclass
class Section:
    """What one attention call, or one module of an adapter, has told. Its place among these stands for the number of
    its layer until all are known.

    Attributes:
        path: of the module.
        call: whether it is an attention call.
        left_out: why there are no statistics; None where there are.
        elsewhere: whether that is since it is among other tokens.
        no_weights: why there are none of the weights; None where there are.
        cross: whether it is cross-attention, measured under its own names.
        number: of the call, among all calls from 1 on.
    """

    path: str
    call: bool = True
    left_out: str | None = None
    elsewhere: bool = False
    no_weights: str | None = None
    cross: bool = False
    number: int = 0


class Boundary:
    """Adds to the `Collector` of each side what attention calls and an adapter's modules tell.

    Args:
        main: the tokens that modality describes.
        others: further sides that the user declared.
        adapter: what to take at modules, or None.
        collective: whether every rank does the same at the same time.
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
        self.own_calls: list[int] = []  # numbers of those that were measured on the main side
        self.called = 0
        self.met = main.inputs is None  # whether anything stood for the main side's tokens
        self._crossed: dict[tuple[str, str], tuple[Side, Side, Side]] = {}
        self._before: dict[Any, dict[str, Tensor]] = {}  # what came before a layer's attention call

    # Whose tokens

    def ours(self, origin: Origin | None) -> bool:
        """Whether a tensor may stand for the tokens of the main side: if its origin is not known, it may."""
        return origin is None or self.main.inputs is None or self.main.inputs <= origin.inputs

    def is_stream(self, x: Tensor, origin: Origin | None) -> bool:
        """Whether a tensor is (B, T, D) of the main side."""
        shaped = x.ndim == 3 and x.shape[:2] == self.modality_BT.shape and x.is_floating_point()
        return shaped and origin is not None and self.ours(origin)

    def see_ids(self, ids: Tensor, origin: Origin | None) -> None:
        """What an embedding takes: ids of a side, as its stack has them, such as shifted labels."""
        self.met = self.met or self.main.takes(origin)
        for side in self.sides:
            if side.takes(origin):
                side.see_ids(ids)

    def _tokens_of(self, call: Call | Unread, over: tuple[Origin | None, Origin | None]) -> tuple[Side, Side]:
        """The sides of the queries and of the keys.

        Raises:
            Elsewhere: they are other tokens than those of the modalities.
            Unread: it cannot be told.
        """
        q, k = over
        self.met = self.met or self.main.takes(q)
        if q is None or k is None:
            raise Unread("what it attends over cannot be traced")
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
            raise Elsewhere(f"attention over {q}, where modality is of {self.main.source}")
        return of_q, of_k

    # Attention calls

    def see_call(self, path: str, call: Call | Unread, over: tuple[Origin | None, Origin | None]) -> int:
        """Everything at the attention boundary, or why not. Ranks do the same: what one leaves out all leave out.

        In fp32 also within a forward that needs autocast, since its weights are of several dtypes.

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
            section.no_weights = call.unsaid or self._differs(call, pairs)
        except Unread as unread:
            section.left_out, section.elsewhere = str(unread), isinstance(unread, Elsewhere)
        shaped = isinstance(call, Call) and call.shaped is not None
        counts_M2, shaped = self._agree(section, pairs, shaped, len(side.names) ** 2)
        if pairs is not None and section.left_out is None:
            assert isinstance(call, Call)
            # A rank whose pairs are those of the layer before would not ask the others for it.
            vars(pairs)["counts_everywhere"] = counts_M2
            self._measure(path, call, side, pairs, section.no_weights is None, shaped)
            if side is self.main:
                self.own_calls.append(section.number)

    def _across(self, call: Call, of_q: Side, of_k: Side) -> tuple[Side, Call]:
        """Cross-attention as attention over the tokens of both sides, one after the other."""
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
        """Pairs of all ranks by modality, and whether any shapes its logits; fills in what other ranks left out."""
        if not self.collective:
            return ([0] * n if pairs is None else pairs.count_MM.flatten().tolist()), shaped
        own = torch.zeros(n + 3, dtype=torch.long, device=self.device)
        if pairs is not None:
            own[:n] = pairs.count_MM.flatten()
        said = [section.left_out is not None, section.no_weights is not None, shaped]
        own[n:] = torch.tensor(said, device=own.device)
        dist.all_reduce(own)
        *counts_M2, left_out, no_weights, any_shaped = own.tolist()
        section.left_out = section.left_out or ("so on another rank" if left_out else None)
        section.no_weights = section.no_weights or ("so on another rank" if no_weights else None)
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
                f"{q.shape[0]} sequences of {q.shape[2]} queries and {k.shape[2]} keys, where modality has {B} of {T}"
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
        """Whether the weights that the call gave are another function of q and k than the one that was read."""
        if call.weights_BHTS is None:
            return None
        sees_TS = pairs.visible_BTS[0]
        for head in range(call.q_BHTK.shape[1]):
            z_TS = call.logits(head, slice(0, 1))[0].masked_fill(~sees_TS, -torch.inf)
            error_TS = (z_TS.softmax(-1) - call.weights_BHTS[0, head].float()).abs()
            if (error_TS[sees_TS.any(-1)] > _SAME_WEIGHTS).any():
                return "weights that are not the softmax of its logits"
        return None

    def _weights(self, layer: int, call: Call, side: Side, pairs: Pairs) -> None:
        """Statistics of weights whose softmax takes more than capped logits: a bias, a score_mod.

        What the softmax takes is handed on as a dot product, of the rows of the identity with its own columns.
        """
        B, T, _ = pairs.visible_BTS.shape
        one, eye_BHTT = pairs.one_head, torch.eye(T, device=self.device).expand(B, 1, T, T)
        found: dict[str, Moments] = {}
        ranks_1B = []
        for head in range(call.q_BHTK.shape[1]):
            z_BTS = call.logits(head).masked_fill(~pairs.visible_BTS, 0.0)
            z_BHST = z_BTS.transpose(1, 2)[:, None]
            of_head = attention_statistics(eye_BHTT, z_BHST, 1.0, one)
            parts = {name: getattr(of_head, name) for name in WEIGHT_ROWS.values()}
            parts |= {f"mass{b}": mass for b, mass in enumerate(of_head.mass)}
            found = {name: found[name] + x if found else x for name, x in parts.items()}
            ranks_1B.append(attention_rank(eye_BHTT, z_BHST, 1.0, pairs.visible_BTS, reach=pairs.reach))
        add = side.collector.found
        for statistic, name in WEIGHT_ROWS.items():
            add.add_moments([tag(statistic, query, layer=layer) for query in side.names], None, found[name])
        for b, key in enumerate(side.names):
            mass = found[f"mass{b}"]
            add.add(
                [tag("attn_mass", query, key, layer=layer) for query in side.names],
                {"sum": mass.sum, "count": mass.count, "pairs": pairs.count_MM[:, b].float()},
                lambda raw: (raw["sum"] / raw["count"], raw["count"] * (raw["pairs"] > 0)),
            )
        add.add(
            [tag("attn_rank", layer=layer)],
            matrix_sums(torch.cat(ranks_1B), pairs.seen_B),
            mean_of_matrices,
        )

    # What an adapter adds

    def see_module(self, path: str, given: Tensor | None, output: Tensor | None) -> None:
        """Sites of the adapter that lie at this module."""
        if self.adapter is None:
            return
        for site in self.adapter.at(path):
            tensor = site.tensor(given, output)
            if tensor is None or tensor.ndim < 3 or tensor.shape[:2] != self.modality_BT.shape:
                continue
            if site.name in ("attn_in", "q_raw", "k_raw"):
                self._before.setdefault(layer_of(path), {})[site.name] = tensor
            if site.name == "final":
                self.main.collector.final(tensor)
            elif site.name not in ("q_raw", "k_raw"):
                self.sections.append(Section(path, call=False))
                self.main.collector.norms(NORMS[site.name], len(self.sections) - 1, tensor)

    # In the end

    def output(self, logits_BTV: Tensor, target_mask_BT: Tensor) -> None:
        """The output softmax by the modality of the next token, with the vocabulary in blocks one after the other."""
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
        blocks = dict(zip(names, sizes, strict=True))
        self.main.collector.output(logits_BTV.float(), target_BT, target_mask_BT, blocks)

    def see_stream(self, stream: Stream) -> None:
        """The residual stream and what is added to it, where an adapter does not name them."""
        named = {site.name for site in self.adapter.sites} if self.adapter is not None else set()
        for i, section in enumerate(self.sections):
            for name, lengths_BT1 in stream.layers.get(section.number, {}).items():
                if section.call and name not in named:
                    self.main.collector.norms(NORMS[name], i, lengths_BT1)
        if stream.final is not None and "final" not in named:
            self.main.collector.final(stream.final)

    def finished(self) -> Probe:
        """The probe, with its layers numbered."""
        measured = [s for s in self.sections if s.call and s.left_out is None and not s.cross]
        numbers = number([section.path for section in measured])
        of_call = {id(section): n for section, n in zip(measured, numbers, strict=True)}
        of_layer = {layer_of(section.path): n for section, n in zip(measured, numbers, strict=True)}
        final = []
        for section in self.sections:
            place = layer_of(section.path)
            own = 0 if place is None else place[1]
            final.append(of_call.get(id(section), of_layer.get(place, own)))
        found = self.main.collector.found
        for side in self.sides[1:]:
            found.parts += side.collector.found.parts if side.ready else []
        for side, of_q, of_k in self._crossed.values():
            found.parts += [cross_part(part, of_q.names, of_k.names) for part in side.collector.found.parts]
        for part in found.parts:
            part.tags[:] = [_LAYER_TAG.sub(lambda m: f"/layer{final[int(m[1])]:02d}", t) for t in part.tags]
        return found
