"""Computes statistics from the attention calls that `Capture` intercepts in a third-party model.

A call is self-attention if queries and keys have the same origin (`origins`), else cross-attention. A call is
measured if its tokens belong to the main side or to a declared side (`Side`); otherwise the reason is recorded.
The ranks agree on what they measure (`agreed`).

Shapes: B batch, H heads, T query tokens, S key tokens, K head_dim, M modalities, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmqk.distributed import summed, world_size
from mmqk.monitors.adapters import Adapter, layer_numbers, layer_of
from mmqk.monitors.collect import Statistics
from mmqk.monitors.foreign.calls import Call, NotMeasured, OtherTokens, same_document
from mmqk.monitors.foreign.layers import Stream
from mmqk.monitors.foreign.trace import Origin
from mmqk.monitors.formulas.reduce import Pairs
from mmqk.monitors.modalities import Side, cross_part, joined, padded_call

# Keys that no query should attend to, as in ``attn_mass_padding``: those that a finite additive mask hides, padding,
# and the tokens of other packed documents.
LEAKS = ("hidden", "padding", "documents")
_LAYER_TAG = re.compile(r"/layer(\d+)(?=/|$)")
# Largest accepted difference between the weights that a call returned and the softmax of its logits.
_WEIGHT_TOLERANCE = 0.02
_FLAGS = 6  # most flags that the ranks agree on at a time
_FINAL = 1000  # more than the number of ranks

# Origins of the queries and of the keys of a call.
CallOrigins = tuple[Origin | None, Origin | None]


class ProbeError(RuntimeError):
    """Raised if a probe failed.

    Attributes:
        is_final: whether a probe of the whole batch would fail too.
        is_fatal: whether the other ranks cannot go on, so that the run ends.
        is_elsewhere: whether it failed on another rank, which prints the reason.
    """

    def __init__(self, message: str, is_final: bool, is_fatal: bool = False, is_elsewhere: bool = False):
        super().__init__(message)
        self.is_final, self.is_fatal, self.is_elsewhere = is_final, is_fatal, is_elsewhere


def agreed(device: torch.device, *flags: bool) -> list[bool]:
    """Return for each of at most six flags whether it is true on any rank.

    Raises:
        ProbeError: the probe failed on another rank.
    """
    if world_size() == 1:
        return list(flags)
    values = [0.0, *map(float, flags), *[0.0] * (_FLAGS - len(flags))]
    failed, *sums = summed(torch.tensor(values, device=device)).tolist()
    if failed:
        raise ProbeError("the probe failed on another rank", failed >= _FINAL, is_elsewhere=True)
    return [bool(x) for x in sums[: len(flags)]]


def failed_here(device: torch.device, is_final: bool) -> bool:
    """Make `agreed` raise on every other rank, and return whether any rank's failure is final."""
    if world_size() == 1:
        return is_final
    failed = float(_FINAL if is_final else 1)
    return bool(summed(torch.tensor([failed, *[0.0] * _FLAGS], device=device))[0] >= _FINAL)


@dataclass
class CallRecord:
    """What became of one attention call.

    Attributes:
        path: path of the module.
        place: the call's number in tags until `Measurement.finished`, which knows the layer numbers.
        not_measured: why the call was not measured; None if it was.
        other_tokens: whether the call was not measured because its tokens belong to no declared side.
        no_weights: why the call has no entropy, mass and rank; None if it has them.
        cross: whether the call is measured as cross-attention, with statistics named ``cross_...``.
    """

    path: str
    place: int = 0
    not_measured: str | None = None
    other_tokens: bool = False
    no_weights: str | None = None
    cross: bool = False


