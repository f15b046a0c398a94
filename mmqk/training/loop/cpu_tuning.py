"""What a process is told so that its steps cost less on a CPU; no number changes."""

from __future__ import annotations

import ctypes
import os

# glibc's malloc.h. Left alone, it hands every large block back to the kernel, which clears its pages anew each time.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST = (2**30, 2**25)  # bytes; glibc before 2.35 refuses more than the second
_PAD = 2**27


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees for its next use; whether the C library can.

    Only glibc can, for blocks below 1 GiB (32 MiB before 2.35); elsewhere (macOS, musl) nothing happens. What a
    process has taken at its peak it keeps until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library without a name
        return False
    kept = any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST)
    return bool(kept and mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_TOP_PAD, _PAD))


def skip_nvml_check() -> None:
    """Undo what importing Lightning does to every step of an optimizer: to look for NVIDIA's library on the disk.

    torch asks in each whether there is a GPU; without this word of Lightning's it asks the CUDA runtime it has.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
