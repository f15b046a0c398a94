"""Computes a lower bound on the memory of a run from its shapes, and checks it before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmqk.model import ModelConfig
from mmqk.store import UserError

if TYPE_CHECKING:
    from mmqk.config import RunConfig

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(run: RunConfig, device: torch.device) -> None:
    """Refuse a run if its weights and one micro-batch together need more memory than the device has.

    The estimate is a lower bound, so a run that passes may still be too large.

    Raises:
        UserError: the run needs more memory; the message has both sizes and the fields to lower.
    """
    weights, batch = least_bytes(run)
    room = memory_of(device)
    if weights + batch <= room:
        return
    model, data = run.model, run.data
    if weights > room:
        subject = f"model ({parameters(model):.3g} parameters, with gradients and the optimizer's moments)"
        fields = (
            f"model.d_model {model.d_model}, model.n_layers {model.n_layers} or model.d_ff {model.mlp_width}"
        )
    else:
        subject = f"model and a micro-batch of {_rows(run)} sequences"
        fields = f"data.batch_size {data.batch_size} or data.seq_len {data.seq_len}"
        fields += ", or raise trainer.accumulate_grad_batches"
    raise UserError(
        f"The {subject} need at least {(weights + batch) / 2**30:,.1f} GiB of memory, but this {device.type} has"
        f" {room / 2**30:,.1f} GiB: lower {fields}."
    )


def least_bytes(run: RunConfig) -> tuple[int, int]:
    """Return the lower bounds in bytes: weights with gradients and moments, and the activations of a rank's backward
    pass."""
    model = run.model
    size = 4 if run.trainer["precision"] == "32-true" else 2
    weight = 2 if run.trainer["precision"] == "bf16-true" else 4
    shards = run.processes if run.trainer["strategy"] == "fsdp" else 1
    tokens = _rows(run) * run.data.seq_len
    # A block stores attention's input, queries and output, and the MLP's input and hidden layer. With activation
    # checkpointing it stores only its input.
    block = (
        model.d_model
        if run.activation_checkpointing
        else 3 * model.d_model + model.n_heads * model.head_dim + model.mlp_width
    )
    at_once = tokens if run.loss.chunk_size is None else min(tokens, run.loss.chunk_size)
    activations = size * (tokens * model.n_layers * block + at_once * model.vocab_size)
    if run.backend == "math" and not run.activation_checkpointing:
        activations += size * tokens * run.data.seq_len * model.n_heads * model.n_layers
    # A weight has a gradient and two moments; with Muon, the matrices of the blocks have one moment.
    stored = 4 * parameters(model) - (block_parameters(model) if run.optim.matrices == "muon" else 0)
    return weight * stored // shards, activations


def parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the matrices, without gains and biases."""
    tables = 1 if model.tie_embeddings else 2
    return block_parameters(model) + tables * model.vocab_size * model.d_model


def block_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the matrices of the blocks."""
    heads = model.n_heads + model.kv_heads
    attention = 2 * model.d_model * heads * model.head_dim
    mlp = (2 if model.mlp == "gelu" else 3) * model.d_model * model.mlp_width
    return model.n_layers * (attention + mlp)


def memory_of(device: torch.device) -> int:
    """Return the memory of a device in bytes; for a CPU, the memory of the machine or the limit of its container."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in map(Path, CGROUP_LIMITS):
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


def _rows(run: RunConfig) -> int:
    """Return the number of sequences per micro-batch on one device."""
    return run.data.batch_size // (run.trainer["accumulate_grad_batches"] * run.processes)
