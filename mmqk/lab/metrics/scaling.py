"""Extrapolation of the largest attention logit over model size, from small models to a larger one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmqk.lab.metrics.metric import Measured, planned_steps
from mmqk.lab.metrics.rates import learning_rate
from mmqk.lab.runs.load import Run

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
        by = AT_SHARE * planned_steps(run)
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
        return Measured(
            math.nan, f"the largest model's logit is not finite at learning rate {undefined[0].rate:g}"
        )
    if zero := [one for one in predictions if one.ratio == 0]:
        return Measured(math.nan, f"the fit predicts a logit of 0 at learning rate {zero[0].rate:g}")
    return Measured(max((one.ratio for one in predictions), key=lambda ratio: abs(math.log(ratio))))
