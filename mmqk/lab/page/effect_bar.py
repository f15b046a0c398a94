"""Draw the effect of a claim: its interval, and marks at no effect and at the smallest effect of interest."""

from __future__ import annotations

import math
from html import escape

from mmqk.lab.formatting import exp
from mmqk.lab.page.findings import effect_in_cell
from mmqk.lab.verdicts.verdicts import Verdict

WIDTH, HEIGHT, PAD = 300.0, 38.0, 12.0


def effect_bar(verdict: Verdict) -> str:
    """Return the drawing as SVG; empty if the claim has no finite effect."""
    effect, claim = verdict.effect, verdict.claim
    if effect is None or not math.isfinite(effect.value):
        return ""
    low, high = (effect.low, effect.high) if effect.has_interval else (effect.value, effect.value)
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    limits = () if math.isnan(claim.min_effect) else claim.thresholds
    first, last = min(0.0, low, *limits), max(0.0, high, *limits)
    span = (last - first) or 1.0

    def at(value: float) -> str:
        return f"{PAD + (WIDTH - 2 * PAD) * (value - first) / span:.1f}"

    def named(value: float) -> str:
        return f"×{exp(value):.3g}" if verdict.metric.scale == "log" else f"{value:.3g}"

    description = f"Effect {effect_in_cell(verdict)}; no effect is {named(0)}"
    if limits:
        description += f"; the smallest effect of interest is {' or '.join(map(named, limits))}"
    values = sorted([0.0, *limits])
    # If marks are close together, the outer labels extend outward.
    near = (values[-1] - values[0]) / span * (WIDTH - 2 * PAD) < 40
    anchors = ["end", *["middle"] * (len(values) - 2), "start"] if near and limits else ["middle"] * len(values)
    middle = HEIGHT / 2 - 6
    parts = [
        f'<svg class="bar" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(description)}">',
        f'<line x1="{PAD:g}" x2="{WIDTH - PAD:g}" y1="{middle:g}" y2="{middle:g}" stroke="var(--line)"/>',
    ]
    for value, anchor in zip(values, anchors, strict=True):
        x, dash = at(value), ' stroke-dasharray="3 2"' if value else ""
        parts.append(f'<line x1="{x}" x2="{x}" y1="2" y2="{HEIGHT - 12:g}" stroke="var(--soft)"{dash}/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - 1:g}" text-anchor="{anchor}">{named(value)}</text>')
    parts.append(
        f'<line x1="{at(low)}" x2="{at(high)}" y1="{middle:g}" y2="{middle:g}" stroke="currentColor" '
        'stroke-width="4"/>'
        f'<circle cx="{at(effect.value)}" cy="{middle:g}" r="6" fill="currentColor"/></svg>'
    )
    return "".join(parts)
