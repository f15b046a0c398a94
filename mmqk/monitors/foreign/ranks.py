"""Agreement of all ranks during a probe, so that a failure on one rank ends the probe on every rank.

Every collective operation of a probe follows a call of `agreed`. A rank whose probe fails calls `failed_here` once,
in place of its next `agreed`.
"""

from __future__ import annotations

import torch

from mmqk.distributed import summed, world_size

_FLAGS = 4
_FINAL = 1000  # more than the number of ranks


class ProbeError(RuntimeError):
    """Raised if a probe failed.

    Attributes:
        is_final: whether a probe of the whole batch would fail too.
        is_fatal: whether the other ranks cannot go on, so that the run ends.
    """

    def __init__(self, message: str, is_final: bool, is_fatal: bool = False):
        super().__init__(message)
        self.is_final, self.is_fatal = is_final, is_fatal


class FailedElsewhereError(RuntimeError):
    """Raised on the other ranks if a probe failed on one rank.

    Attributes:
        is_final: whether a probe of the whole batch would fail too.
    """

    def __init__(self, is_final: bool):
        super().__init__("the probe failed on another rank")
        self.is_final = is_final


def agreed(device: torch.device, *flags: bool) -> list[bool]:
    """Return for each of at most four flags whether it is true on any rank.

    Raises:
        FailedElsewhereError: the probe failed on another rank.
    """
    if world_size() == 1:
        return list(flags)
    values = [0.0, *map(float, flags), *[0.0] * (_FLAGS - len(flags))]
    failed, *sums = summed(torch.tensor(values, device=device)).tolist()
    if failed:
        raise FailedElsewhereError(failed >= _FINAL)
    return [bool(x) for x in sums[: len(flags)]]


def failed_here(device: torch.device, is_final: bool) -> bool:
    """Make `agreed` raise on every other rank, and return whether any rank's failure is final."""
    if world_size() == 1:
        return is_final
    failed = float(_FINAL if is_final else 1)
    return bool(summed(torch.tensor([failed, *[0.0] * _FLAGS], device=device))[0] >= _FINAL)
