"""Compare schedules, weight decay and whole runs with a written-out AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from mmqk.config import LossConfig, OptimConfig
from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig
from mmqk.training.optimizers import lr_multiplier, make_optimizer
from tests.peers import Peer
from tests.training.toy import MODEL as TOY
from tests.training.toy import fit, module_of, toy_batch

ADAMW = Peer(
    ("adam_eps", "beta2", "decay_independent", "warmup", "decay_gains", "no_decay_embeddings"),
    "AdamW written out", 1e-12,
)  # fmt: skip
SCHEDULE = Peer(("warmup",), "formula written out", 1e-12)
PEERS = [ADAMW, SCHEDULE]
STEPS, WARMUP = 40, 8


@pytest.mark.parametrize("final", [0.05, 0.5])
def test_schedules_are_their_formulas(final):
    after = [(step - WARMUP) / (STEPS - WARMUP) for step in range(WARMUP, STEPS + 1)]
    curves = {
        "constant": [1.0 for _ in after],
        "cosine": [final + (1 - final) * (1 + math.cos(math.pi * t)) / 2 for t in after],
        "exponential": [math.exp(t * math.log(final)) for t in after],
    }
    ramp = [k / WARMUP for k in range(1, WARMUP + 1)]  # a learning rate of 0 would train nothing
    for name, curve in curves.items():
        config = OptimConfig(schedule=name, warmup_steps=WARMUP, final_lr_ratio=final)
        found = [lr_multiplier(config, step, STEPS) for step in range(STEPS + 1)]
        assert found == pytest.approx([*ramp, *curve], rel=0, abs=SCHEDULE.tolerance), name
        # The control: each of the other two schedules gives a different curve.
        assert all(found[WARMUP:] != pytest.approx(other) for key, other in curves.items() if key != name)


# Groups ----------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("gains", "embeddings"), [(False, True), (True, False)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_decays_is_what_the_switches_say(variant, gains, embeddings):
    """With gradients of 0, AdamW multiplies decayed parameters by `1 - lr * decay` and does not change the others.

    Checkpoints store optimizer state by position, so the default groups must not change. Older versions grouped
    parameters by their number of axes."""
    config = replace(VARIANTS[variant], d_model=16, n_layers=2, n_heads=2, vocab_sizes=TOY.vocab_sizes)
    model = EarlyFusionTransformer(config).double()
    if (gains, embeddings) == (False, True):  # the defaults
        by_axes = [[p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]]
        found = [group["params"] for group in make_optimizer(OptimConfig(), model).param_groups]
        same = [list(map(id, a)) == list(map(id, b)) for a, b in zip(by_axes, found, strict=True)]
        assert all(same) is (variant not in ("gains of two axes", "cosine"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)  # so that decay changes every element
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = OptimConfig(lr=0.5, weight_decay=0.2, decay_gains=gains, decay_embeddings=embeddings)
    optimizer = make_optimizer(settings, model)
    placed = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(placed) == len({id(p) for p in placed}) == len(before)  # each once, even a tied parameter
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kinds = {name: kind_of(name, config) for name in before}
    assert set(kinds.values()) == {"matrix", "embedding", "rest"}
    for name, p in model.named_parameters():
        decays = {"matrix": True, "embedding": embeddings, "rest": gains}[kinds[name]]
        expected = before[name] * (1 - 0.5 * 0.2 * decays)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=ADAMW.tolerance)
        # The control: a parameter changes only if weight decay applies to it.
        assert torch.equal(p.detach(), before[name]) is not decays, name
    assert ("head.weight" in before) is not config.tie_embeddings


# Whole runs -------------------------------------------------------------------------------------------------

RUNS = {
    "coupled": {}, "independent": {"decay_mode": "independent"}, "eps": {"eps": 1e-2}, "beta1": {"beta1": 0.6},
    "beta2": {"beta2": 0.5}, "warm-up": {"warmup_steps": 4}, "gains": {"decay_gains": True},
    "embeddings left out": {"decay_embeddings": False},
}  # fmt: skip
BATCHES = [toy_batch(seed) for seed in range(6)]


@cache
def run_by_hand(name: str) -> dict[str, torch.Tensor]:
    """Train without a Trainer or an optimizer: gradient, clipping by global norm, schedule, AdamW, weight decay."""
    setting = {"decay_mode": "coupled", "eps": 1e-8, "beta1": 0.9, "beta2": 0.95, "warmup_steps": 2,
               "decay_gains": False, "decay_embeddings": True, **RUNS[name]}  # fmt: skip
    lr, decay, beta1, beta2, warmup = 0.02, 0.3, setting["beta1"], setting["beta2"], setting["warmup_steps"]
    module = module_of(TOY, LossConfig(z_loss=0.01))
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in module.model.named_parameters()}
    for t, batch in enumerate(BATCHES, start=1):
        sums = module.losses(batch)
        loss = (sums.ce.sum() + 0.01 * sums.log_z_sq.sum()) / batch.target_mask_BT.sum()
        gradients = torch.autograd.grad(loss, list(module.model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        done = max(0, t - 1 - warmup) / (len(BATCHES) - warmup)
        schedule = t / warmup if t <= warmup else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
        with torch.no_grad():
            for (name, p), g in zip(module.model.named_parameters(), gradients, strict=True):
                m, v = moments[name]
                g = g * min(1.0, 0.5 / (float(norm) + 1e-6))
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
                moments[name] = (m, v)
                decays = {"matrix": 1, "embedding": setting["decay_embeddings"], "rest": setting["decay_gains"]}
                share = decays[kind_of(name, TOY)] * decay * schedule
                p *= 1 - share * (lr if setting["decay_mode"] == "coupled" else 1.0)
                p -= lr * schedule * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + setting["eps"])
    return {name: p.detach() for name, p in module.model.named_parameters()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_adamw_written_out(name):
    """The run uses Trainer, clipping, schedule and optimizer together. Each setting changes the weights, so each is a
    control for the others."""
    setting = {"lr": 0.02, "weight_decay": 0.3, "warmup_steps": 2, "schedule": "cosine", **RUNS[name]}
    module = module_of(TOY, LossConfig(z_loss=0.01), **setting)
    lines = fit(module, BATCHES, clip=0.5)
    assert min(line["grad_norm"] for line in lines) > 0.5
    expected = run_by_hand(name)
    for key, p in module.model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[key], rtol=0, atol=ADAMW.tolerance)
    for other in RUNS.keys() - {name}:
        wrong = run_by_hand(other)
        assert max(float((wrong[k] - expected[k]).abs().max()) for k in wrong) > 1e-3, other
