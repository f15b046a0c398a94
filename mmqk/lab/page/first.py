"""What changed first: the series that grew in a single run, and the statistics of failed runs that left the range of
the healthy runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from mmqk.lab.formatting import DASH, number
from mmqk.lab.metrics.probes import FACTOR, FALLING, GROWING, Growth, growth_order
from mmqk.lab.page.tables import PLACES, Cell, Table, as_text, table
from mmqk.lab.runs import Run
from mmqk.lab.verdicts.failure_order import failure_order
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
    "w_q_stable_rank": "stable rank of W_q",
    "w_k_stable_rank": "stable rank of W_k",
    "w_q_grad_over_v": "RMS of g²/v of W_q",
    "w_k_grad_over_v": "RMS of g²/v of W_k",
    "out_log_z": "log Z",
    "grad_norm": "gradient norm",
    "loss": "loss",
}
RULE = (
    f"A series is listed if it stays above {FACTOR:g} times its value at the end of the warm-up (attention entropy: "
    "below half of it) from the listed step to the end of the run. Without a warm-up, the first probe counts."
)
ABOUT = (
    "Failed runs of “{treatment}” beside the healthy runs of “{control}”. Each statistic is the largest value over "
    "layers (attention entropy and stable rank: the smallest). It leaves the range of the healthy runs if, after "
    "warm-up, it is outside the range at each of the last 4 or more probes before the failure; the table gives the "
    "first of these probes. The range at a step goes from their lowest to their highest value, widened on both sides "
    "by its own width (on a log scale, except for loss and log Z). Survivors: compared runs without a failure. "
    "Healthy: the healthy runs, each compared with the others. A statistic that also leaves the range in survivors "
    "or healthy runs does not distinguish the failed runs."
)


def single(study: Study) -> dict[str, Any] | None:
    """Return the content for a study of one run without claims; None for any other study."""
    runs = list({run.name: run for run in study.runs}.values())
    if len(runs) != 1 or study.claims or study.missing:
        return None
    (run,) = runs
    statistics = {tag.statistic for tag in run.tags.values()}
    watched = statistics & {*GROWING, *FALLING, "loss", "grad_norm"}
    grown = growth_order(run)
    rows = table(
        "Sorted by step",
        ["What grew", "From step", "Before", "At the end", "Ratio"],
        [[_place(g), f"{g.step:,}", number(g.start), number(g.end), _ratio(g)] for g in grown],
    )
    status = run.status
    ended = [status.status and f"{status.status} at step {status.step:,}", status.reason.rstrip(".")]
    alarms: list[list[Cell | str]] = [
        [f"{a.step:,}", a.name.replace("_", " "), a.where, Cell(a.sentence, css="wrap")] for a in run.alarms
    ]
    return {
        "ended": ": ".join(filter(None, ended)),
        "first": f"{_place(grown[0])}, from step {grown[0].step:,}" if grown else "",
        "grown": rows and replace(rows, rows=rows.rows[:MOST_ROWS]),
        "later": rows and len(rows.rows) > MOST_ROWS and replace(rows, rows=rows.rows[MOST_ROWS:]),
        "rule": RULE if statistics & {*GROWING, *FALLING} else "",
        "alarms": table("Alarms of the run", ["Step", "Alarm", "Where", "Message"], alarms, text=4),
        "watched": bool(watched or run.alarms),
        "settings": settings(run),
    }


def _place(growth: Growth) -> str:
    query, dash, key = growth.modality.partition("-")
    of = f", {query} to {key}" if dash else f", {query}" if query else ""
    return f"{WORDS[growth.statistic]}{of}" + ("" if growth.layer is None else f", layer {growth.layer}")


def _ratio(growth: Growth) -> str:
    return f"{'÷' if growth.statistic in FALLING else '×'}{number(growth.ratio)}"


def settings(run: Run) -> Table | None:
    """Return the fields that differ from their defaults."""
    from mmqk.config import defaults  # imports pydantic, which other pages do not need

    default = defaults()
    rows: list[list[Cell | str]] = [
        [Cell("", code=name), as_text(value), as_text(default[name])]
        for name, value in flatten(run.config).items()
        if name in default and name not in PLACES and value != default[name]
    ]
    return table("Fields that differ from their defaults", ["Field", "Value", "Default"], rows, text=3)


def order_table(study: Study) -> Table | None:
    """Return the statistics of the failed runs that left the range of the healthy runs, the earliest first."""
    order = failure_order(study)
    if order is None:
        return None
    rows = [
        [
            WORDS[row.statistic] + (f", {row.modality}" if row.modality else ""),
            DASH if row.layer is None else str(row.layer),
            f"{len(row.steps)} of {len(order.failing)}",
            _spread(row.steps.values()),
            _spread(row.before.values()),
            "{} of {}".format(*row.surviving),
            "{} of {}".format(*row.healthy),
        ]
        for row in order.rows
    ]
    heads = ["Statistic", "Layer", "Failed runs", "From step", "Steps before the failure", "Survivors", "Healthy"]
    note = ABOUT.format(treatment=study.label(order.treatment), control=study.label(order.control))
    if order.others:
        arms = sorted({study.label(run.arm) for run in order.others})
        note += f" Not counted: {len(order.others)} failed runs of other arms ({'; '.join(arms)})."
    return table("Statistics that left the range of the healthy runs", heads, rows, note=note)


def _spread(steps: Collection[int]) -> str:
    low, high = min(steps), max(steps)
    middle = f"{np.median(list(steps)):,.0f}"
    return middle if low == high else f"{middle} ({low:,} to {high:,})"
