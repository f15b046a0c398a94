"""Ctrl-C, SIGTERM and SIGUSR1 in the process of a run, from its first line on. Standard library only.

A thread hears the signals, because the main thread may be inside a long call (a compilation, a collective) that runs
no Python. Where nothing is to be saved the process ends at once, with its status and one sentence; else the training
loop looks at `Ending.signum` after each step.
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

# The last is what a cluster sends some time before its limit (docs/cluster.md).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Id of the process that started this one as a rank of its run.
PARENT = "MMQK_PARENT"
_PARENT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """A signal asked the run to end; what was to be saved has been saved."""

    def __init__(self, signum: int):
        super().__init__(f"{signal.Signals(signum).name} received")
        self.signum = signum


class Ending:
    """How this process ends at a signal. A second signal ends it at once, whatever is to be saved.

    Attributes:
        installed: whether signals come here; not where a program calls `mmqk.train.main` itself.
        signum: the first signal, None before it.
        folder: gets the status, where this process owns one.
        step: the step that the same command goes on from.
        speaks: whether this process says that it was interrupted.
    """

    def __init__(self) -> None:
        self.installed = False
        self.signum: int | None = None
        self.folder: RunFolder | None = None
        self._over = False
        self.step: Callable[[], int] = lambda: 0
        self.speaks = True
        # One of several processes must not leave before they have met.
        self._to_save: Callable[[], bool] = _among_others
        self._parent: int | None = None
        self._lock = threading.RLock()

    def install(self) -> None:
        """Take the signals; called once, by the main thread of a process that is a run's own."""
        self._follow(os.environ.pop(PARENT, None))
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=self._listen, args=(reader,), name="mmqk-signals", daemon=True).start()
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for signum in SIGNALS:
            # Python writes to the pipe for signals that have a handler.
            signal.signal(signum, _nothing)
        os.register_at_fork(after_in_child=self._forked)
        self.installed = True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def until(self, to_save: Callable[[], bool]) -> None:
        """From here on end at once unless ``to_save()``; a signal that has come before counts."""
        with self._lock:
            self._to_save = to_save
            if self.signum is not None and not to_save():
                self._leave(self.signum)

    @contextlib.contextmanager
    def of(self, folder: RunFolder) -> Iterator[None]:
        """What a signal ends while this process owns ``folder``; afterwards it is about to end by itself."""
        self.folder, self.step = folder, lambda: folder.status().step
        try:
            yield
        finally:
            self.folder, self._over = None, self.installed

    @contextlib.contextmanager
    def starting_ranks(self) -> Iterator[None]:
        """Processes that start here end with this one, and take no signal before they have called `install`."""
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
                    self._hear(signum)

    def _hear(self, signum: int) -> None:
        with self._lock:
            if self._over and self.signum is None:
                self.signum = signum
                return
            again, self.signum = self.signum is not None, self.signum or signum
            if again or not self._to_save():
                self._leave(self.signum)

    def _leave(self, signum: int) -> None:
        said = "interrupted before the run started; the same command starts it."
        if self.folder is not None:
            try:
                step = self.step()
                said = f"interrupted at step {step}; the same command goes on from there."
                if not self.folder.last_status("interrupted", step, f"{signal.Signals(signum).name} received"):
                    return  # it has finished and is about to end by itself
            except Exception as error:  # of the disk, or of a damaged file
                said = f"interrupted; status.json cannot be read or written ({' '.join(str(error).split())})."
        if self.speaks and not self._over:
            with contextlib.suppress(OSError):
                os.write(2, f"{said}\n".encode())
        os._exit(128 + signum)

    def _follow(self, parent: str | None) -> None:
        """Never outlive the process that started this one."""
        if parent is None:
            return
        self._parent = int(parent)
        if sys.platform == "linux":
            import ctypes

            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != self._parent:  # gone before it could be followed
            os._exit(128 + signal.SIGKILL)

    def _forked(self) -> None:
        """A loader worker: its signals are not this process's, Ctrl-C is for its parent, SIGTERM ends it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.installed = False


def _nothing(*_: object) -> None:
    pass


def _among_others() -> bool:
    """Whether the environment looks as if this process were one of several of a run; `Ranks` knows."""
    several = os.environ.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in os.environ
    return several or "LOCAL_RANK" in os.environ or "NODE_RANK" in os.environ


ENDING = Ending()
