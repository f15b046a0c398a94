"""Planted violations: functions that turn a sound case into one with a mistake, and the check that finds it.

A function returns None if the family cannot have this mistake.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.monitors.preflight.families import (
    IMAGE,
    PAD,
    Case,
    D,
    H,
    K,
    T,
    encoder_of,
    logits_and_labels,
    loss_of,
    optimizer_of,
)

Plant = Callable[[Case], Case | None]


@dataclass(frozen=True)
class Violation:
    """A kind of violation.

    Attributes:
        kind: its name in the table.
        check: the check that must fail.
        plant: turns a sound case into one with the violation.
    """

    kind: str
    check: str
    plant: Plant


def look_ahead(case: Case) -> Case:
    """Each embedding contains a part of the next one."""
    case.embedding.register_forward_hook(lambda module, args, x: x + 0.1 * torch.cat([x[:, 1:], x[:, :1] * 0], 1))
    return case


def mixed_rows(case: Case) -> Case:
    """Each embedding contains a part of the mean over the batch."""
    case.embedding.register_forward_hook(lambda module, args, x: x + 0.1 * x.mean(0, keepdim=True))
    return case


def packing_leak(case: Case) -> Case:
    """The documents of the batch see each other: a mask of ones (transformers#46634), or no document ids at all."""
    batch = case.packed | {"attention_mask": torch.ones(len(case.packed["input_ids"]), T, dtype=torch.long)}
    if case.family == "plain":
        case.model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"document_ids": None}), with_kwargs=True
        )
    return replace(case, batch=batch)


def padding_ignored(case: Case) -> Case:
    """The model ignores the mask of padding."""

    def forget(module, args, kwargs):
        return args, kwargs | {"attention_mask": torch.ones_like(kwargs["attention_mask"])}

    case.model.register_forward_pre_hook(forget, with_kwargs=True)
    return case


def padding_seen(case: Case) -> Case:
    """The mean over all tokens, padding included, is part of each embedding."""

    def mix(module, args: tuple[Tensor], x: Tensor) -> Tensor:
        return x + 0.1 * x.cumsum(1).flip(1).cummax(1).values.mean(1, keepdim=True)

    case.embedding.register_forward_hook(mix)
    return case


def finite_mask(case: Case) -> Case:
    """Hidden keys get -1e4."""
    mask = torch.zeros(1, 1, T, T).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e4)
    padding = case.batch["attention_mask"][:, None, None] == 0
    if case.family == "qwen2.5-vl":  # without images, because the positions of images need a mask (B, T)
        return replace(
            case, batch=case.packed | {"attention_mask": mask, "position_ids": torch.arange(T).expand(4, 4, T)}
        )
    return replace(case, batch=case.batch | {"attention_mask": mask.masked_fill(padding, -1e4)})


