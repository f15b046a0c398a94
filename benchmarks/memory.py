"""Peak memory: a GPU is asked, on a CPU every operation is watched."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Most bytes alive at once of what operations made while it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for storage in {t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)} - given:
            if storage not in self._known:
                self._known.add(storage)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.bytes = max(self.bytes, self.alive)
        return out

    def _gone(self, n: int) -> None:
        self.alive -= n


class CudaPeak:
    """Most bytes that the allocator gave out above those given out before."""

    def __enter__(self) -> CudaPeak:
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.bytes = torch.cuda.max_memory_allocated() - self._before
