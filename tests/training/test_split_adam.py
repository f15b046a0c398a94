"""AdamW with moments by modality equals AdamW for parameters of one modality, and a written-out formula otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmqk.config import LossConfig
from mmqk.model import PerModalityConfig
from mmqk.training.optimizers import SplitAdamW
from tests.peers import Peer
from tests.training.toy import MODEL, apart, cut, fit, module_of, toy_batch, weights

TORCH = Peer(("split_second_moment",), "torch AdamW", 1e-12)
WRITTEN_OUT = Peer(("split_second_moment",), "formula written out", 1e-12)
PEERS = [TORCH, WRITTEN_OUT]
SETTING = {"lr": 0.03, "betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.2}
STEPS = 6


class Three(nn.Module):
    """Four matrices: the loss of the first modality uses `both` and `first`, that of the second `both` and `second`,
    and no loss uses `neither`. In one step the second modality is absent."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("both", "first", "second", "neither"):
            self.register_parameter(name, nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64)))

    def losses(self, step: int) -> list[Tensor]:
        """Return the losses of the two modalities, whose gradients differ in size and direction."""
        x = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        first = ((self.both * x[0]).sum() - 1).square() + ((self.first * x[1]).sum() - 1).square()
        second = (self.both * x[1]).sum().square() + (self.second * x[0]).sum().square()
        return [first, (step != 3) * 100 * second]


def test_a_parameter_of_both_takes_the_sum_of_both_steps_and_the_others_are_as_with_adamw():
    """The written-out formula: moments by modality, one decay, bias correction by the number of steps."""
    ours = Three()
    p = Three().both.detach().clone()
    m, v = [torch.zeros_like(p)] * 2, [torch.zeros_like(p)] * 2
    (b1, b2), lr = SETTING["betas"], SETTING["lr"]
    decay = SETTING["weight_decay"]
    rest = {name: value for name, value in SETTING.items() if name != "weight_decay"}
    optimizer = SplitAdamW([{"params": list(ours.parameters()), "weight_decay": decay}], **rest)
    for step in range(STEPS):
        gradients = [torch.autograd.grad(loss, ours.both)[0] for loss in ours.losses(step)]
        p = p - lr * decay * p
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
    adamw = torch.optim.AdamW(theirs.parameters(), **SETTING)
    for step in range(STEPS):
        adamw.zero_grad()
        sum(theirs.losses(step)).backward()
        adamw.step()
    gaps = {name: float((p - theirs.get_parameter(name)).detach().abs().max()) for name, p in ours.named_parameters()}
    # The control: AdamW on the summed loss differs, but not for parameters of one modality, or of none.
    assert gaps.pop("both") > 1e-2 and max(gaps.values()) < TORCH.tolerance
    assert torch.equal(ours.neither, Three().neither) and not torch.equal(ours.second, Three().second)


# In training -----------------------------------------------------------------------------------------------


def test_a_loss_that_is_switched_off_leaves_one_modality_and_adamw():
    batches, loss = [toy_batch(seed) for seed in range(3)], LossConfig(weights={"image": 0.0}, z_loss=0.1)
    split, plain = (module_of(loss=loss, split_second_moment=split) for split in (True, False))
    fit(split, batches)
    fit(plain, batches)
    assert apart(weights(split), weights(plain)) < 1e-10
    state = split.trainer.optimizers[0].state[split.model.head.weight]
    assert state["exp_avg"].shape == (1, 16, 16)  # a modality that is not trained has no moments


@pytest.mark.parametrize("optim", [{"split_second_moment": True}, {"qk_clip": 0.3}], ids=str)
def test_micro_batches_equal_one_batch(optim):
    """Half of each batch has no image. The layers are untied: their gradients differ by modality."""
    config = replace(MODEL, per_modality=PerModalityConfig(mlp=True, norms=True))
    batches = [toy_batch(seed) for seed in range(3)]
    for batch in batches:
        batch.ids_BT[:2] %= 9
        batch.modality_BT[:2] = 0
    whole, parts, alone = (module_of(config, **optim) for _ in range(3))
    one = fit(whole, batches, clip=0.5)
    two = fit(parts, [half for batch in batches for half in cut(batch, 2)], accumulate=2, clip=0.5)
    assert apart(weights(whole), weights(parts)) < 1e-9
    assert two == [pytest.approx(line, rel=1e-5) for line in one]
    # The control: training on the second halves alone gives different weights.
    fit(alone, [cut(batch, 2)[1] for batch in batches], clip=0.5)
    assert apart(weights(whole), weights(alone)) > 1e-3
