"""AdamW with moments by modality equals AdamW for parameters of one modality, and a written-out formula otherwise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmqk.config import LossConfig
from mmqk.model import PerModalityConfig
from mmqk.training.losses import loss_parts, total_loss
from mmqk.training.optimizers import SplitAdamW
from tests.peers import Peer
from tests.training.test_no_sync import Methods, Operations
from tests.training.toy import MODEL, apart, cut, fit, module_of, toy_batch, weights

TORCH = Peer(("split_second_moment",), "torch AdamW", 1e-12)
WRITTEN_OUT = Peer(("split_second_moment",), "formula written out", 1e-12)
PEERS = [TORCH, WRITTEN_OUT]
SETTING = {"lr": 0.03, "betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.2}
STEPS = 6


class Three(nn.Module):
    """Four matrices: the loss of the first modality uses `both` and `first`, that of the second `both` and `second`,
    and no loss uses `neither`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("both", "first", "second", "neither"):
            self.register_parameter(name, nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64)))

    def losses(self, step: int) -> list[Tensor]:
        """Return the losses of the two modalities, whose gradients differ in size and direction."""
        x = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return [((self.both * x[0]).sum() + (self.first * x[1]).sum() - 1).square(),
                100 * ((self.both * x[1]).sum() + (self.second * x[0]).sum()).square()]  # fmt: skip


def split_steps(model: Three, which: slice = slice(None), steps: int = STEPS) -> SplitAdamW:
    optimizer = SplitAdamW(model.parameters(), **SETTING)
    for step in range(steps):
        optimizer.zero_grad()
        optimizer.backward(model.losses(step)[which])
        optimizer.step()
    return optimizer


def adamw_steps(model: nn.Module, losses: Callable[[int], Tensor], steps: int = STEPS) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), **SETTING)
    for step in range(steps):
        optimizer.zero_grad()
        losses(step).backward()
        optimizer.step()


def gaps(a: nn.Module, b: nn.Module) -> dict[str, float]:
    other = dict(b.named_parameters())
    return {name: float((p - other[name]).detach().abs().max()) for name, p in a.named_parameters()}


# Cases that equal AdamW ------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, 1])
def test_with_one_modality_it_is_adamw(m):
    ours, theirs = Three(), Three()
    split_steps(ours, slice(m, m + 1))
    adamw_steps(theirs, lambda step: theirs.losses(step)[m])
    assert max(gaps(ours, theirs).values()) < TORCH.tolerance
    # A parameter without a gradient is not decayed, as in AdamW.
    assert torch.equal(ours.neither, Three().neither) and not torch.equal(ours.both, Three().both)
    # The control: the steps of the other modality differ.
    other = Three()
    adamw_steps(other, lambda step: other.losses(step)[1 - m])
    assert gaps(ours, other)["both"] > 1e-2


# Cases that differ from AdamW ------------------------------------------------------------------------------


def test_a_parameter_of_both_takes_the_sum_of_both_steps():
    """The written-out formula: moments by modality, one decay, bias correction by the number of steps."""
    ours = Three()
    p = Three().both.detach().clone()
    m, v = [torch.zeros_like(p)] * 2, [torch.zeros_like(p)] * 2
    (b1, b2), lr = SETTING["betas"], SETTING["lr"]
    optimizer = SplitAdamW(ours.parameters(), **SETTING)
    for step in range(STEPS):
        gradients = [torch.autograd.grad(loss, ours.both)[0] for loss in ours.losses(step)]
        p = p - lr * SETTING["weight_decay"] * p
        for a, g in enumerate(gradients):
            m[a], v[a] = b1 * m[a] + (1 - b1) * g, b2 * v[a] + (1 - b2) * g * g
            m_hat, v_hat = m[a] / (1 - b1 ** (step + 1)), v[a] / (1 - b2 ** (step + 1))
            p = p - lr * m_hat / (v_hat.sqrt() + SETTING["eps"])
        optimizer.zero_grad()
        optimizer.backward(ours.losses(step))
        torch.testing.assert_close(ours.both.grad, gradients[0] + gradients[1])
        optimizer.step()
        torch.testing.assert_close(ours.both.detach(), p, rtol=0, atol=WRITTEN_OUT.tolerance)
    theirs = Three()
    adamw_steps(theirs, lambda step: sum(theirs.losses(step)))
    assert gaps(ours, theirs)["both"] > 1e-2  # the control: AdamW on the summed loss differs


def test_an_absent_modality_is_a_gradient_of_zero():
    """The moments of an absent modality decay and still move the weights, as in AdamW with a gradient of 0."""
    p, q = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    split, plain = SplitAdamW([p], **SETTING), torch.optim.AdamW([q], **SETTING)
    for factor in (1.0, 0.0, 0.0, 3.0, 0.0):
        for optimizer, losses in ((split, [factor * (p * x).sum(), 0.0 * p.sum()]), (plain, None)):
            optimizer.zero_grad()
            split.backward(losses) if losses else (factor * (q * x).sum()).backward()
            optimizer.step()
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=TORCH.tolerance)
    state = split.state[p]
    assert state["step"] == 5 and bool((state["exp_avg_sq"][1] == 0).all())
    # The control: a skipped step differs from a step with a gradient of 0.
    before = q.detach().clone()
    plain.zero_grad()
    plain.step()
    assert torch.equal(q.detach(), before)


# In training -----------------------------------------------------------------------------------------------


