"""Compare the schedules and AdamW with written-out formulas, and check error messages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mmqk.config import OptimConfig
from mmqk.training.optimizers import lr_multiplier, make_optimizer
from tests.peers import Peer
from tests.training.toy import Small, set_gradients

SCHEDULE = Peer(("warmup",), "formula written out", 1e-12)
ADAMW = Peer(("adam_eps", "beta2"), "AdamW written out", 1e-12)
PEERS = [SCHEDULE, ADAMW]
STEPS, WARMUP = 40, 8


def shares(config: OptimConfig) -> list[float]:
    """Return the multiplier of the learning rate for every update, and the final value of the schedule."""
    return [lr_multiplier(config, step, STEPS) for step in range(STEPS + 1)]


# Schedules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "cosine", "exponential"])
def test_warm_up_is_linear_from_its_first_share_to_the_peak(schedule):
    found = shares(OptimConfig(schedule=schedule, warmup_steps=WARMUP))[:WARMUP]
    expected = [k / WARMUP for k in range(1, WARMUP + 1)]
    assert found == pytest.approx(expected, rel=0, abs=SCHEDULE.tolerance)
    assert found[0] > 0  # a learning rate of 0 would train nothing
    # The control: a warm-up of a different length gives a different ramp.
    assert shares(OptimConfig(schedule=schedule, warmup_steps=WARMUP + 1))[:WARMUP] != pytest.approx(found)


@pytest.mark.parametrize("final", [0.05, 0.5])
def test_schedules_are_their_formulas(final):
    after = [(step, (step - WARMUP) / (STEPS - WARMUP)) for step in range(WARMUP, STEPS + 1)]
    written_out = {
        "constant": {step: 1.0 for step, _ in after},
        "cosine": {step: final + (1 - final) * (1 + math.cos(math.pi * t)) / 2 for step, t in after},
        "exponential": {step: math.exp(t * math.log(final)) for step, t in after},
    }
    found = {
        name: shares(OptimConfig(schedule=name, warmup_steps=WARMUP, final_lr_ratio=final)) for name in written_out
    }
    for name, formula in written_out.items():
        assert found[name][WARMUP:] == pytest.approx(list(formula.values())), name
        # The control: each of the other two schedules gives a different curve.
        assert all(found[o][WARMUP:] != pytest.approx(list(formula.values())) for o in found if o != name)


# AdamW -----------------------------------------------------------------------------------------------------


def written_out(p, gradients, config: OptimConfig, decay: float):
    """Return the parameter after steps of AdamW (Loshchilov and Hutter, Algorithm 2) with a list of gradients."""
    m = v = torch.zeros_like(p)
    for t, g in enumerate(gradients, start=1):
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        m_hat, v_hat = m / (1 - config.beta1**t), v / (1 - config.beta2**t)
        p = p - config.lr * decay * p - config.lr * m_hat / (v_hat.sqrt() + config.eps)
    return p


def test_steps_equal_the_formula():
    config = OptimConfig(lr=0.07, beta1=0.6, beta2=0.8, eps=0.3, weight_decay=0.4)
    model = Small()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    gradients = {
        name: [torch.randn(p.shape, generator=generator, dtype=p.dtype) for _ in range(3)]
        for name, p in start.items()
    }
    optimizer = make_optimizer(config, model)
    for t in range(3):
        for name, p in model.named_parameters():
            p.grad = gradients[name][t]
        optimizer.step()
        for name, p in model.named_parameters():
            decay = 0.4 if name == "layer.weight" else 0.0
            expected = written_out(start[name], gradients[name][: t + 1], config, decay)
            torch.testing.assert_close(p.detach(), expected, rtol=0, atol=ADAMW.tolerance)
    # The control: every number of the configuration has an effect.
    for other in ({"beta1": 0.9}, {"beta2": 0.95}, {"eps": 1e-8}, {"lr": 0.08}):
        wrong = written_out(start["layer.weight"], gradients["layer.weight"], replace(config, **other), 0.4)
        assert float((model.matrix.detach() - wrong).abs().max()) > 1e-3, other


def test_an_epsilon_that_is_accepted_keeps_weights_without_gradient_finite():
    """Embedding rows of tokens that a batch does not contain have a gradient of exactly 0, so eps must not be 0."""

    def step(eps: float) -> torch.Tensor:
        model = Small()
        optimizer = make_optimizer(OptimConfig(lr=0.1, eps=eps), model)
        set_gradients(model)
        optimizer.step()
        return model.matrix.detach()

    assert torch.isfinite(step(1e-8)).all()
    try:
        OptimConfig(eps=0.0)
    except ValueError as error:
        assert "optim.eps" in str(error)
    else:
        assert torch.isfinite(step(0.0)).all()


# Refusals --------------------------------------------------------------------------------------------------
