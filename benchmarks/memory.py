"""Measures peak memory: on a GPU with CUDA's allocator, on a CPU by intercepting every operation."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Measure the largest number of bytes in use at the same time by tensors that were created inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.bytes = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for storage in {t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)} - given:
            if storage not in self._counted:
                self._counted.add(storage)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.bytes = max(self.bytes, self.alive)
        return out

    def _gone(self, n: int) -> None:
        self.alive -= n


class CudaPeak:
    """Measure the largest number of bytes allocated at the same time, minus the bytes allocated at the start."""

    def __enter__(self) -> CudaPeak:
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.bytes = torch.cuda.max_memory_allocated() - self._before
