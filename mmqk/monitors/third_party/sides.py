"""The tokens that attention is over: those that modality describes, and other sides that the user declares.

Cross-attention between two sides is measured as attention over the tokens of both, one after the other, in which
queries see only keys of the other side.

Shapes: B batch, H heads of queries, G heads of keys, T query tokens, S key tokens, K head width.
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

# Of the name of a side in tags: the input whose positions it is, and of which modality they are if not all of one.
Sides = Mapping[str, "str | tuple[str, Modality]"]


@dataclass
class Side:
    """The tokens of one stack of a model.

    Attributes:
        name: in tags; empty for that of modality.
        names: of its modalities.
        inputs: names of the inputs whose positions its tokens are; None before that is known.
        modalities: how its ids tell them; None where all are of one modality, or a function told.
        modality_BT: of each token; None before it is known.
        valid_BT: False at padding.
        pairs: who sees whom, as met so far.
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
        """Its inputs, to be named in a sentence."""
        return " and ".join(sorted(self.inputs or ())) or "other tokens"

    @property
    def ready(self) -> bool:
        """Whether its tokens are known."""
        return self.modality_BT is not None

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Modality and validity, (B, T) each."""
        if self.modality_BT is None:
            raise Unread(f"no embedding took the ids of {self.source}")
        if self.valid_BT is None or self.valid_BT.shape != self.modality_BT.shape:
            self.valid_BT = torch.ones_like(self.modality_BT, dtype=torch.bool)
        return self.modality_BT, self.valid_BT

    @cached_property
    def collector(self) -> Collector:
        """Of its statistics."""
        return Collector(self.names, *self.tokens)

    def takes(self, origin: Origin | None) -> bool:
        """Whether a tensor of this origin stands for its tokens."""
        return origin is not None and bool(self.inputs) and self.inputs <= origin.inputs  # type: ignore[operator]

    def see_ids(self, ids: Tensor) -> None:
        """The first integers (B, T) that an embedding takes."""
        if self.modality_BT is None and self.modalities is not None and ids.ndim == 2:
            self.modality_BT = self.modalities.of_ids(ids)

    def see_shape(self, x_BHTK: Tensor) -> None:
        """Where all tokens are of one modality, their number is that of the first attention over them."""
        if self.modality_BT is None and self.modalities is None:
            self.modality_BT = torch.zeros(
                x_BHTK.shape[0], x_BHTK.shape[2], dtype=torch.long, device=x_BHTK.device
            )


def check_sides(sides: Sides, names: Sequence[str]) -> dict[str, tuple[str, Modalities | None]]:
    """Sides as the user declared them, by name: the input, and the modalities.

    Raises:
        UserError: a name that no tag can have or that a modality has, or something else than an input's name.
    """
    found: dict[str, tuple[str, Modalities | None]] = {}
    for name, given in sides.items():
        of, modality = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if not isinstance(of, str):
            raise UserError(
                f"sides: {name} is {given!r}: give the name of an input of the forward, or that and its modality"
            )
        if name in names:
            raise UserError(f"sides: {name} is a modality already: give the side another name")
        try:
            tag("q_norm", name)
        except ValueError as error:
            raise UserError(f"sides: {error}") from error
        found[name] = (of, None if modality is None else Modalities(modality))
    return found


def made_sides(
    declared: Mapping[str, tuple[str, Modalities | None]], inputs: Inputs, main: Side, device: torch.device
) -> list[Side]:
    """The sides of one batch.

    Raises:
        UserError: an input that is not there, or that modality describes already.
    """
    there, made = dict(tensors(inputs)), []
    for name, (of, modalities) in declared.items():
        if of not in there:
            raise UserError(
                f"sides: {name} is of {of}, which is no tensor among the inputs {', '.join(there)}: name one of these"
            )
        if main.inputs is not None and of in main.inputs:
            raise UserError(
                f"sides: {name} is of {of}, which modality describes: name the input of another side"
            )
        names = (name,) if modalities is None else tuple(f"{name}_{part}" for part in modalities.names)
        side = Side(name, names, frozenset({of}), modalities)
        if modalities is not None and modalities.function is not None:
            side.modality_BT, side.modalities = modalities.of(inputs).to(device), None
        mask = there.get(mask_of([of], inputs))
        side.valid_BT = None if mask is None else mask.to(device) > 0
        made.append(side)
    return made


def mask_of(source: Collection[str] | None, inputs: Inputs) -> str:
    """The name of the padding mask of some inputs: decoder_attention_mask for decoder_input_ids and for labels."""
    if source is None or len(source) != 1:
        return "attention_mask"
    (name,), ids = source, named_ids(inputs)
    if name == "labels" or name.startswith("decoder_"):
        return "decoder_attention_mask"
    return "attention_mask" if ids is None or ids[0] == name else f"{name.removesuffix('_ids')}_attention_mask"


def joined(of_q: Side, of_k: Side) -> Side:
    """The tokens of both, those of the queries first."""
    (modality_BT, valid_BT), (modality_BS, valid_BS) = of_q.tokens, of_k.tokens
    if len(modality_BT) != len(modality_BS):
        raise Unread(f"{len(modality_BT)} sequences of queries and {len(modality_BS)} of keys")
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
    """The call over the tokens of both sides, with queries and keys of 0 where there are none."""
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
    """(..., T, S) as the part of (..., T + S, T + S) where queries meet keys; 0 elsewhere."""
    T, S = x.shape[-2:]
    return F.pad(x, (T, 0, 0, S))


def cross_part(part: StatisticPart, q_names: Sequence[str], k_names: Sequence[str]) -> StatisticPart:
    """Statistics of cross-attention under their own names, without those of queries and keys that are not there."""
    keep = [_is_there(name, q_names, k_names) for name in part.tags]
    finish: Callable = part.finish

    def finished(raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        values, counts = (x.flatten() for x in finish(raw))
        return values, counts * torch.tensor(keep, device=counts.device)

    return StatisticPart([f"cross_{name}" for name in part.tags], part.raw, finished)


def _is_there(name: str, q_names: Sequence[str], k_names: Sequence[str]) -> bool:
    found = parsed_tag(name)
    if found.pair is not None:
        return found.pair[0] in q_names and found.pair[1] in k_names
    of_keys = found.statistic.startswith(("k_", "v_"))
    return found.modality is None or found.modality in (k_names if of_keys else q_names)
