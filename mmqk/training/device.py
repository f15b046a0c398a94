"""The device of a run: its kernels, advice on what it cannot compute, and settings of the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any

import torch

from mmqk.model.backends import kernel_name
from mmqk.store import UserError

if TYPE_CHECKING:
    from mmqk.config import RunConfig

# Words in torch's errors, and the advice that a run adds to them.
ADVICE = {
    "out of memory": "lower data.batch_size, data.seq_len or the model, or raise trainer.accumulate_grad_batches",
    "can't allocate memory": "lower data.batch_size or data.seq_len, or raise trainer.accumulate_grad_batches",
    "No available kernel": "use backend sdpa or math",
    "C++ compiler": "install g++ or clang++, or leave compile off",
    "triton": "install Triton, or leave compile off and use another backend than flex",
}


def resolve_device(run: RunConfig, device: torch.device) -> dict[str, Any]:
    """Return the device, the attention kernels and the compilation settings of the run, to store in its record.

    Raises:
        UserError: the device has no kernel for this configuration, or has no GPU to compile for.
    """
    dtype = torch.float32 if run.trainer.precision == "32-true" else torch.bfloat16
    apart, dropout = run.data.documents_apart, run.model.attn_dropout
    reaches = sorted({run.model.reach_of(layer) for layer in range(run.model.n_layers)})
    try:
        kernels = [
            kernel_name(run.backend, device.type, dtype, apart or window > 0 or separate, dropout)
            for window, separate in reaches
        ]
    except ValueError as error:
        raise UserError(str(error)) from error
    if run.compile and device.type == "cpu" and run.trainer.accelerator != "cpu":
        raise UserError(
            "There is no GPU here, and compiling for a CPU takes minutes and gigabytes before step 1: set --compile"
            " false, or set --trainer.accelerator cpu to compile anyway."
        )
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "attention": " and ".join(dict.fromkeys(kernels)),
        "compiled": run.compile,
        "recomputed": run.activation_checkpointing,
    }


def describe(settled: dict[str, Any]) -> str:
    """Describe the result of `resolve_device` in one line."""
    words = [f"; blocks {word}" for word in ("compiled", "recomputed") if settled[word]]
    return f"{settled['name']}; attention: {settled['attention']}{''.join(words)}"


def advised(error: BaseException) -> BaseException:
    """Return torch's error as a `UserError` with advice if the machine cannot compute the run, or if another process
    or a loader worker has ended; else the error."""
    message = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and ("by peer" in message or "remote process exited" in message):  # gloo, NCCL
        return UserError(
            "another process of this run has ended: see its output for the reason, and run the same command again to"
            " continue from the last checkpoint"
        )
    if "DataLoader worker (pid" in message:
        return UserError(
            "a loader worker was killed: if the machine ran out of memory, give fewer data.workers; the same command"
            " continues from the last checkpoint"
        )
    advice = next((advice for words, advice in ADVICE.items() if words.lower() in message.lower()), None)
    if advice is None or not isinstance(error, RuntimeError):
        return error
    return UserError(f"{message[:400].rstrip('.')}: {advice}.")


# From glibc's malloc.h. By default glibc returns every large block to the kernel, which clears the pages
# before they are used again.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def tune(device: torch.device) -> None:
    """Apply the settings below for a run on this device."""
    # Under ``trainer.deterministic`` torch would fill new tensors, which only reveals reads of uninitialized memory:
    # ``python -m timeit "torch.empty(2**23)"`` takes 8 us with this setting and 9.9 ms without it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cpu":
        keep_freed_memory()
        skip_nvml_check()


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees.

    Only glibc supports this, for blocks below 1 GiB (32 MiB before 2.35). On macOS or with musl the call does
    nothing. The process keeps its peak memory until it ends.

    Measured: a step of configs/demo.yaml has 6 to 78 page faults with this setting and 1,923 to 3,582 without it
    (four processes each). ``python -m timeit "torch.ones(2**23)"`` takes 2.3 ms with it and 16.6 ms without it.
    benchmarks/README.md compares whole steps.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # TypeError: on Windows CDLL needs a name
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_MMAP_THRESHOLD, 2**30)  # glibc before 2.35 refuses this value and keeps the one above
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 2**27)


def skip_nvml_check() -> None:
    """Undo a setting of Lightning that makes every optimizer step search the disk for NVIDIA's library.

    torch checks in each step whether there is a GPU. After this call torch uses the loaded CUDA runtime.

    Measured: a step of fused AdamW over 40 matrices of 64 x 64 takes 0.30 to 0.31 ms after this call and 0.45 to
    0.47 ms before it (medians of 300 steps, measured twice).
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


def set_threads(threads: int) -> None:
    """Set the number of CPU threads; 0 keeps torch's default. Call it again after Lightning has started processes,
    because Lightning changes the number.

    Sums depend on the number of threads, so a resumed run needs the number with which it began.
    """
    if threads:
        torch.set_num_threads(threads)
