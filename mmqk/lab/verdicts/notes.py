"""The notes of a verdict: sentences built from its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mmqk.lab.formatting import decimals, exp, fixed, listed, number, plural
from mmqk.lab.grid.claims import Claim
from mmqk.lab.metrics import trained_modalities
from mmqk.lab.runs.load import Run
from mmqk.lab.stats import AnyEffect
from mmqk.lab.stats.auroc import Auroc
from mmqk.lab.stats.effects import Effect, Spread
from mmqk.lab.stats.exact import Counts, clopper_pearson
from mmqk.lab.verdicts.claims import claim_metric, measured_label
from mmqk.lab.verdicts.compared import Group
from mmqk.store.formatting import percent, plain

ENOUGH_SEEDS = 6
# Smaller relative differences in trained targets are not reported: different sequences already cause them.
ALIKE = 0.01


def about_family(claim: Claim) -> list[str]:
    """Return a note that an exploratory claim is a hypothesis."""
    # The note of the claim may already start with the word "exploratory".
    hypothesis = claim.status == "exploratory" and not claim.note.lower().startswith("exploratory")
    return ["Exploratory: a hypothesis to test with new runs, not a result."] if hypothesis else []


def about_control(claim: Claim, control: Claim) -> str:
    """Return a note if the positive control does not show that the runs can detect an effect on the claim's metric;
    else an empty string."""
    label, tested = measured_label(control), measured_label(claim)
    if control.status == "control":
        shows = f"only that the {label} is at least {control.at_least:g}"
    elif control.metric != claim.metric:
        shows = f"an effect on the {label}"
    else:
        return ""
    return (
        f"The positive control {control.id} shows {shows}, not that these runs can detect a difference in the "
        f"{tested}, so this verdict is weaker than it would be with such a control."
    )


def about_spread(spread: Spread | None, effect: AnyEffect | None) -> list[str]:
    """Return a note with the spread over seeds and the method of the interval; if the claim counts runs, with the
    share of each arm and its exact interval."""
    if isinstance(effect, Counts):
        arms = [(effect.a, effect.n_treatment), (effect.b, effect.m)]
        shares = [f"{count} of {n} ({100 * low:.0f} to {100 * high:.0f} %)"
                  for count, n in arms for low, high in [clopper_pearson(count, n)]]  # fmt: skip
        return [
            f"Counted runs: {shares[0]} in the treatment, {shares[1]} in the control, with 95 % Clopper-Pearson "
            f"intervals; Fisher's p {_p(effect.fisher)} for equal shares."
        ]
    if isinstance(effect, Auroc):
        of = f"{plural(effect.failures, 'failed run')} and {plural(effect.survivors, 'other run')}"
        return [
            f"{plural(effect.pairs, 'pair')} of runs of the same arm ({of}); the interval is a jackknife over runs."
        ]
    if spread is None or effect is None or not effect.has_interval:
        return []
    if effect.of == "differences":
        sd = effect.error * math.sqrt(effect.n)
        return [
            f"The interval uses the differences by seed (standard deviation {plain(sd, 2)}), because the runs of a "
            f"seed are identical until the fork ({plain(effect.df)} degrees of freedom)."
        ]
    sds = ", ".join(f"{plain(sd, 2)}" for sd in spread.by_arm.values())
    method = {
        "pooled": "uses the pooled standard deviation",
        "two arms": "is the Welch interval of the two arms alone, because its standard error is larger",
    }[effect.of]
    return [
        f"Standard deviation over seeds: {sds} by arm, {plain(spread.sd, 2)} pooled "
        f"(p = {spread.p_equal:.2g} for equal spread); "
        f"the interval {method} ({plain(effect.df)} degrees of freedom)."
    ]


def about_seeds(claim: Claim, effect: AnyEffect | None, sign_flip: float) -> list[str]:
    """Return a note with the p-value of the exact sign-flip test, or a note that there are too few seeds for it."""
    if not isinstance(effect, Effect) or not effect.has_interval:
        return []
    if math.isfinite(sign_flip):
        return [f"Exact sign-flip test of the same hypothesis: p {_p(sign_flip)}."]
    if claim.status == "confirmatory" and effect.n < ENOUGH_SEEDS:
        return [f"An exact sign-flip test needs {ENOUGH_SEEDS} seeds; there are {effect.n}."]
    return []


def about_power(claim: Claim, size: str) -> str:
    """Return a note with the true effect that the first test detects with 80 % power; for an equivalence, with the
    smallest min_effect that has 80 % power."""
    if not size:
        return ""
    if claim.test == "equivalence":
        return f"With these seeds an equivalence has 80 % power only for a min_effect of at least {size}."
    return f"With these seeds the claim is reproduced with at most 80 % power if the true effect is {size}."


def trained_targets(run: Run) -> float:
    """Return the mean number of trained targets per optimizer step over all ranks, counted in the sequences of the
    run.

    NaN if the run did not count them. Modalities that are not trained do not count.
    """
    counts = [run.data.get(modality, {}).get("targets", math.nan) for modality in trained_modalities(run)]
    return float(run.setting("data.batch_size", math.nan) * sum(counts)) if counts else math.nan


def about_targets(groups: Iterable[Group]) -> list[str]:
    """Return a note with the trained targets per step of each arm, if the arms differ in these numbers or in the
    trained modalities.

    Empty if a run did not count its targets.
    """
    counts: dict[str, float] = {}
    trained = set()
    for members in groups:
        numbers = [trained_targets(run) for run in members.all]
        if not numbers or not all(math.isfinite(count) and count > 0 for count in numbers):
            return []
        counts[members.label] = sum(numbers) / len(numbers)
        trained |= {trained_modalities(run) for run in members.all}
    difference = max(counts.values()) / min(counts.values()) - 1 if counts else 0.0
    if difference <= ALIKE and len(trained) < 2:
        return []
    by_arm = listed([f"{count:,.0f} ({label})" for label, count in counts.items()])
    return [
        f"Trained targets per step, counted in the data of the runs: {by_arm}; they differ by {percent(difference)}."
    ]


def interval_text(claim: Claim, low: float, high: float) -> tuple[str, str]:
    """Return the ends of an interval as text: ratios, or differences with their unit."""
    metric = claim_metric(claim)
    if metric.scale == "log":
        return f"×{number(exp(low))}", f"×{number(exp(high))}"
    places = decimals((high - low) / 2)
    return fixed(low, places, "+"), f"{fixed(high, places, '+')} {metric.unit}".strip()


def _p(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-4 else "< 0.0001"
