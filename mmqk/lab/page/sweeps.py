"""Figures over the learning rate and the model size, on the axes of Wortsman et al. (arXiv 2309.14322), and the
figures that a grid names under ``report.figures``.

The runs of a sweep differ only in learning rate and model size. Sweeps come from the configurations of the runs, so
they also exist without a grid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmqk.lab.formatting import count, listed
from mmqk.lab.metrics import (
    FAMILY_METRICS,
    METRICS,
    Extrapolation,
    extrapolate,
    final_loss,
    initial_loss,
    is_trained,
    model_size,
)
from mmqk.lab.metrics.families import RATE, fit_quadratic, learning_rate
from mmqk.lab.page.draw import PALETTE, families, ramp
from mmqk.lab.page.figure import Figure, Line, Panel
from mmqk.lab.page.figures import final_norm, training_loss
from mmqk.lab.runs import Run
from mmqk.lab.verdicts.study import Study, as_list
from mmqk.lab.verdicts.verdicts import middle
from mmqk.store import UserError, flatten

SIZE = ("model.d_model", "model.n_layers", "model.n_heads", "model.n_kv_heads", "model.d_head", "model.d_ff")
FEWEST_RATES = 3
RATES: Any = {"xlabel": "learning rate", "x": "optim.lr", "xlog": True}
SIZES: Any = {"xlabel": "parameters without embeddings and head", "x": "parameters", "xlog": True}
MOST_SWEEPS, MOST_SIZES = 3, 3
FIT_SIZES = 3
POINTS = "One point per run (× if it diverged); lines through the medians. At most {} configurations are drawn."
CAPPED = " A diverged run has its loss at initialization, and its last finite logit."
Value = Callable[[Run], float]


@dataclass(frozen=True)
class Sweep:
    """Runs of one configuration at several learning rates, and perhaps several sizes; ``label`` is its name."""

    label: str
    runs: tuple[Run, ...]

    @property
    def rates(self) -> list[float]:
        """Learning rates, ascending."""
        return sorted(set(map(learning_rate, self.runs)))

    @property
    def sizes(self) -> list[float]:
        """Numbers of parameters without embeddings and head, ascending."""
        return sorted({model_size(run) for run in self.runs})

    def at(self, *, lr: float | None = None, size: float | None = None) -> list[Run]:
        """Return the runs with this learning rate and this size; None matches all."""
        alike = (run for run in self.runs if lr in (None, learning_rate(run)))
        return [run for run in alike if size in (None, model_size(run))]


def sweeps(study: Study, arms: Sequence[str] = ()) -> list[Sweep]:
    """Return the groups with at least three learning rates, the largest group first. If ``arms`` is given
    (names of arms or families), use only their runs."""
    groups: dict[str, list[Run]] = {}
    for run in {run.name: run for run in study.runs}.values():
        wanted = not arms or run.arm in arms or run.family in arms
        measured = run.identity and run.tags and learning_rate(run) > 0 and model_size(run) > 0
        if wanted and measured and run.role in ("verdict", "selection") and not run.fork:
            rest = {k: v for k, v in flatten(run.identity).items() if k not in ("seed", RATE, *SIZE)}
            groups.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(run)
    found = [group for group in groups.values() if len(set(map(learning_rate, group))) >= FEWEST_RATES]
    found.sort(key=lambda group: -len({(learning_rate(run), model_size(run)) for run in group}))
    settings = [flatten(group[0].identity) for group in found]
    made = []
    for group, fields in zip(found, settings, strict=True):
        names = list(dict.fromkeys(run.family for run in group))
        if len(names) > 1:  # name the fields in which it differs from the other groups
            differ = [
                f"{name.removeprefix('model.')}={value}"
                for name, value in fields.items()
                if name not in ("seed", RATE, *SIZE) and any(other.get(name) != value for other in settings)
            ]
            made.append(Sweep(listed(differ[:3]) or study.title, tuple(group)))
        else:
            made.append(Sweep(study.label(names[0]), tuple(group)))
    return made


def sweep_figures(study: Study) -> list[Figure]:
    """Return the figures that the grid names, then the figures over learning rate and size that the runs have the
    numbers for. While runs of the grid are missing or unfinished, a named figure without numbers is left out.

    Raises:
        UserError: the grid names arms that it does not have, or that have no runs for the figure.
    """
    named = list(filter(None, (_named(study, entry) for entry in study.report.get("figures") or ())))
    taken = {figure.like for figure in named}
    others = [make(study, (), like) for make, like in SWEEPS.values() if like not in taken]
    figures: dict[str, Figure] = {}
    for figure in (*named, *filter(None, others)):
        base = re.sub(r"[^a-z0-9]+", "-", (figure.like or figure.name).lower()).strip("-") or figure.name
        name, number = base, 2
        while name in figures:
            name, number = f"{base}-{number}", number + 1
        figures[name] = replace(figure, name=name)
    return list(figures.values())


def _named(study: Study, entry: Mapping[str, Any]) -> Figure | None:
    kind, members = str(entry.get("kind")), families(study)
    names = as_list(entry.get("arms"))
    if unknown := [arm for arm in names if arm not in study.arms and arm not in members]:
        raise UserError(f"report.figures: {kind} names the arm {unknown[0]!r}, which the grid does not have")
    arms = tuple(dict.fromkeys(a for name in names for a in ([name] if name in study.arms else members[name])))
    make, like = KINDS[kind]
    figure = make(study, arms, str(entry.get("like") or like))
    if figure is None and not study.missing and all(run.status.finished for run in study.runs):
        raise UserError(
            f"report.figures: the runs have no numbers for {kind}: name arms that measured it, or leave it out"
        )
    return figure


def lr_sensitivity(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Draw the final loss against learning rate by size, and LR sensitivity against size: Wortsman Fig. 1."""
    groups = list(zip(PALETTE, sweeps(study, arms)[:MOST_SWEEPS], strict=False))
    sizes = sorted({size for _, sweep in groups for size in sweep.sizes})
    shades = dict(zip(sizes, ramp(len(sizes)), strict=True))
    rows = []
    for modality in _trained(study, groups):
        loss, label = _capped_loss(modality), f"final {modality} loss (nats per token)"
        if len(sizes) > 1:
            columns = [
                (sweep.label, [(shades[n], _size(n), sweep.at(size=n)) for n in sweep.sizes]) for _, sweep in groups
            ]
        else:
            columns = [(_size(sizes[0]), [(color, sweep.label, list(sweep.runs)) for color, sweep in groups])]
        row = [
            Panel(f"final_loss/{modality}", title, label, tuple(
                line for color, name, runs in shown for line in _over(runs, loss, color, name)), **RATES)
            for title, shown in columns
        ]  # fmt: skip
        lines = [line for color, sweep in groups for line in _sensitivity(study, sweep, modality, color)]
        if lines:
            label = f"LR sensitivity, {modality} (nats)"
            statistic = f"lr_sensitivity/{modality}"
            row.append(Panel(statistic, "LR sensitivity", label, tuple(lines), shared=False, **SIZES))
        rows.append(tuple(row))
    caption = POINTS.format(MOST_SWEEPS) + CAPPED + (
        " Sensitivity (the source's Section 2.2): the mean over the learning rates of min(final loss, loss at "
        "initialization), minus the lowest of these values; over the seeds that have every learning rate."
    )
    title = "Final loss and learning-rate sensitivity"
    return Figure("lr_sensitivity", title, caption, tuple(rows), like) if rows else None


