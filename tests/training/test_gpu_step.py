"""On a GPU: the compiled loss equals the dense loss in float64, recomputed blocks give the same step, and a step has
no host synchronization."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import replace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from mmqk.config import LossConfig
from mmqk.model import EarlyFusionTransformer, ModelConfig, transformer
from mmqk.training import losses as chunked_loss
from mmqk.training.callbacks import StepLog
from mmqk.training.losses import chunked_losses, modality_losses, total_loss
from tests.training.toy import BLOCKS, cut, module_of, toy_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"


def apart(ours, theirs):
    """Return the norm of the difference divided by the norm of the reference."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


# Head and loss ---------------------------------------------------------------------------------------------


@pytest.fixture
def inductor():
    """Discard compiled graphs before and after the test."""
    chunked_loss._compiled.cache_clear()
    torch.compiler.reset()
    counters.clear()
    yield
    chunked_loss._compiled.cache_clear()
    torch.compiler.reset()


def test_the_compiled_loss_in_bf16_is_the_dense_one_in_float64(inductor):
    """256 tokens in chunks of 96: the last chunk is shorter and needs a second graph."""
    V, D, M, generator = 1003, 64, 3, torch.Generator().manual_seed(0)
    hidden_BTD = torch.randn(4, 64, D, generator=generator).to(DEVICE).requires_grad_()
    head_VD = (0.5 * torch.randn(V, D, generator=generator)).to(DEVICE).requires_grad_()
    targets_BT = torch.randint(0, V, (4, 64), generator=generator).to(DEVICE)
    mask_BT = (torch.rand(4, 64, generator=generator) < 0.8).to(DEVICE)
    of, weights_M = ((targets_BT, (targets_BT >= 700).long(), mask_BT), torch.tensor([1.0, 0.3, 2.0]).to(DEVICE))

    def gradients(sums, weights_M, z_loss):
        loss = total_loss(sums, weights_M, z_loss, mask_BT.sum())
        return [loss, *torch.autograd.grad(loss, (hidden_BTD, head_VD))]

    def dense(softcap, z_loss):
        logits_BTV = F.linear(hidden_BTD.double(), head_VD.double())
        if softcap is not None:
            logits_BTV = softcap * torch.tanh(logits_BTV / softcap)
        sums = modality_losses(logits_BTV, *of, M)
        return sums, gradients(sums, weights_M.double(), z_loss)

    with torch.autocast(DEVICE, torch.bfloat16):
        sums = chunked_losses(hidden_BTD, head_VD, *of, weights_M, 0.05, 96, 5.0, compiled=True)
    ours = gradients(sums, weights_M, 0.05)
    assert counters["stats"]["unique_graphs"] == 2
    exact_sums, exact = dense(5.0, 0.05)
    assert torch.equal(sums.count.double(), exact_sums.count)
    assert all(apart(getattr(sums, n), getattr(exact_sums, n)) < 1e-3 for n in ("ce", "log_z", "log_z_sq"))
    assert apart(ours[0], exact[0]) < 1e-3
    assert all(x.dtype == torch.float32 for x in ours)
    assert all(apart(a, b) < 0.01 for a, b in zip(ours[1:], exact[1:], strict=True))

    # The controls: without the softcap, with a different softcap, and without z-loss.
    capless, more = dense(None, 0.05), dense(6.0, 0.05)
    for other_sums, other in (capless, more):
        assert all(apart(getattr(sums, n), getattr(other_sums, n)) > 2e-3 for n in ("ce", "log_z", "log_z_sq"))
        assert all(apart(a, b) > 0.02 for a, b in zip(ours[1:], other[1:], strict=True))
    for a, b in zip(ours, dense(5.0, 0.0)[1], strict=True):
        assert apart(a, b) > 0.02


# Recomputed blocks -----------------------------------------------------------------------------------------


def deep(**fields):
    config = ModelConfig(vocab_sizes=BLOCKS, d_model=256, n_layers=8, n_heads=4, **fields)
    return EarlyFusionTransformer(config, "math").to(DEVICE).train()


def step(model, recompute, narrow=False):
    """Return the loss and the gradients of a step; every call draws the same dropout masks."""
    model.activation_checkpointing = recompute
    torch.manual_seed(1)
    ids_BT = torch.randint(0, 16, (4, 256), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=narrow):
        logits_BTV = model(ids_BT)
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(("narrow", "tolerance"), [(False, 1e-5), (True, 0.01)])
def test_recomputed_blocks_give_the_same_step(monkeypatch, narrow, tolerance):
    model = deep(residual_dropout=0.2, attn_dropout=0.1)
    expected = step(model, False, narrow)

    def furthest(ours):
        return max(apart(a, b) for a, b in zip(ours, expected, strict=True))

    assert furthest(step(model, True, narrow)) < tolerance

    def forgetful(block, *inputs, preserve_rng_state, use_reentrant):
        return checkpoint(block, *inputs, preserve_rng_state=False, use_reentrant=use_reentrant)

    # The control: recomputed blocks draw different dropout masks.
    monkeypatch.setattr(transformer, "checkpoint", forgetful)
    assert furthest(step(model, False, narrow)) < tolerance
    assert furthest(step(model, True, narrow)) > 10 * tolerance


