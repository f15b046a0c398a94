"""Train one run in two processes, started as srun starts them on one machine or on two.

The processes are forked from a process with all imports, so each starts in a second.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from mmqk.lab.runner.executors import PRELOAD, start_server
from tests.training.gates import SECONDS

RANKS = 2


def start(
    args: Sequence[str], log: Path, strategy: str = "ddp", nodes: int = 1, spike: int = 0
) -> list[ForkServerProcess]:
    """Start both processes and return them in the order of their ranks. Rank r writes its output to ``{log}{r}``.

    With ddp, rank r also writes its final weights to ``{log}{r}.weights``. The second rank adds 100 to its loss at
    the step ``spike``; if it is -1, the second rank has no data.
    """
    start_server(PRELOAD)
    port = free_port()
    flags = [
        *args, f"--trainer.devices={RANKS // nodes}", f"--trainer.num_nodes={nodes}", f"--trainer.strategy={strategy}"
    ]  # fmt: skip
    both = [get_context("forkserver").Process(target=_rank, args=(rank, port, flags, f"{log}{rank}", nodes, spike))
            for rank in range(RANKS)]  # fmt: skip
    for process in both:
        process.start()
    return both


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def end(both: Sequence[ForkServerProcess]) -> list[int | None]:
    """Wait for both processes and return their exit codes; fail the test if one does not end."""
    for process in both:
        process.join(SECONDS)
    alive = [rank for rank, process in enumerate(both) if process.is_alive()]
    for rank in alive:
        both[rank].kill()
    assert not alive, f"ranks {alive} hang"
    return [process.exitcode for process in both]


def train(args: Sequence[str], log: Path, strategy: str = "ddp", nodes: int = 1, spike: int = 0) -> list[int | None]:
    """Start both processes, wait until they end, and return their exit codes."""
    return end(start(args, log, strategy, nodes, spike))


def _rank(rank: int, port: int, args: list[str], log: str, nodes: int, spike: int) -> None:
    local = RANKS // nodes
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "run", "SLURM_NTASKS": str(RANKS), "SLURM_NTASKS_PER_NODE": str(local),
        "SLURM_NNODES": str(nodes), "SLURM_NODEID": str(rank // local), "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % local),
    }  # fmt: skip
    sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115 (until the process ends)
    from mmqk.data.datamodule import TokenDataModule
    from mmqk.store import UserError, cli_main
    from mmqk.train import main
    from mmqk.training.module import TrainingModule

    def keep(module: TrainingModule) -> None:
        torch.save(module.model.state_dict(), f"{log}.weights")

    if "--trainer.strategy=ddp" in args:
        TrainingModule.on_train_end = keep  # type: ignore[method-assign]
    training_step = TrainingModule.training_step

    def spiking(module: TrainingModule, *rest: Any) -> torch.Tensor:
        loss = training_step(module, *rest)
        if rank == 1 and module.trainer.global_step + 1 == spike:
            assert module._step_loss is not None
            module._step_loss = module._step_loss + 100
        return loss

    def missing(*_: Any) -> None:
        raise UserError("planted: the data are missing")

    TrainingModule.training_step = spiking  # type: ignore[method-assign]
    if rank == 1 and spike == -1:
        TokenDataModule.setup = missing  # type: ignore[method-assign]
    sys.exit(cli_main(main)(args))