def _sensitivity(study: Study, sweep: Sweep, modality: str, color: str) -> list[Line]:
    """Return the LR sensitivity of each seed against size, and the line through the medians."""
    families_of = {run.family for run in sweep.runs}
    planned = {arm.point.get(RATE) for arm in study.arms.values() if arm.family in families_of}
    points: dict[float, list[float]] = {}
    for size in sweep.sizes:
        runs = [run for run in sweep.at(size=size) if run.status.finished]
        rates = {float(rate) for rate in planned if isinstance(rate, int | float)}
        rates |= set(map(learning_rate, sweep.at(size=size)))
        for seed in sorted({run.seed for run in runs}):
            of_seed = [run for run in runs if run.seed == seed]
            value = FAMILY_METRICS["lr_sensitivity"].measure(of_seed, modality)
            # The value of a seed that lacks some learning rates cannot be compared.
            if math.isfinite(value) and rates <= set(map(learning_rate, of_seed)):
                points.setdefault(size, []).append(value)
    if not points:
        return []
    medians = [middle(values) for values in points.values()]
    dots = [_dots([size] * len(v), v, color, sweep.label) for size, v in points.items()]
    return [_median(list(points), medians, color, sweep.label), *dots]


def loss_and_logit_by_lr(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Draw the final loss and the largest attention logit against learning rate: Wortsman Fig. 2."""
    groups = list(zip(PALETTE, sweeps(study, arms), strict=False))
    sizes = sorted({size for _, sweep in groups for size in sweep.sizes})
    shown = sizes if len(sizes) <= MOST_SIZES else [sizes[0], sizes[-1]]
    values: list[tuple[str, str, Value, bool]] = [
        (f"final_loss/{m}", f"final {m} loss (nats per token)", _capped_loss(m), False)
        for m in _trained(study, groups)
    ]
    values.append(("largest_attention_logit", "largest |attention logit|", _logit, True))
    rows = []
    for statistic, label, value, log in values:
        row = [
            Panel(statistic, _size(size), label, tuple(
                line for color, sweep in groups for line in _over(sweep.at(size=size), value, color, sweep.label)
            ), log=log, **RATES)
            for size in shown
        ]  # fmt: skip
        rows += [tuple(row)] if any(panel.lines for panel in row) else []
    caption = f"{POINTS.format(len(PALETTE))}{CAPPED} Of more than {MOST_SIZES} sizes: the smallest and the largest."
    title = "Final loss and largest attention logit by learning rate"
    return Figure("loss_and_logit_by_lr", title, caption, tuple(rows), like) if rows else None


def logit_by_size(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Draw the largest attention logit against parameters: Wortsman Fig. 9.

    Fit one quadratic per learning rate, with the largest size held out. This needs at least four sizes: three for the
    fit and the held-out one.
    """
    groups = [sweep for sweep in sweeps(study, arms) if len(sweep.sizes) > FIT_SIZES][:MOST_SWEEPS]
    rates = sorted({lr for sweep in groups for lr in sweep.rates})
    colors = dict(zip(rates, ramp(len(rates)), strict=True))
    panels = []
    for sweep in groups:
        lines: list[Line] = []
        for lr in sweep.rates:
            fits = _extrapolations(sweep, lr)
            if not fits:
                continue
            held_out, color, name = fits[0].sizes[-1], colors[lr], f"learning rate {lr:g}"
            points: dict[float, list[float]] = {}
            for one in fits:
                for size, value in zip(one.sizes, one.logits, strict=True):
                    points.setdefault(size, []).append(value)
            for size, measured in points.items():
                seen = [value for value in measured if math.isfinite(value)]
                lines.append(_dots([size] * len(seen), seen, color, name, "D" if size == held_out else "o"))
            fitted = [size for size in sorted(points) if size < held_out]
            curve = fit_quadratic(fitted, [middle(points[size]) for size in fitted])
            at = np.geomspace(fitted[0], held_out, 40)
            lines.append(Line("", "", None, at, curve(at), role="fit", color=color, group=name))
        if lines:
            label = "largest |attention logit|"
            panels.append(Panel("largest_attention_logit", sweep.label, label, tuple(lines), log=True, **SIZES))
    caption = (
        "One point per run: the largest logit of layer 0 at the last probe in the first fifth of the run (source: "
        "block 0, step 2,000 of 100,000). Dotted: for each learning rate a quadratic in log-log through the medians "
        "of all sizes but the largest, which is held out (open diamonds)."
    )
    title = "Largest attention logit by size"
    return Figure("logit_by_size", title, caption, (tuple(panels),), like) if panels else None


def _extrapolations(sweep: Sweep, lr: float) -> list[Extrapolation]:
    """Return one extrapolation per seed that has every size."""
    runs = [run for run in sweep.at(lr=lr) if run.status.finished]
    by_seed = [[run for run in runs if run.seed == seed] for seed in sorted({run.seed for run in runs})]
    fits = [fit for of_seed in by_seed for fit in extrapolate(of_seed)[0]]
    return [fit for fit in fits if fit.sizes[-1] == sweep.sizes[-1]]


def _over(runs: Iterable[Run], value: Value, color: str, name: str) -> list[Line]:
    """Return one point per run (× if it diverged) and the line through the medians, by learning rate."""
    done = [run for run in runs if run.status.finished and math.isfinite(value(run))]
    by_rate: dict[float, list[float]] = {}
    for run in sorted(done, key=learning_rate):
        by_rate.setdefault(learning_rate(run), []).append(value(run))
    lines = [_median(list(by_rate), list(map(middle, by_rate.values())), color, name)] if len(by_rate) > 1 else []
    for run in done:
        dot = _dots([learning_rate(run)], [value(run)], color, name, "x" if run.status.status == "diverged" else "o")
        lines.append(replace(dot, arm=run.arm, seed=run.seed, run=run.name))
    return lines


def _median(x: Sequence[float], y: Sequence[float], color: str, name: str) -> Line:
    return Line("", "", None, np.array(x, dtype=float), np.array(y), role="median", color=color, group=name)


def _dots(x: Sequence[float], y: Sequence[float], color: str, name: str, marker: str = "o") -> Line:
    return Line("", "", None, np.array(x, dtype=float), np.array(y), color=color, marker=marker, group=name)


def _capped_loss(modality: str) -> Value:
    def value(run: Run) -> float:
        end, start = final_loss(run, modality).value, initial_loss(run, modality)
        if run.status.status == "diverged" or not math.isfinite(end):
            return start
        return min(end, start) if math.isfinite(start) else end

    return value


def _logit(run: Run) -> float:
    value = METRICS["largest_attention_logit"].measure(run, None)
    seen = run.combined("attn_logit_absmax", np.max)[1]
    seen = seen[np.isfinite(seen)]
    return value if math.isfinite(value) else float(seen[-1]) if len(seen) else math.nan


def _trained(study: Study, groups: Sequence[tuple[str, Sweep]]) -> list[str]:
    return [m for m in study.modalities if any(is_trained(run, m) for _, sweep in groups for run in sweep.runs)]


def _size(size: float) -> str:
    return f"{count(size)} parameters"


SWEEPS = {
    "lr_sensitivity": (lr_sensitivity, "Wortsman Fig. 1"),
    "loss_and_logit_by_lr": (loss_and_logit_by_lr, "Wortsman Fig. 2"),
    "logit_by_size": (logit_by_size, "Wortsman Fig. 9"),
}
# The kinds that a grid may name, and the published figure of each; the names are `mmqk.lab.grid.claims.FIGURE_KINDS`.
KINDS: dict[str, tuple[Callable[[Study, Sequence[str], str], Figure | None], str]] = {
    "output_norm": (final_norm, "Chameleon Fig. 5a"),
    "training_loss": (training_loss, ""),
    **SWEEPS,
}
