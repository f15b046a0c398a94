"""Find the CPU cores and GPUs that runs may use, without initializing CUDA."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> tuple[str, ...]:
    """Return the GPUs that runs may use, each as a value for CUDA_VISIBLE_DEVICES. If this variable is set, these are
    the GPUs that it lists; otherwise they are all GPUs of the machine.

    The GPUs are counted without CUDA, because CUDA would create a context on each GPU.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip() not in ("", "-1"))
    files = sorted(Path("/dev").glob("nvidia[0-9]*"), key=lambda path: (len(path.name), path.name))
    return tuple(str(i) for i in range(len(files)))
