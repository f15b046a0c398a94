"""The survival of the arms: the share of runs that have not failed, by step."""

from __future__ import annotations

import numpy as np

from mmqk.lab.formatting import listed
from mmqk.lab.page.figures.shapes import Figure, Line, Panel
from mmqk.lab.page.figures.style import legend
from mmqk.lab.stats.survival import kaplan_meier
from mmqk.lab.verdicts.failure_order import LATE
from mmqk.lab.verdicts.failures import EVENTS, times_to_failure
from mmqk.lab.verdicts.study import Study


def survival_figure(study: Study) -> Figure | None:
    """Draw the Kaplan-Meier curve of each arm in a claim about failures; None if there is no such claim."""
    claims = [claim for claim in study.claims if claim.metric in LATE and claim.compared]
    if not claims:
        return None
    metric = claims[0].metric if claims[0].metric in EVENTS else "time_of_failure"
    named = dict.fromkeys(
        arm.name for claim in claims for name in claim.compared for arm in study.arms_of(name, claim.at)
    )
    arms = tuple(arm for arm in named if study.finished(arm))
    lines, counts = [], []
    for arm in arms:
        times, failed = times_to_failure(study.finished(arm), metric)
        steps, shares = kaplan_meier(times, failed)
        # Draw a step function: each share holds until the step before the next failure. The x values must differ.
        at, held = np.repeat(steps, 2)[1:], np.repeat(shares, 2)[:-1]
        at[1::2] -= 1
        at, first = np.unique(at, return_index=True)
        lines.append(Line(arm, "", None, at, held[first], "median"))
        counts.append(f"{sum(failed)} of {len(failed)} ({study.label(arm)})")
    if not lines:
        return None
    caption = "Kaplan-Meier curves over the finished runs. A run that did not fail counts up to its last step."
    if any(len(study.finished(arm)) < len(study.arms[arm].seeds) for arm in arms):
        caption += " Some runs have not finished. Failed runs end earlier than others, so the curves are too low."
    panel = Panel("surviving", "", "share of runs that have not failed", tuple(lines), top=1.05)
    return Figure("survival", f"Failed runs: {listed(counts)}.", caption, ((panel,),), arms, legend(study, arms))
