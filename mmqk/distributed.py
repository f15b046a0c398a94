"""Over the ranks of a run; on one process they are what was given."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this one."""
    return dist.get_rank() if world_size() > 1 else 0


def summed(tensor: Tensor) -> Tensor:
    """Over all ranks, in place; a collective call."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def largest(tensor: Tensor) -> Tensor:
    """Over all ranks, in place; a collective call."""
    if world_size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def first_said(sentence: str | None) -> str | None:
    """That of the first rank that has one; a collective call that waits for the device."""
    if world_size() == 1:
        return sentence
    said: list[str | None] = [None] * world_size()
    dist.all_gather_object(said, sentence)
    return next((s for s in said if s is not None), None)
