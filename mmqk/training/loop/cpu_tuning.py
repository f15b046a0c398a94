"""Process settings that make steps faster on a CPU; no number changes."""

from __future__ import annotations

import ctypes
import os

# From glibc's malloc.h. By default glibc returns every large block to the kernel, which clears the pages again.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST = (2**30, 2**25)  # bytes; glibc before 2.35 accepts at most the second
_PAD = 2**27


def keep_freed_memory() -> bool:
    """Let this process reuse the memory that it frees; return whether the C library supports it.

    Only glibc does, for blocks below 1 GiB (32 MiB before 2.35); with macOS or musl nothing changes. The process
    keeps its peak memory until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library without a name
        return False
    kept = any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST)
    return bool(kept and mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_TOP_PAD, _PAD))


def skip_nvml_check() -> None:
    """Undo a setting of Lightning's import that makes every optimizer step search the disk for NVIDIA's library.

    torch checks in each step whether there is a GPU; without the setting it asks the loaded CUDA runtime.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
