"""Start a run that pauses at a chosen place until the test releases it, so that a signal arrives at that place."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from mmqk.lab.runner.executors import PRELOAD, start_server

SECONDS = 1800.0  # only a process that hangs takes longer, also on a busy machine


def wait_for(there: Callable[[], Any]) -> Any:
    """Return the first true value of ``there()``; fail the test after `SECONDS` seconds."""
    until = time.monotonic() + SECONDS
    while not (found := there()):
        assert time.monotonic() < until, "timed out"
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def pause(folder: Path) -> None:
    """Write the id of this process to the file ``folder / "at"`` and wait for the file ``folder / "go"``."""
    (folder / "at.partial").write_text(str(os.getpid()))
    os.replace(folder / "at.partial", folder / "at")
    while not (folder / "go").exists():
        time.sleep(0.02)


def start(args: list[str], folder: Path, place: str = "", step: int = 0) -> ForkServerProcess:
    """Start ``python -m mmqk.train`` as a fork of a process with all imports. Write its output to ``folder / "log"``.

    Args:
        args: command line of the run.
        folder: folder of the log and of the files that `pause` uses.
        place: where the run pauses: "data" (after the run folder is opened), "step" (in the forward pass after
            ``step`` optimizer steps), or "" for no pause.
        step: number of optimizer steps before the pause.
    """
    return process(_run, args, folder, place, step)


def process(function: Callable[..., object], *args: object) -> ForkServerProcess:
    """Call a function in a process that is forked from one with all imports."""
    start_server(PRELOAD)
    started = get_context("forkserver").Process(target=function, args=args)
    started.start()
    return started


def _run(args: list[str], folder: Path, place: str, step: int) -> None:
    sys.stdout = sys.stderr = open(folder / "log", "w", buffering=1)  # noqa: SIM115 (until the process ends)
    os.dup2(sys.stderr.fileno(), 2)
    from mmqk.data.datamodule import TokenDataModule
    from mmqk.store import cli_main
    from mmqk.train import main
    from mmqk.training.module import TrainingModule

    setup, forward = TokenDataModule.setup, TrainingModule.training_step

    def gated_setup(self, *rest):
        pause(folder)
        return setup(self, *rest)

    def gated_forward(self, *rest):
        if self.trainer.global_step == step and not (folder / "at").exists():
            pause(folder)
        return forward(self, *rest)

    if place == "data":
        TokenDataModule.setup = gated_setup
    elif place:
        TrainingModule.training_step = gated_forward
    sys.exit(cli_main(main)(args))
