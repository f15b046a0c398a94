"""The child process that trains one run. The fork server creates it, and it is interrupted when mmqk.ablate ends."""

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

# Seconds that an interrupted run has to write its checkpoint and status.
GRACE_SECONDS = 30.0
# Signals that are blocked in the server that forks the runs; each run unblocks them.
BLOCKED = (signal.SIGINT, signal.SIGTERM)


def run_job(entry: str, args: list[str], log: str, device: str | None = None) -> None:
    """Call ``entry`` with the command line ``args``, and write its output to ``log``.

    ``entry`` is "module:function"; the function returns an exit code, and the process ends with this code.
    CUDA_VISIBLE_DEVICES is set to ``device``. The variable takes effect because the fork server has not initialized
    CUDA.
    """
    _redirect(log)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    # Ctrl-C in a terminal sends SIGINT to the whole process group. The parent also sends SIGINT to the run, and this
    # second signal would interrupt the run's shutdown. In a new session, the run gets signals only from its parent.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="mmqk-parent-watch", daemon=True).start()
    sys.exit(cli_main(lambda argv: _call(entry, argv))(args))


def _call(entry: str, args: list[str] | None) -> int:
    # Signals have been blocked since the server started, so a signal sent during the fork is delivered here.
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
    """Interrupt this process when the mmqk.ablate process ends, even if SIGKILL ended it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    print("mmqk: the process that started this run has ended", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)
