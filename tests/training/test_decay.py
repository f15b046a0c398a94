"""Check the effect of weight decay on each parameter, and compare whole runs with a written-out AdamW."""

from __future__ import annotations

import math
from dataclasses import replace

import lightning as L
import pytest
import torch

from mmqk.config import LossConfig, OptimConfig
from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig
from mmqk.training.module import TrainingModule
from mmqk.training.optimizers import lr_multiplier, make_optimizer
from tests.peers import Peer
from tests.training.toy import MODEL as TOY
from tests.training.toy import Small, fit, module_of, set_gradients, toy_batch

ADAMW = Peer(("decay_independent", "warmup", "decay_gains", "no_decay_embeddings"), "AdamW written out", 1e-12)
PEERS = [ADAMW]
STEPS = 40
MODEL = ModelConfig(
    d_model=16,
    n_layers=2,
    n_heads=2,
    post_norm=True,
    qk_norm=QKNormConfig(kind="rms"),
    vocab_sizes={"text": 9, "image": 7},
)


# Weight decay ----------------------------------------------------------------------------------------------


def decays(config: OptimConfig, updates: int) -> list[float]:
    """Return the share of a matrix that each update removes if all gradients are 0, with the optimizer of a run."""
    module = TrainingModule(MODEL, LossConfig(), config, seed=0, backend="math").double()
    # Keep a reference to the Trainer, because the module has only a weak one.
    module.trainer = trainer = L.Trainer(max_steps=STEPS, barebones=True)
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
    # The control: the two conventions differ by far more than the tolerance.
    assert all(abs(a - b) > 0.5 * b for a, b in zip(coupled, independent, strict=True))


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
    # The control: a frozen matrix is in no group.
    model = Small()
    model.matrix.requires_grad_(False)
    [group] = make_optimizer(OptimConfig(), model).param_groups
    assert {id(p) for p in group["params"]} == {id(model.gain), id(model.bias)}


VARIANTS = {
    "plain": ModelConfig(),
    "gains of two axes": ModelConfig(qk_norm=QKNormConfig(kind="layer", gain="per_head", bias=True)),
    "cosine": ModelConfig(qk_norm=QKNormConfig(kind="l2", gain="per_head", scale_max=100.0)),
    "layer norm": ModelConfig(norm="layer", norm_bias=True, post_norm=True, layer_scale=0.1),
    "sigma": ModelConfig(weight_reparam="sigma"),
    "untied": ModelConfig(per_modality=PerModalityConfig(norms=True, qk=True, mlp=True)),
    "tied": ModelConfig(tie_embeddings=True),
}


def kind_of(name: str, config: ModelConfig) -> str:
    """Return the kind of a parameter by its name alone."""
    if name == "embed.weight":
        return "embedding"
    last = [part for part in name.split(".") if not part.isdigit() and part != "copies"][-2:]
    return "matrix" if last[0] in {"w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down", "head"} and (
        last[1] == "weight"
    ) else "rest"  # fmt: skip


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_decays_is_what_the_switches_say(variant, gains, embeddings):
    """With gradients of 0, AdamW multiplies decayed parameters by `1 - lr * decay` and does not change the others."""
    config = replace(VARIANTS[variant], d_model=16, n_layers=2, n_heads=2, vocab_sizes=MODEL.vocab_sizes)
    model = EarlyFusionTransformer(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)  # so that decay changes every element
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = OptimConfig(lr=0.5, weight_decay=0.2, decay_gains=gains, decay_embeddings=embeddings)
    optimizer = make_optimizer(settings, model)
    placed = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(placed) == len({id(p) for p in placed}) == len(before)  # each once, even a tied parameter
    set_gradients(model)
    optimizer.step()
    kinds = {name: kind_of(name, config) for name in before}
    assert set(kinds.values()) == {"matrix", "embedding", "rest"}
    for name, p in model.named_parameters():
        decays_ = {"matrix": True, "embedding": embeddings, "rest": gains}[kinds[name]]
        expected = before[name] * (1 - 0.5 * 0.2 * decays_)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=ADAMW.tolerance)
        # The control: a parameter changes only if weight decay applies to it.
        assert torch.equal(p.detach(), before[name]) is not decays_, name
    assert ("head.weight" in before) is not config.tie_embeddings


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_default_groups_are_those_that_checkpoints_have(variant):
    """Checkpoints store optimizer state by position, so the default groups must not change. Older versions grouped
    parameters by their number of axes."""
    config = replace(VARIANTS[variant], d_model=16, n_layers=2, n_heads=2, vocab_sizes=MODEL.vocab_sizes)
    model = EarlyFusionTransformer(config)
    by_axes = [[p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]]
    found = [group["params"] for group in make_optimizer(OptimConfig(), model).param_groups]
    same = [
        len(a) == len(b) and all(p is q for p, q in zip(a, b, strict=True))
        for a, b in zip(by_axes, found, strict=True)
    ]
    assert all(same) is (variant not in ("gains of two axes", "cosine"))


