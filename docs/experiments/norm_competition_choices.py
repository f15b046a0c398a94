"""The effect of claims of norm_competition under every choice of metric, window and excluded runs.

    python norm_competition_choices.py RUNS_OR_ZIP [CLAIM ...]

The method is the specification curve of Simonsohn, Simmons and Nelson, Nature Human Behaviour 4 (2020). The claims
make the same comparison at several learning rates, sizes and lengths. The script prints one row per choice (claim,
metric, window, runs, seeds, ratio of treatment to control with its 95 % interval), and how many intervals lie above,
within and below the smallest effect of interest. The choices share runs, so they are not independent.
"""

import itertools
import math
import sys

import numpy as np

from mmqk.lab.effects import paired_effect, pooled_spread
from mmqk.lab.metrics import METRICS, find_metric
from mmqk.lab.metrics.outcomes import is_trained
from mmqk.lab.study import compare, load_study

CLAIMS = ("gap-low", "gap-high", "gap-edge", "gap-large", "gap-long")
# Metrics whose effects are ratios.
SPECIFIED = ("largest_attention_logit", "qk_norm_product", "q_norm", "k_norm", "resid_norm", "final_norm")
FLOOR_NATS = 0.1


def of_window(share):
    """Return a function that computes the geometric mean of a series over the last ``share`` of the run, without
    warm-up."""

    def measure(run, metric, modality):
        steps, values = metric.series(run, modality)
        values = values[steps >= max((1 - share) * max(steps, default=0), run.warmup_steps)]
        usable = len(values) and (values > 0).all() and np.isfinite(values).all()
        return float(np.exp(np.log(values).mean())) if usable else math.nan

    return measure


WINDOWS = {
    "last 3 probes": lambda run, metric, modality: metric.measure(run, modality),
    "second half": of_window(0.5),
    "after warm-up": of_window(1.0),
}
RUNS = {
    "all": lambda run, modalities: True,
    "completed": lambda run, modalities: run.status.status == "completed",
    f"excess at most {FLOOR_NATS:g} nat": lambda run, modalities: all(
        METRICS["final_excess"].measure(run, m) <= FLOOR_NATS for m in modalities if is_trained(run, m)
    ),
}


def specifications(study, claim):
    """Yield (metric, window, runs, effect); of several choices that select the same runs, only the first."""
    compared = compare(study, claim)
    arms = (compared.treatment, compared.control)
    _, modality = find_metric(claim.metric)
    chosen = {}
    for words, keep in RUNS.items():
        seeds = tuple(frozenset(r.seed for r in arm.all if keep(r, study.modalities)) for arm in arms)
        chosen.setdefault(seeds, words)
    for (seeds, words), name, window in itertools.product(chosen.items(), SPECIFIED, WINDOWS):
        a, b = (
            {
                run.seed: math.log(value)
                for run in arm.all
                if run.seed in kept and 0 < (value := WINDOWS[window](run, METRICS[name], modality)) < math.inf
            }
            for arm, kept in zip(arms, seeds, strict=True)
        )
        spread = pooled_spread({"treatment": [*a.values()], "control": [*b.values()]})
        effect = paired_effect(a, b, spread)
        if effect is not None and effect.has_interval:
            yield name, window, words, effect


def main(argv):
    study = load_study(argv[0])
    print("claim,metric,window,runs,seeds,ratio,low,high")
    made = []
    for claim in study.claims:
        if claim.id in (argv[1:] or CLAIMS):
            for *choice, effect in specifications(study, claim):
                made.append((effect.low / claim.min_effect, effect.high / claim.min_effect))
                ratios = [f"{math.exp(value):.6g}" for value in (effect.value, effect.low, effect.high)]
                print(",".join([claim.id, *choice, str(effect.n), *ratios]))
    above, below = sum(low > 1 for low, _ in made), sum(high < -1 for _, high in made)
    within = sum(low > -1 and high < 1 for low, high in made)
    rest = len(made) - above - within - below
    print(f"{len(made)} choices: {above} above, {within} within, {below} below, {rest} include a limit")


if __name__ == "__main__":
    main(sys.argv[1:])
