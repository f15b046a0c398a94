"""The processes of one run: Lightning's Trainer, what they tell each other, and FSDP."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mmqk.checkpoint import built
from mmqk.model import EarlyFusionTransformer
from mmqk.store import UserError
from mmqk.training.optimizers import parameter_names
from mmqk.training.saving import CheckpointFiles

if TYPE_CHECKING:
    from mmqk.config import RunConfig


# (Reason not to train, checkpoint to resume from). The reason is "" if the run is finished and None if the process
# trains.
Message = tuple[str | None, Path | None]
# Environment variable with the id of the process that started this process as a rank of its run.
PARENT = "MMQK_PARENT"
_PR_SET_PDEATHSIG = 1


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
        _end_with(os.environ.pop(PARENT, None))
        self.argv, self._started = argv, False
        try:
            strategy = {"strategy": Sharded(run.trainer.processes)} if run.trainer.strategy == "fsdp" else {}
            self.trainer = L.Trainer(
                **asdict(run.trainer) | strategy,
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
        # `mmqk.train` handles the signals; Lightning's SIGTERM handler would wait for the other processes. These
        # private parts of Lightning are checked by tests/training/test_run.py.
        self.trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
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
        self._awaited = environment.creates_processes_externally or run.trainer.num_nodes > 1
        # Lightning would exchange SIGTERM in every step and so synchronize with the device; `Lifecycle` does so at
        # every flush.
        self.trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore

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
        """
        messages = self._exchange((None, resume_from))
        for rank, (why, _) in enumerate(messages):
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
            self._exchange(("" if error is None else str(error), None))

    def end(self) -> None:
        """End the other processes after an error in the first process, because they may be waiting for it."""
        launcher: Any = self.trainer.strategy.launcher
        if self.several and launcher is not None:
            launcher.kill(signal.SIGKILL)


def _end_with(parent: str | None) -> None:
    """On Linux, end this process when the process that started it ends. Elsewhere a rank ends at its next collective
    call, which fails."""
    if parent is None:
        return
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(parent):  # the parent ended before prctl
        os._exit(128 + signal.SIGKILL)


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


# torch.distributed.checkpoint is imported inside the functions: the import takes half a second.


def shard(model: EarlyFusionTransformer, mesh: Any) -> None:
    """Shard a model. FSDP gathers a block's parameters while the block runs, and the other parameters while the model
    runs."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor in every process. If `tensor` is sharded, this is a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole_model(model: EarlyFusionTransformer, backend: str) -> EarlyFusionTransformer:
    """Return the model itself, or, if it is sharded, an unsharded copy in every process. For a sharded model this
    is a collective call."""
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return model
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return built(model.config, state, backend).train(model.training)


class Sharded(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with checkpoints in the format of the other strategies.

    In the optimizer state, Lightning's strategy numbers the parameters in the order of the model. This class uses the
    order of the optimizer's groups, as the other strategies do.
    """

    def __init__(self, processes: int) -> None:
        super().__init__(data_parallel_size=processes, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        if self.lightning_module is None:
            self._setup_distributed()  # `Ranks` needs the process group before the model exists
        else:
            super().setup_environment()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the unsharded optimizer state on the first rank, and an empty dict on the others."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer, options=options)
        if self.global_rank:
            return {}
        return _renamed(full, {name: i for i, name in enumerate(parameter_names(optimizer, self.model))})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the whole checkpoint in each process; each process keeps only its own shards."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        content = torch.load(Path(checkpoint_path), map_location="cpu", weights_only=weights_only, mmap=True)
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True)
        for optimizer, saved in zip(self.optimizers, content["optimizer_states"], strict=True):
            names = parameter_names(optimizer, self.model)
            named = _renamed(saved, dict(enumerate(names)))
            if fresh := [name for name in names if name not in named["state"]]:  # a fork added them: they start at zero
                full: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer, options=options)
                for name in fresh:
                    named["state"][name] = {key: torch.zeros_like(x) for key, x in full["state"][name].items()}
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=named, options=options)
        # Load the weights after the optimizer state, because torch may take an optimizer step with learning rate 0 to
        # create that state.
        set_model_state_dict(self.model, content["state_dict"], options=options)
        return content


def _renamed(state: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer state whose parameters have new names or numbers."""
    return {
        "state": {new[key]: dict(moments) for key, moments in state["state"].items()},
        "param_groups": [{**group, "params": [new[key] for key in group["params"]]} for group in state["param_groups"]],
    }
