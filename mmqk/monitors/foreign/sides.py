"""Sides: the token sequences that a model attends over, such as the tokens of an encoder and of a decoder.

The main side has the tokens that ``modality`` describes; users declare other sides with ``sides``. Cross-attention
from side a to side b is measured as self-attention over the T + S concatenated tokens of both: q is padded with zeros
at the tokens of b, k and v at those of a, and the mask leaves only the (T, S) corner visible.

Shapes: B batch, H query heads, G key heads, T query tokens, S key tokens, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from mmqk.monitors.collect import Collector, StatisticPart
from mmqk.monitors.foreign.calls import Call, NotMeasured
from mmqk.monitors.foreign.inputs import Inputs, named_tensors, valid_tokens
from mmqk.monitors.foreign.trace import Origin
from mmqk.monitors.formulas.reduce import Pairs
from mmqk.monitors.modalities import Modalities, Modality, check_name
from mmqk.store.errors import UserError
from mmqk.store.metrics import parse_tag

# Name of a side in tags -> the model input with the side's tokens, or (input, modality) for several modalities.
Sides = Mapping[str, "str | tuple[str, Modality]"]


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
    both = Side(f"{of_q.name} to {of_k.name}", of_q.names + of_k.names, None)
    both.modality_BT = torch.cat([of_queries_BT, of_keys_BS], 1)
    both.padding_BT = torch.cat([valid_BT, valid_BS], 1)
    return both


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
