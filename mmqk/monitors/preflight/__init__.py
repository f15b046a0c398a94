"""Checks a model and a batch before training: leaks, attention, loss and parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from mmqk.monitors.foreign.steps import Optimizers
from mmqk.monitors.modalities import Modality
from mmqk.monitors.preflight import attention, parameters
from mmqk.monitors.preflight import loss as losses
from mmqk.monitors.preflight.context import Context, Finding, Loss, NotChecked, Table
from mmqk.store import UserError

__all__ = ["Finding", "Table", "preflight"]

CHECKS: dict[str, Callable[[Context], Finding]] = {
    "leaks: causality": attention.causality,
    "leaks: other sequences": attention.sequences,
    "leaks: documents": attention.documents,
    "leaks: id of padding": attention.padding_ids,
    "leaks: padding on the right": partial(attention.more_padding, sides=(0, 3)),
    "leaks: padding on the left": partial(attention.more_padding, sides=(3, 0)),
    "leaks: finite mask": attention.finite_masks,
    "attention: QK-Norm": attention.qk_norm,
    "attention: scale": attention.scale,
    "attention: softcap": attention.softcap,
    "attention: window": attention.window,
    "attention: sinks": attention.sinks,
    "attention: tokens": attention.tokens,
    "loss: ids": losses.ids,
    "loss: shift": losses.shift,
    "loss: padding": losses.padding,
    "loss: labels": losses.reached,
    "loss: z-loss": losses.z_loss,
    "loss: weights": losses.weights,
    "loss: one modality": losses.one_modality,
    "loss: halves": losses.halves,
    "loss: initial loss": losses.initial,
    "parameters: no gradient": parameters.no_gradient,
    "parameters: gradient norm": parameters.gradient_norm,
    "parameters: too small updates": parameters.too_small_updates,
    "parameters: tied weights": parameters.tied,
    "parameters: decay": parameters.decay,
    "parameters: in no group": parameters.in_no_group,
}


def preflight(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    optimizer: Optimizers | None = None,
    modality: Modality | None = None,
) -> Table:
    """Check a model and a batch before training, in some forward and backward passes.

    The passes run in evaluation mode and eagerly; if all weights are in fp32, also outside autocast. Weights, buffers,
    gradients, optimizer state, random states and modes are the same afterwards, bit for bit.

    Args:
        model: the object that the training loop calls.
        batch: a batch of two or more sequences, with padding if training has padding: a mapping
            (``model(**batch)``), a tuple (``model(*batch)``) or a tensor (``model(batch)``).
        loss: a function (model, batch) -> scalar that calls the model; by default ``model(**batch).loss``.
        optimizer: the optimizer or a list of them; without it, its checks are left out.
        modality: the id ranges of each modality except text, ``{"image": range(4, 8196)}``, or a function, as for
            `attach`; by default the ids that the model's config names, or text only.

    Raises:
        UserError: no module, or an invalid range or name of a modality.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model is of {type(model)}: pass the nn.Module that the training loop calls")
    context = Context(model, batch, loss, optimizer, modality)
    try:
        text = "; ".join(filter(None, ("loss of the batch", context.modalities.origin)))
        findings = [Finding("ok", context.first.loss, text, check="forward and backward")]
    except Exception as error:
        text, advice = _in_words(error), "run the loss on this batch alone, under autocast if training uses it"
        if loss is not None:
            advice += "; loss must be a function loss(model, batch) that calls the model and returns a scalar tensor"
        return Table((Finding("FAILED", None, text, advice, "forward and backward"),))
    for name, check in CHECKS.items():
        try:
            finding = check(context)
        except NotChecked as reason:
            finding = Finding("not checked", None, str(reason))
        except Exception as error:  # a model may refuse a changed batch
            finding = Finding("not checked", None, _in_words(error))
        findings.append(replace(finding, check=name))
    return Table(tuple(findings))


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
