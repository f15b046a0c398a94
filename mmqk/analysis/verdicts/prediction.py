"""Measure how well a metric predicts which runs of an arm fail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mmqk.analysis.formatting import capital, listed
from mmqk.analysis.metrics.outcome import outcomes
from mmqk.analysis.stats.auroc import Auroc, auroc
from mmqk.analysis.verdicts.compared import Compared, lost_of, metric_value, middle


@dataclass(frozen=True)
class Prediction:
    """How well the metric of a claim separates failed runs from the other runs of their arm.

    Attributes:
        effect: the AUROC; None if it has no value.
        medians: median of the metric by arm.
        counts: (failed runs, all runs) by arm.
        why: why there is no AUROC, or no interval; else empty.
    """

    effect: Auroc | None
    medians: Mapping[str, float]
    counts: Mapping[str, tuple[int, int]]
    why: str = ""


def predict(compared: Compared) -> Prediction:
    """Return the AUROC of the claim's metric as a predictor of failed runs, over pairs of runs of the same arm.

    A run fails if it diverged, stalled or did not learn a trained modality (`mmqk.analysis.metrics.outcome`); whether
    it stalled depends on the best of the compared runs. A metric that differs between arms but not within an arm,
    such as the learning rate, has an AUROC of 0.5.
    """
    runs, name = compared.runs, compared.claim.metric
    medians = {
        key: middle(metric_value(run, name) for run in group.all) for key, group in compared.groups.items()
    }
    scores = [math.nan if run.lost else metric_value(run, name) for run in runs]
    failed = [outcome.kind != "well" for outcome in outcomes(runs)]
    of_run = dict(zip((run.name for run in runs), failed, strict=True))
    counts = {
        key: (sum(of_run[run.name] for run in group.all), len(group.all))
        for key, group in compared.groups.items()
    }
    if unmeasured := [run for run, score in zip(runs, scores, strict=True) if math.isnan(score)]:
        named = [f"{run.arm} seed {run.seed}" for run in unmeasured]
        lost = f" ({lost_of(unmeasured)})" if lost_of(unmeasured) else ""
        return Prediction(None, medians, counts, f"Without a value: {listed(named)}{lost}.")
    effect = auroc(scores, failed, [run.arm for run in runs])
    why = f"{capital(effect.why)}." if effect.why else ""
    return Prediction(None if math.isnan(effect.value) else effect, medians, counts, why)
