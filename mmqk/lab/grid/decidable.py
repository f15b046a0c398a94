"""Check registered claims before training: against the metrics and arms that they name, and whether the planned runs
could support them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from mmqk.lab.counts import Counts
from mmqk.lab.effects import FEWEST_OF_EACH
from mmqk.lab.formatting import plural
from mmqk.lab.grid import Grid
from mmqk.lab.grid.arms import Job
from mmqk.lab.grid.claims import CHECKS, FAMILY_LEVEL, Claim
from mmqk.lab.metrics import FamilyMetric, Metric, find_metric
from mmqk.store import UserError

MOST_CONFIRMATORY = 6


def check_claims(claims: Sequence[Claim], arms: Mapping[str, Sequence[Mapping[str, Any]]], where: str) -> None:
    """Check that the fields of each claim are consistent with each other, with its metric and with its arms.

    Args:
        claims: the claims of a grid.
        arms: the points of every arm and family by name; an arm has one point.
        where: name of the file for error messages.

    Raises:
        UserError: a claim is invalid, or a family has too many confirmatory claims.
    """
    for claim in claims:
        try:
            metric, _ = find_metric(claim.metric)
        except UserError as error:
            raise UserError(f"{where}: claim {claim.id}: {error}") from None
        points = {name: [point for point in arms[name] if at(point, claim.at)] for name in claim.compared}
        problems = chain(_wrong_fields(claim, isinstance(metric, FamilyMetric)), _wrong_points(claim, metric, points))
        if problem := next(problems, None):
            raise UserError(f"{where}: claim {claim.id}: {problem}")
    for family, members in by_family(claims, "confirmatory").items():
        if len(members) > MOST_CONFIRMATORY:
            raise UserError(
                f"{where} has {len(members)} confirmatory claims in the family {family!r}: keep at most "
                f"{MOST_CONFIRMATORY} and make the others exploratory"
            )


def check_modalities(claims: Iterable[Claim], modalities: Collection[str], where: Path) -> None:
    """Raise UserError if the metric of a claim has a modality that no run of the grid has."""
    for claim in claims:
        modality = find_metric(claim.metric)[1]
        if claim.compared and modality not in (None, *modalities):
            raise UserError(f"{where}: claim {claim.id}: no run has {modality}: use one of {', '.join(modalities)}")


def by_family(claims: Iterable[Claim], status: str) -> dict[str, list[Claim]]:
    """Return the claims with this status, grouped by `Claim.alpha_family`."""
    families: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.status == status and not claim.not_run:
            families.setdefault(claim.alpha_family, []).append(claim)
    return families


def _wrong_fields(claim: Claim, of_family: bool) -> Iterator[str]:
    """Yield what is wrong with the fields of a claim; ``of_family``: whether its metric needs several runs."""
    for name, reason in claim.unchecked.items():
        if name not in CHECKS or not reason.strip():
            yield f"unchecked has {name!r} with the reason {reason!r}: give one of {', '.join(CHECKS)} and the reason"
    test, is_control, has_run = claim.test if claim.decided else "", claim.status == "control", not claim.not_run
    wrong = {
        "it sets regime and turns off its check: remove regime or unchecked.learned":
            claim.regime and "learned" in claim.unchecked,
        "it predicts failures within arms: give arms, and neither treatment nor control":
            test == "prediction" and (claim.treatment or claim.control or not claim.arms),
        "it predicts failures: give the smallest AUROC of interest (0.5 to 1) as min_effect, and no direction":
            test == "prediction" and not (0.5 < claim.min_effect < 1 and claim.direction == "greater"),
        f"it predicts failures, but {claim.metric} needs several runs: name a metric of one run":
            test == "prediction" and of_family,
        "it needs treatment, control and min_effect":
            test not in ("", "prediction") and not (claim.treatment and claim.control and claim.min_effect > 0),
        "it counts runs: give a min_effect below 1, as it is a difference of shares":
            test == "count" and claim.min_effect >= 1,
        "it has not_run: remove its treatment, control and arms, or remove not_run":
            claim.not_run and (claim.compared or is_control),
        "it names no arms: give treatment and control, or arms": has_run and not claim.compared,
        f"it has {claim.treatment!r} as its treatment and as its control: name two arms that differ":
            claim.treatment and claim.treatment == claim.control,
        "it is a control and needs at_least": is_control and math.isnan(claim.at_least),
        f"it is a control, and {claim.metric} needs several runs: give a metric of one run": is_control and of_family,
        f"it counts runs, but {claim.metric} is computed from several runs: name a metric of one run":
            has_run and claim.test == "count" and of_family,
    }  # fmt: skip
    yield from (sentence for sentence, condition in wrong.items() if condition)


def _wrong_points(
    claim: Claim, metric: Metric | FamilyMetric, points: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[str]:
    for name, found in points.items():
        if not found:
            yield f"{name!r} has no point at {point_label(claim.at)}: give a point of its axes"
        elif len(found) > 1 and isinstance(metric, Metric) and claim.test != "prediction":
            example = point_label(found[0])
            yield f"{name!r} has {len(found)} points: choose one, for example at: {{{example}}}"


def at(point: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether a point of the axes has these values."""
    return all(name in point and point[name] == value for name, value in values.items())


def point_label(point: Mapping[str, Any]) -> str:
    """Return a point as text: ``optim.lr: 0.01, model.n_layers: 2``."""
    return ", ".join(f"{name}: {value}" for name, value in point.items())


# The smallest number of seeds per arm for which docs/evidence.md reports the coverage of the intervals.
FEWEST_SEEDS = 3


