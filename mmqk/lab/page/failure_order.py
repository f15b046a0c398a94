"""The table of the statistics that left the range of the healthy runs first, and its figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np

from mmqk.lab.formatting import capital, listed, plural
from mmqk.lab.metrics.departure import reduced
from mmqk.lab.page.figures.captions import loss_series
from mmqk.lab.page.figures.curves import arm_lines, bin_width, finite
from mmqk.lab.page.figures.shapes import Figure, Key, Line, Panel
from mmqk.lab.page.figures.style import INK, legend
from mmqk.lab.page.single import WORDS
from mmqk.lab.verdicts.failure_order import FailureOrder, OrderRow
from mmqk.lab.verdicts.study import Study

NAMES = WORDS | {
    "w_q_stable_rank": "stable rank of W_q",
    "w_k_stable_rank": "stable rank of W_k",
    "w_q_grad_over_v": "RMS of g²/v of W_q",
    "w_k_grad_over_v": "RMS of g²/v of W_k",
    "out_log_z": "log Z",
    "grad_norm": "gradient norm",
    "loss": "loss",
}
ABOUT = (
    "Each statistic is the largest value over layers (attention entropy and stable rank: the smallest); the "
    "table names the layer. A statistic leaves the range of the healthy runs of “{control}” if, after warm-up, "
    "it is outside the range at each of the last 4 or more probes before the failure. The table gives the first "
    "of these probes, so no lead is shorter than 3 intervals between probes. The range at a step goes from their "
    "lowest to their highest value, widened on both sides by its own width (on a log scale, except for loss and "
    "log Z). Survivors: compared runs without a failure, except those of the control; they may differ in other "
    "settings, and only those that have the statistic count. Healthy: the healthy runs, each compared with the "
    "others. A statistic that also leaves the range in survivors or healthy runs does not distinguish the failed "
    "runs."
)


def order_table(study: Study, order: FailureOrder | None) -> dict[str, Any]:
    """Return the rows of the table and the sentence that explains it; empty without an order."""
    if order is None or not order.rows:
        return {}
    return {
        "about": ABOUT.format(control=study.label(order.control)) + _others(study, order),
        "rows": [
            {
                "what": _what(row),
                "layer": "–" if row.layer is None else str(row.layer),
                "runs": f"{len(row.steps)} of {len(order.failing)}",
                "step": _spread(row.steps.values()),
                "before": _spread(row.before.values()),
                "surviving": "{} of {}".format(*row.surviving),
                "healthy": "{} of {}".format(*row.healthy),
            }
            for row in order.rows
        ],
    }


def _others(study: Study, order: FailureOrder) -> str:
    """Return a sentence about the failed runs of the other arms; empty if there are none."""
    arms = Counter(study.label(run.arm) for run in order.others)
    failed = listed([f"{plural(n, 'failed run')} of “{label}”" for label, n in arms.items()])
    return f" The table does not count {failed}." if arms else ""


def _only_in_failed(order: FailureOrder, row: OrderRow) -> bool:
    """Return whether the statistic left the range in failed runs only. If there are survivors, one must have it."""
    compared = bool(row.surviving[1]) or not order.surviving
    return compared and not row.surviving[0] and not row.healthy[0]


def _what(row: OrderRow) -> str:
    queries = " queries" if row.statistic.startswith("attn_") else ""
    return f"{NAMES[row.statistic]}{f', {row.modality}{queries}' if row.modality else ''}"


def _spread(steps: Collection[int]) -> str:
    low, high = min(steps), max(steps)
    middle = f"{np.median(list(steps)):,.0f}"
    return middle if low == high else f"{middle} ({low:,} to {high:,})"


def order_figure(study: Study, order: FailureOrder | None) -> Figure | None:
    """Draw the statistics of the failing arm and of its control over time, one row above another; circles mark the
    steps at which a failing run left the range of the healthy runs. None without an order."""
    if order is None:
        return None
    width = bin_width(study)
    panels = [
        [("attn_logit_absmax", m, f"Largest logit, {m} queries", "|attention logit|") for m in study.modalities],
        [("attn_entropy", m, f"Attention entropy, {m} queries", "lowest layer (nats)") for m in study.modalities],
        [(f"w_{k}_stable_rank", "", f"Stable rank of W_{k}", "lowest layer") for k in "qk"],
        [
            ("grad_norm", "", "Gradient norm", "largest between probes"),
            ("w_q_grad_over_v", "", "RMS of g²/v of W_q", "largest layer"),
        ],
        [("loss", m, f"{capital(m)} loss", "nats per token") for m in study.modalities],
    ]
    rows = []
    for row in panels:
        made = [_panel(study, order, *panel, width) for panel in row]
        rows.append(tuple(panel for panel in made if panel.lines))
    arms = (order.treatment, order.control)
    keys = (*legend(study, arms), Key("leaves the range of the healthy runs", INK, marker="o"))
    first = next((row for row in order.rows if _only_in_failed(order, row)), None)
    reading = f"{plural(len(order.failing), 'run')} of “{study.label(order.treatment)}” failed."
    if first is not None:
        reading += (
            " Of the statistics that left the range of the healthy runs in failed runs only, the first was: "
            f"{_what(first)}, in {len(first.steps)} of {plural(len(order.failing), 'run')}, "
            f"{_spread(first.before.values())} steps before the failure."
        )
    caption = "Thin lines: runs; thick lines: medians; × marks a divergence."
    return Figure("failure_order", reading, caption, tuple(filter(None, rows)), arms, keys)


def _panel(
    study: Study, order: FailureOrder, statistic: str, modality: str, title: str, ylabel: str, width: int
) -> Panel:
    """Return the panel of one statistic, reduced over layers."""

    def series(run):
        if statistic == "loss":
            return loss_series(modality, width)(run)
        return finite(reduced(run, statistic, modality))

    lines = arm_lines(study, (order.treatment, order.control), modality, series)
    steps = next((r.steps for r in order.rows if (r.statistic, r.modality) == (statistic, modality)), {})
    marks = []
    for run in order.failing:
        at, values = series(run)
        if run.name in steps and len(at):
            index = int(np.abs(at - steps[run.name]).argmin())
            place = at[index : index + 1].astype(float), values[index : index + 1]
            marks.append(Line(order.treatment, modality, run.seed, *place, "event", run=run.name, marker="o"))
    log = statistic in ("attn_logit_absmax", "grad_norm", "w_q_grad_over_v", "attn_entropy")
    return Panel(statistic, title, ylabel, (*lines, *marks), log=log)
