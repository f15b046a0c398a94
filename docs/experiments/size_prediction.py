"""Predict width 128 of configs/claims/size.yaml from widths 32 to 96, and compare (C6).

    python docs/experiments/size_prediction.py runs/size --write    fits, and writes size_prediction.csv
    python docs/experiments/size_prediction.py reports/examples/size.zip    compares that file with the runs, and draws

The fits and the rule of C6 are under `hypotheses` of size.yaml. The file is committed before width 128 is trained.
"""

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from mmqk.lab.metrics.families import AT_SHARE, BLOCK, first_unstable_lr, fit_quadratic, model_size
from mmqk.lab.study import load_study

FILE = Path(__file__).with_name("size_prediction.csv")
FITTED, PREDICTED, PARAMETERS = ("w32", "w48", "w64", "w96"), "w128", 802_816


def mean(values):
    return float(np.exp(np.mean(np.log(values))))


def early_logit(run):
    """Return the largest logit of block 0 at the last probe in the first fifth of the run."""
    steps, values = run.combined("attn_logit_absmax", np.max, None, BLOCK)
    return values[steps <= AT_SHARE * run.planned_steps][-1]


def measured(study, family):
    """Return the number of parameters, and geometric means over seeds: of the logits by learning rate, and of the
    first unstable learning rate, as "edge"."""
    arms = study.arms_of(family)
    by_rate = {f"{arm.point['optim.lr']:g}": study.finished(arm.name) for arm in arms}
    if any(len(runs) < len(arm.seeds) for arm, runs in zip(arms, by_rate.values(), strict=True)):
        raise SystemExit(f"{family} is not finished: train it first")
    found = {rate: mean([early_logit(run) for run in runs]) for rate, runs in by_rate.items()}
    edges = [first_unstable_lr(runs).value for runs in zip(*by_rate.values(), strict=True)]
    return model_size(study.finished(arms[0].name)[0]), found | {"edge": mean(edges)}


def predictions(study):
    """Yield a row for each number: family, name, the prediction, and the number at width 96."""
    for suffix in ("", "-qk"):
        sizes, found = zip(*(measured(study, f"{family}{suffix}") for family in FITTED), strict=True)
        for name in found[0]:
            values = [numbers[name] for numbers in found]
            line = np.polynomial.Polynomial.fit(np.log(sizes), np.log(values), 1)
            straight = float(np.exp(line(np.log(PARAMETERS))))
            predicted = straight if name == "edge" else float(fit_quadratic(sizes, values)(PARAMETERS))
            yield f"{PREDICTED}{suffix}", name, f"{predicted:.5g}", f"{values[-1]:.5g}"


def compare(study):
    """Print prediction over outcome, and the verdict on C6."""
    ratios = []
    for family, name, *numbers in list(csv.reader(FILE.open()))[1:]:
        outcome = measured(study, family)[1][name]
        predicted, same = (float(number) / outcome for number in numbers)
        print(
            f"{family} {name}: {numbers[0]} predicted, {outcome:.4g} measured: ×{predicted:.2f}; width 96 ×{same:.2f}"
        )
        ratios += [(predicted, same)] if family == PREDICTED and name != "edge" else []
    off, naive = np.abs(np.log(ratios)).T
    verdict = "reproduced" if off.max() <= np.log(2) and off.mean() < naive.mean() else "inconclusive"
    verdict = "contradicted" if off.max() > np.log(3) else verdict
    print(f"C6 {verdict}: mean factor ×{np.exp(off.mean()):.2f}, with width 96 ×{np.exp(naive.mean()):.2f}")


def draw(study):
    """Draw the logits of each learning rate over size: the fit to the smaller widths, its prediction, the outcome."""
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.6), sharey=True, layout="constrained")
    for panel, suffix, title in zip(panels, ("", "-qk"), ("no QK-Norm", "QK-Norm"), strict=True):
        sizes, found = zip(*(measured(study, f"{family}{suffix}") for family in (*FITTED, PREDICTED)), strict=True)
        for i, rate in enumerate(rate for rate in found[0] if rate != "edge"):
            logits, color = [numbers[rate] for numbers in found], plt.colormaps["viridis"](i / 7)
            grid = np.geomspace(sizes[0], PARAMETERS, 60)
            fit = fit_quadratic(sizes[:-1], logits[:-1])
            panel.plot(grid, [fit(x) for x in grid], color=color, lw=1)
            panel.plot(sizes[:-1], logits[:-1], "o", color=color, ms=4, label=f"learning rate {rate}")
            panel.plot(sizes[-1], logits[-1], "*", color=color, ms=9)
        panel.set(xscale="log", yscale="log", title=title, xlabel="parameters of the blocks")
        panel.xaxis.set_minor_formatter("")
    panels[0].set_ylabel("largest logit of block 0, step 100")
    panels[1].legend(frameon=False, fontsize=8, loc="upper left", title="lines: fit to widths 32 to 96; ★: width 128")
    figure.savefig(FILE.with_suffix(".png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    study = load_study(sys.argv[1])
    if "--write" not in sys.argv:
        compare(study)
        draw(study)
    elif any(run.arm.startswith(PREDICTED) for run in study.runs):
        raise SystemExit("width 128 has runs: a prediction must come before them")
    else:
        rows = [("family", "number", "predicted", "at_width_96"), *predictions(study)]
        FILE.write_text("\n".join(map(",".join, rows)) + "\n")
        print(FILE.read_text(), end="")
