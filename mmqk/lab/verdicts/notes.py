"""What a verdict tells in words: what was tested, and notes with the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mmqk.lab.formatting import decimals, exp, fixed, listed, number
from mmqk.lab.grid.claims import Claim
from mmqk.lab.metrics import trained_modalities
from mmqk.lab.runs import Run
from mmqk.lab.stats import AnyEffect
from mmqk.lab.stats.auroc import Auroc
from mmqk.lab.stats.effects import Spread
from mmqk.lab.stats.exact import Counts, clopper_pearson
from mmqk.lab.stats.survival import log_rank
from mmqk.lab.verdicts.claims import claim_metric
from mmqk.lab.verdicts.compared import EVENTS, Compared, Group, times_to_failure
from mmqk.store.formatting import plain

# Smaller relative differences in trained targets are not reported: different sequences already cause them.
ALIKE = 0.01


def sentence(text: str) -> str:
    """Return a text with a full stop."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def about_control(claim: Claim, control: Claim) -> str:
    """Return a note if the positive control does not show that the runs can detect an effect on the claim's metric;
    else an empty string."""
    if control.status != "control" and control.metric == claim.metric:
        return ""
    return (
        f"The positive control {control.id} does not show that these runs can detect a difference in {claim.metric}, "
        "so this verdict is weaker than it would be with such a control."
    )


def about_effect(effect: AnyEffect | None, spread: Spread | None, sign_flip: float) -> list[str]:
    """Return notes with the numbers that the interval is computed from, and with the tests that decide nothing."""
    if isinstance(effect, Counts):
        arms = [(effect.a, effect.n_treatment), (effect.b, effect.m)]
        shares = [f"{count} of {n} ({100 * low:.0f} to {100 * high:.0f} %)"
                  for count, n in arms for low, high in [clopper_pearson(count, n)]]  # fmt: skip
        return [f"Counted (95 % Clopper-Pearson): {'; '.join(shares)}. Fisher's exact test: p {_p(effect.fisher)}."]
    if isinstance(effect, Auroc):
        return [f"Pairs of runs: {effect.pairs}; failed runs: {effect.failures}; other runs: {effect.survivors}."]
    if effect is None or not effect.has_interval:
        return []
    notes = [f"Interval from: {effect.of}, {plain(effect.df)} degrees of freedom."]
    if spread is not None:
        sds = ", ".join(f"{plain(sd, 2)}" for sd in spread.by_arm.values())
        pooled = f"pooled: {plain(spread.sd, 2)}; equal spread: p = {spread.p_equal:.2g}"
        notes.append(f"Standard deviation over seeds by arm: {sds}; {pooled}.")
    if math.isfinite(sign_flip):
        notes.append(f"Sign-flip test: p {_p(sign_flip)}.")
    return notes


def trained_targets(run: Run) -> float:
    """Return the mean number of trained targets per optimizer step over all ranks, counted in the sequences of the
    run.

    NaN if the run did not count them. Modalities that are not trained do not count.
    """
    counts = [run.data.get(modality, {}).get("targets", math.nan) for modality in trained_modalities(run)]
    return float(run.setting("data.batch_size", math.nan) * sum(counts)) if counts else math.nan


def about_targets(groups: Iterable[Group]) -> list[str]:
    """Return a note with the trained targets per step of each arm, if the arms differ in these numbers or in the
    trained modalities. Empty if a run did not count its targets."""
    counts: dict[str, float] = {}
    trained = set()
    for members in groups:
        numbers = [trained_targets(run) for run in members.all]
        if not numbers or not all(math.isfinite(count) and count > 0 for count in numbers):
            return []
        counts[members.label] = sum(numbers) / len(numbers)
        trained |= {trained_modalities(run) for run in members.all}
    if len(trained) < 2 and max(counts.values(), default=0) <= (1 + ALIKE) * min(counts.values(), default=0):
        return []
    by_arm = "; ".join(f"{label}: {count:,.0f}" for label, count in counts.items())
    return [f"Trained targets per step, counted in the data of the runs: {by_arm}."]


def about_survival(compared: Compared) -> list[str]:
    """Return notes for a claim about the time of an event (`EVENTS`): the failed runs, the log-rank test, and what
    the interval leaves out; empty for other claims. The test needs all planned runs, because a run that fails
    finishes first."""
    claim = compared.claim
    if claim.metric not in EVENTS or claim.test != "superiority" or not claim.decided:
        return []
    groups = [times_to_failure(group.all, claim.metric) for group in compared.pair]
    complete = all(len(group.all) == group.planned for group in compared.pair)
    p = log_rank(*groups[0], *groups[1]) if complete else math.nan
    notes = ["" if math.isnan(p) else f"Log-rank test of equal survival: p = {p:.2g}."]
    trained = [{m for run in group.all for m in trained_modalities(run)} for group in compared.pair]
    for group, (_, failed), lacks in zip(
        compared.pair, groups, (trained[1] - trained[0], trained[0] - trained[1]), strict=True
    ):
        unsure = "" if any(failed) else "; the interval ignores the uncertainty of this arm"
        notes.append(f"Failed runs of “{group.label}”: {sum(failed)} of {len(failed)}{unsure}.")
        if lacks:
            notes.append(f"Losses that “{group.label}” does not train: {listed(sorted(lacks))}.")
    return [note for note in notes if note]


def interval_text(claim: Claim, low: float, high: float) -> tuple[str, str]:
    """Return the ends of an interval as text: ratios, or differences with their unit."""
    metric = claim_metric(claim)
    if metric.scale == "log":
        return f"×{number(exp(low))}", f"×{number(exp(high))}"
    places = decimals((high - low) / 2)
    return fixed(low, places, "+"), f"{fixed(high, places, '+')} {metric.unit}".strip()


def effect_tested(claim: Claim) -> str:
    """Return what the claim tests of its treatment, relative to its control: ``at least ×2``, ``at least 0.1 nats
    lower``; empty for a claim without a verdict."""
    if not claim.decided:
        return ""
    metric, size = claim_metric(claim), claim.min_effect
    if claim.test == "prediction":
        return f"AUROC of at least {plain(size)}"
    if metric.scale == "log":
        ends = plain(exp(-size)), plain(exp(size))
        if claim.test == "equivalence":
            return f"from ×{ends[0]} to ×{ends[1]}"
        return f"at least ×{ends[1]}" if claim.sign > 0 else f"at most ×{ends[0]}"
    amount = f"{plain(size)} {metric.unit}".strip()
    if claim.test == "equivalence":
        return f"less than {amount} apart"
    more, less = ("more", "fewer") if claim.test == "count" else ("higher", "lower")
    return f"at least {amount} {more if claim.sign > 0 else less}"


def _p(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-4 else "< 0.0001"
