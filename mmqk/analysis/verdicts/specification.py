"""The specification curve: the effect of claims under every reasonable choice of metric, window and runs.

Simonsohn, Simmons and Nelson, Nature Human Behaviour 4 (2020). ``report.specification`` of the grid names the claims:
the same contrast at several learning rates, sizes or lengths. Specifications share runs, so they are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mmqk.analysis.metrics import METRICS, Metric, find_metric, is_trained
from mmqk.analysis.metrics.metric import warmup_steps
from mmqk.analysis.runs.load import Run
from mmqk.analysis.stats.effects import Effect, paired_effect, pooled_spread
from mmqk.analysis.verdicts.compared import compare
from mmqk.analysis.verdicts.study import Claim, Study

# Ratios, so that their effects share an axis.
SPECIFIED = ("largest_attention_logit", "qk_norm_product", "q_norm", "k_norm", "resid_norm", "final_norm")
# Some specifications exclude runs with a larger final excess of a trained modality.
FLOOR_NATS = 0.1


@dataclass(frozen=True)
class Specification:
    """One choice, and the effect under it (log ratio).

    Attributes:
        claim: id of the claim that names the arms.
        metric: key of `SPECIFIED`.
        window: key of `WINDOWS`.
        runs: key of `RUNS`.
        effect: treatment over control, with a spread of these two arms alone.
    """

    claim: str
    metric: str
    window: str
    runs: str
    effect: Effect


def _window(share: float) -> Callable[[Run, Metric, str | None], float]:
    """The geometric mean of a series over the probes after warm-up in the last ``share`` of the run."""

    def measure(run: Run, metric: Metric, modality: str | None) -> float:
        steps, values = metric.series(run, modality)
        values = values[steps >= max((1 - share) * max(steps, default=0), warmup_steps(run))]
        usable = len(values) and (values > 0).all() and np.isfinite(values).all()
        return float(np.exp(np.log(values).mean())) if usable else math.nan

    return measure


def _at_floor(run: Run) -> bool:
    final = METRICS["final_excess"]
    return all(final.measure(run, m) <= FLOOR_NATS for m in ("text", "image") if is_trained(run, m))


WINDOWS: Mapping[str, Callable[[Run, Metric, str | None], float]] = {
    "last 3 probes": lambda run, metric, modality: metric.measure(run, modality),
    "second half": _window(0.5),
    "after warm-up": _window(1.0),
}
RUNS: Mapping[str, Callable[[Run], bool]] = {
    "all": lambda run: True,
    "completed": lambda run: run.status.status == "completed",
    f"excess at most {FLOOR_NATS:g} nat": _at_floor,
}


def specifications(study: Study) -> list[Specification]:
    """Every specification with an interval; one that excludes runs only if it excludes any."""
    named = study.report.get("specification") or []
    return [made for claim in study.claims if claim.id in named for made in _of_claim(study, claim)]


def _of_claim(study: Study, claim: Claim) -> list[Specification]:
    treatment, control = compare(study, claim).pair
    _, modality = find_metric(claim.metric)
    made = []
    counted: set[tuple[str, ...]] = set()
    for words, keep in RUNS.items():
        runs = [[run for run in members.all if keep(run)] for members in (treatment, control)]
        names = tuple(run.name for of in runs for run in of)
        if names in counted:
            continue
        counted.add(names)
        for name in SPECIFIED:
            for window, measure in WINDOWS.items():
                measured = [{run.seed: measure(run, METRICS[name], modality) for run in of} for of in runs]
                a, b = ({s: math.log(v) for s, v in of.items() if 0 < v < math.inf} for of in measured)
                effect = paired_effect(a, b, pooled_spread({"treatment": [*a.values()], "control": [*b.values()]}))
                if effect is not None and effect.has_interval:
                    made.append(Specification(claim.id, name, window, words, effect))
    return made
