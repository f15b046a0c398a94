"""Metrics of a family: over learning rates, and over model sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmqk.lab.metrics.outcomes import diverged, final_loss, has_floor, initial_loss, trained_modalities, weight_of
from mmqk.lab.runs import Run
from mmqk.model.config import ModelConfig

RATE = "optim.lr"
UNSTABLE_NATS = 0.1


class Measured(NamedTuple):
    """A measured number, or NaN with the reason.

    Attributes:
        value: the number; if ``towards`` is not 0, a bound.
        why: why the value is NaN or a bound; else empty.
        towards: 1 if the true value is at least ``value``, -1 if it is at most ``value``, 0 if it is ``value``.
    """

    value: float
    why: str = ""
    towards: int = 0


class NotMeasured(Exception):
    """Why a number cannot be computed from these runs."""


def learning_rate(run: Run) -> float:
    """Return the peak learning rate of a run; NaN if not recorded."""
    value = run.point.get(RATE, run.setting(RATE))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


class Ended(NamedTuple):
    """Losses of a run in nats per token.

    Attributes:
        rate: learning rate of the run.
        final: final loss; infinite if the run diverged.
        initial: loss at initialization.
    """

    rate: float
    final: float
    initial: float


def ends(runs: Sequence[Run], modality: str | None = None) -> list[Ended]:
    """Return the losses of a family's runs by ascending learning rate.

    The loss is the held-out loss, or the excess loss if every run has a floor. If ``modality`` is None, the loss is
    the mean over the trained modalities, weighted as in the training loss.

    Raises:
        NotMeasured: the runs cannot be compared.
    """
    trained = {(modality,) if modality else trained_modalities(run) for run in runs}
    if len(trained) > 1:
        raise NotMeasured("the runs train different modalities: name one modality")
    names = trained.pop() if trained else ()
    if not names:
        raise NotMeasured("the runs have no loss by modality")
    series = "excess" if all(has_floor(run, m) for run in runs for m in names) else "loss"
    ended, held_out = [], set()
    for run in runs:
        rate, weights = learning_rate(run), [weight_of(run, m) for m in names]
        failed = diverged(run)
        if math.isnan(rate):
            raise NotMeasured(f"{run.name} has no learning rate")
        if math.isnan(failed):
            raise NotMeasured(f"{run.name} has not finished")
        last = [final_loss(run, m, series) for m in names]
        held_out |= set() if failed else {end.held_out for end in last}
        final = math.inf if failed else sum(w * end.value for w, end in zip(weights, last, strict=True))
        first = sum(w * initial_loss(run, m, series) for w, m in zip(weights, names, strict=True))
        if sum(weights) <= 0 or math.isnan(final) or math.isnan(first):
            raise NotMeasured(f"{run.name} has no {series} of {' and '.join(names)} at its end or at initialization")
        ended.append(Ended(rate, final / sum(weights), first / sum(weights)))
    ended.sort(key=lambda end: end.rate)
    rates = [end.rate for end in ended]
    if len(held_out) > 1:
        raise NotMeasured("the final loss is on held-out data in some runs and on training data in others")
    if twice := [rate for rate, after in pairwise(rates) if rate == after]:
        same = f"several runs have the learning rate {twice[0]:g}"
        raise NotMeasured(f"{same}: give the runs of one point of the other axes")
    if len(rates) < 2:
        raise NotMeasured("there is one learning rate: at least 2 are needed")
    return ended


def lr_sensitivity(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the mean over the learning rates of ``min(loss, loss at initialization) - lowest loss of the grid``.

    This is the metric of Wortsman et al. (arXiv 2309.14322, section 2.2), with equal weight for every learning rate.
    Infinite if no run ended below its loss at initialization: the formula would give 0, the best value of this
    metric.
    """
    ended = ends(runs, modality)
    if all(end.final >= end.initial for end in ended):
        return Measured(math.inf, "no run ended below its loss at initialization: ranked worst", 1)
    clipped = [min(end.final, end.initial) for end in ended]
    return Measured(sum(loss - min(clipped) for loss in clipped) / len(clipped))


