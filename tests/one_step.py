"""One training step of a variant, without a Trainer, data files or a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from mmqk.config import LossConfig, MonitorConfig, OptimConfig
from mmqk.config.checks import check_conflicts
from mmqk.data.batch import TokenBatch
from mmqk.model import ModelConfig
from mmqk.model.ranges import check_backend
from mmqk.model.transformer import modality_of_ids
from mmqk.training.module import TrainingModule


def apply(config: Any, settings: Mapping[str, Any], prefix: str) -> Any:
    """Return `config` with the settings whose names begin with `prefix`, also in nested dataclasses and mappings."""
    own = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
    changes: dict[str, Any] = {}
    for head in dict.fromkeys(name.partition(".")[0] for name in own):
        if head not in {f.name for f in fields(config)}:
            raise ValueError(f"there is no field {prefix}{head}.")
        inner = getattr(config, head)
        if is_dataclass(inner):
            changes[head] = apply(inner, settings, f"{prefix}{head}.")
        elif isinstance(inner, dict):
            changes[head] = inner | {n.partition(".")[2]: v for n, v in own.items() if n.startswith(f"{head}.")}
        else:
            changes[head] = own[head]
    return replace(config, **changes)


def build(
    settings: Mapping[str, Any], model: ModelConfig, optim: OptimConfig | None = None, max_steps: int = 100
) -> TrainingModule:
    """Return the training module of `model` with `settings`; its optimizer is in `module.trainer.optimizers`.

    Raises:
        ValueError: the settings would be refused for a run.
    """
    model = apply(model, settings, "model.")
    loss = apply(LossConfig(), settings, "loss.")
    optim = apply(OptimConfig() if optim is None else optim, settings, "optim.")
    backend = settings.get("backend", "math")
    check_backend(backend, model.attn_softcap, model.attention)
    check_conflicts(optim, model, MonitorConfig())
    module = TrainingModule(model, loss, optim, seed=0, backend=backend)
    trainer = SimpleNamespace(
        accumulate_grad_batches=1, world_size=1, global_rank=0, global_step=0, max_steps=max_steps
    )
    module.trainer = trainer  # type: ignore[assignment]
    trainer.optimizers = [module.configure_optimizers()["optimizer"]]
    return module


def step(module: TrainingModule, batch: TokenBatch) -> float:
    """Run forward, backward, clipping and update in Lightning's order; return the loss."""
    optimizer = module.trainer.optimizers[0]
    optimizer.zero_grad()
    loss = module.training_step(batch, 0)
    module.backward(loss)
    module.configure_gradient_clipping(optimizer, 1.0)
    optimizer.step()
    return float(loss.detach())


def token_batch(ids_BT: Sequence[Sequence[int]] | torch.Tensor, vocab_sizes: Mapping[str, int]) -> TokenBatch:
    """Return a batch of these rows of ids; -1 is padding."""
    ids_BT = torch.as_tensor(ids_BT)
    valid_BT = ids_BT >= 0
    ids_BT = ids_BT.clamp_min(0)
    mask_BT = valid_BT & valid_BT.roll(-1, dims=1)
    mask_BT[:, -1] = False
    return TokenBatch(ids_BT, modality_of_ids(ids_BT, vocab_sizes), mask_BT, valid_BT, mask_BT.sum())
