"""When statistics of a run leave the range of healthy runs, by layer and modality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmqk.analysis.metrics.late import failure_step
from mmqk.analysis.metrics.metric import warmup_steps
from mmqk.analysis.runs.load import Run, Series

# Statistics of probes, in the order of the page, and statistics of steps with the function that reduces a window.
PROBED = (
    "attn_logit_absmax", "attn_entropy", "w_q_stable_rank", "w_k_stable_rank", "w_q_grad_over_v", "w_k_grad_over_v",
    "final_norm",
)  # fmt: skip
STEPPED: dict[str, Callable] = {"log_z": np.mean, "grad_norm": np.max, "loss": np.mean}
FEWEST_HEALTHY = 3
# A series that is outside at its last one to three probes only may be outside by chance.
FEWEST_OUTSIDE = 4


@dataclass(frozen=True)
class Departure:
    """One series that left the range of the healthy runs and did not return.

    Attributes:
        statistic: name of the statistic, as in docs/statistics.md.
        modality: modality of the tokens, or of the queries; empty if there is none.
        layer: the layer; None if the statistic has no layer.
        step: the first step from which the series stays outside.
    """

    statistic: str
    modality: str
    layer: int | None
    step: int


def departures(run: Run, healthy: Sequence[Run]) -> list[Departure]:
    """Return the series that left the range of the healthy runs, sorted by the step at which they left it.

    The range at a step goes from the lowest to the highest value of the healthy runs at this step, widened on both
    sides by its own width. A series has left the range if, after warm-up, it is outside at its last 4 probes or more,
    until the run fails (`failure_step`) or ends. A value that is not finite is outside. Loss and log Z are means, and
    the gradient norm is the largest value, over the steps between two probes.

    Args:
        run: the run to examine.
        healthy: at least 3 other runs. Steps that one of them did not reach are not compared.
    """
    assert len(healthy) >= FEWEST_HEALTHY
    failed, start = failure_step(run), warmup_steps(run)
    end = run.last_step if failed is None else failed
    left = []
    for name, tag in run.tags.items():
        if tag.statistic not in (*PROBED, *STEPPED) or tag.head is not None:
            continue
        steps, values = windowed(run, name, tag.statistic)
        kept = (steps > start) & (steps <= end)
        steps, values = steps[kept], values[kept]
        others = [windowed(other, name, tag.statistic) for other in healthy]
        for at, _ in others:
            steps, kept, _ = np.intersect1d(steps, at, return_indices=True)
            values = values[kept]
        table = np.stack([seen[np.searchsorted(at, steps)] for at, seen in others])
        low, high = np.fmin.reduce(table), np.fmax.reduce(table)
        with np.errstate(invalid="ignore"):
            inside = (values >= 2 * low - high) & (values <= 2 * high - low)
        last_inside = np.flatnonzero(inside)
        index = int(last_inside[-1]) + 1 if len(last_inside) else 0
        if len(steps) - index >= FEWEST_OUTSIDE:
            modality = tag.pair[0] if tag.pair else tag.modality
            left.append(Departure(tag.statistic, modality or "", tag.layer, int(steps[index])))
    order = [*PROBED, *STEPPED]
    return sorted(left, key=lambda d: (d.step, order.index(d.statistic), d.layer or 0, d.modality))


def windowed(run: Run, name: str, statistic: str) -> Series:
    """Return a series at the steps of the probes. A statistic of steps is reduced over the steps since the previous
    probe. Step 0 and the steps after the last scheduled probe are left out."""
    steps, values = run.series(name)
    if statistic not in STEPPED:
        return steps, values
    width = max(1, int(run.setting("monitor.every_n_steps", 1)))
    windows = (steps - 1) // width
    complete = [w for w in np.unique(windows) if w >= 0 and (w + 1) * width <= run.last_step]
    reduced = [float(STEPPED[statistic](values[windows == w])) for w in complete]
    return np.array([(w + 1) * width for w in complete], dtype=np.int64), np.array(reduced)
