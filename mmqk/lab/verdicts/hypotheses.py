"""The verdict of a hypothesis: whether the effects of several claims have the pattern that it predicts.

A hypothesis of a grid predicts, for some claims, the state of the effect: "above" (above min_effect), "none" (between
-min_effect and min_effect) or "below" (below -min_effect). The 95 % interval of an effect leaves one or more
of these three states possible. A prediction allows one or two of the states. Its verdict is

contradicted    if it allows none of the possible states
supported       if it allows all of the possible states
not told apart  in all other cases, and if the claim has no interval or failed a check

A hypothesis is contradicted if one of its predictions is contradicted, supported if all are supported, and otherwise
not told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mmqk.lab.grid.hypotheses import PREDICTIONS, STATES, Hypothesis
from mmqk.lab.stats.effects import Effect
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import Verdict

PatternVerdict = Literal["supported", "contradicted", "not told apart"]


@dataclass(frozen=True)
class Pattern:
    """The verdict of a hypothesis and of each of its predictions.

    Attributes:
        hypothesis: the hypothesis as registered.
        verdict: supported, contradicted or not told apart.
        predictions: the verdict of each prediction, by claim.
        possible: the states (`STATES`) that the interval of each claim leaves possible; empty if they are unknown.
    """

    hypothesis: Hypothesis
    verdict: PatternVerdict
    predictions: Mapping[str, PatternVerdict]
    possible: Mapping[str, tuple[str, ...]]


def patterns(study: Study, verdicts: Sequence[Verdict]) -> list[Pattern]:
    """Return the verdict of every hypothesis, in the order of the grid."""
    of_claims = {verdict.claim.id: possible_states(verdict) for verdict in verdicts}
    results = []
    for hypothesis in study.hypotheses:
        predictions = {
            claim: prediction_verdict(predicted, of_claims.get(claim, ()))
            for claim, predicted in hypothesis.predicts.items()
        }
        values = set(predictions.values())
        verdict: PatternVerdict = "supported" if values == {"supported"} else "not told apart"
        verdict = "contradicted" if "contradicted" in values else verdict
        possible = {claim: of_claims.get(claim, ()) for claim in predictions}
        results.append(Pattern(hypothesis, verdict, predictions, possible))
    return results


def possible_states(verdict: Verdict) -> tuple[str, ...]:
    """Return the states (`STATES`) that the 95 % interval of the effect overlaps.

    Empty if a check other than a negative control failed, if the runs cannot decide the claim, if the effect has no
    interval, or if the effect is a bound because a run failed.
    """
    effect, size = verdict.effect, verdict.claim.min_effect
    if verdict.open or verdict.bounds or not isinstance(effect, Effect) or not effect.has_interval:
        return ()
    if any(not c.passed for c in verdict.controls if not c.name.startswith("negative control")):
        return ()
    reaches = {
        "above": effect.high > size,
        "none": effect.low < size and effect.high > -size,
        "below": effect.low < -size,
    }
    return tuple(state for state in STATES if reaches[state])


def prediction_verdict(predicted: str, possible: Sequence[str]) -> PatternVerdict:
    """Return the verdict of one prediction (a key of `PREDICTIONS`)."""
    allowed = PREDICTIONS[predicted]
    if not possible or (set(possible) & allowed and set(possible) - allowed):
        return "not told apart"
    return "supported" if set(possible) <= allowed else "contradicted"
