"""The page of a single run: which statistics grew first, its alarms, and its settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mmqk.lab.formatting import number, plural
from mmqk.lab.metrics.growth_order import FACTOR, FALLING, GROWING, Growth, growth_order, has_two_probes
from mmqk.lab.metrics.metric import warmup_steps
from mmqk.lab.page.compared import PLACES, as_text
from mmqk.lab.runs.load import Run
from mmqk.lab.verdicts.study import Study
from mmqk.store import flatten

# The page shows this many rows; the others are folded.
MOST_ROWS = 8
WORDS = {
    "attn_logit_absmax": "largest attention logit",
    "q_norm": "query norm",
    "k_norm": "key norm",
    "v_norm": "value norm",
    "attn_out_norm": "norm of attention's output",
    "mlp_out_norm": "norm of the MLP's output",
    "resid_norm": "residual norm",
    "final_norm": "output norm of the last layer",
    "attn_entropy": "attention entropy",
}


def single(study: Study) -> dict[str, Any] | None:
    """Return the content for a study of one run without claims; None for any other study."""
    runs = list({run.name: run for run in study.runs}.values())
    if len(runs) != 1 or study.claims or study.missing:
        return None
    (run,) = runs
    grown = growth_order(run)
    still = "is " if run.status.status == "running" else ""
    ended = f". The run {still}{run.status.status} at step {run.status.step:,}" if run.status.status else ""
    reason = f": {run.status.reason.rstrip('.')}" if run.status.reason else ""
    grows = any(tag.statistic in (*GROWING, *FALLING) for tag in run.tags.values())
    watched = grows or any(tag.statistic in ("loss", "grad_norm") for tag in run.tags.values())
    reference = "the end of the learning rate's warm-up" if warmup_steps(run) else "the first probe"
    first = "No measured series grew"
    if not grows:
        first = study.title
    elif not has_two_probes(run):
        first = f"What grew first is unknown: no norm, logit or attention entropy has two values from {reference} on"
    elif grown:
        first = _first(grown)
    rows = [
        {
            "what": _place(growth),
            "step": f"{growth.step:,}",
            "start": number(growth.start),
            "end": number(growth.end) if math.isfinite(growth.end) else str(growth.end),
            "ratio": f"{'÷' if growth.statistic == 'attn_entropy' else '×'}{number(growth.ratio)}"
            if math.isfinite(growth.ratio)
            else "∞",
        }
        for growth in grown
    ]
    return {
        "headline": f"{first}{ended}{reason}.",
        "rows": rows[:MOST_ROWS],
        "more": rows[MOST_ROWS:],
        "settings": settings(run),
        "watched": watched or bool(run.alarms),
        "alarms": [
            {"step": f"{a.step:,}", "name": a.name, "where": a.where, "sentence": a.sentence} for a in run.alarms
        ],
        "rule": grows
        and f"A series is listed if it stays above {FACTOR:g} times its value at {reference} "
        "(attention entropy: below half of it) from the listed step to the end of the run.",
    }


def settings(run: Run) -> list[tuple[str, str, str]]:
    """Return the fields that differ from their defaults: name, value and default."""
    from mmqk.config import defaults  # imports pydantic, which other pages do not need

    default = defaults()
    return [
        (name, as_text(value), as_text(default[name]))
        for name, value in flatten(run.config).items()
        if name in default and name not in PLACES and value != default[name]
    ]


def _first(grown: Sequence[Growth]) -> str:
    """Return which series changed first and from which step. If several changed at the same probe, name the first
    two."""
    step = grown[0].step
    tied = [_place(growth) for growth in grown if growth.step == step]
    if len(tied) == 1:
        return f"First to change: {tied[0]}, from step {step:,}"
    others = [f"and {plural(len(tied) - 2, 'other')}"] if len(tied) > 2 else []
    return f"First to change, at the same probe (step {step:,}): {'; '.join([*tied[:2], *others])}"


def _place(growth: Growth) -> str:
    query, dash, key = growth.modality.partition("-")
    of = f", {query} to {key}" if dash else f", {query}" if query else ""
    layer = "" if growth.layer is None else f", layer {growth.layer}"
    return f"{WORDS[growth.statistic]}{of}{layer}"