class OverTokens(nn.Module):
    """A projection whose output is normalized over the tokens."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * (y.square().mean(1, keepdim=True) + 1e-6).rsqrt()


def wrong_axis(case: Case) -> Case:
    """Queries and keys are normalized over the tokens."""
    for attention in case.attention:
        attention.q_proj, attention.k_proj = OverTokens(attention.q_proj), OverTokens(attention.k_proj)
    return case


def queries_only(case: Case) -> Case:
    """Only the queries are normalized."""
    for attention in case.attention:
        if hasattr(attention, "k_norm"):
            attention.k_norm = nn.Identity()
        else:
            attention.q_proj = nn.Sequential(attention.q_proj, nn.RMSNorm(D))
    return with_new_optimizer(case)


def other_eps(case: Case) -> Case | None:
    """The norm of queries and keys uses the eps of bf16, 0.0078, instead of its own."""
    if not hasattr(case.attention[0], "q_norm"):
        return None
    for attention in case.attention:
        for norm in (attention.q_norm, attention.k_norm):
            norm.register_forward_hook(lambda module, args, y: y * wrong(args[0]))
    return case


def wrong(x: Tensor) -> Tensor:
    """Return the factor that replaces an eps of 0 by one of 0.0078."""
    square = x.square().mean(-1, keepdim=True)
    return ((square + 1e-12) / (square + 0.0078)).sqrt()


def unused_gain(case: Case) -> Case:
    """A gain is created and never used (x-transformers#352)."""
    for attention in case.attention:
        attention.qk_scale = nn.Parameter(torch.ones(K))
    return with_new_optimizer(case)


def with_new_optimizer(case: Case) -> Case:
    return replace(case, optimizer=optimizer_of(case.model))


def config_of(attention: nn.Module) -> Any:
    if not hasattr(attention, "config"):
        attention.config = SimpleNamespace()
    return attention.config


def softcap_ignored(case: Case) -> Case:
    """The config has a softcap, and the calls get none (transformers#32309)."""
    for attention in case.attention:
        config_of(attention).attn_logit_softcapping = 50.0
    return case


def other_scale(case: Case) -> Case:
    """The config has another scale than the calls get."""
    for attention in case.attention:
        config_of(attention).query_pre_attn_scalar = 256
    return case


def scaled_twice(case: Case) -> Case | None:
    """Queries are multiplied by 1/sqrt(head_dim), and the call does it again; a QK-Norm would undo the first."""
    if hasattr(case.attention[0], "q_norm"):
        return None
    for attention in case.attention:
        attention.q_proj.register_forward_hook(lambda module, args, y: y * K**-0.5)
    return case


def window_ignored(case: Case) -> Case:
    """The layers have a window of 8 tokens, and the mask shows all tokens."""
    for attention in case.attention:
        attention.config, attention.sliding_window = copy.copy(config_of(attention)), 8
        if hasattr(attention.config, "layer_types"):  # the config of the model, which builds the mask, is another one
            attention.config.layer_types, attention.config.sliding_window = ["sliding_attention"] * 2, 8
    return case


def sinks_ignored(case: Case) -> Case:
    """The layers have sinks that the calls do not get."""
    for attention in case.attention:
        attention.sinks = nn.Parameter(torch.zeros(H))
    return with_new_optimizer(case)


def detached(case: Case) -> Case:
    """The output of attention is detached."""
    for attention in case.attention:
        attention.o_proj.register_forward_hook(lambda module, args, y: y.detach())
    return case


def unused_module(case: Case) -> Case:
    """A linear layer is created and never called."""
    case.model.adapter = nn.Linear(4, 4)
    return with_new_optimizer(case)


def bf16_gains(case: Case) -> Case:
    """Gains of 1 in bf16 cannot move by 1e-4."""
    case = replace(case, model=case.model.bfloat16())
    if "pixel_values" in case.batch:
        case.batch["pixel_values"] = case.batch["pixel_values"].bfloat16()
    return replace(case, optimizer=optimizer_of(case.model, lr=1e-4))


def large_scalar(case: Case) -> Case:
    """A parameter of one element is 1e4, and the learning rate 1e-4."""
    case.model.size = nn.Parameter(torch.tensor(1e4))
    case.embedding.register_forward_hook(lambda module, args, x: x * case.model.size / 1e4)
    return replace(case, optimizer=optimizer_of(case.model, lr=1e-4))


def head_of(case: Case) -> nn.Linear:
    return case.model.head if case.family == "plain" else case.model.lm_head


def tied_twice(case: Case) -> Case:
    """The head shares the memory of the embedding, but it is another Parameter."""
    head_of(case).weight = nn.Parameter(case.embedding.weight.data)
    return with_new_optimizer(case)


def decayed_norms(case: Case) -> Case:
    return replace(case, optimizer=torch.optim.AdamW(case.model.parameters(), lr=1e-3, weight_decay=0.1))


def missing_group(case: Case) -> Case:
    """The optimizer has no biases and gains."""
    del case.optimizer.param_groups[1]
    return case


def dominated(case: Case) -> Case:
    """A penalty makes the gradient of the head larger than all others."""
    return replace(case, loss=lambda model, batch: loss_of(model, batch) + head_of(case).weight.sum())


def shifted_twice(case: Case) -> Case:
    """The labels are shifted in the batch and in the loss."""
    labels = case.batch["labels"]
    later = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    return replace(case, batch=case.batch | {"labels": later})


def not_shifted(case: Case) -> Case:
    """The loss compares each token with itself."""
    labels = case.batch["labels"]
    earlier = torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], 1)
    return replace(case, batch=case.batch | {"labels": earlier})


def labels_in_padding(case: Case) -> Case:
    labels = case.batch["labels"].masked_fill(case.batch["attention_mask"] == 0, PAD)
    return replace(case, batch=case.batch | {"labels": labels})


Reduce = Callable[[Tensor, Tensor, Tensor], Tensor]


