"""What runs in the process of one run: it is forked ready to train, and must end with whoever started it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait

from mmqk.store import cli_main

# How long an interrupted run may take to write its checkpoint and its status.
GRACE_SECONDS = 30.0
# The server that forks the runs leaves these to its parent; each run takes them itself.
BLOCKED = (signal.SIGINT, signal.SIGTERM)


def run_job(entry: str, args: list[str], log: str, device: str | None = None) -> None:
    """Call ``entry`` ("module:function", an exit code from a command line) with its output in ``log``.

    ``device`` becomes CUDA_VISIBLE_DEVICES: the server has imported torch but touched no device, so it counts still.
    Never returns: the process ends with the exit code.
    """
    _redirect(log)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    # Ctrl-C in a terminal reaches a whole process group, and a second SIGINT would cut short the orderly end
    # that the first one began: the parent alone passes it on.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="mmqk-parent-watch", daemon=True).start()
    sys.exit(cli_main(lambda argv: _call(entry, argv))(args))


def _call(entry: str, args: list[str] | None) -> int:
    # Blocked since the server: a signal that was sent while we were being forked arrives here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)(args)


def _redirect(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _end_with_parent() -> None:
    """Interrupt this process when the one that runs the ablation is gone, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    print("mmqk: the process that started this run is gone", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)
