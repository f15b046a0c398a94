"""Measures time and peak memory of head and loss alone, forward and backward: dense, and with `loss.chunk_size`.

The timed work starts from given hidden states. It computes the loss, with z-loss and two modalities, and the
gradients of the loss with respect to the hidden states and the head. The full size runs in bf16, and the logits of a
batch take most of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.harness import Candidate, Context, Unit, compare, seconds_of
from mmqk.training.losses import chunked_losses, modality_losses, total_loss

Z_LOSS = 1e-4
DENSE = "dense"


@dataclass(frozen=True)
class Size:
    """Number of tokens, width, vocabulary, and the chunk sizes to measure."""

    tokens: int
    width: int
    vocabulary: int
    chunks: tuple[int, ...]


TOY = [Size(2048, 128, 4096, (128, 512, 2048))]
FULL = [Size(32768, 768, vocabulary, (1024, 2048, 4096, 8192)) for vocabulary in (16384, 32768, 65536)]


def units(context: Context) -> list[Unit]:
    """Return the units of this table."""
    return [
        Unit("loss", f"{size.vocabulary // 1024}k-ids", 30, partial(_measure, size=size))
        for size in (FULL if context.full else TOY)
    ]


def _measure(context: Context, size: Size) -> dict[str, Any]:
    candidates = [
        Candidate(
            DENSE if chunk is None else f"{chunk:,} tokens a chunk",
            partial(step_of, size, chunk, context.device),
            {"steps": 1, "tokens": size.tokens},
        )
        for chunk in (None, *size.chunks)
    ]
    return {
        "title": f"{size.tokens:,} tokens, width {size.width}, {size.vocabulary:,} ids",
        "facts": {"precision": "bf16-mixed" if context.device == "cuda" else "32-true"},
        "base": DENSE,
        "rows": compare(candidates, context, repeat=5 if context.full else 1, rounds=10),
    }


def step_of(size: Size, chunk: int | None, device: str) -> Callable[[int], float]:
    """Return the timed function. It runs forward and backward, without an update of the weights."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, size.tokens, size.width, generator=random).to(device).requires_grad_()
    head = (0.02 * torch.randn(size.vocabulary, size.width, generator=random)).to(device).requires_grad_()
    targets = torch.randint(size.vocabulary, (1, size.tokens), generator=random).to(device)
    of = targets, (targets >= size.vocabulary // 2).long(), torch.ones_like(targets, dtype=torch.bool)
    weights, n = torch.ones(2, device=device), float(size.tokens)
    compiled = device == "cuda"  # on a GPU both losses are compiled, as in a run with --compile
    dense = torch.compile(modality_losses, dynamic=False) if compiled else modality_losses

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            if chunk is None:
                sums = dense(hidden @ head.T, *of, 2)
            else:
                sums = chunked_losses(hidden, head, *of, weights, Z_LOSS, chunk, compiled=compiled)
            loss = total_loss(sums, weights, Z_LOSS, n)
        loss.backward()
        hidden.grad = head.grad = None

    return lambda repeat: seconds_of(step, repeat, device)
