"""When do statistics of failed runs leave the range of healthy runs? Prints a table of docs/late_divergence.md.

    python docs/experiments/failure_order.py runs/late        (or the pack reports/examples/late.zip)

The failed runs of the treatment of the first claim about late failure are compared with the runs of its control that
did not fail, which must be 4 or more. The range at a step goes from the lowest to the highest value of the healthy
runs at this step, and is then widened on both sides by its own width: on a log scale, except for loss and log Z. Only
probes after warm-up and up to the failure (`failure_step`) or the end count. A statistic has left the range if it is
outside at the last 4 or more of these probes; the step is the first of them. A value that is not finite is outside.

Each statistic of a probe is the largest value over layers and keys (attention entropy and stable rank: the smallest).
Of the steps between two probes, the loss is the mean and the gradient norm the largest value. Survivors are the runs
without a failure of all arms that claims about failures compare, except the control. Healthy runs are compared with
the other healthy runs. A statistic that also leaves the range in survivors does not distinguish the failed runs.
"""

import sys
from collections import Counter
from functools import reduce

import numpy as np

from mmqk.lab.metrics.outcomes import failure_step, trained_modalities
from mmqk.lab.study import load_study

# Statistics of probes and of steps. The function reduces them over layers, or over the steps before a probe.
PROBED = {
    "attn_logit_absmax": np.max, "attn_entropy": np.min, "w_q_stable_rank": np.min, "w_k_stable_rank": np.min,
    "w_q_grad_over_v": np.max, "w_k_grad_over_v": np.max, "final_norm": np.max, "out_log_z": np.max,
}  # fmt: skip
STEPPED = {"grad_norm": np.max, "loss": np.mean}
LINEAR = ("out_log_z", "loss")
FEWEST_HEALTHY = 3
FEWEST_OUTSIDE = 4
LATE = ("late_failure", "time_of_failure")


