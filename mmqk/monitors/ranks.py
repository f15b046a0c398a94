"""Sums over the ranks of a run; on one process they are what was given."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def summed(tensor: Tensor) -> Tensor:
    """Over all ranks, in place; a collective call."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor
