"""Every remedy trains in bf16 and continues from its checkpoint bit for bit."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mmqk.lab.remedies import REMEDIES
from mmqk.model import ModelConfig
from mmqk.training.module import TrainingModule
from tests.one_step import build, step, token_batch

BLOCKS = {"text": 24, "image": 16}
MODEL = ModelConfig(vocab_sizes=BLOCKS, d_model=16, n_layers=2, n_heads=2)
BATCHES = [token_batch([[i, 2, 30, 31, 32, 33, 3, 4], [5, 6, 7, 8, 25 + i, 26, 27, 9]], BLOCKS) for i in range(6)]
SAVED_AT = 3


def train(module: TrainingModule, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        module.trainer.global_step = number
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(step(module, BATCHES[number]))
    return losses


def saved(module: TrainingModule) -> bytes:
    content = {"state_dict": module.state_dict(), "optimizer": module.trainer.optimizers[0].state_dict()}
    module.on_save_checkpoint(content)
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def loaded(settings: Mapping[str, Any], checkpoint: bytes, optimizer: bool = True) -> TrainingModule:
    module = build(settings, MODEL)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)  # so that a weight that the checkpoint lacks changes the loss
    content = torch.load(io.BytesIO(checkpoint), weights_only=True)
    module.load_state_dict(content["state_dict"])
    if optimizer:
        module.trainer.optimizers[0].load_state_dict(content["optimizer"])
    module.on_load_checkpoint(content)
    return module


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.key)
def test_a_remedy_continues_from_its_checkpoint_bit_for_bit_in_bf16(remedy):
    settings = {"optim.lr": 0.01, **remedy.settings}
    whole = build(settings, MODEL)
    train(whole, 0, SAVED_AT)
    checkpoint = saved(whole)
    after = train(whole, SAVED_AT, len(BATCHES))
    again = loaded(settings, checkpoint)
    assert train(again, SAVED_AT, len(BATCHES)) == after
    assert all(torch.isfinite(torch.tensor(after)))
    ours, theirs = again.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_comparison_notices_an_optimizer_that_was_not_restored():
    whole = build({"optim.lr": 0.01}, MODEL)
    train(whole, 0, SAVED_AT)
    without = loaded({"optim.lr": 0.01}, saved(whole), optimizer=False)
    assert train(without, SAVED_AT, len(BATCHES)) != train(whole, SAVED_AT, len(BATCHES))
