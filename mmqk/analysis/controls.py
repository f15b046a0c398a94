"""What must be true before a verdict may say anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmqk.analysis.metrics import Metric, find_metric, is_trained, learnt
from mmqk.analysis.runs import Run
from mmqk.analysis.study import Claim, Study
from mmqk.analysis.words import number
from mmqk.store import differing_fields

BOUND_SLACK = 1.01


@dataclass(frozen=True)
class Control:
    """One check: what it is called, whether it passed, and what was seen."""

    name: str
    passed: bool
    detail: str

    def as_record(self) -> dict[str, object]:
        """As it stands in verdicts.json."""
        return {"name": self.name, "passed": self.passed, "detail": self.detail}


def regime_reached(study: Study, claim: Claim, runs: Sequence[Run]) -> Control:
    """Whether every compared run learnt every modality that it is trained on.

    Comparing learnt with unlearnt runs measures learning, whatever it is called.
    """
    unlearnt: dict[tuple[str, str], int] = {}
    untrained: dict[tuple[str, str], None] = {}
    for run in runs:
        for modality in study.modalities:
            if not is_trained(run, modality):
                untrained[(run.arm, modality)] = None
            elif not learnt(run, modality):
                unlearnt[(run.arm, modality)] = unlearnt.get((run.arm, modality), 0) + 1
    parts = [
        f"{modality} was not learnt in {count} of {sum(r.arm == arm for r in runs)} runs of "
        f"{study.label(arm)}"
        for (arm, modality), count in unlearnt.items()
    ] or ["every modality that is trained was learnt in every run"]
    parts += [f"{modality} is not trained in {study.label(arm)}" for arm, modality in untrained]
    return Control(claim.regime or REGIME_NAME, not unlearnt, "; ".join(parts))


REGIME_NAME = "modalities learnt"


def only_declared_differences(study: Study, claim: Claim, runs: Sequence[Run]) -> Control:
    """Whether the two arms ran the same code and differ, seed by seed, only in what the grid sets."""
    name = "arms differ only as declared"
    if len({run.code for run in runs}) > 1:
        return Control(name, False, "the runs were made by different versions of the code")
    declared = [field for arm in claim.compared for field in study.arms[arm].settings]
    control = {run.seed: run for run in runs if run.arm == claim.control}
    found: set[str] = set()
    for run in runs:
        if run.arm == claim.treatment and run.seed in control:
            found.update(differing_fields(run.identity, control[run.seed].identity))
    extra = sorted(f for f in found if not any(_covers(d, f) for d in declared))
    if extra:
        return Control(name, False, f"they also differ in {', '.join(extra)}")
    named = sorted(f for f in found if not any(other.startswith(f"{f}.") for other in found))
    return Control(name, True, f"they differ in {', '.join(named) or 'nothing'}")


def _covers(declared: str, field: str) -> bool:
    # The other way round too: an arm that leaves a mapping empty has the mapping itself as its field.
    return field == declared or field.startswith(f"{declared}.") or declared.startswith(f"{field}.")


def within_bound(runs: Sequence[Run]) -> Control | None:
    """Whether no finite logit lies above its layer's QK-Norm bound, where there is one: a check of us."""
    worst = 0.0
    for run in runs:
        for layer in {tag.layer for tag in run.tags.values() if tag.statistic == "attn_logit_bound"}:
            steps, bounds = run.combined("attn_logit_bound", np.max, layer=layer)
            at, logits = run.combined("attn_logit_absmax", np.max, layer=layer)
            _, i, j = np.intersect1d(steps, at, return_indices=True)
            finite = np.isfinite(logits[j]) & np.isfinite(bounds[i])
            worst = max([worst, *(logits[j][finite] / bounds[i][finite]).tolist()])
    if worst == 0:
        return None
    return Control(
        "logits within the QK-Norm bound", worst <= BOUND_SLACK, f"at most {100 * worst:.0f} % of the bound"
    )


def _reached(metric: Metric, run: Run, modality: str | None) -> float:
    # Of a run that ended in NaN only what was seen before is evidence.
    value = metric.measure(run, modality)
    return metric.worst_seen(run, modality) if math.isinf(value) else value


def reaches(study: Study, control: Claim) -> Control:
    """Whether a control's arms show what they are known to show: the metric can move, and we see it."""
    metric, modality = find_metric(control.metric)
    seen, passed = [], True
    for arm in control.arms:
        values = [_reached(metric, run, modality) for run in study.finished(arm)]
        median = float(np.median(values)) if values else math.nan
        passed = passed and median >= control.at_least
        seen.append(
            f"{number(median)} in {study.label(arm)}" if values else f"no finished run of {study.label(arm)}"
        )
    what = f"{metric.label} at least {control.at_least:g}"
    return Control(f"positive control {control.id}", passed, f"{what}: {', '.join(seen)}")
