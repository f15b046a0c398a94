"""Planted violations: functions that turn a sound case into one with a mistake, and the check that finds it.

A function returns None if the family cannot have this mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.monitors.preflight.families import Case, T

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
    case.embedding.register_forward_hook(
        lambda module, args, x: x + 0.1 * torch.cat([x[:, 1:], x[:, :1] * 0], 1)
    )
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
            case,
            batch=case.packed | {"attention_mask": mask, "position_ids": torch.arange(T).expand(4, 4, T)},
        )
    return replace(case, batch=case.batch | {"attention_mask": mask.masked_fill(padding, -1e4)})


VIOLATIONS = (
    Violation("later tokens are visible", "leaks: causality", look_ahead),
    Violation("other sequences are visible", "leaks: other sequences", mixed_rows),
    Violation("packed documents see each other", "leaks: documents", packing_leak),
    Violation("padding on the left is visible", "leaks: padding on the left", padding_ignored),
    Violation("padding is part of a mean", "leaks: id of padding", padding_seen),
    Violation("mask of -1e4", "leaks: finite mask", finite_mask),
)