def with_loss(case: Case, reduce: Reduce) -> Case:
    """Return the case with a loss that is a function of logits, labels and the cross-entropy (B, T - 1)."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits, labels = logits_and_labels(model, batch)
        nll = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view(labels.shape)
        return reduce(logits, labels, nll) + encoder_of(model)

    return replace(case, loss=loss)


def last_targets_lost(case: Case) -> Case:
    """The loss uses the first 18 tokens."""
    return with_loss(case, lambda logits, labels, nll: nll[:, :18].sum() / (labels[:, :18] >= 0).sum())


def z_loss_on_padding(case: Case) -> Case:
    def reduce(logits: Tensor, labels: Tensor, nll: Tensor) -> Tensor:
        return nll.sum() / (labels >= 0).sum() + 1e-2 * logits.logsumexp(-1).square().mean()

    return with_loss(case, reduce)


def divided_by_all(case: Case) -> Case:
    """The sum over targets is divided by all tokens."""
    return with_loss(case, lambda logits, labels, nll: nll.mean())


def mean_of_means(case: Case) -> Case:
    """Each sequence counts the same, whatever its number of targets."""
    return with_loss(case, lambda logits, labels, nll: (nll.sum(1) / (labels >= 0).sum(1)).mean())


def modality_without_guard(case: Case) -> Case | None:
    """The loss is a mean for each modality, which is 0 / 0 without its targets; or an image encoder is not run."""
    if case.family == "chameleon":
        return None  # it trains no image targets
    if case.family == "qwen2.5-vl":
        return replace(case, loss=lambda model, batch: model(**batch).loss)

    def reduce(logits: Tensor, labels: Tensor, nll: Tensor) -> Tensor:
        image, text = labels >= IMAGE.start, (labels >= 0) & (labels < IMAGE.start)
        return nll[image].mean() + nll[text].mean()

    return with_loss(case, reduce)


def range_outside(case: Case) -> Case:
    return replace(case, modality=case.modality | {"audio": range(150, 200)})


def large_head(case: Case) -> Case:
    """The head is 200 times too large at the start."""
    with torch.no_grad():
        head_of(case).weight.mul_(200)
    return case


VIOLATIONS = (
    Violation("later tokens are visible", "leaks: causality", look_ahead),
    Violation("other sequences are visible", "leaks: other sequences", mixed_rows),
    Violation("packed documents see each other", "leaks: documents", packing_leak),
    Violation("padding on the left is visible", "leaks: padding on the left", padding_ignored),
    Violation("padding is part of a mean", "leaks: id of padding", padding_seen),
    Violation("mask of -1e4", "leaks: finite mask", finite_mask),
    Violation("QK-Norm over tokens", "attention: QK-Norm", wrong_axis),
    Violation("QK-Norm of queries alone", "attention: QK-Norm", queries_only),
    Violation("QK-Norm with another eps", "attention: QK-Norm", other_eps),
    Violation("gain created and unused", "attention: QK-Norm", unused_gain),
    Violation("softcap in the config alone", "attention: softcap", softcap_ignored),
    Violation("scale differs from the config", "attention: scale", other_scale),
    Violation("scaled twice", "attention: scale", scaled_twice),
    Violation("window ignored", "attention: window", window_ignored),
    Violation("sinks ignored", "attention: sinks", sinks_ignored),
    Violation("labels shifted twice", "loss: shift", shifted_twice),
    Violation("labels not shifted", "loss: shift", not_shifted),
    Violation("labels at padding", "loss: padding", labels_in_padding),
    Violation("targets left out", "loss: labels", last_targets_lost),
    Violation("z-loss on padding", "loss: z-loss", z_loss_on_padding),
    Violation("divided by B * T", "loss: weights", divided_by_all),
    Violation("mean of sequence means", "loss: halves", mean_of_means),
    Violation("absent modality", "loss: one modality", modality_without_guard),
    Violation("range outside the vocabulary", "loss: ids", range_outside),
    Violation("head too large", "loss: initial loss", large_head),
    Violation("detached attention", "parameters: no gradient", detached),
    Violation("module never called", "parameters: no gradient", unused_module),
    Violation("gains in bf16", "parameters: too small updates", bf16_gains),
    Violation("large parameter of one element", "parameters: too small updates", large_scalar),
    Violation("tied weights updated twice", "parameters: tied weights", tied_twice),
    Violation("norms and embeddings decayed", "parameters: decay", decayed_norms),
    Violation("parameters in no group", "parameters: in no group", missing_group),
    Violation("one tensor dominates grad_norm", "parameters: gradient norm", dominated),
)
