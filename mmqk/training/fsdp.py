"""``trainer.strategy fsdp``: shards weights, gradients and moments (torch's FSDP2), but not checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mmqk.model import EarlyFusionTransformer
from mmqk.training.loop.lightning_private import start_process_group

# torch.distributed.checkpoint is imported inside the functions: the import takes half a second.


def shard(model: EarlyFusionTransformer, mesh: Any) -> None:
    """Shard a model. FSDP gathers a block's parameters while the block runs, and the other parameters while the model
    runs."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters are sharded."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor in every process. If `tensor` is sharded, this is a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole_model(model: EarlyFusionTransformer, backend: str) -> EarlyFusionTransformer:
    """Return the model itself, or, if it is sharded, an unsharded copy in every process. For a sharded model this
    is a collective call."""
    if not is_sharded(model):
        return model
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with torch.device("meta"):  # do not draw initial weights
        copy = EarlyFusionTransformer(model.config, backend)
    copy.to_empty(device=next(iter(state.values())).device)
    if model.config.tie_embeddings:
        copy.head.weight = copy.embed.weight
    copy.load_state_dict(state)
    return copy.train(model.training)


class Sharded(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with checkpoints in the format of the other strategies.

    In the optimizer state, Lightning's strategy numbers the parameters in the order of the model. This class uses the
    order of the optimizer's groups, as the other strategies do.
    """

    def __init__(self, processes: int) -> None:
        super().__init__(
            data_parallel_size=processes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    def setup_environment(self) -> None:
        if self.lightning_module is None:
            start_process_group(self)  # `Ranks` needs the process group before the model exists
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
        number = {name: i for i, name in enumerate(self._names(optimizer))}
        return {
            "state": {number[name]: state for name, state in full["state"].items()},
            "param_groups": [
                {**group, "params": [number[name] for name in group["params"]]}
                for group in full["param_groups"]
            ],
        }

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the whole checkpoint in each process; each process keeps only its own shards."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        content = torch.load(Path(checkpoint_path), map_location="cpu", weights_only=weights_only, mmap=True)
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True)
        for optimizer, saved in zip(self.optimizers, content["optimizer_states"], strict=True):
            set_optimizer_state_dict(
                self.model, optimizer, optim_state_dict=self._named(optimizer, saved), options=options
            )
        # Load the weights after the optimizer state, because torch may take an optimizer step with learning rate 0 to
        # create that state.
        set_model_state_dict(self.model, content["state_dict"], options=options)
        return content

    def _named(self, optimizer: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
        names = self._names(optimizer)
        return {
            "state": {names[i]: dict(state) for i, state in saved["state"].items()},
            "param_groups": [
                {**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]
            ],
        }

    def _names(self, optimizer: Any) -> list[str]:
        """Return the names of the parameters in the order of the optimizer's state dict."""
        assert self.model is not None
        names = {p: name for name, p in self.model.named_parameters()}
        return [names[p] for group in optimizer.param_groups for p in group["params"]]
