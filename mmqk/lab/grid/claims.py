"""Claims and report settings of a grid, and the hash of the claims.

`check` compares them with the metrics and the planned runs before training, and `mmqk.lab.verdicts` computes the
verdicts after the runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from mmqk.lab.grid.arms import Names, build
from mmqk.model.ranges import check_fields, number
from mmqk.store import UserError, identity_hash

# Checks of every verdict: the key that turns the check off under ``unchecked``, and the name of the check on the
# page.
CHECKS = {"learned": "modalities learned", "declared": "arms differ only as declared", "seeds": "enough seeds"}
# The confirmatory claims of a family share this level.
FAMILY_LEVEL = 0.05
# Fields that name another claim, whose verdict must be computed first.
LEANS = ("positive_control", "manipulation_check")
# Old names of fields. The hash of the claims uses them, so that the hash does not change.
OLD_NAMES = {
    "source_access": "mark",
    "reference_value": "number_there",
    "would_contradict": "falsifier",
    "min_effect": "delta",
}


@dataclass(frozen=True)
class Claim:
    """A claim as it was registered in the grid.

    Attributes:
        id: short name, such as C2.
        statement: what is claimed, one sentence.
        source: where the claim was made, such as a paper and its figure.
        source_access: how the source was read, a key of ``marks`` in captions.yaml of the page.
        reference_value: the number in the source, as text.
        estimand: description of the quantity that the effect estimates.
        metric: the name of a metric of `mmqk.lab.metrics`.
        treatment: the arm (for a family metric, the family) whose metric should be greater or less (``direction``).
        control: the arm or family that the treatment is compared with.
        at: values of the axes at which two families are compared.
        arms: the arms of a prediction, or of a claim whose status is "shown" or "control".
        min_effect: smallest effect of interest, positive, on the scale of the metric (on a log scale, 0.69 is a
            factor of 2); for a prediction, the smallest AUROC of interest.
        direction: whether the treatment should be greater or less; not used for an equivalence. A grid file must
            name it (`check_directions`); a claim that was registered without one tests "greater".
        test: superiority: the effect exceeds min_effect. equivalence: the effect is smaller than min_effect in both
            directions. count: compares the shares of the runs that diverge, or reach ``at_least``; min_effect is a
            difference of these shares.
            prediction: the metric is higher in failed runs than in the other runs of an arm (AUROC).
        regime: the name on the page for the check that the runs learned every trained modality.
        unchecked: the checks (`CHECKS`) that the verdict skips, each with the reason.
        positive_control: id of the claim or control that must pass before this claim can be contradicted, or be
            reproduced as an equivalence.
        manipulation_check: id of the claim or control that shows that the treatment changed what it should change.
        at_least: for a control, the value that the median of every arm must reach; for a count, the value that a
            run must reach.
        status: a "shown" claim never gets a verdict; a "control" is a check and not a claim.
        alpha_family: name of the family of claims that share one significance level; by default the name of the grid.
        seeds: registered number of seeds per arm; 0 if not registered.
        would_contradict: the result that would contradict the claim, as registered.
        note: a sentence to add to the notes of the verdict.
        not_run: why no run of this grid tests the claim, and what a test would need; such a claim has no arms.
        finding: text that no code reads; it is part of the hash of older grids.
    """

    id: str
    statement: str = ""
    source: str = ""
    source_access: str = ""
    reference_value: str = ""
    estimand: str = ""
    metric: str = "largest_attention_logit"
    treatment: str = ""
    control: str = ""
    at: dict[str, Any] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    min_effect: float = number(math.nan, 1e-12, 1e12)
    direction: Literal["greater", "less"] = "greater"
    test: Literal["superiority", "equivalence", "count", "prediction"] = "superiority"
    regime: Literal["both modalities learned", "all modalities learned"] | None = None
    unchecked: dict[str, str] = field(default_factory=dict)
    positive_control: str = ""
    manipulation_check: str = ""
    at_least: float = number(math.nan, -1e30, 1e30)
    status: Literal["confirmatory", "exploratory", "shown", "control"] = "confirmatory"
    alpha_family: str = ""
    seeds: int = number(0, 0, 10_000)
    would_contradict: str = ""
    note: str = ""
    not_run: str = ""
    finding: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "")

    @property
    def decided(self) -> bool:
        """Whether the claim gets a verdict: its status allows one, and runs test it."""
        return not self.not_run and self.status in ("confirmatory", "exploratory")

    @property
    def compared(self) -> tuple[str, ...]:
        """Names of the compared arms or families, without repetition."""
        pair = (self.treatment, self.control) if self.treatment and self.control else self.arms
        return tuple(dict.fromkeys(pair))

    @property
    def sign(self) -> int:
        """1 for "greater", -1 for "less"."""
        return 1 if self.direction == "greater" else -1

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The values that the interval must exclude for a verdict."""
        size = self.min_effect
        return (-size, size) if self.test == "equivalence" else (self.sign * size,)

    @property
    def not_checked(self) -> tuple[str, ...]:
        """The skipped checks with their reasons: ``“modalities learned” (the claim is about learning)``."""
        return tuple(f"“{CHECKS[name]}” ({reason})" for name, reason in self.unchecked.items())

    @property
    def leans_on(self) -> tuple[str, ...]:
        """Ids of the claims and controls whose verdicts this claim needs."""
        return tuple(name for key in LEANS if (name := getattr(self, key)))


