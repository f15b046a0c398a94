"""Figures over the learning rate and the model size, on the axes of Wortsman et al. (arXiv 2309.14322)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mmqk.lab.formatting import capital, count, listed, nats, number, plural
from mmqk.lab.metrics import (
    FAMILY_METRICS,
    Extrapolation,
    extrapolate,
    final_loss,
    initial_loss,
    is_trained,
)
from mmqk.lab.metrics.rates import learning_rate
from mmqk.lab.metrics.scaling import fit_quadratic
from mmqk.lab.page.figures.captions import LOGIT
from mmqk.lab.page.figures.shapes import Figure, Key, Line, Panel
from mmqk.lab.page.figures.style import INK, PALETTE, ramp
from mmqk.lab.page.figures.sweeps import Sweep, medians, sweeps
from mmqk.lab.runs.load import Run
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import middle

RATE: Any = {"xlabel": "learning rate", "x": "optim.lr", "xlog": True}
SIZES: Any = {"xlabel": "parameters without embeddings and head", "x": "parameters", "xlog": True}
MOST_SWEEPS, MOST_SIZES = 3, 3
FIT_SIZES = 3
Value = Callable[[Run], float]


def lr_sensitivity(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Draw the final loss against learning rate by size, and LR sensitivity against size: Wortsman Fig. 1."""
    every = sweeps(study, arms)
    groups = every[:MOST_SWEEPS]
    if not groups:
        return None
    sizes = sorted({size for sweep in groups for size in sweep.sizes})
    colors = dict(zip(sizes, ramp(len(sizes)), strict=True))
    by_sweep = list(zip(PALETTE, groups, strict=False))
    several = len(sizes) > 1
    if several:
        titles = [(s.label, [(colors[size], s.at(size=size)) for size in s.sizes]) for s in groups]
    else:
        titles = [(_size(sizes[0]), [(color, list(sweep.runs)) for color, sweep in by_sweep])]
    rows, sentences = [], []
    for modality in _trained(study, groups):
        loss = _capped_loss(modality)
        label = f"final {modality} loss (nats per token)"
        row = []
        for title, shown in titles:
            lines = [line for color, runs in shown for line in _over(runs, learning_rate, loss, color)]
            row.append(Panel(f"final_loss/{modality}", title, label, tuple(lines), **RATE))
        panel, sentence = _sensitivity(study, groups, modality)
        if panel.lines:
            row.append(panel)
            sentences.append(sentence)
        rows.append(tuple(row))
    if not rows:
        return None
    keys = [Key(_size(size), colors[size]) for size in sizes] if several else []
    keys += [Key(sweep.label, color) for color, sweep in by_sweep]
    reading = f"{capital('; '.join(sentences))}." if sentences else "Final loss against the learning rate."
    caption = _dots(groups, len(every)) + _given(groups, "their loss at initialization")
    if sentences:
        caption += (
            " Sensitivity (the source's Section 2.2): the mean over the learning rates of min(final loss, loss at "
            "initialization), minus the lowest of these values; over the seeds that have every learning rate."
        )
    return Figure("lr_sensitivity", reading, caption, tuple(rows), _arms(groups), tuple(keys), like)


def _sensitivity(study: Study, groups: Sequence[Sweep], modality: str) -> tuple[Panel, str]:
    """Return the panel of LR sensitivity against size, and a sentence on the largest size."""
    lines, ends = [], []
    sensitivity = FAMILY_METRICS["lr_sensitivity"].measure
    for color, sweep in zip(PALETTE, groups, strict=False):
        points: dict[float, list[float]] = {}
        for size in sweep.sizes:
            runs = [run for run in sweep.at(size=size) if run.status.finished]
            for seed in sorted({run.seed for run in runs}):
                of_seed = [run for run in runs if run.seed == seed]
                value = sensitivity(of_seed, modality)
                # The value of a seed that lacks some learning rates cannot be compared.
                if math.isfinite(value) and _rates(study, sweep, size) <= {
                    learning_rate(run) for run in of_seed
                }:
                    points.setdefault(size, []).append(value)
        if points:
            at = np.array(list(points))
            lines.append(_median(at, [middle(v) for v in points.values()], color))
            lines += [_scatter([size] * len(v), v, color, ".") for size, v in points.items() if len(v) > 1]
            ends.append((max(points), f"{nats(middle(points[max(points)]))} ({sweep.label})"))
    panel = Panel(
        f"lr_sensitivity/{modality}", "LR sensitivity", f"LR sensitivity, {modality} (nats)", tuple(lines),
        shared=False, **SIZES,
    )  # fmt: skip
    if not ends:
        return panel, ""
    return panel, (
        f"the LR sensitivity of the {modality} loss is {listed([words for _, words in ends])} nats at "
        f"{_size(max(size for size, _ in ends))}"
    )


