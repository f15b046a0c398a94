"""The processes of one run: Lightning starts them and joins them, here they agree on where it begins."""

from __future__ import annotations

import contextlib
import importlib.util
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

from mmqk.store import UserError
from mmqk.training.checkpoint import CheckpointFiles
from mmqk.training.fsdp import Sharded
from mmqk.training.loop.signals import ENDING, Interrupted

if TYPE_CHECKING:
    from mmqk.config import RunConfig

# Why a process does not train, empty where nothing is left to, None where it does; from which checkpoint; its signal.
Word = tuple[str | None, Path | None, int | None]


class Ranks:
    """All processes of a run, of which the first alone owns its folder. A context manager.

    Started by Lightning (one command on one machine), by srun or by torchrun. Every process prepares by itself; they
    meet in `start`, where the first says what the run goes on from. Where the first leaves without having started,
    for a mistake or because nothing is left to train, the others are told and leave too.

    Args:
        run: resolved.
        argv: its command line, with which Lightning starts the other processes.

    Attributes:
        trainer: without callbacks and loggers, which come later.

    Raises:
        UserError: Lightning cannot train with these flags here.
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
        # Its handler of SIGTERM waits for the other processes; `Ending` has the signals.
        self.trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        self.several = self.trainer.world_size > 1
        if not self.several:
            ENDING.until(lambda: False)
            # One of many single runs of a cluster's job is no rank among them.
            rank_zero_only.rank = 0  # type: ignore[attr-defined]
            return
        environment = self.trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False  # its own checkpoints beside ours; docs/cluster.md requeues
        # Somebody else may be waiting for the first process already; those that Lightning starts are not there yet.
        self._awaited = environment.creates_processes_externally or run.trainer["num_nodes"] > 1
        # Nobody waits for a first process before it has started the others, and those end with it.
        ENDING.speaks = self.first
        ENDING.until(lambda: self._awaited or not self.first)
        # Lightning's own look for a SIGTERM waits for the device in every step; `Lifecycle` looks with every flush.
        self.trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    @property
    def first(self) -> bool:
        """Whether this process owns the folder and writes."""
        return self.trainer.is_global_zero

    def start(self, resume_from: Path | None) -> tuple[bool, Path | None]:
        """Meet the other processes, started here where nobody else has: whether to train, and from where.

        Args:
            resume_from: a checkpoint, as the first process found it.

        Raises:
            UserError: in the first process, for a mistake that only another one met.
            Interrupted: one of them had a signal.
        """
        words = self._meet((None, resume_from, ENDING.signum))
        for signum in (signum for _, _, signum in words if signum is not None):
            raise Interrupted(signum)
        for rank, (why, *_) in enumerate(words):
            if why is not None:
                if self.first and why:
                    raise UserError(f"process {rank} of {len(words)}: {why}")
                return False, None
        return True, words[0][1]

    def _meet(self, word: Word) -> list[Word]:
        """What every process has to say, by rank."""
        self._started = True
        if not self.several:
            return [word]
        strategy = self.trainer.strategy
        if strategy.launcher is None:
            strategy.setup_environment()
        else:
            # Before `fit` does, which then finds them started: more than the training itself needs the others.
            with _command(self.argv), ENDING.starting_ranks():
                strategy.launcher.launch(lambda: None, trainer=self.trainer)
            strategy.setup_environment()
        words: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(words, word)
        return words

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.several and not self._started and self._awaited:
            self._meet(("" if error is None else str(error), None, None))

    def end(self) -> None:
        """The first broke down: the others, who may wait for it in vain, end with it."""
        launcher: Any = self.trainer.strategy.launcher
        if self.several and launcher is not None:
            launcher.kill(signal.SIGKILL)


@contextlib.contextmanager
def _command(argv: list[str]) -> Iterator[None]:
    """Whoever called us, Lightning starts its processes with ``python -m mmqk.train`` and this command line."""
    import __main__

    before = __main__.__spec__, sys.argv
    __main__.__spec__, sys.argv = importlib.util.find_spec("mmqk.train"), ["mmqk.train", *argv]
    try:
        yield
    finally:
        __main__.__spec__, sys.argv = before