def reduced(run, statistic, modality, layer=None):
    """Return the steps of the probes and one value for each. Statistics of steps have none at step 0 and after the
    last scheduled probe."""
    if statistic in PROBED:
        return run.combined(statistic, PROBED[statistic], modality or None, layer)
    steps, values = run.series(f"{statistic}/{modality}" if modality else statistic)
    width = run.setting("monitor.every_n_steps", 0) or 100
    complete = (steps > 0) & (steps <= run.last_step // width * width)
    windows = (steps[complete] - 1) // width
    kept = np.unique(windows)
    means = [STEPPED[statistic](values[complete][windows == window]) for window in kept]
    return (kept + 1) * width, np.array(means)


def departures(run, healthy):
    """Return (layer, step) at which each statistic left the range, by statistic and modality; None if it did not. A
    statistic without 3 healthy runs that have it at each of the last 4 probes has no entry."""
    end = failure_step(run) or run.last_step
    tags = [tag for name, tag in run.tags.items() if tag.head is None and not name.startswith("grad_norm/")]
    left = {}
    for statistic in (*PROBED, *STEPPED):
        mine = [tag for tag in tags if tag.statistic == statistic]
        for modality in sorted({(tag.pair[0] if tag.pair else tag.modality) or "" for tag in mine}):
            steps, values = reduced(run, statistic, modality)
            during = (steps > run.warmup_steps) & (steps <= end)
            steps, values = steps[during], values[during]
            alike = [other for other in healthy if statistic != "loss" or same_loss(run, other, modality)]
            others = [reduced(other, statistic, modality) for other in alike]
            others = [other for other in others if np.isin(steps[-FEWEST_OUTSIDE:], other[0]).all()]
            if len(others) < FEWEST_HEALTHY:
                continue
            measured = [(steps, values), *others]
            steps = reduce(np.intersect1d, [at for at, _ in measured])
            table = np.stack([values[np.searchsorted(at, steps)] for at, values in measured])
            with np.errstate(invalid="ignore", divide="ignore"):
                table = np.log(table) if statistic not in LINEAR else table
                values, rest = table[0], np.where(np.isfinite(table[1:]), table[1:], np.nan)
                low, high = np.fmin.reduce(rest), np.fmax.reduce(rest)
                inside = (values >= 2 * low - high) & (values <= 2 * high - low) & np.isfinite(values)
            index = int(max(np.flatnonzero(inside), default=-1)) + 1
            left[statistic, modality] = None
            if len(steps) - index >= FEWEST_OUTSIDE:
                step = int(steps[index])
                left[statistic, modality] = layer_of(run, mine, statistic, modality, step), step
    return left


def same_loss(run, other, modality):
    """Return whether both runs train the loss of the modality; without a modality, whether they train the same."""
    trained = [trained_modalities(one) for one in (run, other)]
    return all(modality in names for names in trained) if modality else trained[0] == trained[1]


def layer_of(run, tags, statistic, modality, step):
    """Return the layer that has the value of `reduced` at this step; None if the statistic has no layer."""
    found = {}
    for layer in sorted({tag.layer for tag in tags if tag.layer is not None}):
        steps, values = reduced(run, statistic, modality, layer)
        if (steps == step).any():
            found[layer] = values[steps == step][0]
    worst = max if PROBED.get(statistic) is np.max else min
    return worst(found, key=found.get, default=None)


def failure_order(study):
    """Return a row for each statistic that left the range in a failed run: (statistic, modality, most frequent layer,
    steps by failed run, steps before the failure by failed run, the runs left and compared among the survivors, and
    the same among the healthy). The first rows left in most of the failed runs, the longest before the failure."""
    claims = [claim for claim in study.claims if claim.metric in LATE and len(claim.compared) == 2]
    pairs = [tuple(study.arms_of(name, claim.at)[0].name for name in claim.compared) for claim in claims]
    arms = dict.fromkeys(arm for pair in pairs for arm in pair)
    failed = {run.name: failure_step(run) for arm in arms for run in study.finished(arm)}

    def runs(arm, fails):
        return [run for run in study.finished(arm) if (failed[run.name] is not None) == fails]

    either_way = [order for pair in pairs for order in (pair, pair[::-1])]
    found = [(a, b) for a, b in either_way if runs(a, True) and len(runs(b, False)) > FEWEST_HEALTHY]
    if not found:
        return []
    treatment, control = found[0]
    failing, healthy = runs(treatment, True), runs(control, False)
    surviving = [run for arm in arms if arm != control for run in runs(arm, False)]
    left = {run.name: departures(run, healthy) for run in (*failing, *surviving)}
    left |= {run.name: departures(run, [other for other in healthy if other is not run]) for run in healthy}

    def count(key, of):
        compared = [left[run.name][key] for run in of if key in left[run.name]]
        return sum(one is not None for one in compared), len(compared)

    order = [*PROBED, *STEPPED]
    keys = {key for run in failing for key, one in left[run.name].items() if one}
    rows = []
    for key in sorted(keys, key=lambda key: (order.index(key[0]), key[1])):
        first = {run.name: one for run in failing if (one := left[run.name].get(key))}
        layer = Counter(layer for layer, _ in first.values()).most_common(1)[0][0]
        steps = {name: step for name, (_, step) in first.items()}
        before = {name: failed[name] - step for name, step in steps.items()}
        rows.append((*key, layer, steps, before, count(key, surviving), count(key, healthy)))
    return sorted(rows, key=lambda row: (-len(row[3]), -np.median([*row[4].values()])))


def spread(values):
    low, middle, high = min(values), np.median(list(values)), max(values)
    return f"{middle:,.0f}" if low == high else f"{middle:,.0f} ({low:,} to {high:,})"


if __name__ == "__main__":
    titles = ["statistic", "layer", "failed runs", "leaves the range at step", "steps before the failure"]
    print("| " + " | ".join([*titles, "survivors", "healthy"]) + " |")
    print("| --- " * 7 + "|")
    for statistic, modality, layer, steps, before, surviving, healthy in failure_order(load_study(sys.argv[1])):
        name = f"{statistic}, {modality}" if modality else statistic
        cells = [name, "–" if layer is None else str(layer), str(len(steps)), spread(steps.values())]
        cells += [spread(before.values()), "{} of {}".format(*surviving), "{} of {}".format(*healthy)]
        print("| " + " | ".join(cells) + " |")
