"""The only uses of Lightning's private API in mmqk, checked against the code of Lightning 2.6.6."""

from __future__ import annotations

import traceback

import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy


def leave_signals_alone(trainer: L.Trainer) -> None:
    """Keep Lightning from installing signal handlers: its SIGTERM handler waits for the other processes.

    `mmqk.training.loop.signals` handles the signals. Lightning has no public switch for its handlers.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def skip_sigterm_broadcast(trainer: L.Trainer) -> None:
    """Do not exchange SIGTERM between the processes in every step, because the exchange synchronizes with the device.

    `Lifecycle` exchanges the signals at every flush.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def start_process_group(strategy: ModelParallelStrategy) -> None:
    """Start the process group before `fit`, because the public `setup_environment` needs a module, which does not
    exist yet."""
    strategy._setup_distributed()


def raised_by_loading(error: BaseException) -> bool:
    """Return whether Lightning raised the error while it loaded a checkpoint.

    The traceback then has a frame in Lightning's checkpoint_connector. The type of the error does not show this,
    because Lightning does not wrap the errors of `load_state_dict` and of its own loops.
    """
    frames = traceback.walk_tb(error.__traceback__)
    return any("checkpoint_connector" in frame.f_globals.get("__name__", "") for frame, _ in frames)
