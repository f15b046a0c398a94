"""Which change prevents a late failure? Prints the table of the section "Rescue" of docs/late_divergence.md.

    python docs/experiments/late_rescue.py runs/late_rescue        (or the pack reports/examples/late_rescue.zip)

One row per arm; values of several seeds are separated by slashes. The first columns of a fork are the largest logit
of its parent at the fork, the change of the output logits there, divided by their RMS, and the change of the held-out
image loss. By the rules of late_rescue.yaml a change helped only if the held-out text loss of every run ends below
that of every run with noise from the same step. The last column applies the rule to the training text loss as well,
the mean of the last 500 steps.
"""

import sys

import numpy as np

import mmqk
from mmqk.lab.metrics.outcomes import final_loss, rise_step, window_means


def over_seeds(runs, value):
    return " / ".join(value(run) for run in runs)


def lowest(run, modality):
    """Return the lowest held-out loss and its step."""
    steps, losses = run.history(f"val_loss/{modality}")
    best = int(np.nanargmin(losses))
    return f"{losses[best]:.2f} ({steps[best]:,})"


def held_out_text(run):
    return final_loss(run, "text").value


def training_text(run):
    return window_means(run, "text")[1][-1]


def above_lowest(run, modality):
    """Return the mean training loss of the last 500 steps, and how far it is above the lowest mean."""
    means = window_means(run, modality)[1]
    return f"{means[-1]:.2f} ({means[-1] - means.min():+.2f})"


def largest_logit(run):
    return f"{np.median(run.combined('attn_logit_absmax', np.max)[1][-3:]):,.0f}"


def parent_logit(run):
    if run.parent is None:
        return "–"
    steps, logits = run.parent.combined("attn_logit_absmax", np.max)
    return f"{np.median(logits[steps <= run.fork['step']][-3:]):,.0f}"


def output_change(run):
    if not run.forked:
        return "–"
    change = run.forked["function"]
    before, after = change["loss"]["image"]
    return f"{change['logits_rms_relative']:.2g}, {after - before:+.2f}"


def rises(run):
    steps = (rise_step(run, modality) for modality in ("text", "image"))
    return ", ".join("–" if step is None else f"{step:,}" for step in steps)


def below_noise(runs, noise, loss):
    """Return how many pairs of a run and a run with noise have a lower loss in the first."""
    if not noise or runs == noise:
        return "–"
    below = [loss(a) < loss(b) for a in runs for b in noise]
    return f"{sum(below)} of {len(below)} pairs"


if __name__ == "__main__":
    runs = [run for run in mmqk.load_runs(sys.argv[1]) if run.status.finished]
    arms = {arm: [run for run in runs if run.arm == arm] for arm in dict.fromkeys(run.arm for run in runs)}
    titles = ["arm", "seeds", "logit of the parent", "change at the fork"]
    titles += ["held-out text loss", "lowest (step)", "held-out image loss", "lowest (step)"]
    titles += ["training text loss", "training image loss", "rises for good (text, image)", "largest logit"]
    titles += ["held-out; training text loss below noise"]
    print("| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|")
    for arm, of_arm in arms.items():
        start = (of_arm[0].fork or {}).get("step")
        row = [arm, " / ".join(str(run.seed) for run in of_arm)]
        row += [over_seeds(of_arm, parent_logit), over_seeds(of_arm, output_change)]
        for modality in ("text", "image"):
            row.append(over_seeds(of_arm, lambda run, m=modality: f"{final_loss(run, m).value:.2f}"))
            row.append(over_seeds(of_arm, lambda run, m=modality: lowest(run, m)))
        row += [over_seeds(of_arm, lambda run, m=m: above_lowest(run, m)) for m in ("text", "image")]
        row += [over_seeds(of_arm, rises), over_seeds(of_arm, largest_logit)]
        noise = arms.get(f"noise-{start}", [])
        row.append("; ".join(below_noise(of_arm, noise, loss) for loss in (held_out_text, training_text)))
        print("| " + " | ".join(row) + " |")
