"""Reductions over the ranks of a run. In a run with one process a reduction returns its argument."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Return the number of processes of the run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if world_size() > 1 else 0


def summed(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks in place and return it. All ranks must call this function."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def largest(tensor: Tensor) -> Tensor:
    """Take the maximum of a tensor over all ranks in place and return it. All ranks must call this function."""
    if world_size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def gathered(value: Any) -> list[Any]:
    """Return the arguments of all ranks, in their order. All ranks must call this function, which synchronizes with
    the device."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def first_of_ranks(sentence: str | None) -> str | None:
    """Return the first argument that is not None, in the order of ranks; None if every rank passes None.

    It calls `gathered`.
    """
    return next((s for s in gathered(sentence) if s is not None), None)