def _rates(study: Study, sweep: Sweep, size: float) -> set[float]:
    """Return the learning rates of all existing and planned runs of a sweep at a size."""
    runs = sweep.at(size=size)
    families = {run.family for run in runs}
    planned = {arm.point.get(RATE["x"]) for arm in study.arms.values() if arm.family in families}
    return {learning_rate(run) for run in runs} | {float(lr) for lr in planned if isinstance(lr, int | float)}


def loss_and_logit_by_lr(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Draw the final loss and the largest attention logit against learning rate: Wortsman Fig. 2."""
    every = sweeps(study, arms)
    groups = every[: len(PALETTE)]
    if not groups:
        return None
    sizes = sorted({size for sweep in groups for size in sweep.sizes})
    shown = sizes if len(sizes) <= MOST_SIZES else [sizes[0], sizes[-1]]
    values: list[tuple[str, str, Value, bool]] = [
        (f"final_loss/{m}", f"final {m} loss (nats per token)", _capped_loss(m), False)
        for m in _trained(study, groups)
    ]
    values.append(("largest_attention_logit", "largest |attention logit|", _logit, True))
    rows = []
    by_sweep = list(zip(PALETTE, groups, strict=False))
    for statistic, label, value, log in values:
        row = []
        for size in shown:
            lines = [
                line for color, s in by_sweep for line in _over(s.at(size=size), learning_rate, value, color)
            ]
            row.append(Panel(statistic, _size(size), label, tuple(lines), log=log, **RATE))
        if any(panel.lines for panel in row):
            rows.append(tuple(row))
    if not rows:
        return None
    top = max(learning_rate(run) for sweep in groups for run in sweep.at(size=shown[-1]))
    last = {
        sweep.label: runs
        for sweep in groups
        if (runs := [r for r in sweep.at(lr=top, size=shown[-1]) if r.status.finished])
    }
    ends = listed([f"{number(middle(map(_logit, runs)))} ({label})" for label, runs in last.items()])
    several = "; medians over runs" if any(len(runs) > 1 for runs in last.values()) else ""
    reading = (
        f"At learning rate {top:g} and {_size(shown[-1])} the largest attention logit ended at {ends}{several}."
        if ends
        else "The largest attention logit against the learning rate."
    )
    caption = _dots(groups, len(every)) + _given(
        groups, "their loss at initialization and their last finite logit"
    )
    if len(shown) < len(sizes):
        caption += f" Shown: the smallest and the largest of {len(sizes)} sizes."
    keys = tuple(Key(sweep.label, color) for color, sweep in by_sweep)
    return Figure("loss_and_logit_by_lr", reading, caption, tuple(rows), _arms(groups), keys, like)


def logit_by_size(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Draw the largest attention logit against parameters: Wortsman Fig. 9.

    Fit one quadratic per learning rate, with the largest size held out. This needs at least four sizes: three for the
    fit and the held-out one.
    """
    every = [sweep for sweep in sweeps(study, arms) if len(sweep.sizes) > FIT_SIZES]
    groups = every[:MOST_SWEEPS]
    if not groups:
        return None
    rates = sorted({lr for sweep in groups for lr in sweep.rates})
    colors = dict(zip(rates, ramp(len(rates)), strict=True))
    panels, predictions = [], []
    for sweep in groups:
        lines: list[Line] = []
        for lr in sweep.rates:
            fits = _extrapolations(sweep, lr)
            if not fits:
                continue
            held_out, color = fits[0].sizes[-1], colors[lr]
            points: dict[float, list[float]] = {}
            for one in fits:
                for size, value in zip(one.sizes, one.logits, strict=True):
                    points.setdefault(size, []).append(value)
            for size, values in points.items():
                finite = [value for value in values if math.isfinite(value)]
                marker = "D" if size == held_out else "o"
                lines.append(_scatter([size] * len(finite), finite, color, marker))
            fitted = [size for size in sorted(points) if size < held_out]
            curve = fit_quadratic(fitted, [middle(points[size]) for size in fitted])
            at = np.geomspace(fitted[0], held_out, 40)
            lines.append(Line("", "", None, at, curve(at), role="fit", color=color))
            predicted, actual = float(curve(held_out)), middle(points[held_out])
            at_rate = f"at learning rate {lr:g} ({sweep.label})"
            words = f"{number(predicted)} predicted, {number(actual)} measured {at_rate}"
            predictions.append((actual, words))
        logit = "largest |attention logit|"
        panels.append(Panel("largest_attention_logit", sweep.label, logit, tuple(lines), log=True, **SIZES))
    if not predictions:
        return None
    largest = _size(max(size for sweep in groups for size in sweep.sizes))
    highest = [words for _, words in sorted(predictions, key=lambda pair: -pair[0])[:2]]
    reading = f"The largest attention logit at {largest}, held out: {'; '.join(highest)}."
    caption = (
        "One point per run: the largest logit of layer 0 at the last probe in the first fifth of the run (source: "
        "block 0, step 2,000 of 100,000). Dashed: for each learning rate a quadratic in log-log through the medians "
        "of all sizes but the largest, which is held out (open diamonds)." + _shown(groups, len(every))
    )
    keys = (
        *(Key(f"learning rate {lr:g}", colors[lr]) for lr in rates),
        Key("held out of the fit", INK, marker="D"),
    )
    return Figure("logit_by_size", reading, caption, (tuple(panels),), _arms(groups), keys, like)


def _extrapolations(sweep: Sweep, lr: float) -> list[Extrapolation]:
    """Return one extrapolation per seed that has every size."""
    runs = [run for run in sweep.at(lr=lr) if run.status.finished]
    by_seed = [[run for run in runs if run.seed == seed] for seed in sorted({run.seed for run in runs})]
    fits = [fit for of_seed in by_seed for fit in extrapolate(of_seed)[0]]
    return [fit for fit in fits if fit.sizes[-1] == sweep.sizes[-1]]


def _over(runs: Iterable[Run], key: Value, value: Value, color: str) -> list[Line]:
    """Return one point per run (× if it diverged) and the line through the medians."""
    done = [run for run in runs if run.status.finished and math.isfinite(value(run))]
    lines = []
    if len({key(run) for run in done}) > 1:
        at = medians(done, key, value)
        lines.append(_median(np.array(list(at)), list(at.values()), color))
    for run in done:
        marker = "x" if run.status.status == "diverged" else "o"
        lines.append(_scatter([key(run)], [value(run)], color, marker, run))
    return lines


def _median(at: np.ndarray, values: Sequence[float], color: str) -> Line:
    return Line("", "", None, at.astype(float), np.array(values), role="median", color=color)


def _scatter(
    at: Sequence[float], values: Sequence[float], color: str, marker: str, run: Run | None = None
) -> Line:
    x, y = np.array(at, dtype=float), np.array(values, dtype=float)
    arm, seed, name = (run.arm, run.seed, run.name) if run else ("", None, "")
    return Line(arm, "", seed, x, y, run=name, color=color, marker=marker)


def _capped_loss(modality: str) -> Value:
    def value(run: Run) -> float:
        end, start = final_loss(run, modality).value, initial_loss(run, modality)
        if run.status.status == "diverged" or not math.isfinite(end):
            return start
        return min(end, start) if math.isfinite(start) else end

    return value


def _logit(run: Run) -> float:
    value = LOGIT(run, None)
    if math.isfinite(value):
        return value
    seen = run.combined("attn_logit_absmax", np.max)[1]
    seen = seen[np.isfinite(seen)]
    return float(seen[-1]) if len(seen) else math.nan


def _trained(study: Study, groups: Sequence[Sweep]) -> list[str]:
    return [m for m in study.modalities if any(is_trained(run, m) for sweep in groups for run in sweep.runs)]


def _arms(groups: Sequence[Sweep]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(arm for sweep in groups for arm in sweep.arms))


def _given(groups: Sequence[Sweep], what: str) -> str:
    """Return a sentence on the value at which diverged runs are drawn; empty if no run diverged."""
    diverged = any(run.status.status == "diverged" for sweep in groups for run in sweep.runs)
    return f" Diverged runs (×) are drawn at {what}." if diverged else ""


def _dots(groups: Sequence[Sweep], every: int) -> str:
    runs = [run for sweep in groups for run in sweep.runs]
    chosen = sum(run.role == "selection" and run.status.finished for run in runs)
    left = sum(not run.status.finished for run in runs)
    words = f"One point per run ({len(runs) - left}); lines through the medians."
    if chosen:
        words += (
            f" Of these, {plural(chosen, 'run')} only selected a learning rate; verdicts do not count them."
        )
    words += f" Not shown: {plural(left, 'unfinished run')}." if left else ""
    return words + _shown(groups, every)


def _shown(groups: Sequence[Sweep], every: int) -> str:
    """Return a sentence on the number of drawn configurations; empty if all are drawn."""
    return f" Shown: {len(groups)} of {every} configurations." if len(groups) < every else ""


def _size(size: float) -> str:
    return f"{count(size)} parameters"
