"""Which tokens a model attends over: modalities of tokens, from ranges of ids, a function of the model's inputs, or the
model's config; and sides, the token sequences such as those of an encoder and of a decoder.

The main side has the tokens that ``modality`` describes; users declare other sides with ``sides``. Cross-attention
from side a to side b is measured as self-attention over the T + S concatenated tokens of both: q is padded with zeros
at the tokens of b, k and v at those of a, and the mask leaves only the (T, S) corner visible.

Shapes: B batch, H query heads, G key heads, T query tokens, S key tokens, K head_dim, M modalities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmqk.monitors.adapters import unwrapped
from mmqk.monitors.collect import Collector, StatisticPart
from mmqk.monitors.foreign.calls import Call, NotMeasured
from mmqk.monitors.foreign.inputs import Inputs, named_tensors, valid_tokens
from mmqk.monitors.foreign.trace import Origin
from mmqk.monitors.formulas.reduce import Pairs
from mmqk.store.errors import UserError
from mmqk.store.formatting import some
from mmqk.store.metrics import parse_tag, tag

# Id ranges of each modality except text, or a function from the inputs to (B, T) modality numbers.
Modality = Mapping[str, range | Sequence[range]] | Callable[[Mapping[str, Any]], Tensor]
# Name of a side in tags -> the model input with the side's tokens, or (input, modality) for several modalities.
Sides = Mapping[str, "str | tuple[str, Modality]"]

_IMAGE_CODES = ("IMGIMG", "<|visual token")  # how the names of image codes begin in Chameleon and in Emu3


class Modalities:
    """Maps tokens to modalities.

    Args:
        modality: ``{"image": range(a, b)}``, the id range or ranges of each modality. Other ids are text; with ``{}``
            all ids are text. It may also be a function that gets the model's inputs by name and returns (B, T), the
            modality number of each token over which attention runs. A token with a number outside 0 to M - 1 has no
            modality.
        names: if ``modality`` is a function, the names of modalities 0 to M - 1; else ignored.

    Attributes:
        names: the M names.
        ranges: id ranges by modality; None if ``modality`` is a function.
        origin: what the first line says of ranges that were read from the model's config; else empty.

    Raises:
        UserError: a range overlaps another, is empty or has a step other than 1, or a name is not a valid tag.
    """

    def __init__(self, modality: Modality, names: Sequence[str] = ("text", "image")):
        self.function, self.origin = modality if callable(modality) else None, ""
        if isinstance(names, str) or len(set(names)) < max(1, len(names)):
            raise UserError(f"names is {names!r}: give one or more different names, such as ('text', 'image')")
        if self.function is None and not isinstance(modality, Mapping):
            raise UserError(
                f'modality is {modality!r}: give ranges of ids, such as {{"image": range(4, 8196)}}, or a function'
            )
        self.ranges: dict[str, list[range]] | None = None
        if isinstance(modality, Mapping):
            parts = {str(name): list(x) if isinstance(x, list | tuple) else [x] for name, x in modality.items()}
            self.ranges = {"text": [], **parts}  # type: ignore[dict-item]
            _check_ranges(self.ranges)
        self.names = tuple(names if self.ranges is None else self.ranges)
        for name in self.names:
            check_name("modality", name)

    def of(self, inputs: Inputs) -> Tensor:
        """Return the modality numbers, (B, T)."""
        if self.function is not None:
            modality_BT = self.function(inputs.named)
            if not isinstance(modality_BT, Tensor) or modality_BT.ndim != 2:
                is_tensor = isinstance(modality_BT, Tensor)
                returned = f"shape {tuple(modality_BT.shape)}" if is_tensor else type(modality_BT).__name__
                raise UserError(f"the modality function returned {returned}: return modality numbers (B, T)")
            return modality_BT.long()
        if inputs.ids is None:
            raise UserError(
                f"modality has id ranges, but the model's inputs ({', '.join(inputs.named)}) have no token ids: "
                "pass a function from the inputs to modality numbers (B, T)"
            )
        return self.of_ids(inputs.ids[1])

    def of_ids(self, ids: Tensor) -> Tensor:
        """Return the modality numbers of ids of any shape, by the ranges."""
        assert self.ranges is not None
        number = torch.zeros_like(ids, dtype=torch.long)
        for m, name in enumerate(self.names):
            for part in self.ranges[name]:
                number = torch.where((ids >= part.start) & (ids < part.stop), m, number)
        return number


def modalities_of(model: nn.Module, modality: Modality | None, names: Sequence[str] = ("text", "image")) -> Modalities:
    """Return the modalities that the user gives or, if ``modality`` is None, those in the model's config.

    The config of a model of transformers names the id of the placeholder of an image, a video or a sound
    (``image_token_id``, in older models ``image_token_index``). The ids of image codes are in ``vocabulary_map``.
    """
    if modality is not None:
        return Modalities(modality, names)
    config = getattr(unwrapped(model), "config", None)
    found = _ids_of_config(config)
    modalities, kind = Modalities({name: _ranges_of(ids) for name, ids in found.items()}), type(config).__name__
    words = [f"{name} is id {some(map(str, sorted(ids)), 1)}" for name, ids in found.items()]
    modalities.origin = f"modality from {kind}: {', '.join(words)}"
    if not found:
        modalities.origin = "all tokens are text, because no modality is given" + f" or in {kind}" * bool(config)
    return modalities


def _ids_of_config(config: Any) -> dict[str, set[int]]:
    """Return the ids of each modality except text that a config or one of its parts names."""
    found: dict[str, set[int]] = {}
    parts = [config, *(x for x in getattr(config, "__dict__", {}).values() if hasattr(x, "__dict__"))]
    for name in ("image", "video", "audio"):
        fields = [getattr(part, f"{name}_token_{end}", None) for part in parts for end in ("id", "index")]
        ids = {x for x in fields if isinstance(x, int) and x >= 0}.difference(*found.values())
        codes = getattr(config, "vocabulary_map", None) if name == "image" else None
        ids |= {i for token, i in (codes or {}).items() if token.startswith(_IMAGE_CODES)}
        if ids:
            found[name] = ids
    return found


def _ranges_of(ids: set[int]) -> list[range]:
    starts, stops = (sorted(i for i in ids if i + by not in ids) for by in (-1, 1))
    return [range(start, stop + 1) for start, stop in zip(starts, stops, strict=True)]


def check_name(option: str, name: str) -> None:
    try:
        tag("q_norm", name)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def _check_ranges(ranges: Mapping[str, list[range]]) -> None:
    if len(ranges) < 2 and ranges["text"]:
        raise UserError(
            'modality has only text: give the ids of another modality, such as {"image": range(4, 8196)}, or {} if '
            "all ids are text"
        )
    for name, parts in ranges.items():
        if any(not isinstance(part, range) or part.step != 1 or part.start < 0 or not part for part in parts):
            raise UserError(
                f"modality: {name} is {parts}: give ranges of ids from 0 up, not empty and with step 1, or pass a "
                "function from the model's inputs to modality numbers (B, T)"
            )
        if not parts and name != "text":
            raise UserError(f"modality: {name} has no ids: give a range of ids")
    spans = sorted((part.start, part.stop, name) for name, parts in ranges.items() for part in parts)
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise UserError(
                f"modality: ids {start} to {end - 1} are both {one} and {other}: give ranges that do not overlap"
            )


@dataclass
class Side:
    """One token sequence of a model.

    Attributes:
        name: name in tags; empty for the main side.
        names: names of its modalities.
        inputs: names of the model inputs that its tokens come from; None until the first attention call.
        modalities: maps its token ids to modalities; None if the side has one modality or a modality function.
        modality_BT: modality of each token; None until its ids or its length are known.
        padding_BT: 0 or False at padding, or an additive mask; None if there is no padding.
        document_BT: number of each token's packed document; None if the inputs do not tell documents apart.
        pairs: the visible pairs of query and key, one entry for each mask so far.
    """

    name: str
    names: tuple[str, ...]
    inputs: frozenset[str] | None
    modalities: Modalities | None = None
    modality_BT: Tensor | None = None
    padding_BT: Tensor | None = None
    document_BT: Tensor | None = None
    pairs: list[Pairs] = field(default_factory=list)

    @property
    def source(self) -> str:
        """The names of its inputs, for messages."""
        return " and ".join(sorted(self.inputs or ())) or "other tokens"

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """The modality of each token, and a mask that is False at padding, (B, T) each."""
        if self.modality_BT is None:
            raise NotMeasured(f"no embedding got the ids of {self.source}")
        return self.modality_BT, valid_tokens(self.padding_BT, self.modality_BT)

    @cached_property
    def collector(self) -> Collector:
        """The `Collector` of its statistics."""
        return Collector(self.names, *self.tokens)

    @property
    def sees_all(self) -> bool:
        """Whether every token sees all tokens of its sequence in some layer, as in a masked language model."""
        valid_BT = self.tokens[1]
        padding_BTS = ~(valid_BT[:, :, None] & valid_BT[:, None, :])
        return valid_BT.shape[1] > 1 and any(bool((p.visible_BTS | padding_BTS).all()) for p in self.pairs)

    def has(self, origin: Origin | None) -> bool:
        """Return whether a tensor of this origin has the tokens of this side."""
        return origin is not None and bool(self.inputs) and self.inputs <= origin.inputs  # type: ignore[operator]

    def set_length(self, x_BHTK: Tensor) -> None:
        """Set the number of tokens of a side with one modality from its first attention call."""
        if self.modality_BT is None and self.modalities is None:
            self.modality_BT = x_BHTK.new_zeros(x_BHTK.shape[0], x_BHTK.shape[2], dtype=torch.long)


def check_sides(sides: Sides, names: Sequence[str]) -> dict[str, tuple[str, Modalities | None]]:
    """Return the name of the input and the modalities of each declared side, by the name of the side.

    Raises:
        UserError: a name is not a valid tag or is the name of a modality.
    """
    checked: dict[str, tuple[str, Modalities | None]] = {}
    for name, value in sides.items():
        source, modality = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if name in names:
            raise UserError(f"sides: '{name}' is already the name of a modality: rename the side")
        check_name("sides", name)
        checked[name] = (source, None if modality is None else Modalities(modality))
    return checked


def sides_of_batch(
    declared: Mapping[str, tuple[str, Modalities | None]], inputs: Inputs, main: Side, device: torch.device
) -> list[Side]:
    """Return the declared sides for one batch.

    Raises:
        UserError: an input that the model does not get, or that ``modality`` already describes.
    """
    by_name, sides = dict(named_tensors(inputs.named)), []
    for name, (source, modalities) in declared.items():
        if source not in by_name:
            raise UserError(
                f"sides: the model has no tensor input '{source}' for side '{name}': use one of {', '.join(by_name)}"
            )
        if main.inputs is not None and source in main.inputs:
            raise UserError(
                f"sides: input '{source}' of side '{name}' is already described by modality: name another input"
            )
        names = (name,) if modalities is None else tuple(f"{name}_{part}" for part in modalities.names)
        side = Side(name, names, frozenset({source}), modalities, padding_BT=inputs.padding([source]))
        if modalities is not None and modalities.function is not None:
            side.modality_BT, side.modalities = modalities.of(inputs).to(device), None
        sides.append(side)
    return sides


def joined(of_q: Side, of_k: Side) -> Side:
    """Return a side with the tokens of both sides, queries first. Key modalities follow the query modalities."""
    (modality_BT, valid_BT), (modality_BS, valid_BS) = of_q.tokens, of_k.tokens
    if len(modality_BT) != len(modality_BS):
        raise NotMeasured(f"it has {len(modality_BT)} query sequences but {len(modality_BS)} key sequences")
    outside_BS = (modality_BS < 0) | (modality_BS >= len(of_k.names))
    of_queries_BT = modality_BT.masked_fill(modality_BT >= len(of_q.names), -1)
    of_keys_BS = (modality_BS + len(of_q.names)).masked_fill(outside_BS, -1)
    modality_BU, valid_BU = torch.cat([of_queries_BT, of_keys_BS], 1), torch.cat([valid_BT, valid_BS], 1)
    name, names = f"{of_q.name} to {of_k.name}", of_q.names + of_k.names
    return Side(name, names, None, modality_BT=modality_BU, padding_BT=valid_BU)


def padded_call(call: Call) -> Call:
    """Return the call over the T + S tokens of both sides: q is 0 at key tokens, k and v are 0 at query tokens."""
    T, S, device = call.q_BHTK.shape[2], call.k_BGSK.shape[2], call.q_BHTK.device
    mask = torch.ones(1, 1, T, S, dtype=torch.bool, device=device) if call.mask is None else call.mask
    score_mod, weights, masked = call.score_mod, call.weights_BHTS, call.masked

    def padded_score_mod(z_BUU: Tensor, head: int) -> Tensor:
        assert score_mod is not None
        return _corner(score_mod(z_BUU[:, :T, T:], head))

    return replace(
        call,
        q_BHTK=F.pad(call.q_BHTK, (0, 0, 0, S)),
        k_BGSK=F.pad(call.k_BGSK, (0, 0, T, 0)),
        v_BGSK=F.pad(call.v_BGSK, (0, 0, T, 0)),
        mask=_corner(mask.expand(*mask.shape[:2], T, S)),
        masked=None if masked is None else _corner(masked.expand(*masked.shape[:2], T, S)),
        score_mod=None if score_mod is None else padded_score_mod,
        weights_BHTS=None if weights is None else _corner(weights),
    )


def _corner(x: Tensor) -> Tensor:
    """Place (..., T, S) in the upper right corner of zeros (..., T + S, T + S)."""
    T, S = x.shape[-2:]
    return F.pad(x, (T, 0, 0, S))


def cross_part(part: StatisticPart, q_names: Sequence[str], k_names: Sequence[str]) -> StatisticPart:
    """Return the statistics with tags ``cross_...``, without the norms of the zeros that pad the queries and keys."""

    def is_padding(name: str) -> bool:
        parsed = parse_tag(name)
        names = k_names if parsed.statistic.startswith(("k_", "v_")) else q_names
        return parsed.pair is None and parsed.modality not in (None, *names)

    kept = torch.tensor([not is_padding(name) for name in part.tags])
    finish: Callable = part.finish

    def finished(raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        values, counts = (x.flatten() for x in finish(raw))
        return values, counts * kept.to(counts.device)

    return StatisticPart([f"cross_{name}" for name in part.tags], part.raw, finished)
