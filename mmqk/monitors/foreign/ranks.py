"""Agreement of the ranks during a probe: on flags, and on the failure of the probe on one of them."""

from __future__ import annotations

import torch

from mmqk.distributed import summed, world_size

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