def test_training_on_one_modality_is_adamw():
    """The runs have z-loss, clipping and independent decay; the optimizer has two modalities, the data only one."""
    setting = {"weight_decay": 0.3, "decay_mode": "independent", "lr": 0.02}
    batches = [toy_batch(seed, only="image") for seed in range(4)]
    split, plain = (
        module_of(loss=LossConfig(z_loss=0.01), split_second_moment=split, **setting) for split in (True, False)
    )
    lines = [fit(module, batches, clip=0.5) for module in (split, plain)]
    assert apart(weights(split), weights(plain)) < 1e-10
    assert lines[0] == [pytest.approx(line, rel=1e-6) for line in lines[1]]
    assert min(line["grad_norm"] for line in lines[1]) > 0.5  # the gradients are clipped


def test_a_loss_that_is_switched_off_leaves_one_modality_and_adamw():
    batches, loss = [toy_batch(seed) for seed in range(3)], LossConfig(weights={"image": 0.0}, z_loss=0.1)
    split, plain = (module_of(loss=loss, split_second_moment=split) for split in (True, False))
    fit(split, batches)
    fit(plain, batches)
    assert apart(weights(split), weights(plain)) < 1e-10
    state = split.trainer.optimizers[0].state[split.model.head.weight]
    assert state["exp_avg"].shape == (1, 16, 16)  # a modality that is not trained has no moments


def test_parts_add_up_to_the_usual_gradient():
    module, batch = module_of(loss=LossConfig(z_loss=0.1)), toy_batch(0)
    parameters = list(module.model.parameters())
    optimizer = SplitAdamW(parameters, lr=0.1)
    sums = module.losses(batch)
    weights_M = torch.tensor([1.0, 0.3], dtype=torch.float64)
    weighing = (weights_M, 0.1, batch.step_targets)
    expected = torch.autograd.grad(total_loss(sums, *weighing), parameters, retain_graph=True)
    by_hand = [
        torch.autograd.grad(
            weights_M[a] * (sums.ce[a] + 0.1 * sums.log_z_sq[a]) / batch.step_targets, parameters, retain_graph=True
        )
        for a in (0, 1)
    ]
    optimizer.backward(list(loss_parts(sums, *weighing)))
    for i, p in enumerate(parameters):
        torch.testing.assert_close(p.grad, expected[i], rtol=0, atol=1e-12)
        for a in (0, 1):
            torch.testing.assert_close(optimizer._gradients[p][a], by_hand[a][i], rtol=0, atol=1e-12)
    # The control: neither part equals the sum.
    head = module.model.head.weight
    assert all(float((g - head.grad).abs().max()) > 1e-3 for g in optimizer._gradients[head])


def test_micro_batches_equal_one_batch():
    """Half of each batch has no image. The layers are untied: their gradients differ by modality."""
    config = replace(MODEL, per_modality=PerModalityConfig(mlp=True, norms=True))
    batches = [toy_batch(seed) for seed in range(3)]
    for batch in batches:
        batch.ids_BT[:2] %= 9
        batch.modality_BT[:2] = 0
    whole, parts = (module_of(config, split_second_moment=True) for _ in range(2))
    one = fit(whole, batches, clip=0.5)
    two = fit(parts, [half for batch in batches for half in cut(batch, 2)], accumulate=2, clip=0.5)
    assert apart(weights(whole), weights(parts)) < 1e-9
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    # The control: training on the second halves alone gives different weights.
    alone = module_of(config, split_second_moment=True)
    fit(alone, [cut(batch, 2)[1] for batch in batches], clip=0.5)
    assert apart(weights(whole), weights(alone)) > 1e-3


# Skipped steps ----------------------------------------------------------------------------------------------


def stepped(found_inf: float | None, factor: float = 1.0) -> Three:
    """Return the model after four steps that ask the host for nothing; ``found_inf`` is set unless it is None."""
    model = Three()
    optimizer = SplitAdamW(model.parameters(), **SETTING)
    for step in range(4):
        optimizer.zero_grad()
        optimizer.backward([factor * loss for loss in model.losses(step)])
        if found_inf is not None:
            optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
        with Operations(asked := Counter()), Methods(asked):
            optimizer.step()
        assert not asked
    return model


@pytest.mark.parametrize("factor", [1.0, float("nan"), float("inf")])
def test_told_of_a_bad_gradient_no_parameter_changes(factor):
    assert max(gaps(stepped(1.0, factor), Three()).values()) == 0
    # The control: without `found_inf` the weights change.
    assert gaps(stepped(None), Three())["both"] > 1e-2


@pytest.mark.parametrize("split", [False, True])
def test_a_run_stands_still_from_its_first_bad_gradient_on(split):
    good, bad = toy_batch(0), toy_batch(1)
    bad.step_targets = bad.step_targets * 0.0  # a loss over 0 targets is not finite
    stopped, whole = (module_of(split_second_moment=split, weight_decay=0.3, qk_clip=0.1) for _ in range(2))
    lines = fit(stopped, [good, bad, good, good], clip=0.5)
    fit(whole, [good], clip=0.5)
    assert [math.isfinite(line["grad_norm"]) for line in lines] == [True, False, True, True]
    assert apart(weights(stopped), weights(whole)) == 0
    # The control: a second good batch changes the weights.
    other = module_of(split_second_moment=split, weight_decay=0.3, qk_clip=0.1)
    fit(other, [good, good], clip=0.5)
    assert apart(weights(other), weights(whole)) > 1e-3
