"""The specification curve: the effect of claims under every reasonable choice of metric, window and runs.

The method is that of Simonsohn, Simmons and Nelson, Nature Human Behaviour 4 (2020). ``report.specification`` of the
grid names the claims, which should make the same comparison at several learning rates, sizes or lengths.
Specifications share runs, so they are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmqk.lab.metrics import METRICS, Metric, find_metric, is_trained
from mmqk.lab.metrics.metric import warmup_steps
from mmqk.lab.runs.load import Run
from mmqk.lab.stats.effects import Effect, paired_effect, pooled_spread
from mmqk.lab.verdicts.compared import compare
from mmqk.lab.verdicts.study import Claim, Study

# Metrics whose effects are ratios, so they can share an axis.
SPECIFIED = ("largest_attention_logit", "qk_norm_product", "q_norm", "k_norm", "resid_norm", "final_norm")
# Some specifications exclude a run if the final excess loss of a trained modality exceeds this value.
FLOOR_NATS = 0.1


@dataclass(frozen=True)
class Specification:
    """One choice of metric, window and runs, and the effect with this choice (log ratio).

    Attributes:
        claim: id of the claim that names the arms.
        metric: key of `SPECIFIED`.
        window: key of `WINDOWS`.
        runs: key of `RUNS`.
        effect: treatment relative to control, with the spread over the seeds of these two arms.
    """

    claim: str
    metric: str
    window: str
    runs: str
    effect: Effect


def _window(share: float) -> Callable[[Run, Metric, str | None], float]:
    """Return a function that computes the geometric mean of a series over the last ``share`` of the run, without
    warm-up."""

    def measure(run: Run, metric: Metric, modality: str | None) -> float:
        steps, values = metric.series(run, modality)
        values = values[steps >= max((1 - share) * max(steps, default=0), warmup_steps(run))]
        usable = len(values) and (values > 0).all() and np.isfinite(values).all()
        return float(np.exp(np.log(values).mean())) if usable else math.nan

    return measure


def _at_floor(run: Run, modalities: Sequence[str]) -> bool:
    final = METRICS["final_excess"]
    return all(final.measure(run, m) <= FLOOR_NATS for m in modalities if is_trained(run, m))


WINDOWS: Mapping[str, Callable[[Run, Metric, str | None], float]] = {
    "last 3 probes": lambda run, metric, modality: metric.measure(run, modality),
    "second half": _window(0.5),
    "after warm-up": _window(1.0),
}
RUNS: Mapping[str, Callable[[Run, Sequence[str]], bool]] = {
    "all": lambda run, modalities: True,
    "completed": lambda run, modalities: run.status.status == "completed",
    f"excess at most {FLOOR_NATS:g} nat": _at_floor,
}


def specifications(study: Study) -> list[Specification]:
    """Return every specification with an interval; of several choices that select the same runs, only the first."""
    named = study.named("specification")
    return [made for claim in study.claims if claim.id in named for made in _of_claim(study, claim)]


def _of_claim(study: Study, claim: Claim) -> list[Specification]:
    pair = compare(study, claim).pair
    _, modality = find_metric(claim.metric)
    values = {
        (name, window): [
            {run.seed: math.log(v) for run in arm.all if 0 < (v := measure(run, METRICS[name], modality)) < math.inf}
            for arm in pair
        ]
        for name in SPECIFIED
        for window, measure in WINDOWS.items()
    }
    chosen: dict[tuple[frozenset[int], ...], str] = {}
    for words, keep in RUNS.items():
        seeds = tuple(frozenset(run.seed for run in arm.all if keep(run, study.modalities)) for arm in pair)
        chosen.setdefault(seeds, words)
    made = []
    for seeds, words in chosen.items():
        for (name, window), of_arms in values.items():
            a, b = ({s: v for s, v in arm.items() if s in of} for arm, of in zip(of_arms, seeds, strict=True))
            effect = paired_effect(a, b, pooled_spread({"treatment": [*a.values()], "control": [*b.values()]}))
            if effect is not None and effect.has_interval:
                made.append(Specification(claim.id, name, window, words, effect))
    return made
