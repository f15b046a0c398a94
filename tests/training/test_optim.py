"""The optimizer against formulas written out: schedules, both conventions of weight decay, the groups, AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import lightning as L
import pytest
import torch
from torch import nn

from mmqk.model import ModelConfig, QKNormConfig
from mmqk.training.loss import LossConfig
from mmqk.training.module import TrainingModule
from mmqk.training.optim import OptimConfig, lr_multiplier, make_optimizer

STEPS, WARMUP = 40, 8
MODEL = ModelConfig(
    d_model=16,
    n_layers=2,
    n_heads=2,
    post_norm=True,
    qk_norm=QKNormConfig(kind="rms"),
    blocks={"text": 9, "image": 7},
)


def shares(config: OptimConfig) -> list[float]:
    """The multiplier of every update, and of the one after the last: there the schedule has reached its end."""
    return [lr_multiplier(config, step, STEPS) for step in range(STEPS + 1)]


class Small(nn.Module):
    """A matrix, a gain and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64))
        self.gain = nn.Parameter(torch.tensor([1.5, -0.5], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor(0.25, dtype=torch.float64))


def set_gradients(model: nn.Module, value: float = 0.0) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, value)


# Schedules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "cosine", "exponential"])
def test_warm_up_is_linear_from_its_first_share_to_the_peak(schedule):
    found = shares(OptimConfig(schedule=schedule, warmup_steps=WARMUP))[:WARMUP]
    assert found == pytest.approx([k / WARMUP for k in range(1, WARMUP + 1)])
    assert found[0] > 0  # an update at a rate of 0 would be a step that trains nothing
    # The control: a warm-up of another length is another ramp.
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
        name: shares(OptimConfig(schedule=name, warmup_steps=WARMUP, final_lr=final)) for name in written_out
    }
    for name, formula in written_out.items():
        assert found[name][WARMUP:] == pytest.approx(list(formula.values())), name
        # The control: each of the other two is another curve.
        assert all(found[o][WARMUP:] != pytest.approx(list(formula.values())) for o in found if o != name)


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize(("schedule", "end"), [("constant", 1.0), ("cosine", 0.1), ("exponential", 0.1)])
def test_it_begins_at_the_peak_falls_and_stays_at_its_end(schedule, end, warmup):
    config = OptimConfig(schedule=schedule, warmup_steps=warmup, final_lr=0.1)
    found = shares(config)[warmup:]
    assert found[0] == 1.0 and found[-1] == pytest.approx(end)
    assert all(later <= earlier for earlier, later in pairwise(found))
    assert (found[1] < found[0]) == (schedule != "constant")
    assert lr_multiplier(config, 10 * STEPS, STEPS) == pytest.approx(end)  # past the end nothing goes on


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak():
    found = shares(OptimConfig(warmup_steps=2 * STEPS))[:STEPS]
    assert found == pytest.approx([(step + 1) / (2 * STEPS) for step in range(STEPS)])


# Weight decay ----------------------------------------------------------------------------------------------


def decays(config: OptimConfig, updates: int) -> list[float]:
    """What share of a matrix each update takes away when the loss has no gradient, as a run is set up."""
    module = TrainingModule(MODEL, LossConfig(), config, seed=0, backend="math").double()
    module.trainer = trainer = L.Trainer(max_steps=STEPS, barebones=True)  # kept: the module holds it weakly
    assert trainer.max_steps == STEPS
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    weight, gain = module.model.blocks[0].attention.w_q.weight, module.model.final_norm.weight
    taken, gain_before = [], gain.detach().clone()
    for _ in range(updates):
        before = weight.detach().clone()
        set_gradients(module)
        optimizer.step()
        schedule.step()
        share = 1 - (weight.detach() / before)
        assert float(share.max() - share.min()) < 1e-12
        taken.append(float(share.mean()))
    assert torch.equal(gain, gain_before)
    return taken


@pytest.mark.parametrize("peak", [1e-3, 0.3])
def test_coupled_decay_follows_the_learning_rate_and_independent_only_the_schedule(peak):
    config = OptimConfig(lr=peak, weight_decay=0.1, warmup_steps=4)
    schedule = [lr_multiplier(config, step, STEPS) for step in range(6)]
    assert schedule[0] == 0.25 and schedule[5] < 1
    coupled = [peak * s * 0.1 for s in schedule]
    independent = [s * 0.1 for s in schedule]
    assert decays(config, 6) == pytest.approx(coupled, rel=1e-6)
    assert decays(replace(config, decay_mode="independent"), 6) == pytest.approx(independent, rel=1e-6)
    # The control: the two conventions are far apart, so neither can pass for the other.
    assert all(abs(a - b) > 0.5 * b for a, b in zip(coupled, independent, strict=True))


