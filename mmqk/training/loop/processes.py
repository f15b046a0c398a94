"""The processes of one run. Lightning starts them; `Ranks` makes them start training from the same checkpoint."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from mmqk.checkpoint import CheckpointFiles
from mmqk.store import UserError
from mmqk.training.fsdp import Sharded
from mmqk.training.loop.lightning_private import leave_signals_alone, skip_sigterm_broadcast
from mmqk.training.loop.signals import ENDING, PARENT, Interrupted

if TYPE_CHECKING:
    from mmqk.config import RunConfig

# (Reason not to train, checkpoint to resume from, signal). The reason is "" if the run is finished and None if the
# process trains.
Message = tuple[str | None, Path | None, int | None]


class Ranks:
    """Context manager for the processes of a run; only the first process writes to the run folder.

    Lightning (one command on one machine), srun or torchrun starts the processes. Every process prepares the run
    separately; in `start` the first process sends the path of the checkpoint to all others. If the first process ends
    before `start`, because of an error or because the run is finished, the others end too.

    Args:
        run: The resolved configuration.
        argv: The command line of the run, with which Lightning starts the other processes.

    Attributes:
        trainer: Lightning's Trainer; callbacks and loggers are added later.

    Raises:
        UserError: Lightning cannot train with these flags on this machine.
    """

    def __init__(self, run: RunConfig, argv: list[str]):
        self.argv, self._started = argv, False
        try:
            strategy = run.trainer["strategy"]
            self.trainer = L.Trainer(
                **{**run.trainer, "strategy": Sharded(run.processes) if strategy == "fsdp" else strategy},
                max_epochs=-1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                log_every_n_steps=1,
            )
        except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"Lightning refuses the trainer flags: {' '.join(str(error).split())}") from error
        self.trainer.strategy.checkpoint_io = CheckpointFiles()
        leave_signals_alone(self.trainer)
        self.several = self.trainer.world_size > 1
        if not self.several:
            # A run with one process is not a rank of a larger run, even inside a cluster job with several tasks.
            rank_zero_only.rank = 0  # type: ignore[attr-defined]
            return
        environment = self.trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False  # Lightning's requeue writes other checkpoints; see docs/cluster.md
        # Processes that srun or torchrun started may already wait for the first process. Lightning starts its
        # processes later.
        self._awaited = environment.creates_processes_externally or run.trainer["num_nodes"] > 1
        # Until the first process has started the others, no process waits for it, so a signal may end it at once.
        ENDING.read = self._awaited or not self.first
        skip_sigterm_broadcast(self.trainer)

    @property
    def first(self) -> bool:
        """Return whether this process writes to the run folder."""
        return self.trainer.is_global_zero

    def start(self, resume_from: Path | None) -> tuple[bool, Path | None]:
        """Start or join the other processes; return whether to train, and from which checkpoint.

        Args:
            resume_from: The checkpoint that the first process found.

        Raises:
            UserError: another process failed; raised in the first process only.
            Interrupted: one of the processes received a signal.
        """
        messages = self._exchange((None, resume_from, ENDING.signum))
        for signum in (signum for _, _, signum in messages if signum is not None):
            raise Interrupted(signum)
        for rank, (why, *_) in enumerate(messages):
            if why is not None:
                if self.first and why:
                    raise UserError(f"process {rank} of {len(messages)}: {why}")
                return False, None
        return True, messages[0][1]

    def _exchange(self, message: Message) -> list[Message]:
        """Return the messages of all processes, by rank."""
        self._started = True
        if not self.several:
            return [message]
        strategy = self.trainer.strategy
        if strategy.launcher is None:
            strategy.setup_environment()
        else:
            # Start the processes now, because the exchange needs all of them. `fit` does not start them again.
            ENDING.read = True  # `start` reads the signal
            with _command(self.argv):
                strategy.launcher.launch(lambda: None, trainer=self.trainer)
            strategy.setup_environment()
        messages: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(messages, message)
        return messages

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.several and not self._started and self._awaited:
            self._exchange(("" if error is None else str(error), None, None))

    def end(self) -> None:
        """End the other processes after an error in the first process, because they may be waiting for it."""
        launcher: Any = self.trainer.strategy.launcher
        if self.several and launcher is not None:
            launcher.kill(signal.SIGKILL)


@contextlib.contextmanager
def _command(argv: list[str]) -> Iterator[None]:
    """Let Lightning start its processes with ``python -m mmqk.train`` and this command line. If this process ends,
    they end too."""
    import __main__

    before = __main__.__spec__, sys.argv
    __main__.__spec__, sys.argv = importlib.util.find_spec("mmqk.train"), ["mmqk.train", *argv]
    os.environ[PARENT] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[PARENT]
        __main__.__spec__, sys.argv = before
