"""Coordinate check: the slope of every statistic over the width, without and with µP.

    mmqk ablate coordinates --jobs 2
    python docs/experiments/coordinates.py reports/examples/coordinates.zip    prints, writes coordinates.csv and .png

The pack has update_rms, update_ratio, log_z, out_logit_spread and the row norms of embedding and head besides what
`mmqk pack --small` keeps (`write_pack(..., only=...)`).

The slope is that of log(statistic) over log(width), widths 32 to 256, fitted for each seed; 0 means that the width does
not change the statistic. The interval is Student's over the seeds. A statistic is averaged over layers and modalities
(the largest logit: its maximum). Norms of vectors of d_model numbers are divided by sqrt(d_model).
"""

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from mmqk.lab.study import load_study

FILE = Path(__file__).with_suffix(".csv")
WIDTHS, STEPS = (32, 64, 128, 256), (1, 10, 100, 1000)
FAMILIES = {"standard": ("w32", "w64", "w128", "w256"), "µP": ("w32", "w64-mup", "w128-mup", "w256-mup")}
PER_CHANNEL = ("attn_in_norm", "attn_out_norm", "mlp_out_norm", "resid_norm", "embed_row_norm", "head_row_norm")
LARGEST = "attn_logit_absmax"
NOT_DRAWN = (
    "_max",
    "final_norm",
    "_raw_norm",
    "_block",
    "_within",
    "_mean",
    "attn_mass",
    "out_block_log_z",
    "below_eps",
    "k_common",
)
LEFT_OUT = ("step", "lr", "captions_cut", "tokens_per_s", "clip_factor", "loss", "val_loss", "val_unigram")


def measured(run):
    """Return the value of each statistic at each of the steps of a run; only statistics that are always positive."""
    names = {name.partition("/")[0] for name in run.tags} - set(LEFT_OUT)
    width, found = run.setting("model.d_model"), {}
    for name in sorted(names):
        steps, values = run.combined(name, np.max if name == LARGEST else np.mean)
        values = values[np.isin(steps, STEPS)] / (width**0.5 if name in PER_CHANNEL else 1)
        if len(values) == len(STEPS) and (values > 0).all():
            found[name] = values
    return found


def slopes(study):
    """Yield (parametrization, statistic, step, slope, low, high)."""
    for family, arms in FAMILIES.items():
        by_width = [{run.seed: measured(run) for run in study.finished(arm)} for arm in arms]
        seeds = sorted(by_width[0])
        for name in sorted(set.intersection(*(set(found) for runs in by_width for found in runs.values()))):
            values_WSN = np.log([[runs[seed][name] for seed in seeds] for runs in by_width])
            fit = np.polyfit(np.log(WIDTHS), values_WSN.reshape(len(WIDTHS), -1), 1)[0].reshape(len(seeds), len(STEPS))
            half = stats.t.ppf(0.975, len(seeds) - 1) * fit.std(0, ddof=1) / len(seeds) ** 0.5
            for step, mean, error in zip(STEPS, fit.mean(0), half, strict=True):
                yield family, name, step, *(f"{x:.3f}" for x in (mean, mean - error, mean + error))


def draw(rows):
    """Draw the slope of each statistic at step 1,000, standard against µP, in the order of the standard slopes."""
    last = {(family, name): [float(x) for x in numbers] for family, name, step, *numbers in rows if step == STEPS[-1]}
    names = sorted((name for family, name in last if family == "standard"), key=lambda name: last["standard", name])
    names = [name for name in names if not name.endswith(NOT_DRAWN)]
    figure, panel = plt.subplots(figsize=(7, 0.19 * len(names) + 1), layout="constrained")
    for family, marker in (("standard", "o"), ("µP", "D")):
        mean, low, high = np.array([last[family, name] for name in names]).T
        panel.errorbar(mean, range(len(names)), xerr=[mean - low, high - mean], fmt=marker, ms=4, lw=1, label=family)
    panel.axvline(0, color="gray", lw=0.7)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set(xlabel="slope of log(statistic) over log(width) at step 1,000", ylim=(-1, len(names)))
    panel.legend(frameon=False, loc="lower right")
    figure.savefig(FILE.with_suffix(".png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    table = list(slopes(load_study(sys.argv[1])))
    with FILE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [("parametrization", "statistic", "step", "slope", "low", "high"), *table]
        )
    for family, name, step, mean, low, high in table:
        print(f"{family:9s} {name:24s} {step:5d} {mean:>7s} ({low} to {high})")
    draw(table)