def test_independent_decay_does_not_change_with_the_peak():
    def first(mode: str, peak: float) -> float:
        return decays(OptimConfig(lr=peak, weight_decay=0.2, decay_mode=mode, warmup_steps=2), 1)[0]

    assert first("independent", 1e-4) == pytest.approx(first("independent", 1.0), rel=1e-6)
    assert first("coupled", 1.0) == pytest.approx(1e4 * first("coupled", 1e-4), rel=1e-6)
    assert first("independent", 0.5) == pytest.approx(0.1)


def test_gains_and_biases_are_not_decayed():
    model = Small()
    optimizer = make_optimizer(OptimConfig(lr=0.5, weight_decay=0.5), model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    set_gradients(model)
    optimizer.step()
    assert torch.equal(model.gain, before["gain"]) and torch.equal(model.bias, before["bias"])
    torch.testing.assert_close(model.matrix.detach(), before["matrix"] * (1 - 0.5 * 0.5))


# Groups ----------------------------------------------------------------------------------------------------


def test_every_parameter_is_in_exactly_one_group():
    module = TrainingModule(MODEL, LossConfig(), OptimConfig(weight_decay=0.3), seed=0, backend="math")
    optimizer = make_optimizer(module.optim_config, module.model)
    placed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    named = {id(p): name for name, p in module.named_parameters()}
    assert len(placed) == len(set(placed)) and set(placed) == named.keys()
    decayed, left_out = (
        {named[id(p)] for g in optimizer.param_groups if g["weight_decay"] == wd for p in g["params"]}
        for wd in (0.3, 0.0)
    )
    assert {"model.embed.weight", "model.head.weight", "model.blocks.0.attention.w_q.weight"} <= decayed
    assert {"model.final_norm.weight", "model.blocks.1.attn_post_norm.weight"} <= left_out
    assert all("norm" in name for name in left_out) and not any("norm" in name for name in decayed)
    # The control: without a gain or with a frozen matrix there is nothing left over and nothing extra.
    model = Small()
    model.matrix.requires_grad_(False)
    [group] = make_optimizer(OptimConfig(), model).param_groups
    assert {id(p) for p in group["params"]} == {id(model.gain), id(model.bias)}


# AdamW -----------------------------------------------------------------------------------------------------


def written_out(p, gradients, config: OptimConfig, decay: float):
    """AdamW (Loshchilov and Hutter, Algorithm 2) for a list of gradients."""
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
            decay = 0.4 if name == "matrix" else 0.0
            expected = written_out(start[name], gradients[name][: t + 1], config, decay)
            torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
    # The control: every number of the configuration is felt.
    for other in ({"beta1": 0.9}, {"beta2": 0.95}, {"eps": 1e-8}, {"lr": 0.08}):
        wrong = written_out(start["matrix"], gradients["matrix"], replace(config, **other), 0.4)
        assert float((model.matrix.detach() - wrong).abs().max()) > 1e-3, other


def test_eps_and_betas_reach_adamw():
    config = OptimConfig(lr=0.25, beta1=0.7, beta2=0.999, eps=1e-5)
    for group in make_optimizer(config, Small()).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.7, 0.999), 1e-5)
    assert make_optimizer(OptimConfig(), Small()).param_groups[0]["eps"] != 1e-5


def test_an_epsilon_that_is_accepted_keeps_weights_without_gradient_finite():
    """Embedding rows of tokens that a batch does not hold have a gradient of exactly 0; so eps may not be 0."""

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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", -1e-3),
        ("lr", math.nan),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("beta2", math.nan),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("warmup_steps", -1),
        ("final_lr", -0.1),
        ("final_lr", 1.1),
        ("final_lr", math.nan),
    ],
)
def test_an_impossible_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"optim\.{field}\b"):
        OptimConfig(**{field: value})


@pytest.mark.parametrize("field", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"optim\.{field}\b"):
        OptimConfig(**{field: value})


def test_the_edges_are_allowed_and_an_exponential_to_zero_is_not():
    OptimConfig(beta1=0.0, beta2=0.0, weight_decay=0.0, warmup_steps=0, final_lr=0.0)
    assert OptimConfig(final_lr=1.0, schedule="exponential").final_lr == 1.0
    with pytest.raises(ValueError, match=r"optim\.schedule exponential .*optim\.final_lr 0"):
        OptimConfig(final_lr=0.0, schedule="exponential")
