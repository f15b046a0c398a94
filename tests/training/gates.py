"""A run that stops at a chosen place until it is released, so that a signal arrives exactly there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from mmqk.ablation.pool import PRELOAD, start_server

SECONDS = 1800.0


def wait_for(there: Callable[[], object]) -> None:
    """Return when ``there()`` is true; the test fails if it never is."""
    until = time.monotonic() + SECONDS
    while not there():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stop_at_import(module: str, folder: Path) -> None:
    """The first import of ``module`` writes the id of this process to ``folder`` / at and waits for ``folder`` /
    go."""

    class Gate:
        def find_spec(self, name: str, *_: object) -> None:
            if name == module:
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                pause(folder)

    sys.meta_path.insert(0, Gate())  # type: ignore[arg-type]


def pause(folder: Path) -> None:
    (folder / "at.partial").write_text(str(os.getpid()))
    os.replace(folder / "at.partial", folder / "at")
    while not (folder / "go").exists():
        time.sleep(0.02)


def start(args: list[str], folder: Path, place: str = "", step: int = 0) -> ForkServerProcess:
    """Fork ``python -m mmqk.train`` from a process with all imports; its output goes to ``folder`` / log.

    Args:
        args: its command line.
        folder: for the files that open and close the gate.
        place: "data" (the run folder is open), "step" (in the forward pass of the step after ``step``, asleep in
            Python), "deaf step" (the same, in a call that never runs Python) or "" for no stop.
        step: optimizer steps done.
    """
    start_server(PRELOAD)
    process = get_context("forkserver").Process(target=_run, args=(args, folder, place, step))
    process.start()
    return process


def _run(args: list[str], folder: Path, place: str, step: int) -> None:
    sys.stdout = sys.stderr = open(folder / "log", "w", buffering=1)  # noqa: SIM115 (until the process ends)
    os.dup2(sys.stderr.fileno(), 2)
    import torch

    from mmqk.data.datamodule import TokenDataModule
    from mmqk.store import cli_main
    from mmqk.train import process
    from mmqk.training.step.module import TrainingModule

    setup, forward = TokenDataModule.setup, TrainingModule.training_step

    def gated_setup(self, *rest):
        pause(folder)
        return setup(self, *rest)

    def gated_forward(self, *rest):
        if self.trainer.global_step == step and not (folder / "at").exists():
            if place == "deaf step":
                store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
                (folder / "at").write_text(str(os.getpid()))
                store.wait(["never"])
            pause(folder)
        return forward(self, *rest)

    if place == "data":
        TokenDataModule.setup = gated_setup
    elif place:
        TrainingModule.training_step = gated_forward
    sys.exit(cli_main(process)(args))