@dataclass(frozen=True)
class Report:
    """The keys of ``report`` in a grid file. docs/reports.md describes them."""

    hero: Names = None
    shown: Names = None
    headline: Names = None
    cannot_tell: Names = None
    command: Names = None
    question: Names = None
    ranking: Names = None
    outcomes: bool | Names = None


def claims_hash(grid: Mapping[str, Any]) -> str:
    """Return the hash of the claims and hypotheses of a grid. The hash does not depend on the rest of the grid."""
    claims = grid.get("claims") or []
    record = {"claims": [{OLD_NAMES.get(k, k): v for k, v in c.items() if k != "grid"} for c in claims]}
    return identity_hash(record | ({"hypotheses": grid["hypotheses"]} if grid.get("hypotheses") else {}))


def read_claims(values: Any, names: Iterable[str], grid: str, path: object) -> tuple[Claim, ...]:
    """Return the claims of a grid.

    Args:
        values: the entries under ``claims``.
        names: names of arms, before and after crossing with axes.
        grid: name of the grid.
        path: path of the grid, for error messages.

    Raises:
        UserError: an unknown field, a wrong type, a claim without a unique id, or the name of an arm or
            claim that does not exist.
    """
    claims: list[Claim] = []
    for place, record in enumerate(map(dict, values or ())):
        if not isinstance(record.get("id"), str) or record["id"] in [claim.id for claim in claims]:
            raise UserError(f"{path}: claims[{place}] has no unique id: give it one, as text")
        where = f"{path}: claim {record['id']}"
        # A claim merged from another grid keeps the alpha family of that grid.
        family = record.pop("grid", None) or grid
        if isinstance(record.get("arms"), str):
            record["arms"] = [record["arms"]]
        given = {name: value for name, value in record.items() if value is not None}
        claims.append(build(Claim, {**given, "alpha_family": given.get("alpha_family") or str(family)}, where))
    arms, ids = set(names), [claim.id for claim in claims]
    for claim in claims:
        where = f"{path}: claim {claim.id}"
        check_arms([name for name in (claim.treatment, claim.control, *claim.arms) if name], arms, where)
        for other in claim.leans_on:
            if other not in ids or other == claim.id:
                raise UserError(f"{where} refers to {other!r}, which is not another claim of this grid: name one")
    try:
        TopologicalSorter({claim.id: claim.leans_on for claim in claims}).prepare()
    except CycleError as error:
        ring = ", ".join(error.args[1])
        raise UserError(f"{path}: the claims {ring} are controls of each other: remove one of the references") from None
    return tuple(claims)


def check_directions(claims: Sequence[Claim], values: Sequence[Any], default: Any, path: object) -> None:
    """Refuse a claim that compares two arms without naming its direction.

    ``default`` is the value of the grid's own key ``direction``, which is not part of the hash of the claims. It may
    only be "greater", the direction that the hash of a claim without one stands for.
    """
    if default not in (None, "greater"):
        raise UserError(f"{path}: direction is {default!r}: give 'greater' here, and 'less' in the claims that test it")
    for claim, value in zip(claims, values, strict=True):
        compares = claim.decided and claim.treatment and claim.test in ("superiority", "count")
        if compares and default is None and "direction" not in value:
            raise UserError(
                f"{path}: claim {claim.id} has no direction: add 'greater' if {claim.metric} should be higher in "
                f"{claim.treatment!r} than in {claim.control!r}, or 'less' if it should be lower"
            )


def check_report(report: Report, names: Iterable[str], claims: Sequence[Claim], path: object) -> None:
    """Refuse the name of an arm or claim that does not exist."""
    arms, ids = set(names), [claim.id for claim in claims]
    for key in ("hero", "shown", "ranking", "outcomes"):
        value = getattr(report, key)
        check_arms([] if isinstance(value, bool) else as_list(value), arms, f"{path}: report.{key}")
    if unknown := [id for id in as_list(report.headline) if id not in ids]:
        raise UserError(f"{path}: report.headline: there is no claim {unknown[0]!r} (claims: {', '.join(ids)})")


def check_arms(named: Sequence[str], arms: set[str], where: str) -> None:
    """Refuse the name of an arm that does not exist."""
    for name in named:
        if name not in arms:
            raise UserError(f"{where}: there is no arm {name!r} (arms: {', '.join(sorted(arms))})")


def as_list(value: Any) -> list[Any]:
    """Return one name or a list of names as a list; null is empty."""
    return list(value) if isinstance(value, list | tuple) else [value] if value else []
