"""The figure over the learning rate, on the axes of Wortsman et al. (arXiv 2309.14322).

The runs of a sweep differ only in learning rate and model size. Sweeps come from the configurations of the runs, so
they also exist without a grid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mmqk.lab.formatting import listed, short
from mmqk.lab.metrics import FAMILY_METRICS, METRICS
from mmqk.lab.metrics.families import RATE, SHAPE, learning_rate, model_size
from mmqk.lab.metrics.outcomes import final_loss, initial_loss, is_trained
from mmqk.lab.page.drawing import PALETTE, Figure, Line, Panel
from mmqk.lab.page.figures import figure_of
from mmqk.lab.page.tables import once
from mmqk.lab.runs import Run
from mmqk.lab.study import Study
from mmqk.lab.verdicts.measure import middle
from mmqk.store import flatten

FEWEST_RATES, MOST_SWEEPS, MOST_SIZES = 3, 3, 3
Value = Callable[[Run], float]


@dataclass(frozen=True)
class Sweep:
    """Runs of one configuration at several learning rates, and perhaps several sizes; ``label`` is its name."""

    label: str
    runs: tuple[Run, ...]

    @property
    def sizes(self) -> list[float]:
        """Numbers of parameters without embeddings and head, ascending."""
        return sorted({model_size(run) for run in self.runs})

    def of_size(self, size: float) -> list[Run]:
        """Return the runs of this size."""
        return [run for run in self.runs if model_size(run) == size]


def sweeps(study: Study) -> list[Sweep]:
    """Return the groups with at least three learning rates, the largest group first."""
    groups: dict[str, list[Run]] = {}
    for run in once(study):
        measured = run.identity and run.tags and learning_rate(run) > 0 and model_size(run) > 0
        if measured and run.role in ("verdict", "selection") and not run.fork:
            groups.setdefault(json.dumps(_fixed(run), sort_keys=True, default=str), []).append(run)
    found = [group for group in groups.values() if len(set(map(learning_rate, group))) >= FEWEST_RATES]
    found.sort(key=lambda group: -len({(learning_rate(run), model_size(run)) for run in group}))
    settings = [_fixed(group[0]) for group in found]
    made = []
    for group, fields in zip(found, settings, strict=True):
        # The name of a group of several families: the fields in which it differs from the other groups.
        differ = [name for name, value in fields.items() if any(other.get(name) != value for other in settings)]
        named = listed([f"{name.removeprefix('model.')}={fields[name]}" for name in differ[:3]])
        families = {run.family for run in group}
        label = study.label(families.pop()) if len(families) == 1 else named or study.title
        made.append(Sweep(label, tuple(group)))
    return made


def _fixed(run: Run) -> dict[str, Any]:
    """Return the fields of a run that are equal in its sweep."""
    sizes = [f"model.{name}" for name in SHAPE]
    return {k: v for k, v in flatten(run.identity).items() if k not in ("seed", RATE, *sizes)}


def learning_rates(study: Study) -> Figure | None:
    """Draw the final losses and the largest attention logit against learning rate, and the learning-rate sensitivity
    against size: Wortsman Fig. 1 and 2."""
    groups = dict(zip(PALETTE, sweeps(study)[:MOST_SWEEPS], strict=False))
    trained = [m for m in study.modalities if any(is_trained(run, m) for of in groups.values() for run in of.runs)]
    sizes = sorted({size for sweep in groups.values() for size in sweep.sizes})
    sizes = sizes if len(sizes) <= MOST_SIZES else [sizes[0], sizes[-1]]
    values: dict[str, tuple[str, Value]] = {
        f"final_loss/{m}": (f"final {m} loss (nats)", partial(_capped_loss, modality=m)) for m in trained
    }
    values["largest_attention_logit"] = ("largest |attention logit|", _logit)
    rates: Any = {"xlabel": "learning rate", "x": "optim.lr", "xlog": True}
    counts: Any = {"xlabel": "parameters without embeddings and head", "x": "parameters", "xlog": True}
    rows = []
    for size in sizes:
        row = []
        for statistic, (label, value) in values.items():
            lines = [line for color, of in groups.items() for line in _over(of, size, value, color)]
            title = f"{short(size)} parameters"
            row.append(Panel(statistic, title, label, tuple(lines), log=value is _logit, **rates))
        rows.append(row)
    last = []
    for m in trained:
        lines = [line for color, of in groups.items() for line in _sensitivity(study, of, m, color)]
        last.append(Panel(f"lr_sensitivity/{m}", f"LR sensitivity, {m}", "nats", tuple(lines), **counts))
    title = "Final loss, attention logit and sensitivity by learning rate"
    return figure_of("learning_rates", title, [*rows, last], "Wortsman Fig. 1 and 2", shared=False)


def _over(sweep: Sweep, size: float, value: Value, color: str) -> list[Line]:
    """Return one point per run of a size (× if it diverged) and the line through the medians, by learning rate."""
    lines: list[Line] = []
    by_rate: dict[float, list[float]] = {}
    for run in sorted(sweep.of_size(size), key=learning_rate):
        if run.status.finished and math.isfinite(value(run)):
            by_rate.setdefault(learning_rate(run), []).append(value(run))
            dot = markers([learning_rate(run)], [value(run)], color, sweep.label)
            marker = "x" if run.status.status == "diverged" else "o"
            lines.append(replace(dot, arm=run.arm, seed=run.seed, run=run.name, marker=marker))
    return [*_through(by_rate, color, sweep.label), *lines]


def _sensitivity(study: Study, sweep: Sweep, modality: str, color: str) -> list[Line]:
    """Return the LR sensitivity of each seed against size, and the line through the medians."""
    families = {run.family for run in sweep.runs}
    planned = {arm.point.get(RATE) for arm in study.arms.values() if arm.family in families}
    points: dict[float, list[float]] = {}
    for size in sweep.sizes:
        runs = sweep.of_size(size)
        rates = {float(rate) for rate in planned if isinstance(rate, int | float)} | set(map(learning_rate, runs))
        for seed in sorted({run.seed for run in runs}):
            of_seed = [run for run in runs if run.seed == seed and run.status.finished]
            value = FAMILY_METRICS["lr_sensitivity"].measure(of_seed, modality)
            # The value of a seed that lacks some learning rates cannot be compared.
            if math.isfinite(value) and rates <= set(map(learning_rate, of_seed)):
                points.setdefault(size, []).append(value)
    dots = [markers([size] * len(of), of, color, sweep.label) for size, of in points.items()]
    return [*_through(points, color, sweep.label), *dots]


def _through(values: dict[float, list[float]], color: str, name: str) -> list[Line]:
    """Return the line through the medians of the values at each x; empty for a single x."""
    x, y = np.array(list(values)), np.array([middle(of) for of in values.values()])
    return [Line("", "", None, x, y, role="median", color=color, group=name)] if len(x) > 1 else []


def markers(x: Sequence[float], y: Sequence[float], color: str, name: str) -> Line:
    return Line("", "", None, np.array(x, dtype=float), np.array(y), color=color, marker="o", group=name)


def _capped_loss(run: Run, modality: str) -> float:
    """Return the final loss, or the loss at initialization if the run diverged or ended above it."""
    end, start = final_loss(run, modality).value, initial_loss(run, modality)
    if run.status.status == "diverged" or not math.isfinite(end):
        return start
    return float(np.fmin(end, start))


def _logit(run: Run) -> float:
    """Return the largest logit at the end; if it is not finite, the last finite one."""
    metric = METRICS["largest_attention_logit"]
    value, seen = metric.measure(run, None), metric.series(run, None)[1]
    seen = seen[np.isfinite(seen)]
    return value if math.isfinite(value) else float(seen[-1]) if len(seen) else math.nan
