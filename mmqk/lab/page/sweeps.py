"""The figure over the learning rate, on the axes of Wortsman et al. (arXiv 2309.14322), and the ranking of remedies,
each at its best learning rate.

The runs of a sweep differ only in learning rate and model size. Sweeps come from the configurations of the runs, so
they also exist without a grid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from mmqk.lab.formatting import DASH, count, decimals, exp, fixed, listed, nats, number, slug
from mmqk.lab.metrics import FAMILY_METRICS, METRICS, final_loss, initial_loss, is_trained, model_size
from mmqk.lab.metrics.families import RATE, learning_rate
from mmqk.lab.page.figure import GRAY, PALETTE, Figure, Line, Panel
from mmqk.lab.page.figures import figure_of
from mmqk.lab.page.tables import Cell, Table, once, table
from mmqk.lab.runs import Run
from mmqk.lab.stats.effects import Effect
from mmqk.lab.verdicts.measure import middle
from mmqk.lab.verdicts.ranking import Ranked, Ranking
from mmqk.lab.verdicts.study import Study
from mmqk.store import flatten

SIZE = ("model.d_model", "model.n_layers", "model.n_heads", "model.n_kv_heads", "model.d_head", "model.d_ff")
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
    return {k: v for k, v in flatten(run.identity).items() if k not in ("seed", RATE, *SIZE)}


def learning_rates(study: Study) -> Figure | None:
    """Draw the final losses and the largest attention logit against learning rate, and the learning-rate sensitivity
    against size: Wortsman Fig. 1 and 2."""
    groups = dict(zip(PALETTE, sweeps(study)[:MOST_SWEEPS], strict=False))
    trained = [m for m in study.modalities if any(is_trained(run, m) for of in groups.values() for run in of.runs)]
    sizes = sorted({size for sweep in groups.values() for size in sweep.sizes})
    sizes = sizes if len(sizes) <= MOST_SIZES else [sizes[0], sizes[-1]]
    values = {f"final_loss/{m}": (f"final {m} loss (nats)", _capped_loss(m)) for m in trained}
    values["largest_attention_logit"] = ("largest |attention logit|", _logit)
    rates: Any = {"xlabel": "learning rate", "x": "optim.lr", "xlog": True}
    counts: Any = {"xlabel": "parameters without embeddings and head", "x": "parameters", "xlog": True}
    rows = []
    for size in sizes:
        row = []
        for statistic, (label, value) in values.items():
            lines = [line for color, of in groups.items() for line in _over(of, size, value, color)]
            title = f"{count(size)} parameters"
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
            dot = _dots([learning_rate(run)], [value(run)], color, sweep.label)
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
    dots = [_dots([size] * len(of), of, color, sweep.label) for size, of in points.items()]
    return [*_through(points, color, sweep.label), *dots]


def _through(values: dict[float, list[float]], color: str, name: str) -> list[Line]:
    """Return the line through the medians of the values at each x; empty for a single x."""
    x, y = np.array(list(values)), np.array([middle(of) for of in values.values()])
    return [Line("", "", None, x, y, role="median", color=color, group=name)] if len(x) > 1 else []


def _dots(x: Sequence[float], y: Sequence[float], color: str, name: str) -> Line:
    return Line("", "", None, np.array(x, dtype=float), np.array(y), color=color, marker="o", group=name)


def _capped_loss(modality: str) -> Value:
    def value(run: Run) -> float:
        end, start = final_loss(run, modality).value, initial_loss(run, modality)
        if run.status.status == "diverged" or not math.isfinite(end):
            return start
        return min(end, start) if math.isfinite(start) else end

    return value


def _logit(run: Run) -> float:
    """Return the largest logit at the end; if it is not finite, the last finite one."""
    metric = METRICS["largest_attention_logit"]
    value, seen = metric.measure(run, None), metric.series(run, None)[1]
    seen = seen[np.isfinite(seen)]
    return value if math.isfinite(value) else float(seen[-1]) if len(seen) else math.nan


# A ranking ----------------------------------------------------------------------------------------------------------


def ranking_figure(ranking: Ranking) -> Figure | None:
    """Draw the loss difference against learning-rate sensitivity and against time per step."""
    shown = [row for row in ranking.rows if row.difference and math.isfinite(row.difference.value)]
    sensitivity = [(row, row.sensitivity) for row in [*shown, *ranking.controls] if math.isfinite(row.sensitivity)]
    panels = [
        _remedies(ranking, sensitivity, "learning-rate sensitivity (nats)", "lr_sensitivity"),
        _remedies(ranking, [(r, exp(r.time.value)) for r in shown if r.time], "relative time per step", "time_ratio"),
    ]
    return figure_of("ranking", "Loss against sensitivity and time", [[panel for panel in panels if panel.lines]])


def _remedies(ranking: Ranking, points: Sequence[tuple[Ranked, float]], label: str, x_name: str) -> Panel:
    lines: list[Line] = []
    for row, x in points:
        group, color = ("on the Pareto front", PALETTE[1]) if row.arm in ranking.front else ("other remedies", GRAY)
        group, color = (group, color) if row.difference else ("no remedy", PALETTE[0])
        y = row.difference.value if row.difference else 0.0
        lines.append(replace(_dots([x], [y], color, group), arm=row.arm))
    y_label = "loss minus loss without remedy (nats)"
    return Panel("loss difference", "", y_label, tuple(lines), xlabel=label, x=x_name)


def ranking_table(study: Study, ranking: Ranking) -> Table | None:
    """Return the arms, best first; the arms without a remedy are last."""
    heads = ["Remedy", "Difference (nats)", "Best learning rate", "Trains", "Sensitivity", "Largest logit", "Ratio"]
    heads += [*(f"Growth, {m}" for m in study.modalities), "Failed", "Time", "Parameters", "Front"]
    rows = [
        [
            Cell(study.label(row.arm), f"#arm-{slug(row.arm)}"),
            f"0 (loss {nats(row.loss)})" if row.arm == row.control else interval(row.difference),
            f"{row.rate:g}{'*' if row.at_edge else ''}",
            f"{sum(row.trains.values())} of {len(row.trains)}",
            nats(row.sensitivity),
            number(row.logit),
            interval(row.logit_ratio, ratio=True),
            *(DASH if math.isnan(growth) else number(growth) for growth in row.growth.values()),
            f"{row.failed} of {row.runs}",
            interval(row.time, ratio=True),
            DASH if row.parameters is None else f"{row.parameters:+,}" if row.parameters else "0",
            "yes" if row.arm in ranking.front else "",
        ]
        for row in [*ranking.rows, *ranking.controls]
    ]
    unfinished = "; ".join(map(study.label, ranking.unfinished))
    note = f"Not ranked, because their runs have not finished: {unfinished}." if unfinished else ""
    return table("Remedies by loss", heads, rows, 1, 1, note, sortable=True)


def interval(effect: Effect | None, ratio: bool = False) -> str:
    """Return a difference with its interval, ``-0.031 (-0.052 to -0.010)``; for the logarithm of a ratio,
    ``×1.20 (1.15 to 1.25)``."""
    if effect is None:
        return DASH
    if not math.isfinite(effect.value):
        return "diverged"
    values = [effect.value, *((effect.low, effect.high) if effect.has_interval else ())]
    if ratio:
        value, *ends = (f"{exp(log):.2f}" if exp(log) < 100 else number(exp(log)) for log in values)
        value = f"×{value}"
    else:
        places = decimals(effect.error) if effect.has_interval else 2
        value, *ends = (fixed(one, places, "+") for one in values)
    return f"{value} ({' to '.join(ends)})" if ends else value


def ranking_csv(study: Study, ranking: Ranking) -> str:
    """Return the numbers of the table with 6 digits, one row per arm."""
    rows = []
    for row in [*ranking.rows, *ranking.controls]:
        record: dict[str, Any] = {"arm": row.arm, "label": study.label(row.arm), "control": row.control}
        record |= {"seeds": row.seeds, "rate": row.rate, "at_edge": row.at_edge, "loss": row.loss}
        record |= {"sensitivity": row.sensitivity, "trains": sum(row.trains.values()), "rates": len(row.trains)}
        record |= {"logit": row.logit, **{f"growth_{modality}": growth for modality, growth in row.growth.items()}}
        record |= {"failed": row.failed, "runs": row.runs, "parameters": row.parameters}
        record["front"] = row.arm in ranking.front
        effects = {"difference": row.difference, "logit_ratio": row.logit_ratio, "time_ratio": row.time}
        for name, effect in effects.items():
            values = (effect.value, effect.low, effect.high) if effect else (math.nan,) * 3
            scaled = values if name == "difference" else map(exp, values)
            record |= dict(zip((name, f"{name}_low", f"{name}_high"), scaled, strict=True))
        rows.append(record)
    frame = pd.DataFrame(rows).astype({"at_edge": int, "front": int, "parameters": "Int64"})
    return frame.to_csv(index=False, lineterminator="\n", float_format="%.6g")
