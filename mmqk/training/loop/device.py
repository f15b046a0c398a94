"""Describes the device of a run, its attention kernels and the compilation of its blocks."""

from __future__ import annotations

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
    dtype = torch.float32 if run.trainer["precision"] == "32-true" else torch.bfloat16
    apart, dropout = run.data.documents_apart, run.model.attn_dropout
    reaches = sorted({run.model.reach_of(layer) for layer in range(run.model.n_layers)})
    try:
        kernels = [
            kernel_name(run.backend, device.type, dtype, apart or window > 0 or separate, dropout)
            for window, separate in reaches
        ]
    except ValueError as error:
        raise UserError(str(error)) from error
    if run.compile and device.type == "cpu" and run.trainer["accelerator"] != "cpu":
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


def advised(error: Exception) -> Exception:
    """Return torch's error as a `UserError` with advice if the machine cannot compute the run; else the error."""
    message = " ".join(str(error).split())
    advice = next((advice for words, advice in ADVICE.items() if words.lower() in message.lower()), None)
    if advice is None or not isinstance(error, RuntimeError):
        return error
    return UserError(f"{message[:400].rstrip('.')}: {advice}.")