def test_recomputed_blocks_keep_less_memory():
    model = deep()

    def peak(recompute):
        step(model, recompute)  # so that torch's libraries have allocated their workspaces
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(model, recompute)
        return torch.cuda.max_memory_allocated() - before

    plain = peak(False)
    assert peak(True) < 0.5 * plain
    assert peak(False) > 0.95 * plain  # the control: the order of the calls does not matter


# Host synchronization ---------------------------------------------------------------------------------------

FIRST, FLUSH, ACCUMULATE = 3, 8, 2  # steps before the check begins, step of the flush, micro-batches
GPU = ModelConfig(vocab_sizes=BLOCKS, d_model=128, n_layers=2, n_heads=2)
RUNS = {
    "plain": ({}, {}, {}, "sdpa", False),
    "dense, windows": ({"window": 100, "global_every": 2}, {}, {}, "math", False),
    "loss in chunks": ({"final_softcap": 3.0}, {"chunk_size": 700, "z_loss": 0.01}, {}, "sdpa", False),
    "QK-Clip": ({}, {}, {"qk_clip": 0.1}, "sdpa", False),
    "split moments": ({}, {}, {"split_second_moment": True}, "sdpa", False),
    "dropout": ({"residual_dropout": 0.1, "attn_dropout": 0.1}, {}, {}, "sdpa", False),
    "sigma reparam": ({"weight_reparam": "sigma"}, {}, {}, "sdpa", False),
    "rows, QK-Clip": ({"n_kv_heads": 1, "attn_softcap": 2.0}, {}, {"qk_clip": 0.1}, "flex", False),
    "compiled": ({}, {"chunk_size": 700}, {}, "sdpa", True),
}


class NobodyWaits(L.Callback):
    """Make each host synchronization an error, from the fourth step to the step before the flush.

    This is the last callback, so the check covers all others. On one GPU, Lightning does not synchronize in these
    steps.
    """

    def __init__(self) -> None:
        self.heard = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == FIRST * ACCUMULATE:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.heard += torch.cuda.get_sync_debug_mode() == 2
        if batch_idx == (FLUSH - 1) * ACCUMULATE - 1:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer, pl_module, exception) -> None:
        torch.cuda.set_sync_debug_mode("default")


class Asks(L.Callback):
    """The control: a callback that synchronizes in each step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        outputs["loss"].item()


class Batches:
    """Yield batches as the loader of a run does: copied to the device one step ahead."""

    def __init__(self, documents: bool) -> None:
        batches = [toy_batch(seed, B=16, T=512, padding=2, documents=documents) for seed in range(FLUSH)]
        self.parts = [part.pin_memory() for batch in batches for part in cut(batch, ACCUMULATE)]

    def __iter__(self):
        return (part.to(DEVICE, non_blocking=True) for part in self.parts)


def fit_without_waiting(module, documents, *callbacks) -> tuple[StepLog, NobodyWaits]:
    log, listener = StepLog((FLUSH,)), NobodyWaits()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_steps=FLUSH, max_epochs=-1, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            accumulate_grad_batches=ACCUMULATE, gradient_clip_val=0.5, callbacks=[log, *callbacks, listener],
        )  # fmt: skip
        try:
            trainer.fit(module, Batches(documents))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return log, listener


@pytest.mark.parametrize(("model", "loss", "optim", "backend", "compiled"), RUNS.values(), ids=RUNS)
def test_between_two_flushes_nothing_waits_for_the_device(model, loss, optim, backend, compiled):
    module = module_of(replace(GPU, **model), LossConfig(**loss), backend=backend, **optim).float()
    if compiled:
        module.compile_step()
    log, listener = fit_without_waiting(module, documents=not compiled)
    assert listener.heard == (FLUSH - 1 - FIRST) * ACCUMULATE
    assert log.divergence is None and math.isfinite(log.latest["loss"]) and module.step_record is None


def test_whoever_waits_is_heard():
    assert torch.cuda.get_sync_debug_mode() == 0
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        fit_without_waiting(module_of(GPU).float(), False, Asks())
    assert torch.cuda.get_sync_debug_mode() == 0
