"""Process settings that make steps faster on a CPU and do not change the results.

The docstrings give measurements with one thread of an Intel Xeon and torch 2.14.1, on a busy machine.
"""

from __future__ import annotations

import ctypes
import os

import torch

# From glibc's malloc.h. By default glibc returns every large block to the kernel, which clears the pages
# before they are used again.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST = (2**30, 2**25)  # bytes; glibc before 2.35 accepts at most the second value
_PAD = 2**27


def tune(device: torch.device) -> None:
    """Apply all settings of this file for a run on this device."""
    keep_new_memory_as_it_is()
    if device.type == "cpu":
        keep_freed_memory()
        skip_nvml_check()


def keep_freed_memory() -> bool:
    """Let this process reuse the memory that it frees; return whether the C library supports this.

    Only glibc supports this, for blocks below 1 GiB (32 MiB before 2.35). On macOS or with musl the call does
    nothing. The process keeps its peak memory until it ends.

    Measured: a step of configs/demo.yaml has 6 to 78 page faults with this setting and 1,923 to 3,582 without it
    (four processes each). ``python -m timeit "torch.ones(2**23)"`` takes 2.3 ms with it and 16.6 ms without it.
    benchmarks/README.md compares whole steps.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows CDLL needs a name
        return False
    kept = any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST)
    return bool(kept and mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_TOP_PAD, _PAD))


def skip_nvml_check() -> None:
    """Undo a setting of Lightning that makes every optimizer step search the disk for NVIDIA's library.

    torch checks in each step whether there is a GPU. After this call torch uses the loaded CUDA runtime.

    Measured: a step of fused AdamW over 40 matrices of 64 x 64 takes 0.30 to 0.31 ms after this call and 0.45 to
    0.47 ms before it (medians of 300 steps, measured twice).
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


def keep_new_memory_as_it_is() -> None:
    """Do not fill new tensors under ``trainer.deterministic``. Filling them would only reveal reads of uninitialized
    memory.

    Measured: ``python -m timeit "torch.empty(2**23)"`` takes 8 us after this call and 9.9 ms before it.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_threads(threads: int) -> None:
    """Set the number of CPU threads; 0 keeps torch's default. Call it again after Lightning has started processes,
    because Lightning changes the number.

    Sums depend on the number of threads, so a resumed run needs the number with which it began.
    """
    if threads:
        torch.set_num_threads(threads)
