"""Metrics of a family: over learning rates, and over model sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmqk.lab.metrics.outcomes import (
    divergence_step,
    final_loss,
    has_floor,
    initial_loss,
    trained_modalities,
    weight_of,
)
from mmqk.lab.runs import Run

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


def learning_rate(run: Run) -> float:
    """Return the peak learning rate of a run; NaN if not recorded."""
    return axis_value(run, RATE)


def axis_value(run: Run, axis: str) -> float:
    """Return the value of a run on an axis, from its point or configuration; NaN if it is not a number."""
    value = run.point.get(axis, run.setting(axis))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


@dataclass(frozen=True)
class Ended:
    """Initial and final loss of a run, in nats per token.

    Attributes:
        rate: learning rate of the run.
        final: final loss; infinite if the run diverged.
        initial: loss at initialization.
        diverged: whether the run diverged.
    """

    rate: float
    final: float
    initial: float
    diverged: bool


def ends(runs: Sequence[Run], modality: str | None = None) -> tuple[list[Ended], str]:
    """Return the losses of a family's runs by ascending learning rate, and why they cannot be compared (empty if they
    can).

    The loss is the held-out loss, or the excess loss if every run has a floor. If ``modality`` is None, the loss is
    the mean over the trained modalities, weighted as in the training loss.
    """
    trained = {(modality,) if modality else trained_modalities(run) for run in runs}
    if len(trained) > 1:
        return [], "the runs train different modalities: name one modality"
    names = trained.pop() if trained else ()
    if not names:
        return [], "the runs have no loss by modality"
    series = "excess" if all(has_floor(run, m) for run in runs for m in names) else "loss"
    ended_runs, held_out = [], set()
    for run in runs:
        diverged = divergence_step(run) is not None
        rate, total = learning_rate(run), sum(weight_of(run, m) for m in names)
        if math.isnan(rate):
            return [], f"{run.name} has no learning rate"
        if not diverged and run.status.status != "completed":
            return [], f"{run.name} has not finished"
        last = [final_loss(run, m, series) for m in names]
        if not diverged:
            held_out |= {end.held_out for end in last}
        final = (
            math.inf if diverged else sum(weight_of(run, m) * end.value for m, end in zip(names, last, strict=True))
        )
        first = sum(weight_of(run, m) * initial_loss(run, m, series) for m in names)
        if total <= 0 or math.isnan(final) or math.isnan(first):
            return [], f"{run.name} has no {series} of {' and '.join(names)} at its end or at initialization"
        ended_runs.append(Ended(rate, final / total, first / total, diverged))
    ended_runs.sort(key=lambda end: end.rate)
    rates = [end.rate for end in ended_runs]
    if len(held_out) > 1:
        return [], "the final loss is on held-out data in some runs and on training data in others"
    if len(set(rates)) < len(rates):
        twice = next(rate for rate in rates if rates.count(rate) > 1)
        return (
            [],
            f"several runs have the learning rate {twice:g}: give the runs of one point of the other axes",
        )
    if len(rates) < 2:
        return [], "there is one learning rate: at least 2 are needed"
    return ended_runs, ""


def lr_sensitivity(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the mean over the learning rates of ``min(loss, loss at initialization) - lowest loss of the grid``.

    This is the metric of Wortsman et al. (arXiv 2309.14322, section 2.2), with equal weight for every learning rate.
    Infinite if no run ended below its loss at initialization: the formula would give 0, the best value of this
    metric.
    """
    ended_runs, why = ends(runs, modality)
    if why:
        return Measured(math.nan, why)
    clipped = [min(end.final, end.initial) for end in ended_runs]
    if all(end.final >= end.initial for end in ended_runs):
        return Measured(math.inf, "no run ended below its loss at initialization: ranked worst", 1)
    lowest = min(clipped)
    return Measured(sum(loss - lowest for loss in clipped) / len(clipped))


