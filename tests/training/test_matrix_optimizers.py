"""Compare Muon, AdamH, update clipping, AdaGC, SkipStep and MSign with other implementations or with formulas.

Where AdaGC and SkipStep must change nothing: absent gradients, skipped steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmqk.config import OptimConfig
from mmqk.model import EarlyFusionTransformer
from mmqk.training.guards import AdaGC, SkipStep
from mmqk.training.optimizers import hidden_matrices, make_optimizer, orthogonal, orthogonalize
from tests.model.small import SMALL
from tests.peers import Peer
from tests.training.toy import apart, fit, module_of, toy_batch, weights

MUON = Peer(("muon",), "torch.optim.Muon and AdamW", 0.0, "fp32")
ADAMH = Peer(("adamh",), "formula written out", 1e-12)
STABLE = Peer(("update_clip",), "formula written out", 1e-12)
ADAGC = Peer(("adagc",), "formula written out", 1e-6, "fp32")
SKIP = Peer(("skip_step",), "formula written out", 1e-6, "fp32")
MSIGN = Peer(("msign",), "scipy polar", 1e-6, "fp32")
PEERS = [MUON, ADAMH, STABLE, ADAGC, SKIP, MSIGN]


def model(dtype=torch.float32) -> EarlyFusionTransformer:
    from mmqk.model import ModelConfig

    return EarlyFusionTransformer(ModelConfig(**SMALL)).to(dtype)


def gradients_of(net: nn.Module, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in net.named_parameters()}


def train(net: nn.Module, optimizer, steps: int = 4, scale=lambda step: 1.0) -> None:
    for step in range(steps):
        for name, gradient in gradients_of(net, step).items():
            net.get_parameter(name).grad = scale(step) * gradient
        optimizer.step()


def test_muon_is_torchs_for_the_matrices_and_adamw_for_the_rest():
    config = OptimConfig(matrices="muon", lr=0.01, weight_decay=0.1)
    ours, theirs = model(), model()
    train(ours, make_optimizer(config, ours))
    chosen = hidden_matrices(theirs)
    muon = torch.optim.Muon(list(chosen), lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = [p for p in theirs.parameters() if p not in chosen]
    decaying = [theirs.embed.weight, theirs.head.weight]
    gains = [p for p in rest if all(p is not q for q in decaying)]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(4):
        for name, gradient in gradients_of(theirs, step).items():
            theirs.get_parameter(name).grad = gradient
        muon.step()
        adam.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=MUON.tolerance, msg=name)
    plain = model()
    train(plain, make_optimizer(OptimConfig(lr=0.01), plain))
    assert not torch.equal(plain.blocks[0].attention.w_q.weight, ours.blocks[0].attention.w_q.weight)


def moments(gradients, beta1, beta2):
    m = v = torch.zeros_like(gradients[0])
    for t, g in enumerate(gradients, start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        yield g, m / (1 - beta1**t), v / (1 - beta2**t)


def test_adamh_keeps_every_norm_and_is_its_formula():
    config = OptimConfig(matrices="adamh", lr=0.03)
    net = model(torch.float64)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    train(net, make_optimizer(config, net))
    names = {n for n, p in net.named_parameters() if p in hidden_matrices(net)}
    for name, p in net.named_parameters():
        ratio = float((p.norm() / before[name].norm()).detach())
        assert (ratio == pytest.approx(1, abs=1e-12)) == (name in names), name
    name = "blocks.0.attention.w_q.weight"
    w = before[name]
    for _, m, v in moments([gradients_of(net, step)[name] for step in range(4)], 0.9, 0.95):
        u = m / (v.sqrt() + 1e-8)
        moved = w - 0.03 * u * w.norm() / u.norm()
        w = moved * before[name].norm() / moved.norm()
    torch.testing.assert_close(net.get_parameter(name).detach(), w, rtol=0, atol=ADAMH.tolerance)


def test_update_clipping_is_its_formula_and_acts_on_a_spike():
    config = OptimConfig(update_clip=True, lr=0.01, weight_decay=0.1)
    ours, plain = model(torch.float64), model(torch.float64)
    spike = lambda step: 100.0 if step == 3 else 1.0  # noqa: E731
    name = "blocks.1.mlp.w_up.weight"
    w, factors = ours.get_parameter(name).detach().clone(), []
    train(ours, make_optimizer(config, ours), scale=spike)
    train(plain, make_optimizer(OptimConfig(lr=0.01, weight_decay=0.1), plain), scale=spike)
    for g, m, v in moments([spike(step) * gradients_of(plain, step)[name] for step in range(4)], 0.9, 0.95):
        rms = (g * g / v.clamp_min(1e-16)).mean().sqrt()
        factors.append(max(1.0, float(rms)))
        lr = 0.01 / factors[-1]
        w = w - lr * 0.1 * w - lr * m / (v.sqrt() + 1e-8)
    assert factors[-1] > 1.5 > factors[0]
    torch.testing.assert_close(ours.get_parameter(name).detach(), w, rtol=0, atol=STABLE.tolerance)
    assert (plain.get_parameter(name) - w).abs().max() > 1e-3


def test_adagc_is_its_formula():
    guard, gamma = AdaGC(2, 1.05, warmup=2), [float("inf")] * 2
    torch.manual_seed(0)
    for step in range(8):
        gradients = [torch.randn(5) * (50 if step == 6 else 1), torch.randn(3, 2) * (step not in (1, 4))]
        expected = []
        for i, g in enumerate(gradients):
            norm = float(g.norm())
            if norm == 0:  # a step without a gradient, in and after the warm-up, does not count
                expected.append(g.clone())
            elif step < 2:
                gamma[i] = min(gamma[i], norm)
                expected.append(g.clone())
            else:
                expected.append(g * min(1.0, 1.05 * gamma[i] / norm))
                gamma[i] = 0.98 * gamma[i] + 0.02 * float(expected[-1].norm())
        before = [g.clone() for g in gradients]
        guard.clip(gradients, [g.norm() for g in gradients], step)
        for g, e in zip(gradients, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-6, atol=ADAGC.tolerance)
        if step == 6:
            assert gradients[0].norm() < 0.1 * before[0].norm()
    assert guard.state["gamma_P"].tolist() == pytest.approx(gamma, rel=1e-5)


def test_skip_step_leaves_out_what_lies_six_deviations_above_its_window():
    guard, history = SkipStep(6.0), []
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        loss, norm = (torch.randn((), generator=generator) * 0.1 + 3 for _ in range(2))
        if step in (10, 80, 200):
            norm = norm + (2.0 if step != 200 else 0.0)
            loss = loss + (2.0 if step == 200 else 0.0)
        expected = False
        if len(history) >= 64:
            window = torch.tensor(history[-128:])
            expected = bool(((torch.stack([loss, norm]) - window.mean(0)) > 6 * window.std(0)).any())
        assert bool(guard.skips(loss, norm)) == expected == (step in (80, 200)), step
        history.append([float(loss), float(norm)])
    assert int(guard.state["skipped"]) == 2


def test_msign_is_the_polar_factor_and_touches_attention_alone():
    from scipy.linalg import polar

    net = model()
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    orthogonalize(net, torch.tensor(True))
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    orthogonalize(net, torch.tensor(False))
    changed = {n for n, p in net.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(".attention.w_" in name for name in changed)
    for name in changed:
        w, now = before[name], net.get_parameter(name).detach()
        sign = torch.from_numpy(polar(w.double().numpy())[0])
        expected = sign * w.double().norm() / sign.norm()
        torch.testing.assert_close(now.double(), expected, rtol=0, atol=MSIGN.tolerance)
    bad = torch.full((2, 2), torch.nan)
    assert orthogonal(bad) is bad


# In training ------------------------------------------------------------------------------------------------


OTHER_OPTIMIZERS = [{"matrices": "muon"}, {"matrices": "adamh"}, {"update_clip": True}, {"split_second_moment": True}]


def trained(batches, **optim) -> dict[str, Tensor]:
    """Return the weights and the moments after a run. With `skip_step`, its window has losses and norms near 3."""
    module = module_of(**optim)
    if module.skip_step is not None:
        near_3 = 3 + 0.5 * torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
        module.skip_step.state["window_2N"][:, :64] = near_3
        module.skip_step.state["count"].fill_(64)
    fit(module, batches)
    assert module.skip_step is None or int(module.skip_step.state["skipped"]) == 1
    (optimizer,), names = module.trainer.optimizers, {p: name for name, p in module.model.named_parameters()}
    moments = {f"{names[p]} {key}": torch.as_tensor(value).clone()
               for p, state in optimizer.state.items() for key, value in state.items()}  # fmt: skip
    assert len(moments) > len(names)
    return weights(module) | moments


@pytest.mark.parametrize("optim", OTHER_OPTIMIZERS, ids=["muon", "adamh", "update_clip", "split"])
def test_a_skipped_step_leaves_no_trace_in_the_moments(optim):
    first, second, last = (toy_batch(seed) for seed in range(3))
    outlier = replace(toy_batch(3), step_targets=torch.tensor(1))  # multiplies the loss by its number of targets
    without = trained([first, second, last], **optim)
    assert apart(trained([first, second, outlier, last], skip_step=6.0, **optim), without) == 0
    assert apart(trained([first, second, outlier, last], **optim), without) > 1e-2  # the control
