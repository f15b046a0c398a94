"""When statistics of a run leave the range of healthy runs, by modality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmqk.lab.metrics.outcomes import failure_step, trained_modalities
from mmqk.lab.runs import Run, Series, aligned

# Statistics that probes measure, each with the function that reduces it over layers; in the order of the page.
PROBED: dict[str, Callable] = {
    "attn_logit_absmax": np.max, "attn_entropy": np.min, "w_q_stable_rank": np.min, "w_k_stable_rank": np.min,
    "w_q_grad_over_v": np.max, "w_k_grad_over_v": np.max, "final_norm": np.max, "out_log_z": np.max,
}  # fmt: skip
LINEAR = ("out_log_z", "loss")  # the others are positive and compared on a log scale
# Statistics that every step measures. They are reduced over the steps between two probes, to the largest value
# (np.maximum) or to the mean (np.add).
STEPPED: dict[str, np.ufunc] = {"grad_norm": np.maximum, "loss": np.add}
FEWEST_HEALTHY = 3
DEFAULT_WINDOW = 100  # steps, for a run without probes
# If only the last one, two or three probes are outside the range of the healthy runs, this may be by chance.
FEWEST_OUTSIDE = 4


@dataclass(frozen=True)
class Departure:
    """A statistic left the range of the healthy runs and did not return.

    Attributes:
        layer: the layer with the largest or smallest value (by the function in `PROBED`) at this step; None if the
            statistic has no layer.
        step: the first step from which the statistic stays outside the range.
    """

    layer: int | None
    step: int


def departures(run: Run, healthy: Sequence[Run]) -> dict[tuple[str, str], Departure | None]:
    """Return when each statistic left the range of the healthy runs, by statistic and modality; None if it did not.

    A statistic that cannot be compared has no entry: it needs 3 healthy runs that have it at each of the last 4
    probes. A loss is compared only with healthy runs that train the same loss.

    The range at a step goes from the lowest to the highest value of the healthy runs at this step, and is then
    widened on both sides by its own width. It is computed on a log scale, except for loss and log Z.

    Only probes after warm-up count, up to the step at which the run fails (`failure_step`) or ends. A statistic has
    left the range if it is outside at the last 4 or more of these probes. A value that is not finite is outside.

    Args:
        run: the run to examine.
        healthy: other runs.
    """
    failed, start = failure_step(run), run.warmup_steps
    end = run.last_step if failed is None else failed
    tags = [tag for name, tag in run.tags.items() if tag.head is None and not name.startswith("grad_norm/")]
    trained = {one.name: trained_modalities(one) for one in (run, *healthy)}
    left: dict[tuple[str, str], Departure | None] = {}
    for statistic in (*PROBED, *STEPPED):
        names = {(tag.pair[0] if tag.pair else tag.modality) or "" for tag in tags if tag.statistic == statistic}
        for modality in sorted(names):
            steps, values = reduced(run, statistic, modality)
            during = (steps > start) & (steps <= end)
            steps, values = steps[during], values[during]
            alike = list(healthy)
            if statistic == "loss" and modality:
                both = [set(trained[run.name]) & set(trained[other.name]) for other in healthy]
                alike = [other for other, names in zip(healthy, both, strict=True) if modality in names]
            elif statistic == "loss":
                alike = [other for other in healthy if trained[run.name] == trained[other.name]]
            others = [
                (at, seen)
                for at, seen in (reduced(other, statistic, modality) for other in alike)
                if np.isin(steps[-FEWEST_OUTSIDE:], at).all()
            ]
            if len(others) < FEWEST_HEALTHY:
                continue
            steps, table = aligned([(steps, values), *others])
            with np.errstate(invalid="ignore", divide="ignore"):
                table = np.log(table) if statistic not in LINEAR else table
                values, rest = table[0], np.where(np.isfinite(table[1:]), table[1:], np.nan)
                low, high = np.fmin.reduce(rest), np.fmax.reduce(rest)
                inside = (values >= 2 * low - high) & (values <= 2 * high - low) & np.isfinite(values)
            last = np.flatnonzero(inside)
            index = int(last[-1]) + 1 if len(last) else 0
            left[statistic, modality] = None
            if len(steps) - index >= FEWEST_OUTSIDE:
                step = int(steps[index])
                left[statistic, modality] = Departure(_layer(run, statistic, modality, step), step)
    return left


def reduced(run: Run, statistic: str, modality: str) -> Series:
    """Return a statistic with one value for each probe.

    A statistic of `PROBED` is reduced over layers and key modalities, to its largest or smallest value. A statistic
    of `STEPPED` is reduced over the steps since the previous probe: the loss to its mean, the gradient norm to its
    largest value. Step 0 and the steps after the last scheduled probe are left out of the statistics of `STEPPED`.
    """
    if statistic in PROBED:
        return run.combined(statistic, PROBED[statistic], modality or None)
    steps, values = run.series(f"{statistic}/{modality}" if modality else statistic)
    width = int(run.setting("monitor.every_n_steps", 0)) or DEFAULT_WINDOW
    complete = (steps > 0) & (steps <= run.last_step // width * width)
    steps, values = steps[complete], values[complete]
    if not len(steps):
        return steps, values
    windows, starts, counts = np.unique((steps - 1) // width, return_index=True, return_counts=True)
    sums = STEPPED[statistic].reduceat(values, starts)
    return (windows + 1) * width, sums / counts if STEPPED[statistic] is np.add else sums


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
