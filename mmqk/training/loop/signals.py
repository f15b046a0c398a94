"""Handles Ctrl-C, SIGTERM and SIGUSR1 in the process of a run, from its start. Uses the standard library only.

A thread receives the signals, because the main thread may be inside a long call (a compilation, a collective) that
runs no Python code. If nothing has to be saved, the process writes its status, prints a sentence and ends;
otherwise the training loop checks `Ending.signum` after each step.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmqk.store import RunFolder

# A cluster sends SIGUSR1 some time before the time limit of the job (docs/cluster.md).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Environment variable with the id of the process that started this process as a rank of its run.
PARENT = "MMQK_PARENT"
_PARENT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """Raised to end the run after a signal, when everything has been saved."""

    def __init__(self, signum: int):
        super().__init__(f"{signal.Signals(signum).name} received")
        self.signum = signum


class Ending:
    """Ends this process after a signal. A second signal ends the process at once, without saving.

    Attributes:
        installed: Whether the handler is installed; False if a program calls `mmqk.train.main`.
        signum: Number of the first signal received, or None.
        folder: The run folder with status.json; None if this process does not write to it.
        step: Function that returns the step from which a resume continues.
        prints: Whether this process prints that it was interrupted.
    """

    def __init__(self) -> None:
        self.installed = False
        self.signum: int | None = None
        self.folder: RunFolder | None = None
        self._over = False
        self.step: Callable[[], int] = lambda: 0
        self.prints = True
        # If the run has several processes, no process may exit before all of them are connected.
        self._to_save: Callable[[], bool] = _among_others
        self._parent: int | None = None
        self._lock = threading.RLock()

    def install(self) -> None:
        """Install the signal handlers. Call it once, from the main thread of a process that trains one run."""
        self._follow(os.environ.pop(PARENT, None))
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=self._listen, args=(reader,), name="mmqk-signals", daemon=True).start()
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for signum in SIGNALS:
            # Python writes a signal to the pipe only if the signal has a handler.
            signal.signal(signum, _nothing)
        os.register_at_fork(after_in_child=self._forked)
        self.installed = True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def until(self, to_save: Callable[[], bool]) -> None:
        """Let a signal end the process at once unless ``to_save()`` is true. This also applies to a signal that was
        received before this call."""
        with self._lock:
            self._to_save = to_save
            if self.signum is not None and not to_save():
                self._leave(self.signum)

    @contextlib.contextmanager
    def of(self, folder: RunFolder) -> Iterator[None]:
        """Record a signal in the status of ``folder`` inside the `with` block. After the block, a first signal does
        not end the process, because the process is about to end."""
        self.folder, self.step = folder, lambda: folder.status().step
        try:
            yield
        finally:
            self.folder, self._over = None, self.installed

    @contextlib.contextmanager
    def starting_ranks(self) -> Iterator[None]:
        """If this process ends, end the processes that are started in the block. Signals to these processes are
        blocked until they call `install`."""
        os.environ[PARENT] = str(os.getpid())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if self.installed else ())
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            del os.environ[PARENT]

    def _listen(self, reader: int) -> None:
        while True:
            ready, _, _ = select.select([reader], [], [], None if self._parent is None else _PARENT_SECONDS)
            if self._parent is not None and os.getppid() != self._parent:
                os._exit(128 + signal.SIGKILL)
            for signum in os.read(reader, 64) if ready else b"":
                if signum in SIGNALS:
                    self._receive(signum)

    def _receive(self, signum: int) -> None:
        with self._lock:
            if self._over and self.signum is None:
                self.signum = signum
                return
            again, self.signum = self.signum is not None, self.signum or signum
            if again or not self._to_save():
                self._leave(self.signum)

    def _leave(self, signum: int) -> None:
        message = "interrupted before the run started; the same command starts it."
        if self.folder is not None:
            try:
                step = self.step()
                message = f"interrupted at step {step}; the same command continues from there."
                if not self.folder.last_status("interrupted", step, f"{signal.Signals(signum).name} received"):
                    return  # the run has finished and the process ends anyway
            except Exception as error:  # a disk error or a damaged file
                message = f"interrupted; status.json cannot be read or written ({' '.join(str(error).split())})."
        if self.prints and not self._over:
            with contextlib.suppress(OSError):
                os.write(2, f"{message}\n".encode())
        os._exit(128 + signum)

    def _follow(self, parent: str | None) -> None:
        """End this process when the process that started it ends."""
        if parent is None:
            return
        self._parent = int(parent)
        if sys.platform == "linux":
            import ctypes

            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != self._parent:  # the parent ended before prctl
            os._exit(128 + signal.SIGKILL)

    def _forked(self) -> None:
        """Reset the signal handlers in a loader worker: its parent handles Ctrl-C, and SIGTERM ends the worker."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.installed = False


def _nothing(*_: object) -> None:
    pass


def _among_others() -> bool:
    """Return whether the environment suggests several processes per run. `Ranks` makes the final decision."""
    several = os.environ.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in os.environ
    return several or "LOCAL_RANK" in os.environ or "NODE_RANK" in os.environ


ENDING = Ending()
