"""Figures over the learning rate and the model size, on the axes of Wortsman et al. (arXiv 2309.14322)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mmqk.analysis.formatting import capital, count, listed, nats, number
from mmqk.analysis.metrics import (
    FAMILY_METRICS,
    Extrapolation,
    extrapolate,
    final_loss,
    initial_loss,
    is_trained,
)
from mmqk.analysis.runs.load import Run
from mmqk.analysis.verdicts.study import Study
from mmqk.analysis.verdicts.verdicts import middle
from mmqk.report.figures.captions import LOGIT
from mmqk.report.figures.shapes import Figure, Key, Line, Panel
from mmqk.report.figures.style import PALETTE, ramp
from mmqk.report.figures.sweeps import Sweep, medians, rate, sweeps

RATE: Any = {"xlabel": "learning rate", "x": "optim.lr", "xlog": True}
SIZES: Any = {"xlabel": "parameters without embeddings and head", "x": "parameters", "xlog": True}
MOST_SWEEPS, MOST_SIZES = 3, 3
FIT_SIZES = 3
Value = Callable[[Run], float]


def lr_sensitivity(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Final loss against learning rate by size, and LR sensitivity against size: Wortsman Fig. 1."""
    found = sweeps(study, arms)[:MOST_SWEEPS]
    if not found:
        return None
    sizes = sorted({size for sweep in found for size in sweep.sizes})
    colours = dict(zip(sizes, ramp(len(sizes)), strict=True))
    rows, said = [], []
    for modality in _trained(study, found):
        loss = _capped_loss(modality)
        label = f"final {modality} loss (nats a token)"
        if len(sizes) == 1:
            lines = [
                line
                for colour, sweep in zip(PALETTE, found, strict=False)
                for line in _over(sweep.runs, rate, loss, colour)
            ]
            row = [Panel(f"final_loss/{modality}", _size(sizes[0]), label, tuple(lines), **RATE)]
        else:
            row = [
                Panel(
                    f"final_loss/{modality}",
                    sweep.label,
                    label,
                    tuple(
                        line
                        for size in sweep.sizes
                        for line in _over(sweep.at(size=size), rate, loss, colours[size])
                    ),
                    **RATE,
                )
                for sweep in found
            ]
        panel, sentence = _sensitivity(study, found, modality)
        if panel.lines:
            row.append(panel)
            said.append(sentence)
        rows.append(tuple(row))
    if not rows:
        return None
    several = len(sizes) > 1
    keys = [Key(_size(size), colours[size]) for size in sizes] if several else []
    keys += [Key(s.label, c, arms=s.arms) for c, s in zip(PALETTE, found, strict=False)]
    reading = f"{capital('; '.join(said))}." if said else "Final loss against the learning rate."
    caption = _dots(found) + _given(found, "its loss at initialisation")
    if said:
        caption += (
            " Sensitivity: mean over the learning rates of min(final loss, loss at initialisation) less the best of "
            "them (the source's Section 2.2), of the seeds that have every learning rate."
        )
    return Figure("lr_sensitivity", reading, caption, tuple(rows), _arms(found), tuple(keys), like)


def _sensitivity(study: Study, found: Sequence[Sweep], modality: str) -> tuple[Panel, str]:
    """The panel of LR sensitivity against size, and a sentence on the largest size."""
    lines, ends = [], []
    sensitivity = FAMILY_METRICS["lr_sensitivity"].measure
    for colour, sweep in zip(PALETTE, found, strict=False):
        points: dict[float, list[float]] = {}
        for size in sweep.sizes:
            runs = [run for run in sweep.at(size=size) if run.status.finished]
            for seed in sorted({run.seed for run in runs}):
                own = [run for run in runs if run.seed == seed]
                value = sensitivity(own, modality)
                # A seed that lacks some learning rates would be another number.
                if math.isfinite(value) and _rates(study, sweep, size) <= {rate(run) for run in own}:
                    points.setdefault(size, []).append(value)
        if points:
            at = np.array(list(points))
            lines.append(_median(at, [middle(v) for v in points.values()], colour))
            lines += [
                Line(
                    "", "", None, np.full(len(v), size), np.array(v), colour=colour, marker=".", scatter=True
                )
                for size, v in points.items()
                if len(v) > 1
            ]
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
    """The learning rates that a sweep has or was planned to have at a size."""
    runs = sweep.at(size=size)
    families = {run.family for run in runs}
    planned = {arm.point.get(RATE["x"]) for arm in study.arms.values() if arm.family in families}
    return {rate(run) for run in runs} | {float(lr) for lr in planned if isinstance(lr, int | float)}


