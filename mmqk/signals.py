"""Ctrl-C, SIGTERM and SIGUSR1 in the process of a run: before the first step they end it, then at the next step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

# A cluster sends SIGUSR1 some time before the time limit of the job (docs/cluster.md).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Environment variable with the id of the process that started this process as a rank of its run.
PARENT = "MMQK_PARENT"
_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """Raised to end the run after a signal."""

    def __init__(self, signum: int):
        super().__init__(f"{signal.Signals(signum).name} received")
        self.signum = signum


class Ending:
    """The first signal sets `signum`, which the training loop reads after each step; a second signal raises
    `Interrupted` at once.

    Attributes:
        installed: Whether the handlers are installed; False if a program calls `mmqk.train.main`.
        signum: Number of the first signal received, or None.
        read: Whether code reads `signum`; if not, the first signal raises `Interrupted` too.
    """

    def __init__(self) -> None:
        self.installed = self.read = False
        self.signum: int | None = None

    def install(self) -> None:
        """Install the handlers. Call it once, from the main thread of a process that trains one run."""
        _end_with(os.environ.pop(PARENT, None))
        for signum in SIGNALS:
            signal.signal(signum, self._receive)
        os.register_at_fork(after_in_child=_worker)
        self.installed = True

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        again, self.signum = self.signum is not None, self.signum or signum
        if again or not self.read:
            raise Interrupted(self.signum)


def _worker() -> None:
    """Set the signals of a loader worker: its parent handles Ctrl-C, and SIGTERM ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with(parent: str | None) -> None:
    """On Linux, end this process when the process that started it ends. Elsewhere a rank ends at its next collective
    call, which fails."""
    if parent is None:
        return
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(parent):  # the parent ended before prctl
        os._exit(128 + signal.SIGKILL)


ENDING = Ending()
