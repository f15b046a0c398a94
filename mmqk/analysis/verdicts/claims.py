"""The claims of a grid as registered, and the checks of their fields."""

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
# Checks of every verdict: the key under ``unchecked`` that turns one off, and its name on the page.
CHECKS = {"learnt": "modalities learnt", "declared": "arms differ only as declared", "seeds": "enough seeds"}
# Placeholders that a sentence under ``finding`` may use.
NUMBERS = ("ratio", "difference", "size", "low", "high", "n", "seeds")


@dataclass(frozen=True)
class Claim:
    """A claim as it was registered in the grid.

    Attributes:
        id: C2 and the like.
        statement: what is claimed, one sentence.
        source: where it was claimed, with the figure.
        mark: how the source was read (V, S, A, M, I, X).
        number_there: the number in the source, as text.
        estimand: the quantity that the effect estimates, in words.
        metric: the name of a metric of `mmqk.analysis.metrics`.
        treatment: the arm (for a family metric, the family) whose metric should be greater or less (``direction``).
        control: the arm or family that it is compared with.
        at: the point of the axes at which two families are compared.
        arms: the arms of a claim that is shown and not decided, or of a control.
        delta: smallest effect of interest, on the metric's scale (0.69: a factor of 2), positive.
        direction: "greater" or "less"; not used for an equivalence.
        test: "superiority" (beyond delta), "equivalence" (no difference as large as delta, either way) or
            "count" (more runs diverge, or reach ``at_least``; delta is a difference of shares).
        regime: name on the page of the check that every trained modality was learnt, one of `REGIMES`.
        unchecked: the checks (`CHECKS`) that the verdict skips, each with the reason.
        positive_control: id of the claim or control that must pass before this one can be contradicted, or be
            reproduced as an equivalence.
        negative_control: id of the claim or control that must not show the effect.
        manipulation_check: id of the claim or control that shows that the treatment changed what it should change.
        at_least: for a control, the value that the median of every arm must reach; for a count, the value that a
            run must reach.
        status: confirmatory, exploratory, shown (never decided) or control (a check, not a claim).
        alpha_family: name of the family of claims that share one level; by default the name of the grid.
        seeds: registered seeds per arm; 0 if not registered.
        stopping: {max_seeds: n}: seeds may be added up to n; the level is corrected for the looks.
        lr_rule: "own_best" or "matched", if the verdict must check it.
        exclusions: runs to exclude, in words for the page; excludes nothing by itself.
        falsifier: the result that would contradict the claim, as registered.
        note: a sentence to add to the notes of the verdict.
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
        """Whether its status allows a decision."""
        return self.status in ("confirmatory", "exploratory")

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
        return (-self.delta, self.delta) if self.test == "equivalence" else (self.sign * self.delta,)

    @property
    def measured(self) -> Metric | FamilyMetric:
        """The metric of the claim; for a count, the share of runs."""
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
        """The skipped checks with their reasons: ``“modalities learnt” (the claim is about learning)``."""
        return tuple(f"“{CHECKS[name]}” ({reason})" for name, reason in self.unchecked.items())

    @property
    def max_seeds(self) -> int:
        """The maximal seeds per arm; 0 if not registered."""
        return int(self.stopping.get("max_seeds", self.seeds))

    @property
    def leans_on(self) -> tuple[str, ...]:
        """Ids of the claims and controls that must be judged before this claim."""
        named = (self.positive_control, self.negative_control, self.manipulation_check)
        return tuple(name for name in named if name)


def read_claims(
    values: Sequence[Any], arms: Mapping[str, Sequence[Mapping[str, Any]]], name: str, where: str
) -> tuple[Claim, ...]:
    """The claims of a grid.

    Args:
        values: the entries under ``claims`` in the grid.
        arms: the points of every arm and family by name; an arm has one point.
        name: the name of the grid.
        where: the file for error messages.

    Raises:
        UserError: a claim is invalid.
    """
    claims = tuple(_claim(value, name, where) for value in values)
    ids = [claim.id for claim in claims]
    for claim in claims:
        _check(claim, arms, f"{where}: claim {claim.id}")
        for other in claim.leans_on:
            if other not in ids or other == claim.id:
                raise UserError(f"{where}: claim {claim.id} refers to {other!r}, which is not another claim")
    for family, members in by_family(claims, "confirmatory").items():
        if len(members) > MOST_CONFIRMATORY:
            raise UserError(
                f"{where} has {len(members)} confirmatory claims in the family {family!r}: keep at most "
                f"{MOST_CONFIRMATORY} and make the others exploratory"
            )
    return claims


def by_family(claims: Iterable[Claim], status: str) -> dict[str, list[Claim]]:
    """The claims with this status by their `Claim.alpha_family`."""
    families: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.status == status:
            families.setdefault(claim.alpha_family, []).append(claim)
    return families


def _claim(value: Any, name: str, where: str) -> Claim:
    if not isinstance(value, Mapping) or "id" not in value:
        raise UserError(f"{where}: a claim has no id: give each claim one")
    fields = {key: value[key] for key in Claim.__dataclass_fields__ if value.get(key) is not None}
    here = f"claim {value['id']}"
    for key in ("delta", "at_least"):
        if key in fields:
            fields[key] = _number(fields[key], f"{where}: {key} of {here}")
    for key in ("at", "stopping", "finding", "unchecked"):
        if not isinstance(fields.get(key, {}), Mapping):
            raise UserError(f"{where}: {key} of {here} is {fields[key]!r}, not a mapping of names to values")
    for verdict, sentence in fields.get("finding", {}).items():
        try:
            str(sentence).format(**dict.fromkeys(NUMBERS, ""))
        except (KeyError, IndexError, ValueError):
            raise UserError(
                f"{where}: finding.{verdict} of {here} may contain {', '.join(f'{{{n}}}' for n in NUMBERS)} "
                "and no other braces"
            ) from None
    if "arms" in fields:
        fields["arms"] = tuple([fields["arms"]] if isinstance(fields["arms"], str) else fields["arms"])
    # A claim merged from another grid keeps the family of that grid.
    fields["alpha_family"] = str(fields.get("alpha_family") or value.get("grid") or name)
    return Claim(**{"statement": "", **fields, "id": str(value["id"])})


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
        raise UserError(f"{where} sets regime and turns off its check: remove regime or unchecked.learnt")
    if claim.decided and not (claim.treatment and claim.control and claim.delta > 0):
        raise UserError(f"{where} needs treatment, control and a positive delta")
    if claim.decided and claim.test == "count" and claim.delta >= 1:
        raise UserError(f"{where} counts runs: give a delta below 1, as it is a difference of shares")
    if not claim.compared:
        raise UserError(f"{where} names no arms: give treatment and control, or arms")
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
                f"{where} names {name!r}, which has {len(points)} points: choose one, for example "
                f"at: {{{point_label(points[0])}}}"
            )


def _check_seeds(claim: Claim, where: str) -> None:
    whole = [claim.seeds, *claim.stopping.values()]
    if not all(type(n) is int and n >= 0 for n in whole) or set(claim.stopping) - {"max_seeds"}:
        raise UserError(f"{where}: give seeds as a whole number and stopping as {{max_seeds: n}}")
    if claim.stopping and not 2 <= claim.seeds <= claim.max_seeds:
        raise UserError(
            f"{where} has stopping and needs seeds from 2 to max_seeds, the number of seeds at the first look"
        )


def at(point: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a point of the axes has the wanted values."""
    return all(name in point and point[name] == value for name, value in wanted.items())


def point_label(point: Mapping[str, Any]) -> str:
    """``optim.lr: 0.01, model.n_layers: 2``."""
    return ", ".join(f"{name}: {value}" for name, value in point.items())


def _number(value: Any, where: str) -> float:
    try:
        number_value = float(value if not isinstance(value, bool) else "")
    except (TypeError, ValueError, OverflowError):
        number_value = math.nan
    if not math.isfinite(number_value):
        raise UserError(f"{where} is {shortened(value)}, not a number")
    return number_value