# Whole runs -------------------------------------------------------------------------------------------------

RUNS = {
    "coupled": {},
    "independent": {"decay_mode": "independent"},
    "eps": {"eps": 1e-2},
    "beta2": {"beta2": 0.5},
    "warm-up": {"warmup_steps": 4},
    "gains": {"decay_gains": True},
    "embeddings left out": {"decay_embeddings": False},
}


def run_by_hand(batches, clip: float, *, decay_mode="coupled", eps=1e-8, beta2=0.95, warmup_steps=2,
                decay_gains=False, decay_embeddings=True) -> dict[str, torch.Tensor]:  # fmt: skip
    """Train without a Trainer or an optimizer: gradient, clipping by global norm, schedule, AdamW, weight decay."""
    lr, decay = 0.02, 0.3
    module = module_of(TOY, LossConfig(z_loss=0.01))
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in module.model.named_parameters()}
    for t, batch in enumerate(batches, start=1):
        sums = module.losses(batch)
        loss = (sums.ce.sum() + 0.01 * sums.log_z_sq.sum()) / batch.target_mask_BT.sum()
        gradients = torch.autograd.grad(loss, list(module.model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        done = max(0, t - 1 - warmup_steps) / (len(batches) - warmup_steps)
        schedule = t / warmup_steps if t <= warmup_steps else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
        with torch.no_grad():
            for (name, p), g in zip(module.model.named_parameters(), gradients, strict=True):
                m, v = moments[name]
                g = g * min(1.0, clip / (float(norm) + 1e-6))
                m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g * g
                moments[name] = (m, v)
                share = {"matrix": 1, "embedding": decay_embeddings, "rest": decay_gains}[kind_of(name, TOY)]
                p *= 1 - share * decay * schedule * (lr if decay_mode == "coupled" else 1.0)
                p -= lr * schedule * (m / (1 - 0.9**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return {name: p.detach() for name, p in module.model.named_parameters()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_adamw_written_out(name):
    """The run uses Trainer, clipping, schedule and optimizer together. Each setting changes the weights, so each is a
    control for the others."""
    batches = [toy_batch(seed) for seed in range(6)]
    setting = {"lr": 0.02, "weight_decay": 0.3, "warmup_steps": 2, "schedule": "cosine", **RUNS[name]}
    module = module_of(TOY, LossConfig(z_loss=0.01), **setting)
    lines = fit(module, batches, clip=0.5)
    assert min(line["grad_norm"] for line in lines) > 0.5
    expected = run_by_hand(batches, 0.5, **RUNS[name])
    for key, p in module.model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[key], rtol=0, atol=ADAMW.tolerance)
    for other in RUNS.keys() - {name}:
        wrong = run_by_hand(batches, 0.5, **RUNS[other])
        assert max(float((wrong[k] - expected[k]).abs().max()) for k in wrong) > 1e-3, other
