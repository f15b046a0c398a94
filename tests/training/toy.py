"""Batches and training runs of a few steps in fp64, without data sets, files or a command line."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from mmqk.config import LossConfig, OptimConfig
from mmqk.data.batch import TokenBatch
from mmqk.model import ModelConfig
from mmqk.training.module import TrainingModule

BLOCKS = {"text": 9, "image": 7}
MODEL = ModelConfig(d_model=16, n_layers=2, n_heads=4, vocab_sizes=BLOCKS)


def toy_batch(
    seed: int, B: int = 4, T: int = 12, only: str | None = None, padding: int = 0, documents: bool = False
) -> TokenBatch:
    """Return a batch of random ids of both modalities or of one. About three in four positions are trained targets;
    the last `padding` positions are padding."""
    generator = torch.Generator().manual_seed(seed)
    low, high = {None: (0, 16), "text": (0, 9), "image": (9, 16)}[only]
    ids_BT = torch.randint(low, high, (B, T), generator=generator)
    valid_BT = (torch.arange(T) < T - padding).expand(B, T).clone()
    mask_BT = (torch.rand(B, T, generator=generator) < 0.75) & valid_BT & valid_BT.roll(-1, 1)
    mask_BT[:, -1] = False
    document_BT = (torch.arange(T) // 5).expand(B, T).where(valid_BT, -1) if documents else None
    return TokenBatch(ids_BT, (ids_BT >= 9).long(), mask_BT, valid_BT, mask_BT.sum(), document_BT)


def cut(batch: TokenBatch, n: int) -> list[TokenBatch]:
    """Split the batch into `n` micro-batches of one step; the denominator of the loss stays that of the step."""
    size = len(batch.ids_BT) // n
    return [
        batch._map(lambda t, i=i: t[i * size : (i + 1) * size] if t.ndim else t)  # type: ignore[misc]
        for i in range(n)
    ]


def module_of(
    model: ModelConfig = MODEL, loss: LossConfig | None = None, backend: str = "math", seed: int = 0, **optim: Any
) -> TrainingModule:
    """Return a training module in fp64 with a constant learning rate, unless `optim` sets another schedule."""
    config = OptimConfig(**{"lr": 0.01, "warmup_steps": 0, "schedule": "constant", **optim})
    return TrainingModule(model, loss or LossConfig(), config, seed, backend).double()


class Records(L.Callback):
    """Record the measured values of every step."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if pl_module.step_record is not None:
            self.lines.append(pl_module.named_values(pl_module.step_record.values.tolist()))
            pl_module.step_record = None


def fit(
    module: TrainingModule,
    batches: Sequence[TokenBatch],
    accumulate: int = 1,
    clip: float | None = None,
    callbacks: Sequence[L.Callback] = (),
) -> list[dict[str, float]]:
    """Train on each batch once, in order; return the measured values of every step."""
    records = Records()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_steps=len(batches) // accumulate, max_epochs=-1, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            accumulate_grad_batches=accumulate, gradient_clip_val=clip, callbacks=[records, *callbacks],
        )  # fmt: skip
        trainer.fit(module, DataLoader(list(batches), batch_size=None))  # type: ignore[arg-type]
    return records.lines


def weights(module: TrainingModule) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter and buffer of the model."""
    return {name: tensor.detach().clone() for name, tensor in module.model.state_dict().items()}


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
