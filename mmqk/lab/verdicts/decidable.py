"""Check before training whether the planned runs could support each claim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from mmqk.lab.formatting import plural
from mmqk.lab.grid.arms import Job
from mmqk.lab.grid.claims import Claim
from mmqk.lab.stats.auroc import FEWEST_OF_EACH
from mmqk.lab.stats.exact import Counts
from mmqk.lab.verdicts.claims import at
from mmqk.lab.verdicts.controls import FEWEST_SEEDS
from mmqk.store import UserError

LEVEL = 0.05


def check_decidable(claims: Sequence[Claim], jobs: Iterable[Job], where: object) -> None:
    """Refuse a claim that no result of the planned runs could support.

    Args:
        claims: the claims of the grid, from `mmqk.lab.grid.claims.read_claims`.
        jobs: every planned run.
        where: name of the grid for error messages.

    Raises:
        UserError: no result of the planned runs could support a claim; the message gives the reason.
    """
    by_id = {claim.id: claim for claim in claims}
    planned = [job for job in jobs if job.role == "verdict"]
    for claim in claims:
        if claim.decided and (why := _why_not(claim, by_id, planned, ())):
            raise UserError(f"{where}: no result could support claim {claim.id}: {why}")


def few_seeds(claims: Sequence[Claim], jobs: Iterable[Job]) -> list[str]:
    """Return a warning for each claim with too few planned seeds for a verdict; seeds can be added later."""
    planned = [job for job in jobs if job.role == "verdict"]
    warnings = []
    for claim in claims:
        if claim.test == "prediction":
            continue  # check_decidable checks the number of runs
        arms = [
            {job.seed for job in _runs(claim, name, planned)} for name in (claim.treatment, claim.control)
        ]
        n = min(map(len, arms)) if claim.test == "count" else len(arms[0] & arms[1])
        if claim.decided and "seeds" not in claim.unchecked and n < FEWEST_SEEDS:
            warnings.append(
                f"claim {claim.id} stays inconclusive with {plural(n, 'seed')} per arm: plan {FEWEST_SEEDS} per arm, "
                f"or give a reason under unchecked.seeds"
            )
    return warnings


def _why_not(claim: Claim, by_id: Mapping[str, Claim], jobs: Sequence[Job], above: tuple[str, ...]) -> str:
    """Return why no result could support the claim, and what to do; empty if a result could support it."""
    if claim.test == "prediction":
        return _predicted(claim, jobs)
    treatment, control = (_runs(claim, name, jobs) for name in (claim.treatment, claim.control))
    if shared := sorted({job.arm for job in treatment} & {job.arm for job in control}):
        return f"it compares the arm {shared[0]} with itself; name two arms that differ"
    if claim.test == "count":
        if why := _counted(claim, len(treatment), len(control)):
            return why
    elif why := _seeds(claim, treatment, control, jobs):
        return why
    if claim.test == "equivalence" and not claim.positive_control:
        return (
            "an equivalence needs a positive_control, because runs that cannot show any effect show no difference "
            "either; name a claim or control with a known effect"
        )
    needed = [("manipulation check", claim.manipulation_check), ("negative control", claim.negative_control)]
    if claim.test == "equivalence":
        needed.append(("positive control", claim.positive_control))
    for kind, id in needed:
        other = by_id.get(id)
        if other is not None and (why := _never_passes(kind, other, by_id, jobs, (*above, claim.id))):
            return f"its {kind} {other.id} {why}"
    return ""


def _never_passes(
    kind: str, other: Claim, by_id: Mapping[str, Claim], jobs: Sequence[Job], above: tuple[str, ...]
) -> str:
    if other.status == "control":
        return ""
    if other.id in above:
        return "depends on this claim in turn; remove one of the two references"
    if not other.decided:
        return f"has the status {other.status!r} and no verdict; name one with the status 'control' or 'exploratory'"
    if kind != "negative control":
        if other.test == "equivalence":
            return "is an equivalence, which cannot show an effect; name another claim"
        why = _why_not(other, by_id, jobs, above)
        return f"cannot be supported: {why}" if why else ""
    return ""


def _runs(claim: Claim, name: str, jobs: Iterable[Job]) -> list[Job]:
    """Return the planned runs of an arm, or of a family at the point of the claim."""
    jobs = list(jobs)
    return [job for job in jobs if job.arm == name] or [
        job for job in jobs if job.family.name == name and at(job.point, claim.at)
    ]


def _seeds(claim: Claim, treatment: Sequence[Job], control: Sequence[Job], jobs: Iterable[Job]) -> str:
    """Return why the planned seeds give no interval; empty if they do. An effect is a mean over shared seeds."""
    both = {job.seed for job in treatment} & {job.seed for job in control}
    arms = f"{claim.treatment} and {claim.control}"
    if treatment and control and not both:
        return f"{arms} share no seed; give both the same seeds"
    blocks = {job.family.block for job in treatment}
    by_arm: dict[str, set[int | None]] = {}
    for job in (*treatment, *control, *(job for job in jobs if job.family.block in blocks)):
        by_arm.setdefault(job.arm, set()).add(job.seed)
    if len(both) == 1 and all(len(seeds) == 1 for seeds in by_arm.values()):
        return (
            f"{arms} have one seed, which gives no interval; plan {FEWEST_SEEDS} seeds, or set the status of the "
            "claim to 'shown'"
        )
    return ""


def _predicted(claim: Claim, jobs: Sequence[Job]) -> str:
    """Return why the planned runs of the arms are too few for an AUROC; empty if they are not."""
    n, needed = sum(len(_runs(claim, name, jobs)) for name in claim.arms), 2 * FEWEST_OF_EACH
    if n >= needed:
        return ""
    return f"it predicts failures from {plural(n, 'run')}; plan at least {needed}, half of which should fail"


def _counted(claim: Claim, n: int, m: int) -> str:
    """Return why no count of ``n`` treatment runs and ``m`` control runs exceeds min_effect with p at most 0.05;
    empty if one does."""
    if not n or not m:
        return ""
    most = Counts(n, n, 0, m) if claim.sign > 0 else Counts(0, n, m, m)
    p = max(most.p_at(claim.thresholds[0]), most.fisher)
    if abs(most.value) > claim.min_effect and p <= LEVEL and not math.isnan(p):
        return ""
    runs = plural(n, "run") if n == m else f"{n} and {m} runs"
    return (
        "even a count of all runs in one arm and of none in the other is not enough for min_effect "
        f"{claim.min_effect:g} with {runs} per arm (p = {p:.2g}); add seeds or lower min_effect"
    )
