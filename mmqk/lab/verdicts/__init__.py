"""The verdict of each claim, and its texts: the sentences of sentences.yaml, what a claim tests, and effects with their
intervals.

judge           the verdicts: corrected levels, controls, rules
assess          one claim: its effect, interval and p-value
measure         the values of its metric by arm and seed; the best learning rate of each arm, from selection runs
checks          the conditions that its runs must meet
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from mmqk.lab.counts import AnyEffect
from mmqk.lab.effects import Auroc
from mmqk.lab.formatting import decimals, exp, fixed, number, plural
from mmqk.lab.grid.claims import Claim
from mmqk.lab.metrics import find_metric
from mmqk.store.formatting import plain

SENTENCES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("sentences.yaml").read_text(encoding="utf-8"))
# If the half-width of the interval of a ratio, on a log scale, exceeds this, the ratio has two digits, not three.
ROUGH = 0.35


def say(name: str, **values: Any) -> str:
    """Return a text of sentences.yaml with these values."""
    return SENTENCES[name].format(**values)


def p_text(p: float, equals: str = "") -> str:
    """Return a p-value with two digits: ``0.032`` after ``equals``, or ``< 0.0001``."""
    return f"{equals}{p:.2g}" if p >= 1e-4 else "< 0.0001"


def scale_of(claim: Claim) -> tuple[str, str]:
    """Return the scale ("log" or "linear") and the unit of a claim's effect. They are those of its metric, except for
    a difference of shares and for an AUROC."""
    if claim.decided and claim.test in ("count", "prediction"):
        return "linear", "of the runs" if claim.test == "count" else ""
    metric, _ = find_metric(claim.metric)
    return metric.scale, metric.unit


def effect_tested(claim: Claim) -> str:
    """Return what the claim tests of its treatment, relative to its control: ``at least ×2``, ``at least 0.1 nats
    lower``; empty for a claim without a verdict."""
    if not claim.decided:
        return ""
    (scale, unit), size = scale_of(claim), claim.min_effect
    directed = claim.test in ("superiority", "count")
    ends = {"low": plain(exp(-size)), "high": plain(exp(size))} if scale == "log" else {}
    name = f"{claim.test} {claim.direction}, {scale}" if directed else f"{claim.test}, {scale}"
    return say(name, size=plain(size), amount=f"{plain(size)} {unit}".strip(), **ends)


def interval_text(claim: Claim, low: float, high: float) -> tuple[str, str]:
    """Return the ends of an interval as text: ratios, or differences with their unit."""
    scale, unit = scale_of(claim)
    if scale == "log":
        return f"×{number(exp(low))}", f"×{number(exp(high))}"
    places = decimals((high - low) / 2)
    return fixed(low, places, "+"), f"{fixed(high, places, '+')} {unit}".strip()


def effect_in_cell(claim: Claim, effect: AnyEffect | None, bounds: int = 0) -> str:
    """Return the effect with its interval, unit and number of seeds, as in ``+0.54 (+0.28 to +0.79) nats, n = 3``;
    empty for a claim without a verdict or an effect. The effect is a bound if failed runs count with the worst value
    that was seen. The width of the interval determines the number of digits."""
    if effect is None or not claim.decided:
        return ""
    scale, unit = scale_of(claim)
    ends = (effect.value, effect.low, effect.high)
    half = (effect.high - effect.low) / 2
    if scale == "log":
        before = "×"
        value, low, high = (number(exp(v), 3 if half < ROUGH else 2) for v in ends)
    else:
        before, sign = ("AUROC ", "-") if isinstance(effect, Auroc) else ("", "+")
        value, low, high = (fixed(v, decimals(half), sign) if math.isfinite(v) else number(v) for v in ends)
    interval = f"({low} to {high})" if effect.has_interval else "(no interval)"
    bound = f", a bound: {plural(bounds, 'failed run')}" if bounds else ""
    return f"{before}{value} {interval} {unit}".strip() + f", n = {effect.n}{bound}"


def detectable_in_words(claim: Claim, size: float) -> str:
    """Return the true effect that the first test of these seeds detects with 80 % power; empty if unknown."""
    scale, unit = scale_of(claim)
    if not claim.decided or not math.isfinite(size):
        return ""
    return f"a factor of {number(exp(size), 2)}" if scale == "log" else f"{number(size, 2)} {unit}".strip()
