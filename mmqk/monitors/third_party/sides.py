"""Sides: the token sequences that a model attends over, such as encoder tokens and decoder tokens.

The main side has the tokens that `attach`'s ``modality`` describes; users declare other sides with ``sides``.
Cross-attention from side a to side b is measured as self-attention over the T + S concatenated tokens of both: q is
padded with zeros for the tokens of b, k and v for those of a, and the mask leaves only the (T, S) corner visible.

Shapes: B batch, H query heads, G key heads, T query tokens, S key tokens, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from mmqk.monitors.collect import Collector
from mmqk.monitors.measures.pairs import Pairs
from mmqk.monitors.record import StatisticPart
from mmqk.monitors.third_party.calls import Call, Unread
from mmqk.monitors.third_party.inputs import Inputs, Modalities, Modality, named_ids, tensors
from mmqk.monitors.third_party.origins import Origin
from mmqk.store.errors import UserError
from mmqk.store.tags import parsed_tag, tag

# Name of a side in tags -> the forward input with its tokens, or (input, modality) for tokens of several modalities.
Sides = Mapping[str, "str | tuple[str, Modality]"]


@dataclass
class Side:
    """One token sequence of a model.

    Attributes:
        name: name in tags; empty for the main side.
        names: names of its modalities.
        inputs: names of the forward inputs that its tokens come from; None until a call reveals them.
        modalities: maps its token ids to modalities; None if it has one modality or a modality function.
        modality_BT: modality of each token; None until its ids or its length are seen.
        valid_BT: False at padding.
        pairs: the visible pairs of query and key, one entry for each mask so far.
    """

    name: str
    names: tuple[str, ...]
    inputs: frozenset[str] | None
    modalities: Modalities | None = None
    modality_BT: Tensor | None = None
    valid_BT: Tensor | None = None
    pairs: list[Pairs] = field(default_factory=list)

    @property
    def source(self) -> str:
        """The names of its inputs, for messages."""
        return " and ".join(sorted(self.inputs or ())) or "other tokens"

    @property
    def ready(self) -> bool:
        """Whether the modality of its tokens is set."""
        return self.modality_BT is not None

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Modality and validity, (B, T) each."""
        if self.modality_BT is None:
            raise Unread(f"no embedding read the ids of {self.source}")
        if self.valid_BT is None or self.valid_BT.shape != self.modality_BT.shape:
            self.valid_BT = torch.ones_like(self.modality_BT, dtype=torch.bool)
        return self.modality_BT, self.valid_BT

    @cached_property
    def collector(self) -> Collector:
        """Collects its statistics."""
        return Collector(self.names, *self.tokens)

    def takes(self, origin: Origin | None) -> bool:
        """Whether the positions of a tensor of this origin are its tokens."""
        return origin is not None and bool(self.inputs) and self.inputs <= origin.inputs  # type: ignore[operator]

    def see_ids(self, ids: Tensor) -> None:
        """Set the modalities from the first ids (B, T) that an embedding reads."""
        if self.modality_BT is None and self.modalities is not None and ids.ndim == 2:
            self.modality_BT = self.modalities.of_ids(ids)

    def see_shape(self, x_BHTK: Tensor) -> None:
        """Of a side with one modality: take the number of tokens from its first attention call."""
        if self.modality_BT is None and self.modalities is None:
            self.modality_BT = torch.zeros(
                x_BHTK.shape[0], x_BHTK.shape[2], dtype=torch.long, device=x_BHTK.device
            )


def check_sides(sides: Sides, names: Sequence[str]) -> dict[str, tuple[str, Modalities | None]]:
    """The declared sides by name: the input's name, and its modalities.

    Raises:
        UserError: a name that is no valid tag or is a modality's, or a value that is not an input's name.
    """
    checked: dict[str, tuple[str, Modalities | None]] = {}
    for name, value in sides.items():
        source, modality = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if not isinstance(source, str):
            raise UserError(
                f"sides: {name} is {value!r}: give the name of a forward input, or (name, modality)"
            )
        if name in names:
            raise UserError(f"sides: {name} is already the name of a modality: rename the side")
        try:
            tag("q_norm", name)
        except ValueError as error:
            raise UserError(f"sides: {error}") from error
        checked[name] = (source, None if modality is None else Modalities(modality))
    return checked


