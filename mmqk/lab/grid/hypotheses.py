"""The hypotheses of a grid. Each hypothesis predicts the effects of several claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mmqk.lab.grid.language import build, mapping
from mmqk.store import UserError

# The effect of the treatment relative to the control: above m (above), from -m to m (none), or below -m (below). m is
# the smallest effect of interest of the claim.
STATES = ("above", "none", "below")
PREDICTIONS = {
    "above": {"above"}, "none": {"none"}, "below": {"below"},
    "not above": {"none", "below"}, "not below": {"above", "none"}, "not none": {"above", "below"},
}  # fmt: skip


@dataclass(frozen=True)
class Hypothesis:
    """An explanation, and the effects that it predicts.

    Attributes:
        id: short name, such as H1.
        statement: the explanation, one sentence.
        source: where it was proposed.
        source_access: how the source was read, a key of `mmqk.lab.page.findings.MARKS`.
        predicts: maps a claim id to the predicted effect, which is a key of `PREDICTIONS`. The hypothesis predicts
            nothing for claims that are not in the mapping.
        note: a sentence to print on the page.
    """

    id: str
    statement: str = ""
    source: str = ""
    source_access: str = ""
    predicts: dict[str, str] = field(default_factory=dict)
    note: str = ""


def read_hypotheses(values: Any, claims: Iterable[str], path: object) -> tuple[Hypothesis, ...]:
    """Return the hypotheses of a grid.

    Raises:
        UserError: an unknown field or prediction, a hypothesis without a unique id or without predictions, or a
            prediction for a claim that does not exist.
    """
    if not isinstance(values or [], list | tuple):
        raise UserError(f"{path}: hypotheses must be a list")
    ids, made = set(claims), list[Hypothesis]()
    for place, value in enumerate(values or []):
        record = mapping(value, f"{path}: hypotheses[{place}]")
        if not isinstance(record.get("id"), str) or record["id"] in [h.id for h in made]:
            raise UserError(f"{path}: hypotheses[{place}] has no unique id: give it one, as text")
        where = f"{path}: hypothesis {record['id']}"
        hypothesis = build(Hypothesis, record, where)
        if not hypothesis.predicts:
            raise UserError(f"{where} predicts nothing: give predicts, such as {{C11: above}}")
        for claim, predicted in hypothesis.predicts.items():
            if claim not in ids:
                raise UserError(f"{where} predicts {claim!r}, which is not a claim of this grid: name one")
            if predicted not in PREDICTIONS:
                raise UserError(
                    f"{where} predicts {predicted!r} for {claim}: use one of {', '.join(PREDICTIONS)}"
                )
        made.append(hypothesis)
    return tuple(made)