def decidable_claims(grid: Grid) -> tuple[Claim, ...]:
    """Return the claims of a grid, if the planned runs could support each of them.

    Raises:
        UserError: a claim is invalid, or no result of the planned runs could support it; the message gives the reason.
    """
    points = {name: [point] for _, name, point in grid.points}
    points |= {arm.name: list(arm.points.values()) for arm in grid.arms}
    check_claims(grid.claims, points, str(grid.path))
    by_id = {claim.id: claim for claim in grid.claims}
    planned = [job for job in grid.jobs if job.role == "verdict"]
    for claim in grid.claims:
        if claim.decided and (why := _why_not(claim, by_id, planned)):
            raise UserError(f"{grid.path}: no result could support claim {claim.id}: {why}")
    return grid.claims


def few_seeds(claims: Sequence[Claim], jobs: Iterable[Job]) -> list[str]:
    """Return a warning for each claim with too few planned seeds for a verdict; seeds can be added later."""
    planned, warnings = [job for job in jobs if job.role == "verdict"], []
    for claim in claims:
        if not claim.decided or claim.test == "prediction" or "seeds" in claim.unchecked:
            continue  # `_why_not` checks the number of runs of a prediction
        arms = [{job.seed for job in _runs(claim, name, planned)} for name in claim.compared]
        n = min(map(len, arms)) if claim.test == "count" else len(arms[0] & arms[1])
        if n < FEWEST_SEEDS:
            warnings.append(
                f"claim {claim.id} stays inconclusive with {plural(n, 'seed')} per arm: plan {FEWEST_SEEDS} per arm, "
                f"or give a reason under unchecked.seeds"
            )
    return warnings


def _why_not(claim: Claim, by_id: Mapping[str, Claim], jobs: Sequence[Job]) -> str:
    """Return why no result could support the claim, and what to do; empty if a result could support it."""
    arms = {name: _runs(claim, name, jobs) for name in claim.compared}
    for name, runs in arms.items():
        n = max(Counter(job.arm for job in runs).values(), default=0)
        if claim.seeds and n and n != claim.seeds:
            wanted = plural(claim.seeds, "seed")
            return f"it is registered for {wanted} per arm, but {name} has {n}; change the seeds of the claim or grid"
    if claim.test == "prediction":
        n, needed = sum(map(len, arms.values())), 2 * FEWEST_OF_EACH
        few = f"it predicts failures from {plural(n, 'run')}; plan at least {needed}, half of which should fail"
        return few if n < needed else ""
    treatment, control = arms.values()
    if shared := sorted({job.arm for job in treatment} & {job.arm for job in control}):
        return f"it compares the arm {shared[0]} with itself; name two arms that differ"
    if claim.test == "count":
        why = _too_few_to_count(claim, len(treatment), len(control))
    else:
        why = _no_interval(claim, treatment, control, jobs)
    if why:
        return why
    if claim.test == "equivalence" and not claim.positive_control:
        return (
            "an equivalence needs a positive_control, because runs that cannot show any effect show no difference "
            "either; name a claim or control with a known effect"
        )
    for key in ("manipulation_check", *["positive_control"] * (claim.test == "equivalence")):
        other = by_id.get(getattr(claim, key))
        if other is not None and other.status != "control" and not (other.decided and other.test != "equivalence"):
            return f"its {key.replace('_', ' ')} {other.id} can show no effect; name a control, or a claim of an effect"
    return ""


def _runs(claim: Claim, name: str, jobs: Sequence[Job]) -> list[Job]:
    """Return the planned runs of an arm, or of a family at the point of the claim."""
    return [job for job in jobs if job.arm == name] or [
        job for job in jobs if job.family.name == name and at(job.point, claim.at)
    ]


def _no_interval(claim: Claim, treatment: Sequence[Job], control: Sequence[Job], jobs: Sequence[Job]) -> str:
    """Return why the planned seeds give no interval; empty if they do. An effect is a mean over shared seeds, and its
    spread may come from all arms of the block."""
    both = {job.seed for job in treatment} & {job.seed for job in control}
    arms = f"{claim.treatment} and {claim.control}"
    if treatment and control and not both:
        return f"{arms} share no seed; give both the same seeds"
    blocks = {job.family.block for job in treatment}
    of_block = {(job.arm, job.seed) for job in (*treatment, *control)}
    of_block |= {(job.arm, job.seed) for job in jobs if job.family.block in blocks}
    if len(both) == 1 and len(of_block) == len({arm for arm, _ in of_block}):
        return (
            f"{arms} have one seed, which gives no interval; plan {FEWEST_SEEDS} seeds, or set the status of the "
            "claim to 'shown'"
        )
    return ""


def _too_few_to_count(claim: Claim, n: int, m: int) -> str:
    """Return why no count of ``n`` treatment runs and ``m`` control runs exceeds min_effect with p at most 0.05;
    empty if one does."""
    if not n or not m:
        return ""
    most = Counts(n, n, 0, m) if claim.sign > 0 else Counts(0, n, m, m)
    p = max(most.p_at(claim.thresholds[0]), most.fisher)
    if abs(most.value) > claim.min_effect and p <= FAMILY_LEVEL:
        return ""
    runs = plural(n, "run") if n == m else f"{n} and {m} runs"
    return (
        "even a count of all runs in one arm and of none in the other is not enough for min_effect "
        f"{claim.min_effect:g} with {runs} per arm (p = {p:.2g}); add seeds or lower min_effect"
    )
