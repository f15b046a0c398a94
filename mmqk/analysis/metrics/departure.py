"""When statistics of a run leave the range of healthy runs, by modality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmqk.analysis.metrics.late import failure_step
from mmqk.analysis.metrics.metric import warmup_steps
from mmqk.analysis.runs.load import Run, Series

# Statistics of probes with the function that reduces them over layers, and statistics of steps with the function that
# reduces them over the steps between two probes; in the order of the page.
PROBED: dict[str, Callable] = {
    "attn_logit_absmax": np.max, "attn_entropy": np.min, "w_q_stable_rank": np.min, "w_k_stable_rank": np.min,
    "w_q_grad_over_v": np.max, "w_k_grad_over_v": np.max, "final_norm": np.max,
}  # fmt: skip
LINEAR = ("log_z", "loss")  # the others are positive and compared on a log scale
STEPPED: dict[str, Callable] = {"log_z": np.mean, "grad_norm": np.max, "loss": np.mean}
FEWEST_HEALTHY = 3
# A series that is outside at its last one to three probes only may be outside by chance.
FEWEST_OUTSIDE = 4


@dataclass(frozen=True)
class Departure:
    """One statistic that left the range of the healthy runs and did not return.

    Attributes:
        statistic: name of the statistic, as in docs/statistics.md.
        modality: modality of the tokens, or of the queries; empty if there is none.
        layer: the layer with the largest (smallest) value at this step; None if the statistic has no layer.
        step: the first step from which the statistic stays outside.
    """

    statistic: str
    modality: str
    layer: int | None
    step: int


def departures(run: Run, healthy: Sequence[Run]) -> list[Departure]:
    """Return the statistics that left the range of the healthy runs, sorted by the step at which they left it.

    The range at a step goes from the lowest to the highest value of the healthy runs at this step, widened on both
    sides by its own width; on a log scale, except for loss and log Z. A statistic has left the range if, after
    warm-up, it is outside at its last 4 probes or more, until the run fails (`failure_step`) or ends. A value that is
    not finite is outside.

    Args:
        run: the run to examine.
        healthy: at least 3 other runs. Steps that one of them did not reach are not compared.
    """
    assert len(healthy) >= FEWEST_HEALTHY
    failed, start = failure_step(run), warmup_steps(run)
    end = run.last_step if failed is None else failed
    tags = [tag for tag in run.tags.values() if tag.head is None]
    left = []
    for statistic in (*PROBED, *STEPPED):
        names = {(tag.pair[0] if tag.pair else tag.modality) or "" for tag in tags if tag.statistic == statistic}
        for modality in sorted(names):
            steps, values = reduced(run, statistic, modality)
            during = (steps > start) & (steps <= end)
            steps, values = steps[during], values[during]
            others = [reduced(other, statistic, modality) for other in healthy]
            for at, _ in others:
                steps, places, _ = np.intersect1d(steps, at, return_indices=True)
                values = values[places]
            table = np.stack([values, *(seen[np.searchsorted(at, steps)] for at, seen in others)])
            with np.errstate(invalid="ignore", divide="ignore"):
                values, *rest = np.log(table) if statistic not in LINEAR else table
                low, high = np.fmin.reduce(rest), np.fmax.reduce(rest)
                inside = np.flatnonzero((values >= 2 * low - high) & (values <= 2 * high - low))
            index = int(inside[-1]) + 1 if len(inside) else 0
            if len(steps) - index >= FEWEST_OUTSIDE:
                step = int(steps[index])
                left.append(Departure(statistic, modality, _layer(run, statistic, modality, step), step))
    return sorted(left, key=lambda departure: departure.step)


def reduced(run: Run, statistic: str, modality: str) -> Series:
    """Return a statistic at the steps of the probes: the largest (smallest) value over layers and key modalities, or
    the mean (gradient norm: the largest value) over the steps since the previous probe. Step 0 and the steps after
    the last scheduled probe have no value of the second kind."""
    if statistic in PROBED:
        return run.combined(statistic, PROBED[statistic], modality or None)
    steps, values = run.series(f"{statistic}/{modality}" if modality else statistic)
    width = max(1, int(run.setting("monitor.every_n_steps", 1)))
    windows = (steps - 1) // width
    complete = [w for w in np.unique(windows) if w >= 0 and (w + 1) * width <= run.last_step]
    means = [float(STEPPED[statistic](values[windows == w])) for w in complete]
    return np.array([(w + 1) * width for w in complete], dtype=np.int64), np.array(means)


def _layer(run: Run, statistic: str, modality: str, step: int) -> int | None:
    """Return the layer that has the value of `reduced` at this step."""
    layers = {tag.layer for tag in run.tags.values() if tag.statistic == statistic and tag.layer is not None}
    found: dict[int, float] = {}
    for layer in sorted(layers):
        steps, values = run.combined(statistic, PROBED[statistic], modality or None, layer)
        if len(at := np.flatnonzero(steps == step)):
            found[layer] = float(values[at[0]])
    worst = max if PROBED.get(statistic) is np.max else min
    return worst(found, key=found.__getitem__, default=None)
