"""Reductions over the ranks of a run, and how the ranks agree that a probe failed. In a run with one process a
reduction returns its argument."""

from __future__ import annotations

from typing import Any

import torch
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


_FLAGS = 6
_FINAL = 1000  # more than the number of ranks


class ProbeError(RuntimeError):
    """Raised if a probe failed.

    Attributes:
        is_final: whether a probe of the whole batch would fail too.
        is_fatal: whether the other ranks cannot go on, so that the run ends.
        is_elsewhere: whether it failed on another rank, which prints the reason.
    """

    def __init__(self, message: str, is_final: bool, is_fatal: bool = False, is_elsewhere: bool = False):
        super().__init__(message)
        self.is_final, self.is_fatal, self.is_elsewhere = is_final, is_fatal, is_elsewhere


def agreed(device: torch.device, *flags: bool) -> list[bool]:
    """Return for each of at most six flags whether it is true on any rank.

    Raises:
        ProbeError: the probe failed on another rank.
    """
    if world_size() == 1:
        return list(flags)
    values = [0.0, *map(float, flags), *[0.0] * (_FLAGS - len(flags))]
    failed, *sums = summed(torch.tensor(values, device=device)).tolist()
    if failed:
        raise ProbeError("the probe failed on another rank", failed >= _FINAL, is_elsewhere=True)
    return [bool(x) for x in sums[: len(flags)]]


def failed_here(device: torch.device, is_final: bool) -> bool:
    """Make `agreed` raise on every other rank, and return whether any rank's failure is final."""
    if world_size() == 1:
        return is_final
    failed = float(_FINAL if is_final else 1)
    return bool(summed(torch.tensor([failed, *[0.0] * _FLAGS], device=device))[0] >= _FINAL)
