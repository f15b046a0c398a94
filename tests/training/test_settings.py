"""The setting that makes steps cheaper on a CPU reduces the number of page faults."""

import ctypes
import subprocess
import sys

import pytest

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