def first_unstable_lr(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the lowest unstable learning rate.

    A learning rate is unstable if the run diverged, or if it exceeds the best learning rate and its final loss
    exceeds the lowest final loss by more than 0.1 nat. A higher loss counts, because small models stall more often
    than they diverge. It does not count below the best learning rate, where it means slower learning. If no learning
    rate is unstable, the result is a bound: the learning rate that would come next if the grid were continued.
    """
    ended = ends(runs, modality)
    best = min(ended, key=lambda end: end.final)
    for end in ended:
        if math.isinf(end.final) or (end.rate > best.rate and end.final > best.final + UNSTABLE_NATS):
            return Measured(end.rate)
    highest, before = ended[-1].rate, ended[-2].rate
    why = f"no run up to the learning rate {highest:g} was unstable: the bound is the next learning rate"
    return Measured(highest * highest / before, why, 1)


# Wortsman et al. (arXiv 2309.14322, Fig. 9) measure the logits of block 0 at step 2,000 of 100,000. The runs here are
# shorter, and 2 % of their steps is within the warm-up, so the share is a fifth.
AT_SHARE = 0.2
BLOCK = 0
# Fields of the model that set its size.
SHAPE = ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff")
FEWEST_FITTED = 3


def model_size(run: Run) -> float:
    """Return the number of parameters in the matrices of the blocks (attention and MLP), without embeddings, head,
    gains and biases.

    Wortsman et al. count in the same way; their 3 layers of width 256 have 2.4M parameters. If a matrix has a copy
    per modality, one copy counts, because a token passes through one copy. NaN if the configuration does not define
    the size.
    """
    stored = {name: value for name, value in (run.setting("model") or {}).items() if value is not None}
    if not {"d_model", "n_layers", "n_heads"} <= stored.keys():
        return math.nan
    try:
        model = ModelConfig(**{name: stored[name] for name in (*SHAPE, "mlp") if name in stored})
    except (TypeError, ValueError):
        return math.nan
    attention = 2 * (model.n_heads + model.kv_heads) * model.head_dim
    mlp = (2 if model.mlp == "gelu" else 3) * model.mlp_width
    return float(model.n_layers * model.d_model * (attention + mlp))


def logit_extrapolation(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the ratio of the predicted to the actual largest logit of the held-out largest model.

    For each learning rate, a quadratic in log size is fitted to the log logits of all models except the largest, and
    continued to the largest model. With four model sizes, it passes through the three smallest. The logits are those
    of block 0 at the last probe in the first fifth of the run. With several learning rates, the result is the ratio
    farthest from 1.

    Args:
        runs: runs of one family at one seed.
        modality: modality of the queries.

    Raises:
        NotMeasured: the logits cannot be compared or extrapolated.
    """
    by_rate: dict[float, dict[float, tuple[int, float]]] = {}
    for run in runs:
        rate, size = learning_rate(run), model_size(run)
        if math.isnan(rate) or math.isnan(size):
            raise NotMeasured(f"the learning rate or the model's size is not recorded in {run.name}")
        steps, values = run.combined("attn_logit_absmax", np.max, modality, BLOCK)
        by = AT_SHARE * run.planned_steps
        at = int(np.searchsorted(steps, by, side="right")) - 1
        if at < 0:
            raise NotMeasured(f"{run.name} has no probe up to step {by:g}")
        if size in by_rate.setdefault(rate, {}):
            raise NotMeasured(f"two runs have {size:g} parameters and the learning rate {rate:g}")
        by_rate[rate][size] = int(steps[at]), float(values[at])
    ratios = [_predicted(rate, by_size) for rate, by_size in sorted(by_rate.items())]
    return Measured(max(ratios, key=lambda ratio: abs(math.log(ratio))))


def _predicted(rate: float, by_size: Mapping[float, tuple[int, float]]) -> float:
    """Return the predicted divided by the actual logit of the largest model; ``by_size`` has (step, logit)."""
    at, sizes = f"learning rate {rate:g}", sorted(by_size)
    if len(sizes) <= FEWEST_FITTED:
        few = f"at {at} the model sizes are too few ({len(sizes)})"
        raise NotMeasured(f"{few}: the fit needs {FEWEST_FITTED}, and the prediction one more")
    steps, logits = zip(*(by_size[size] for size in sizes), strict=True)
    if len(set(steps)) > 1:
        raise NotMeasured(f"at {at} the models were probed at different steps")
    if not all(math.isfinite(logit) and logit > 0 for logit in logits[:-1]):
        raise NotMeasured(f"at {at} a logit of a smaller model is not finite and positive: there is nothing to fit")
    if not (math.isfinite(logits[-1]) and logits[-1] > 0):
        raise NotMeasured(f"the largest model's logit is not finite and positive at {at}")
    with np.errstate(over="ignore"):
        ratio = float(fit_quadratic(sizes[:-1], logits[:-1])(sizes[-1])) / logits[-1]
    if ratio == 0:
        raise NotMeasured(f"the fit predicts a logit of 0 at {at}")
    return ratio


def fit_quadratic(sizes: Sequence[float], values: Sequence[float]) -> Callable[[ArrayLike], NDArray[np.float64]]:
    """Return the least-squares quadratic of log value in log size, as a function of size."""
    curve = np.polynomial.Polynomial.fit(np.log(sizes), np.log(values), 2)
    return lambda at: np.exp(curve(np.log(at)))
