"""``trainer.strategy fsdp``: weights, gradients and moments in shards (torch's FSDP2), checkpoints whole."""

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

# torch.distributed.checkpoint is imported where it is used: it takes half a second that other runs need not wait.


def shard(model: EarlyFusionTransformer, mesh: Any) -> None:
    """Each block is gathered for its own forward and backward pass; the rest with the model's."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was here."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The same number or array in every process; a collective call where it is in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole_model(model: EarlyFusionTransformer, backend: str) -> EarlyFusionTransformer:
    """The model itself, or a copy in one piece where it is in shards, in every process; then a collective call."""
    if not is_sharded(model):
        return model
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with torch.device("meta"):  # no initial weights are drawn
        copy = EarlyFusionTransformer(model.config, backend)
    copy.to_empty(device=next(iter(state.values())).device)
    if model.config.tie_embeddings:
        copy.head.weight = copy.embed.weight
    copy.load_state_dict(state)
    return copy.train(model.training)


class Sharded(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with checkpoints that every other strategy reads, and reads theirs.

    Lightning's own number the parameters in the model's order, and those of an optimizer count in the order of its
    groups.
    """

    def __init__(self, processes: int) -> None:
        super().__init__(
            data_parallel_size=processes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    def setup_environment(self) -> None:
        if self._lightning_module is None:
            self._setup_distributed()  # `Ranks` meets before there is a model
        else:
            super().setup_environment()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Whole on the first rank, empty on the others."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer, options=options)
        if self.global_rank:
            return {}
        number = {name: i for i, name in enumerate(self._names(optimizer))}
        return {
            "state": {number[name]: own for name, own in found["state"].items()},
            "param_groups": [
                {**group, "params": [number[name] for name in group["params"]]}
                for group in found["param_groups"]
            ],
        }

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Each process reads the file and keeps its shards."""
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
        # After the optimizer's, which may have taken a step of size 0 to have a state to load into.
        set_model_state_dict(self.model, content["state_dict"], options=options)
        return content

    def _named(self, optimizer: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
        names = self._names(optimizer)
        return {
            "state": {names[i]: dict(own) for i, own in saved["state"].items()},
            "param_groups": [
                {**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]
            ],
        }

    def _names(self, optimizer: Any) -> list[str]:
        """Of the parameters, in the order in which an optimizer's state dict numbers them."""
        assert self.model is not None
        names = {p: name for name, p in self.model.named_parameters()}
        return [names[p] for group in optimizer.param_groups for p in group["params"]]