def first_unstable_lr(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the lowest unstable learning rate.

    A learning rate is unstable if the run diverged, or if it exceeds the best learning rate and its final loss
    exceeds the lowest final loss by more than 0.1 nat. A higher loss counts, because small models stall more often
    than they diverge. It does not count below the best learning rate, where it means slower learning. If no learning
    rate is unstable, the result is a bound: the learning rate that would come next if the grid were continued.
    """
    ended_runs, why = ends(runs, modality)
    if why:
        return Measured(math.nan, why)
    best = min(ended_runs, key=lambda end: end.final)
    for end in ended_runs:
        if end.diverged or (end.rate > best.rate and end.final > best.final + UNSTABLE_NATS):
            return Measured(end.rate)
    highest, before = ended_runs[-1].rate, ended_runs[-2].rate
    why = f"no run up to the learning rate {highest:g} was unstable: the bound is the next learning rate"
    return Measured(highest * highest / before, why, 1)


# Wortsman et al. (arXiv 2309.14322, Fig. 9) measure the logits of block 0 at step 2,000 of 100,000. The runs here are
# shorter, and 2 % of their steps is within the warm-up, so the share is a fifth.
AT_SHARE = 0.2
BLOCK = 0
FEWEST_FITTED = 3


def model_size(run: Run) -> float:
    """Return the number of parameters in the matrices of the blocks (attention and MLP), without embeddings, head,
    gains and biases.

    Wortsman et al. count in the same way; their 3 layers of width 256 have 2.4M parameters. If a matrix has a copy
    per modality, one copy counts, because a token passes through one copy. NaN if the configuration does not define
    the size.
    """
    model = run.setting("model", {})
    try:
        width, layers, heads = (int(model[name]) for name in ("d_model", "n_layers", "n_heads"))
        head = int(model.get("d_head") or width // heads)
        kv_heads = int(model.get("n_kv_heads") or heads)
        gated = model.get("mlp", "swiglu") != "gelu"
        hidden = int(model.get("d_ff") or (16 * math.ceil(8 * width / 3 / 16) if gated else 4 * width))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return math.nan
    attention = 2 * width * heads * head + 2 * width * kv_heads * head
    return float(layers * (attention + (3 if gated else 2) * width * hidden))


@dataclass(frozen=True)
class Extrapolation:
    """The predicted logit of the largest model at one learning rate.

    Attributes:
        rate: the learning rate.
        sizes: parameters of every model (`model_size`), ascending; the fit does not use the last model.
        logits: largest attention logit of every model at ``step``.
        step: the step at which the logits were measured.
        predicted: logit of the largest model, predicted from the logits of the other models.
    """

    rate: float
    sizes: tuple[float, ...]
    logits: tuple[float, ...]
    step: int
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted logit divided by actual logit; NaN if the actual logit is 0 or not finite."""
        actual = self.logits[-1]
        return self.predicted / actual if math.isfinite(actual) and actual > 0 else math.nan


def extrapolate(runs: Sequence[Run], modality: str | None = None) -> tuple[list[Extrapolation], str]:
    """For each learning rate, fit a quadratic in log size to the log logits of all models except the largest, and
    predict the logit of the largest model.

    The logits are those of block 0 at the last probe in the first fifth of the run.

    Args:
        runs: runs of one family at one seed. With four model sizes, the quadratic passes through the three smallest.
        modality: modality of the queries.

    Returns:
        The extrapolations by ascending learning rate, and the reason if there are none.
    """
    by_rate: dict[float, dict[float, tuple[int, float]]] = {}
    for run in runs:
        rate, size = learning_rate(run), model_size(run)
        if math.isnan(rate) or math.isnan(size):
            return [], f"the learning rate or the model's size is not recorded in {run.name}"
        steps, values = run.combined("attn_logit_absmax", np.max, modality, BLOCK)
        by = AT_SHARE * run.planned_steps
        at = int(np.searchsorted(steps, by, side="right")) - 1
        if at < 0:
            return [], f"{run.name} has no probe up to step {by:g}"
        if size in by_rate.setdefault(rate, {}):
            return [], f"two runs have {size:g} parameters and the learning rate {rate:g}"
        by_rate[rate][size] = int(steps[at]), float(values[at])
    predictions, why = [], "there are no runs"
    for rate, by_size in sorted(by_rate.items()):
        one, why = _one(rate, by_size)
        if one is None:
            return [], why
        predictions.append(one)
    return predictions, "" if predictions else why


def _one(rate: float, by_size: dict[float, tuple[int, float]]) -> tuple[Extrapolation | None, str]:
    at = f"at learning rate {rate:g}"
    sizes = sorted(by_size)
    if len(sizes) <= FEWEST_FITTED:
        return (
            None,
            f"{at} the model sizes are too few ({len(sizes)}): the fit needs {FEWEST_FITTED}, and the prediction one "
            "more",
        )
    steps, logits = zip(*(by_size[size] for size in sizes), strict=True)
    if len(set(steps)) > 1:
        return None, f"{at} the models were probed at different steps"
    if not all(math.isfinite(logit) and logit > 0 for logit in logits[:-1]):
        return None, f"{at} a logit of a smaller model is not finite and positive: there is nothing to fit"
    with np.errstate(over="ignore"):
        predicted = float(fit_quadratic(sizes[:-1], logits[:-1])(sizes[-1]))
    return Extrapolation(rate, tuple(sizes), logits, steps[0], predicted), ""


def fit_quadratic(sizes: Sequence[float], values: Sequence[float]) -> Callable[[ArrayLike], NDArray[np.float64]]:
    """Return the least-squares quadratic of log value in log size, as a function of size."""
    curve = np.polynomial.Polynomial.fit(np.log(sizes), np.log(values), 2)
    return lambda at: np.exp(curve(np.log(at)))


def logit_extrapolation(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the ratio of the predicted to the actual largest logit of the held-out largest model.

    With several learning rates, it is the ratio farthest from 1.
    """
    predictions, why = extrapolate(runs, modality)
    if not predictions:
        return Measured(math.nan, why)
    undefined = [one for one in predictions if math.isnan(one.ratio)]
    if undefined:
        return Measured(math.nan, f"the largest model's logit is not finite at learning rate {undefined[0].rate:g}")
    if zero := [one for one in predictions if one.ratio == 0]:
        return Measured(math.nan, f"the fit predicts a logit of 0 at learning rate {zero[0].rate:g}")
    return Measured(max((one.ratio for one in predictions), key=lambda ratio: abs(math.log(ratio))))
