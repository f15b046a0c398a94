"""Checks and describes the device of a run, its attention kernels and the compilation of its blocks."""

from __future__ import annotations

import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

from mmqk.model.backends import attention, kernel_name, mask_of
from mmqk.store import UserError

if TYPE_CHECKING:
    import torch

    from mmqk.config import RunConfig


def resolve_device(run: RunConfig, device: torch.device) -> dict[str, Any]:
    """Return the device, the attention kernels and the compilation settings of the run, to store in its record.

    Raises:
        UserError: the device or the installation cannot run this configuration.
    """
    import torch

    from mmqk.training.loop.memory import check_memory

    check_memory(run, device)
    dtype = torch.float32 if run.trainer["precision"] == "32-true" else torch.bfloat16
    reaches = sorted({run.model.reach_of(layer) for layer in range(run.model.n_layers)})
    try:
        kernels = [
            kernel_name(
                run.backend,
                device.type,
                dtype,
                run.data.documents_apart or window > 0 or separate,
                run.model.attn_dropout,
            )
            for window, separate in reaches
        ]
    except ValueError as error:
        raise UserError(str(error)) from error
    if device.type == "cuda" and run.backend.startswith("sdpa"):
        for window, separate in reaches:
            _try(run, device, dtype, window, separate)
    if run.compile and device.type == "cpu" and run.trainer["accelerator"] != "cpu":
        raise UserError(
            "There is no GPU here, and compiling for a CPU takes minutes and gigabytes before step 1: set --compile"
            " false, or set --trainer.accelerator cpu to compile anyway."
        )
    if run.compile and not _has_compiler(device):
        raise UserError(
            "compile needs Triton, which is not installed: install it or leave compile off."
            if device.type == "cuda"
            else "compile needs a C++ compiler on a CPU: install g++ or clang++, or leave compile off."
        )
    if run.backend == "flex" and not _has_compiler(device):
        raise UserError(
            "backend flex needs Triton, which is not installed: install it or use backend sdpa or math."
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "name": name,
        "attention": " and ".join(dict.fromkeys(kernels)),
        "compiled": run.compile,
        "recomputed": run.activation_checkpointing,
    }


def describe(settled: dict[str, Any]) -> str:
    """Describe the result of `resolve_device` in one line."""
    more = [word for word in ("compiled", "recomputed") if settled[word]]
    if settled["compiled"] and settled["name"] == "cpu":
        more[0] += " (this can take minutes and gigabytes before step 1)"
    return (
        f"{settled['name']}; attention: {settled['attention']}{''.join(f'; blocks {word}' for word in more)}"
    )


def _try(
    run: RunConfig, device: torch.device, dtype: torch.dtype, window: int, separate: bool = False
) -> None:
    """Run attention once with the shapes of the run, because a kernel refuses a shape only when it is called."""
    import torch

    model, T = run.model, run.data.seq_len
    apart = run.data.documents_apart or separate
    document_BT = torch.zeros(1, T, dtype=torch.long, device=device) if apart else None
    mask = mask_of(run.backend, T, device, window, document_BT)
    q = torch.randn(1, model.n_heads, T, model.head_dim, device=device, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings(record=True) as why:
        warnings.simplefilter("always")
        try:
            out, _ = attention(q, q, q, mask, scale=1.0, dropout=model.attn_dropout, backend=run.backend)
            out.sum().backward()
        except RuntimeError as error:
            reasons = "; ".join(" ".join(str(w.message).split()) for w in why) or " ".join(str(error).split())
            raise UserError(
                f"backend {run.backend} cannot run here ({reasons[:400]}): use sdpa or math."
            ) from error


def _has_compiler(device: torch.device) -> bool:
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return has_triton()
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))