def made_sides(
    declared: Mapping[str, tuple[str, Modalities | None]], inputs: Inputs, main: Side, device: torch.device
) -> list[Side]:
    """The declared sides for one batch.

    Raises:
        UserError: an input that the forward does not get, or that ``modality`` already describes.
    """
    by_name, made = dict(tensors(inputs)), []
    for name, (source, modalities) in declared.items():
        if source not in by_name:
            raise UserError(
                f"sides: the forward has no tensor input {source} for {name}: use one of {', '.join(by_name)}"
            )
        if main.inputs is not None and source in main.inputs:
            raise UserError(
                f"sides: {source}, given for {name}, is already described by modality: name another input"
            )
        names = (name,) if modalities is None else tuple(f"{name}_{part}" for part in modalities.names)
        side = Side(name, names, frozenset({source}), modalities)
        if modalities is not None and modalities.function is not None:
            side.modality_BT, side.modalities = modalities.of(inputs).to(device), None
        mask = by_name.get(mask_of([source], inputs))
        side.valid_BT = None if mask is None else mask.to(device) > 0
        made.append(side)
    return made


def mask_of(source: Collection[str] | None, inputs: Inputs) -> str:
    """Name of the padding mask for these inputs: decoder_attention_mask for decoder_input_ids and labels."""
    if source is None or len(source) != 1:
        return "attention_mask"
    (name,), ids = source, named_ids(inputs)
    if name == "labels" or name.startswith("decoder_"):
        return "decoder_attention_mask"
    return "attention_mask" if ids is None or ids[0] == name else f"{name.removesuffix('_ids')}_attention_mask"


def joined(of_q: Side, of_k: Side) -> Side:
    """The tokens of both sides concatenated, the queries' first; a key's modality is M_q + its own."""
    (modality_BT, valid_BT), (modality_BS, valid_BS) = of_q.tokens, of_k.tokens
    if len(modality_BT) != len(modality_BS):
        raise Unread(f"{len(modality_BT)} query sequences but {len(modality_BS)} key sequences")
    outside_BS = (modality_BS < 0) | (modality_BS >= len(of_k.names))
    return Side(
        f"{of_q.name} to {of_k.name}",
        of_q.names + of_k.names,
        None,
        modality_BT=torch.cat(
            [
                modality_BT.masked_fill(modality_BT >= len(of_q.names), -1),
                (modality_BS + len(of_q.names)).masked_fill(outside_BS, -1),
            ],
            1,
        ),
        valid_BT=torch.cat([valid_BT, valid_BS], 1),
    )


def of_cross(call: Call) -> Call:
    """The call padded to the T + S tokens of both sides: q is 0 at key tokens, k and v are 0 at query tokens."""
    T, S, device = call.q_BHTK.shape[2], call.k_BGSK.shape[2], call.q_BHTK.device
    mask = torch.ones(1, 1, T, S, dtype=torch.bool, device=device) if call.mask is None else call.mask
    mask = mask.expand(*mask.shape[:2], T, S)
    shaped, weights = call.shaped, call.weights_BHTS

    def shaped_of_both(z_BUU: Tensor, head: int) -> Tensor:
        assert shaped is not None
        return _corner(shaped(z_BUU[:, :T, T:], head))

    return replace(
        call,
        q_BHTK=F.pad(call.q_BHTK, (0, 0, 0, S)),
        k_BGSK=F.pad(call.k_BGSK, (0, 0, T, 0)),
        v_BGSK=F.pad(call.v_BGSK, (0, 0, T, 0)),
        mask=_corner(mask),
        shaped=None if shaped is None else shaped_of_both,
        weights_BHTS=None if weights is None else _corner(weights),
    )


def _corner(x: Tensor) -> Tensor:
    """(..., T, S) as the upper right corner of (..., T + S, T + S); 0 elsewhere."""
    T, S = x.shape[-2:]
    return F.pad(x, (T, 0, 0, S))


def cross_part(part: StatisticPart, q_names: Sequence[str], k_names: Sequence[str]) -> StatisticPart:
    """The statistics as ``cross_...``, without those of pairs that cross-attention does not have."""
    keep = [_is_cross(name, q_names, k_names) for name in part.tags]
    finish: Callable = part.finish

    def finished(raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        values, counts = (x.flatten() for x in finish(raw))
        return values, counts * torch.tensor(keep, device=counts.device)

    return StatisticPart([f"cross_{name}" for name in part.tags], part.raw, finished)


def _is_cross(name: str, q_names: Sequence[str], k_names: Sequence[str]) -> bool:
    parsed = parsed_tag(name)
    if parsed.pair is not None:
        return parsed.pair[0] in q_names and parsed.pair[1] in k_names
    of_keys = parsed.statistic.startswith(("k_", "v_"))
    return parsed.modality is None or parsed.modality in (k_names if of_keys else q_names)
