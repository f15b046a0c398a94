"""A run in a job of a cluster: ``mmqk train`` as a child process that can be interrupted."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

REQUEUE_SECONDS = 120.0  # within which a cluster requeues a job that it preempts
POLL_SECONDS = 0.5
PR_SET_PDEATHSIG = 1  # of prctl(2)
_PREEMPTED = (128 + signal.SIGTERM, -signal.SIGTERM)  # the second: before the run handles signals


@dataclass
class Child:
    """Trains one run and returns its exit code; minus the number of the signal that killed it.

    Args:
        args: command line of ``mmqk train``.
        log: file for its output.
        cwd: the folder that paths in ``args`` start from.
    """

    args: list[str]
    log: Path
    cwd: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def __call__(self) -> int:
        command = [sys.executable, "-m", "mmqk.train", *self.args]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(command, cwd=self.cwd, stdout=log, stderr=log, preexec_fn=_begin)
        while (code := self._process.poll()) is None:
            # A KeyboardInterrupt is a request to stop: the run writes a checkpoint and ends by itself.
            try:
                time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGINT)
        if code in _PREEMPTED:  # a job that ended by itself would not enter the queue again
            time.sleep(REQUEUE_SECONDS)
        return code

    def stop(self) -> None:
        """Let the run write a checkpoint and stop; return when it has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)
            self._process.wait()


def _begin() -> None:
    """Interrupt the run if its parent dies, and leave the signal of a time limit to the parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
