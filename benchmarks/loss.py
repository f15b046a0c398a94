"""Dense loss against loss in chunks: `python benchmarks/loss.py`, time and peak memory of head and loss, in turns.

Forward and backward from the hidden states to their gradient and that of the head, z-loss on, two modalities. Toy
size on a CPU; `--full` takes the sizes of a GPU in bf16, which is what counts: there the logits of a batch are what
memory goes into.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmqk.training.chunked_loss import chunked_losses
from mmqk.training.loss import modality_losses, total_loss

Z_LOSS = 1e-4


@dataclass(frozen=True)
class Size:
    """One table: tokens, width, vocabulary, and the chunks that are tried."""

    tokens: int
    width: int
    vocabulary: int
    chunks: tuple[int, ...]


TOY = [Size(2048, 128, 4096, (128, 512, 2048))]
FULL = [Size(32768, 768, vocabulary, (1024, 2048, 4096, 8192)) for vocabulary in (16384, 32768, 65536)]


class Peak(TorchDispatchMode):
    """Most bytes alive at once of what operations made; a GPU is asked itself instead."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for storage in {t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)} - given:
            if storage not in self._known:
                self._known.add(storage)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.most = max(self.most, self.alive)
        return out

    def _gone(self, n: int) -> None:
        self.alive -= n


def step_of(size: Size, chunk: int | None, device: str) -> Callable[[], None]:
    """One forward and backward; in bf16 on a GPU."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, size.tokens, size.width, generator=random).to(device).requires_grad_()
    head = (0.02 * torch.randn(size.vocabulary, size.width, generator=random)).to(device).requires_grad_()
    targets = torch.randint(size.vocabulary, (1, size.tokens), generator=random).to(device)
    of = targets, (targets >= size.vocabulary // 2).long(), torch.ones_like(targets, dtype=torch.bool)
    weights, n = torch.ones(2, device=device), float(size.tokens)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            if chunk is None:
                sums = modality_losses(hidden @ head.T, *of, 2)
            else:
                sums = chunked_losses(hidden, head, *of, weights, Z_LOSS, chunk)
            loss = total_loss(sums, weights, Z_LOSS, n)
        loss.backward()
        hidden.grad = head.grad = None

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    """Of one step."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(step: Callable[[], None], device: str) -> int:
    """Most that one step adds to what is there before it."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with Peak() as peak:
        step()
    return peak.most


def table(size: Size, rounds: int, device: str) -> None:
    """Measure and print. What does not fit says so."""
    steps: dict[int | None, Callable[[], None]] = {}
    memory: dict[int | None, int | None] = {}
    for chunk in (None, *size.chunks):
        step = step_of(size, chunk, device)
        try:
            step()  # a warm-up
            memory[chunk] = peak_bytes(step, device)
            steps[chunk] = step
        except torch.OutOfMemoryError:
            memory[chunk] = None
            del step
            torch.cuda.empty_cache()
    times: dict[int | None, list[float]] = {chunk: [] for chunk in steps}
    for _ in range(rounds):
        for chunk, step in steps.items():
            times[chunk].append(seconds(step, device))
    print(
        f"{size.tokens:,} tokens, width {size.width}, {size.vocabulary:,} ids; medians of {rounds} rounds\n"
    )
    print(
        "| tokens a chunk | ms | quartiles | peak MiB | peak against dense |\n| --- | --: | --: | --: | --: |"
    )
    dense = memory[None]
    for chunk, most in memory.items():
        name = "dense" if chunk is None else f"{chunk:,}"
        if most is None:
            print(f"| {name} | out of memory | | | |")
            continue
        low, middle, high = (1e3 * x for x in statistics.quantiles(times[chunk], n=4, method="inclusive"))
        share = "" if dense is None else f"{most / dense:.2f}"
        print(f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} | {most / 2**20:,.0f} | {share} |")
    print()


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--full", action="store_true", help="the sizes of a GPU, which it needs")
    parser.add_argument("--rounds", type=int, default=10, help="of each way, at least 2 (default 10)")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds must be at least 2.")
    if given.full and not torch.cuda.is_available():
        parser.error("--full needs a CUDA GPU: leave it out for the toy size on this CPU.")
    device = "cuda" if given.full else "cpu"
    where = torch.cuda.get_device_name() if given.full else f"{platform.machine()}, one thread"
    torch.set_num_threads(1)
    print(f"`{shlex.join(['python', *sys.argv])}` on {where}, Python {platform.python_version()},"
          f" torch {torch.__version__}\n")  # fmt: skip
    for size in FULL if given.full else TOY:
        table(size, given.rounds, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
