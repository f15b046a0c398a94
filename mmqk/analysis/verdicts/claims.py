"""What a grid claims, as it was registered, and what may be said there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmqk.analysis.metrics import FamilyMetric, Metric, find_metric
from mmqk.ranges import check_numbers, number, shortened
from mmqk.store import UserError

REGIMES = ("both modalities learnt", "all modalities learnt")
STATUSES = ("confirmatory", "exploratory", "shown", "control")
TESTS = ("superiority", "equivalence", "count")
LR_RULES = ("matched", "own_best")
MOST_CONFIRMATORY = 6
# What every verdict takes, under the name by which a claim turns it off, and as the page calls it.
CHECKS = {"learnt": "modalities learnt", "declared": "arms differ only as declared", "seeds": "enough seeds"}
# What a grid's own sentence about its claim may name.
NUMBERS = ("ratio", "difference", "size", "low", "high", "n", "seeds")


@dataclass(frozen=True)
class Claim:
    """A claim as it was registered in the grid.

    Attributes:
        id: C2 and the like.
        statement: what is claimed, one sentence.
        source: where, with a figure.
        mark: how the source was read (V, S, A, M, I, X).
        number_there: the number in the source, as text.
        estimand: what the effect is an estimate of, in words.
        metric: the name of a metric of `mmqk.analysis.metrics`.
        treatment: the arm (or, of a metric of families, the family) that should have more of it (or less, by
            direction) ...
        control: ... than this one.
        at: the point of the axes at which two families are compared.
        arms: of a claim that is shown and not decided, or of a control.
        delta: smallest effect of interest, on the metric's scale (0.69: a factor of 2), positive.
        direction: "greater" or "less"; of no meaning for an equivalence.
        test: "superiority" (beyond delta), "equivalence" (no difference as large as delta, either way) or
            "count" (more runs diverge, or reach ``at_least``; delta is a difference of shares).
        regime: what the check that every trained modality was learnt is called, in words of `REGIMES`.
        unchecked: reasons by the name of the check, of `CHECKS`, that the verdict is to do without.
        positive_control: id of the claim or control that must hold before this one can be contradicted, or an
            equivalence be found.
        negative_control: id of the claim or control that must not show the effect.
        manipulation_check: id of the claim or control which shows that the treatment did what it is for.
        at_least: of a control: every arm's median must reach it; of a count: what a run must reach.
        status: confirmatory, exploratory, shown (never decided) or control (a check, not a claim).
        alpha_family: name of the claims that share one level; the grid's name where none is given.
        seeds: how many an arm was registered for; 0 where that was not said.
        stopping: {max_seeds: n}: seeds may be added up to n, which is paid for in the level.
        lr_rule: "own_best" or "matched", where the verdict is to insist on it.
        exclusions: which runs were to be left out, in words; nothing is left out by it.
        falsifier: what would speak against it, as registered.
        note: anything to add to the verdict.
        finding: sentences by verdict, with `NUMBERS` in braces.
    """

    id: str
    statement: str
    source: str = ""
    mark: str = ""
    number_there: str = ""
    estimand: str = ""
    metric: str = "largest_attention_logit"
    treatment: str = ""
    control: str = ""
    at: Mapping[str, Any] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    delta: float = number(math.nan, 1e-12, 1e12)
    direction: str = "greater"
    test: str = "superiority"
    regime: str = ""
    unchecked: Mapping[str, str] = field(default_factory=dict)
    positive_control: str = ""
    negative_control: str = ""
    manipulation_check: str = ""
    at_least: float = number(math.nan, -1e30, 1e30)
    status: str = "confirmatory"
    alpha_family: str = ""
    seeds: int = number(0, 0, 10_000)
    stopping: Mapping[str, int] = number(dict, 0, 10_000)
    lr_rule: str = ""
    exclusions: str = ""
    falsifier: str = ""
    note: str = ""
    finding: Mapping[str, str] = field(default_factory=dict)

    @property
    def decided(self) -> bool:
        """Whether its runs can decide it."""
        return self.status in ("confirmatory", "exploratory")

    @property
    def compared(self) -> tuple[str, ...]:
        """Every arm that it needs, each once."""
        pair = (self.treatment, self.control) if self.treatment and self.control else self.arms
        return tuple(dict.fromkeys(pair))

    @property
    def sign(self) -> int:
        """1 for a claim of more, -1 for one of less."""
        return 1 if self.direction == "greater" else -1

    @property
    def thresholds(self) -> tuple[float, ...]:
        """What an interval must not include for a verdict."""
        return (-self.delta, self.delta) if self.test == "equivalence" else (self.sign * self.delta,)

    @property
    def measured(self) -> Metric | FamilyMetric:
        """What it measures; of a count, the share of runs."""
        metric, modality = find_metric(self.metric)
        if modality:
            metric = replace(metric, label=f"{metric.label} ({modality})")
        if self.test != "count" or not self.decided or isinstance(metric, FamilyMetric):
            return metric
        what = "that diverged"
        if not math.isnan(self.at_least):
            bound = "at least" if metric.worst == "high" else "at most"
            what += f" or whose {metric.label} is {bound} {self.at_least:g}"
        return replace(metric, label=f"share of runs {what}", unit="", scale="linear", worst="high")

    @property
    def not_checked(self) -> tuple[str, ...]:
        """The checks that it turns off, with their reasons: ``“modalities learnt”, as it is about learning``."""
        return tuple(f"“{CHECKS[name]}” ({reason})" for name, reason in self.unchecked.items())

    @property
    def max_seeds(self) -> int:
        """The most seeds an arm may have; 0 where that was not said."""
        return int(self.stopping.get("max_seeds", self.seeds))

    @property
    def leans_on(self) -> tuple[str, ...]:
        """The claims and controls that must be judged before it."""
        named = (self.positive_control, self.negative_control, self.manipulation_check)
        return tuple(name for name in named if name)


def read_claims(
    values: Sequence[Any], arms: Mapping[str, Sequence[Mapping[str, Any]]], name: str, where: str
) -> tuple[Claim, ...]:
    """The claims of a grid.

    Args:
        values: as the grid has them.
        arms: the points of every arm and family by its name; an arm has one.
        name: of the grid.
        where: for sentences.

    Raises:
        UserError: a claim that cannot be judged as it is written.
    """
    claims = tuple(_claim(value, name, where) for value in values)
    ids = [claim.id for claim in claims]
    for claim in claims:
        _check(claim, arms, f"{where}: claim {claim.id}")
        for other in claim.leans_on:
            if other not in ids or other == claim.id:
                raise UserError(f"{where}: claim {claim.id} leans on {other!r}, which is not another claim")
    for family, members in by_family(claims, "confirmatory").items():
        if len(members) > MOST_CONFIRMATORY:
            raise UserError(
                f"{where} has {len(members)} confirmatory claims in the family {family!r}: keep at most "
                f"{MOST_CONFIRMATORY} and make the others exploratory"
            )
    return claims


def by_family(claims: Iterable[Claim], status: str) -> dict[str, list[Claim]]:
    """The claims of a status by the family whose level they share."""
    families: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.status == status:
            families.setdefault(claim.alpha_family, []).append(claim)
    return families


def _claim(value: Any, name: str, where: str) -> Claim:
    if not isinstance(value, Mapping) or "id" not in value:
        raise UserError(f"{where}: a claim has no id")
    known = {key: value[key] for key in Claim.__dataclass_fields__ if value.get(key) is not None}
    here = f"claim {value['id']}"
    for key in ("delta", "at_least"):
        if key in known:
            known[key] = _number(known[key], f"{where}: {key} of {here}")
    for key in ("at", "stopping", "finding", "unchecked"):
        if not isinstance(known.get(key, {}), Mapping):
            raise UserError(f"{where}: {key} of {here} is {known[key]!r}, not a mapping of names to values")
    for verdict, sentence in known.get("finding", {}).items():
        try:
            str(sentence).format(**dict.fromkeys(NUMBERS, ""))
        except (KeyError, IndexError, ValueError):
            raise UserError(
                f"{where}: finding.{verdict} of {here} may have {', '.join(f'{{{n}}}' for n in NUMBERS)} in it "
                "and no other braces"
            ) from None
    if "arms" in known:
        known["arms"] = tuple([known["arms"]] if isinstance(known["arms"], str) else known["arms"])
    # A claim from another grid that was merged into this one shares its level with those it came with.
    known["alpha_family"] = str(known.get("alpha_family") or value.get("grid") or name)
    return Claim(**{"statement": "", **known, "id": str(value["id"])})


def _check(claim: Claim, arms: Mapping[str, Sequence[Mapping[str, Any]]], where: str) -> None:
    metric, _ = find_metric(claim.metric)
    for key, allowed in (("status", STATUSES), ("test", TESTS), ("lr_rule", LR_RULES)):
        if (value := getattr(claim, key)) and value not in allowed:
            raise UserError(f"{where} has the {key} {value!r}: use one of {', '.join(allowed)}")
    if claim.direction not in ("greater", "less"):
        raise UserError(f"{where} has the direction {claim.direction!r}: use greater or less")
    if claim.regime and claim.regime not in REGIMES:
        raise UserError(f"{where} has the regime {claim.regime!r}: use one of {', '.join(REGIMES)}")
    for name, reason in claim.unchecked.items():
        if name not in CHECKS or not isinstance(reason, str) or not reason.strip():
            raise UserError(
                f"{where} has {name}: {reason} under unchecked: give one of {', '.join(CHECKS)} and the reason"
            )
    if claim.regime and "learnt" in claim.unchecked:
        raise UserError(
            f"{where} asks for a regime and turns off the check of it: drop regime or unchecked.learnt"
        )
    if claim.decided and not (claim.treatment and claim.control and claim.delta > 0):
        raise UserError(f"{where} needs treatment, control and a positive delta")
    if claim.decided and claim.test == "count" and claim.delta >= 1:
        raise UserError(f"{where} counts runs: its delta is a difference of shares, below 1")
    if not claim.compared:
        raise UserError(f"{where} names no arms")
    if claim.treatment and claim.treatment == claim.control:
        raise UserError(
            f"{where} has {claim.treatment!r} as its treatment and as its control: name two arms that differ"
        )
    if claim.status == "control" and math.isnan(claim.at_least):
        raise UserError(f"{where} is a control and needs at_least")
    if claim.status == "control" and isinstance(metric, FamilyMetric):
        raise UserError(f"{where} is a control, and {claim.metric} is not a number of one run")
    _check_seeds(claim, where)
    try:
        check_numbers(claim, "")
    except ValueError as error:
        raise UserError(f"{where}: {str(error).rstrip('.')}") from error
    for name in claim.compared:
        if name not in arms:
            raise UserError(f"{where} names the arm {name!r}, which the grid does not have")
        points = [point for point in arms[name] if at(point, claim.at)]
        if not points:
            raise UserError(f"{where}: {name!r} has no point at {point_label(claim.at)}")
        if isinstance(metric, FamilyMetric):
            if claim.test == "count":
                raise UserError(f"{where} counts runs, and {claim.metric} is not a number of one run")
        elif len(points) > 1:
            raise UserError(
                f"{where} names {name!r}, which has {len(points)} points: say at which one, as in "
                f"at: {{{point_label(points[0])}}}"
            )


def _check_seeds(claim: Claim, where: str) -> None:
    whole = [claim.seeds, *claim.stopping.values()]
    if not all(type(n) is int and n >= 0 for n in whole) or set(claim.stopping) - {"max_seeds"}:
        raise UserError(f"{where}: seeds is a whole number, and stopping is {{max_seeds: n}}")
    if claim.stopping and not 2 <= claim.seeds <= claim.max_seeds:
        raise UserError(
            f"{where} has stopping and needs seeds, from 2 to its max_seeds: the first look has them"
        )


def at(point: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a point of the axes has the values that are wanted."""
    return all(name in point and point[name] == value for name, value in wanted.items())


def point_label(point: Mapping[str, Any]) -> str:
    """``optim.lr: 0.01, model.n_layers: 2``."""
    return ", ".join(f"{name}: {value}" for name, value in point.items())


def _number(value: Any, where: str) -> float:
    try:
        found = float(value if not isinstance(value, bool) else "")
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"{where} is {shortened(value)}, not a number")
    return found