def loss_and_logit_by_lr(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Final loss and largest attention logit against learning rate: Wortsman Fig. 2."""
    found = sweeps(study, arms)[: len(PALETTE)]
    if not found:
        return None
    sizes = sorted({size for sweep in found for size in sweep.sizes})
    shown = sizes if len(sizes) <= MOST_SIZES else [sizes[0], sizes[-1]]
    values: list[tuple[str, str, Value, bool]] = [
        (f"final_loss/{m}", f"final {m} loss (nats a token)", _capped_loss(m), False)
        for m in _trained(study, found)
    ]
    values.append(("largest_attention_logit", "largest |attention logit|", _logit, True))
    rows = []
    for statistic, label, value, log in values:
        row = [
            Panel(
                statistic,
                _size(size),
                label,
                tuple(
                    line
                    for colour, sweep in zip(PALETTE, found, strict=False)
                    for line in _over(sweep.at(size=size), rate, value, colour)
                ),
                log=log,
                **RATE,
            )
            for size in shown
        ]
        if any(panel.lines for panel in row):
            rows.append(tuple(row))
    if not rows:
        return None
    top = max(rate(run) for sweep in found for run in sweep.at(size=shown[-1]))
    last = {
        sweep.label: runs
        for sweep in found
        if (runs := [r for r in sweep.at(lr=top, size=shown[-1]) if r.status.finished])
    }
    ends = listed([f"{number(middle(map(_logit, runs)))} ({label})" for label, runs in last.items()])
    several = "; medians over runs" if any(len(runs) > 1 for runs in last.values()) else ""
    reading = (
        f"At learning rate {top:g} and {_size(shown[-1])} the largest attention logit ended at {ends}{several}."
        if ends
        else "The largest attention logit against the learning rate."
    )
    caption = _dots(found) + _given(found, "its loss at initialisation and its last finite logit")
    if len(shown) < len(sizes):
        caption += f" Smallest and largest of {len(sizes)} sizes."
    keys = tuple(Key(s.label, c, arms=s.arms) for c, s in zip(PALETTE, found, strict=False))
    return Figure("loss_and_logit_by_lr", reading, caption, tuple(rows), _arms(found), keys, like)


def logit_by_size(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Largest attention logit against parameters, a quadratic a learning rate, the largest size held out: Wortsman
    Fig. 9. Needs four sizes: three for the fit."""
    found = [sweep for sweep in sweeps(study, arms) if len(sweep.sizes) > FIT_SIZES][:MOST_SWEEPS]
    if not found:
        return None
    rates = sorted({lr for sweep in found for lr in sweep.rates})
    colours = dict(zip(rates, ramp(len(rates)), strict=True))
    panels, said = [], []
    for sweep in found:
        lines: list[Line] = []
        for lr in sweep.rates:
            read = _extrapolations(sweep, lr)
            if not read:
                continue
            held, colour = read[0].sizes[-1], colours[lr]
            points: dict[float, list[float]] = {}
            for one in read:
                for size, value in zip(one.sizes, one.logits, strict=True):
                    points.setdefault(size, []).append(value)
            for size, values in points.items():
                finite = [value for value in values if math.isfinite(value)]
                marker = "D" if size == held else "o"
                lines.append(_scatter([size] * len(finite), finite, colour, marker))
            fitted = [size for size in sorted(points) if size < held]
            curve = fit_quadratic(fitted, [middle(points[size]) for size in fitted])
            at = np.geomspace(fitted[0], held, 40)
            lines.append(Line("", "", None, at, curve(at), role="fit", colour=colour))
            predicted, actual = float(curve(np.array([held]))[0]), middle(points[held])
            at_rate = f"at learning rate {lr:g} ({sweep.label})"
            words = f"{number(predicted)} predicted, {number(actual)} measured {at_rate}"
            said.append((actual, words))
        panels.append(
            Panel(
                "largest_attention_logit",
                sweep.label,
                "largest |attention logit|",
                tuple(lines),
                log=True,
                **SIZES,
            )
        )
    if not said:
        return None
    largest = _size(max(size for sweep in found for size in sweep.sizes))
    highest = [words for _, words in sorted(said, key=lambda pair: -pair[0])[:2]]
    reading = f"The largest attention logit at {largest}, held out: {'; '.join(highest)}."
    caption = (
        "A point a run: the largest logit of layer 0 at the last probe of the first fifth of the run (the source: "
        "block 0, step 2,000 of 100,000). Dashed: for each learning rate a quadratic in log-log through the medians "
        "of all sizes but the largest, which is held out (open diamonds)."
    )
    keys = (
        *(Key(f"learning rate {lr:g}", colours[lr]) for lr in rates),
        Key("held out of the fit", "#1b1f24", marker="D"),
    )
    return Figure("logit_by_size", reading, caption, (tuple(panels),), _arms(found), keys, like)


def _extrapolations(sweep: Sweep, lr: float) -> list[Extrapolation]:
    """One for each seed that has every size."""
    runs = [run for run in sweep.at(lr=lr) if run.status.finished]
    by_seed = [[run for run in runs if run.seed == seed] for seed in sorted({run.seed for run in runs})]
    found = [one for of_seed in by_seed for one in extrapolate(of_seed)[0]]
    return [one for one in found if one.sizes[-1] == sweep.sizes[-1]]


def fit_quadratic(sizes: Sequence[float], values: Sequence[float]) -> Callable[[np.ndarray], np.ndarray]:
    """The least-squares quadratic of log value in log size, as a function of size."""
    # Centred: powers of log10 of a size are nearly parallel otherwise.
    x = np.log10(np.asarray(sizes, dtype=float))
    centre = x.mean()
    coefficients = np.polyfit(x - centre, np.log10(np.asarray(values, dtype=float)), 2)
    return lambda at: 10 ** np.polyval(coefficients, np.log10(at) - centre)


def _over(runs: Iterable[Run], key: Value, value: Value, colour: str, line: bool = True) -> list[Line]:
    """A point a run, × where it diverged, and the line of their medians."""
    done = [run for run in runs if run.status.finished and math.isfinite(value(run))]
    lines = []
    if line and len({key(run) for run in done}) > 1:
        at = medians(done, key, value)
        lines.append(_median(np.array(list(at)), list(at.values()), colour))
    for run in done:
        marker = "x" if run.status.status == "diverged" else "o"
        lines.append(_scatter([key(run)], [value(run)], colour, marker, run))
    return lines


def _median(at: np.ndarray, values: Sequence[float], colour: str) -> Line:
    return Line("", "", None, at.astype(float), np.array(values), role="median", colour=colour)


def _scatter(
    at: Sequence[float], values: Sequence[float], colour: str, marker: str, run: Run | None = None
) -> Line:
    x, y = np.array(at, dtype=float), np.array(values, dtype=float)
    arm, seed, name = (run.arm, run.seed, run.name) if run else ("", None, "")
    return Line(arm, "", seed, x, y, run=name, colour=colour, marker=marker, scatter=True)


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


def _trained(study: Study, found: Sequence[Sweep]) -> list[str]:
    return [m for m in study.modalities if any(is_trained(run, m) for sweep in found for run in sweep.runs)]


def _arms(found: Sequence[Sweep]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(arm for sweep in found for arm in sweep.arms))


def _given(found: Sequence[Sweep], what: str) -> str:
    """A sentence on the value that diverged runs are drawn with; empty if no run diverged."""
    diverged = any(run.status.status == "diverged" for sweep in found for run in sweep.runs)
    return f" A run that diverged (×) is given {what}." if diverged else ""


def _dots(found: Sequence[Sweep]) -> str:
    runs = [run for sweep in found for run in sweep.runs]
    chosen = sum(run.role == "selection" and run.status.finished for run in runs)
    left = sum(not run.status.finished for run in runs)
    words = f"A point a run ({len(runs) - left}), lines through their medians."
    if chosen:
        words += f" {chosen} of them were made to choose a learning rate and are in no verdict."
    return words + (f" {left} unfinished ones are left out." if left else "")


def _size(size: float) -> str:
    return f"{count(size)} parameters"
