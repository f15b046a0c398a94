"""Cores and GPUs for runs, counted without using a device."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> int:
    """Return the cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def gpus() -> tuple[str, ...]:
    """Return each GPU as a value of CUDA_VISIBLE_DEVICES: the GPUs that this variable lists, or, if it is not set,
    all GPUs of the machine.

    CUDA is not used to count the GPUs, because it would create a context on each of them.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip() not in ("", "-1"))
    files = sorted(Path("/dev").glob("nvidia[0-9]*"), key=lambda path: (len(path.name), path.name))
    return tuple(str(i) for i in range(len(files)))