class Measurement:
    """Measures one forward pass: adds attention calls and an adapter's sites to the `Collector` of each side.

    Args:
        main: the side whose tokens ``modality`` describes.
        others: the declared sides.
        adapter: further sites to measure, or None.
        collective: whether every rank measures at the same time.

    Attributes:
        records: the attention calls; call number n is the n-th record.
        main_calls: numbers of the measured self-attention calls of the main side.
        main_used: whether any measured tensor had the main side's origin.
    """

    def __init__(
        self, main: Side, others: Sequence[Side] = (), adapter: Adapter | None = None, collective: bool = False
    ):
        self.main, self.sides, self.collective = main, [main, *others], collective
        self.modality_BT, self.valid_BT = main.tokens
        self.device = self.modality_BT.device
        self.adapter = adapter
        self.records, self.main_calls = list[CallRecord](), list[int]()
        self.main_used = main.inputs is None
        self._paths: list[str] = []  # module of each call and each adapter's site, by its place
        self._crossed: dict[tuple[str, str], tuple[Side, Side, Side]] = {}
        self._before_call: dict[Any, dict[str, Tensor]] = {}  # by layer: attn_in, q_raw and k_raw
        self._sites: set[str] = set()  # names of the adapter's sites that were measured

    # Sides of a tensor

    def may_be_main(self, origin: Origin | None) -> bool:
        """Return whether a tensor may have the main side's tokens; True if its origin is unknown."""
        return origin is None or self.main.inputs is None or self.main.inputs <= origin.inputs

    def is_stream(self, x: Tensor, origin: Origin | None) -> bool:
        """Return whether a tensor is (B, T, D) with the main side's tokens."""
        fits = x.ndim == 3 and x.shape[:2] == self.modality_BT.shape and x.is_floating_point()
        return fits and origin is not None and self.may_be_main(origin)

    def embedding(self, ids: Tensor, origin: Origin | None) -> None:
        """Set the modalities of a side from the ids that its embedding gets.

        These ids may differ from the model's input, for example in a decoder that gets the shifted labels.
        """
        self.main_used = self.main_used or self.main.has(origin)
        for side in self.sides:
            if side.has(origin) and side.modality_BT is None and side.modalities is not None and ids.ndim == 2:
                side.modality_BT = side.modalities.of_ids(ids)

    def _sides_of(self, call: Call | NotMeasured, origins: CallOrigins) -> tuple[Side, Side]:
        """Return the sides of the queries and of the keys.

        Raises:
            OtherTokens: the tokens belong to no declared side.
            NotMeasured: the queries or keys have no known origin.
        """
        q, k = origins
        self.main_used = self.main_used or self.main.has(q)
        if q is None or k is None:
            raise NotMeasured("its queries or keys cannot be traced to an input of the model")
        if self.main.inputs is None and q.inputs == k.inputs and isinstance(call, Call):
            shape = call.q_BHTK.shape
            if len(shape) == 4 and (shape[0], shape[2]) == tuple(self.modality_BT.shape):
                self.main.inputs = q.inputs
        q_side, k_side = (next((side for side in self.sides if side.has(x)), None) for x in (q, k))
        is_self = q.inputs == k.inputs
        if q_side is not None and k_side is not None and (q_side is k_side) == is_self:
            return q_side, k_side
        if is_self:
            if self.main.inputs is None and isinstance(call, Call):
                self._check_shape(call, self.main, self.main)
            raise OtherTokens(f"attention over the tokens of {q}; modality describes {self.main.source}")
        hint = "" if len(self.sides) > 1 else "; declare the other input with sides="
        raise OtherTokens(f"cross-attention from {q} to {k}{hint}")

    # Attention calls

    def attention(self, path: str, call: Call | NotMeasured, origins: CallOrigins) -> int:
        """Measure one attention call, or record why it cannot be measured.

        If one rank cannot measure the call, all ranks leave it out.

        The statistics are computed in fp32, even if the forward pass runs under autocast.

        Returns:
            The number of the call.
        """
        with torch.autocast(self.device.type, enabled=False):
            self._add_call(path, call, origins)
        return len(self.records)

    def _add_call(self, path: str, call: Call | NotMeasured, origins: CallOrigins) -> None:
        record, side, q_side = CallRecord(path, self._place(path)), self.main, None
        pairs: Pairs | None = None
        leaks: dict[str, Tensor] = {}
        self.records.append(record)
        try:
            q_side, k_side = self._sides_of(call, origins)
            side, record.cross = q_side, q_side is not k_side
            if isinstance(call, NotMeasured):
                raise call
            self._check_shape(call, q_side, k_side)
            if record.cross:  # self-attention over the tokens of both sides
                key = q_side.name, k_side.name
                if key not in self._crossed:
                    self._crossed[key] = joined(q_side, k_side), q_side, k_side
                side, call = self._crossed[key][0], padded_call(call)
            pairs = self._pairs_of(call, side)
            record.no_weights = call.no_weights or self._wrong_weights(call, pairs)
            leaks = self._leaks(call, pairs, side)
        except NotMeasured as reason:
            record.not_measured, record.other_tokens = str(reason), isinstance(reason, OtherTokens)
            if q_side is None and record.other_tokens:
                return  # other ranks may not make this call, such as that of an image encoder without images
        flags = [isinstance(call, Call) and call.score_mod is not None, *(kind in leaks for kind in LEAKS)]
        counts, (has_score_mod, *has_leaks) = self._merge_over_ranks(record, pairs, flags, len(side.names) ** 2)
        if isinstance(call, Call) and pairs is not None and record.not_measured is None:
            # Set the merged counts here: a rank that reuses the pairs of an earlier layer would skip the collective
            # call that computes them.
            vars(pairs)["counts_everywhere"] = counts
            none_BTS = torch.zeros_like(pairs.visible_BTS)
            leaks = {kind: leaks.get(kind, none_BTS) for kind, has in zip(LEAKS, has_leaks, strict=True) if has}
            self._add_statistics(record, call, side, pairs, has_score_mod, leaks)
            if side is self.main:
                self.main_calls.append(len(self.records))

    def _place(self, path: str) -> int:
        self._paths.append(path)
        return len(self._paths) - 1

    def _check_shape(self, call: Call, q_side: Side, k_side: Side) -> None:
        q, k = call.q_BHTK, call.k_BGSK
        if q.ndim != 4 or k.ndim != 4 or q.shape[1] % k.shape[1]:
            raise NotMeasured(f"its queries have shape {tuple(q.shape)} and its keys {tuple(k.shape)}")
        q_side.set_length(q)
        k_side.set_length(k)
        (B, T), S = q_side.tokens[0].shape, k_side.tokens[0].shape[1]
        if (q.shape[0], q.shape[2], k.shape[2]) != (B, T, S):
            tokens = f"{T} tokens" if q_side is k_side else f"{T} and {S} tokens"
            raise OtherTokens(
                f"it has {q.shape[0]} sequences of {q.shape[2]} queries and {k.shape[2]} keys; modality describes "
                f"{B} sequences of {tokens}"
            )

    def _merge_over_ranks(
        self, record: CallRecord, pairs: Pairs | None, flags: list[bool], n: int
    ) -> tuple[list[int], list[bool]]:
        """Return the pair counts, summed over ranks, and whether each of the flags is true on any rank.

        If another rank cannot measure the call or compute its attention weights, ``record`` stores this reason. If
        the ranks do not measure together (`collective`), nothing is merged.
        """
        if not self.collective:
            return ([0] * n if pairs is None else pairs.count_MM.flatten().tolist()), flags
        own = [record.not_measured is not None, record.no_weights is not None, *flags]
        not_measured, no_weights, *any_flags = agreed(self.device, *own)
        record.not_measured = record.not_measured or ("not measured on another rank" if not_measured else None)
        record.no_weights = record.no_weights or ("no weights on another rank" if no_weights else None)
        if not_measured or pairs is None:
            return [0] * n, any_flags
        counts = summed(pairs.count_MM.flatten().to(self.device, torch.long, copy=True))
        return counts.tolist(), any_flags

    def _pairs_of(self, call: Call, side: Side) -> Pairs:
        q = call.q_BHTK
        modality_BT, valid_BT = side.tokens
        B, T = modality_BT.shape
        visible_BTS = valid_BT[:, :, None].expand(B, T, T)
        if call.mask is not None:
            if call.mask.shape[1] > 1 and not (call.mask == call.mask[:, :1]).all():
                raise NotMeasured("its mask differs between heads")
            visible_BTS = visible_BTS & call.mask[:, 0]
        for pairs in side.pairs:
            if pairs.n_heads == q.shape[1] and torch.equal(pairs.visible_BTS, visible_BTS):
                return pairs
        side.pairs.append(Pairs(modality_BT, visible_BTS, len(side.names), q.shape[1]))
        return side.pairs[-1]

    def _leaks(self, call: Call, pairs: Pairs, side: Side) -> dict[str, Tensor]:
        """Return the keys of each of the `LEAKS` that can have weight, bool (B, T, S), without those that have none."""
        valid_BT, leaks = side.tokens[1], dict[str, Tensor]()
        reachable_BTS = pairs.visible_BTS
        if call.masked is not None:
            hidden_BTS = call.masked.any(1).expand_as(reachable_BTS) & valid_BT[:, :, None]
            leaks["hidden"], reachable_BTS = ~pairs.visible_BTS, reachable_BTS | hidden_BTS
        leaks["padding"] = reachable_BTS & ~valid_BT[:, None]
        if side.document_BT is not None:
            leaks["documents"] = reachable_BTS & ~same_document(side.document_BT) & valid_BT[:, None]
        return {kind: keys_BTS for kind, keys_BTS in leaks.items() if kind == "hidden" or keys_BTS.any()}

    def _add_statistics(
        self, record: CallRecord, call: Call, side: Side, pairs: Pairs, has_score_mod: bool, leaks: dict[str, Tensor]
    ) -> None:
        layer, q, k = record.place, call.q_BHTK, call.expanded(call.k_BGSK)
        before = self._before_call.pop(self._layer_of(record.path), {}) if side is self.main else {}
        collector = side.collector
        for name, x_BHTK in (("q", q), ("k", k)):
            if (raw_BTD := before.get(f"{name}_raw")) is not None:
                raw_BHTK = raw_BTD.unflatten(-1, (-1, x_BHTK.shape[-1])).transpose(1, 2)
                collector.norms(f"{name}_raw", layer, raw_BHTK)
                if "attn_in" in before:
                    collector.norm_ratios(f"{name}_weight_gain", layer, before["attn_in"], raw_BTD)
        for site, tensor in (("q", q), ("k", k), ("v", call.v_BGSK)):
            collector.norms(site, layer, tensor)
        has_weights = record.no_weights is None
        softmax = has_weights and not has_score_mod and not leaks
        sink_H = call.sink_H if softmax else None
        collector.attention(layer, q, k, call.scale, pairs, call.softcap, softmax, sink_H)
        if has_weights and not softmax:
            collector.weights(layer, call.weights, q.shape[1], pairs, leaks)

    def _wrong_weights(self, call: Call, pairs: Pairs) -> str | None:
        """Return a reason if the weights that the call returned are not the softmax of its logits; else None."""
        if call.weights_BHTS is None:
            return None
        visible_TS = pairs.visible_BTS[0]
        for head in range(call.q_BHTK.shape[1]):
            weight_TS = call.weights(head, slice(0, 1))[0][0]
            error_TS = (weight_TS - call.weights_BHTS[0, head].float()).abs()
            if (error_TS[visible_TS.any(-1)] > _WEIGHT_TOLERANCE).any():
                return "its weights are not the softmax of its logits"
        return None

    # Sites of an adapter

    def _layer_of(self, path: str) -> Any:
        """Return a key of the layer with this module, the same for a layer's sites and its attention call."""
        return (self.adapter and self.adapter.layer_at(path)) or layer_of(path)

    def module(self, path: str, module_input: Tensor | None, output: Tensor | None) -> None:
        """Measure the adapter's sites at this module."""
        for site in self.adapter.at(path) if self.adapter is not None else ():
            tensor = module_input if site.of == "input" else output
            tensor = site.take(tensor) if tensor is not None and site.take is not None else tensor
            if tensor is None or tensor.ndim < 3 or tensor.shape[:2] != self.modality_BT.shape:
                continue
            self._sites.add(site.name)
            if site.name in ("attn_in", "q_raw", "k_raw"):
                self._before_call.setdefault(self._layer_of(path), {})[site.name] = tensor
            if site.name == "final":
                self.main.collector.final(tensor)
            elif site.name not in ("q_raw", "k_raw"):
                self.main.collector.norms(site.name, self._place(path), tensor)

    # After the forward pass

    def output_softmax(self, logits_BTV: Tensor, target_mask_BT: Tensor) -> None:
        """Add the statistics of the output softmax, with the vocabulary sorted into one block for each modality."""
        V, names, modalities = logits_BTV.shape[-1], self.main.names, self.main.modalities
        assert modalities is not None
        ids_V = torch.arange(V, device=logits_BTV.device)
        modality_V = modalities.of_ids(ids_V)
        sizes = torch.bincount(modality_V, minlength=len(names)).tolist()
        if 0 in sizes:
            return
        order_V = modality_V.argsort(stable=True)
        if not torch.equal(order_V, ids_V):
            logits_BTV = logits_BTV.index_select(-1, order_V)
        target_BT = self.modality_BT.roll(-1, 1)
        blocks = dict(zip(names, sizes, strict=True))
        self.main.collector.output(logits_BTV.float(), target_BT, target_mask_BT, blocks)

    def residual_stream(self, stream: Stream) -> None:
        """Add the norms of the detected residual stream and sublayer outputs, except those of the adapter's sites."""
        for number, record in enumerate(self.records, 1):
            for site, norm_BT1 in stream.layers.get(number, {}).items():
                if site not in self._sites:
                    self.main.collector.norms(site, record.place, norm_BT1)
        if stream.final is not None and "final" not in self._sites:
            self.main.collector.final(stream.final)

    def finished(self) -> Statistics:
        """Return the statistics of all sides, with layer numbers instead of places in the tags."""
        statistics = self.main.collector.statistics
        for side in self.sides[1:]:
            statistics.parts += side.collector.statistics.parts if side.modality_BT is not None else []
        for side, q_side, k_side in self._crossed.values():
            parts = side.collector.statistics.parts
            statistics.parts += [cross_part(part, q_side.names, k_side.names) for part in parts]
        numbers = self._layer_numbers()
        for part in statistics.parts:
            part.tags[:] = [_LAYER_TAG.sub(lambda m: f"/layer{numbers[int(m[1])]:02d}", t) for t in part.tags]
        return statistics

    def _layer_numbers(self) -> list[int]:
        """Return the layer number of each place.

        It is the number of the call if the call was measured, else the number of a measured call in the same layer,
        else the first integer of the path.
        """
        measured = [r for r in self.records if r.not_measured is None and not r.cross]
        numbers = layer_numbers([record.path for record in measured])
        by_place = {record.place: n for record, n in zip(measured, numbers, strict=True)}
        by_layer = {self._layer_of(record.path): n for record, n in zip(measured, numbers, strict=True)}
        return [
            by_place.get(place, by_layer.get(self._layer_of(path), (layer_of(path) or ("", 0))[1]))
            for place, path in enumerate(self._paths)
        ]
