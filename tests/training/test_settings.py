"""The settings that make steps cheaper on a CPU reduce the number of page faults and of checks for a GPU. The private
parts of Lightning that mmqk uses exist."""

import ctypes
import importlib
import subprocess
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from mmqk.training import ranks as on_cpu

# Print the page faults (getrusage) of a loop that allocates and frees blocks of 24 MiB, without those of the first
# pass: before the setting and with it. It cannot be undone, so a process of its own runs this.
FAULTS = """
import ctypes, resource
from mmqk.training.ranks import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def turn(n=24 << 20):
    blocks = [libc.malloc(n) for _ in range(3)]  # the largest mmap threshold that glibc finds by itself is 32 MiB
    for block in blocks:
        ctypes.memset(block, 1, n)
    for block in blocks:
        libc.free(block)
def faults():
    turn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        turn()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
left_alone = faults()
assert keep_freed_memory()
print(left_alone, faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs mallopt of glibc")
def test_freed_memory_is_used_again():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    left_alone, kept = map(int, done.stdout.split())
    assert kept < 20
    assert left_alone > 100  # the control: each pass has faults again, of pages or of huge pages


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch does not repeat the check if there is a GPU")
def test_an_optimizer_looks_for_no_library_of_a_gpu(monkeypatch):
    looks = []
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: looks.append(1) or 0)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight], fused=True)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it when it is imported
    optimizer.step()
    found = len(looks)
    on_cpu.skip_nvml_check()
    optimizer.step()
    assert len(looks) == found > 0  # negative control: found > 0


def test_the_private_parts_exist():
    """Another version of Lightning may rename a private part; assigning to the old name would then have no effect."""
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert callable(trainer._signal_connector.register_signal_handlers)
    assert callable(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    assert callable(ModelParallelStrategy._setup_distributed)
    assert importlib.import_module("lightning.pytorch.trainer.connectors.checkpoint_connector")
