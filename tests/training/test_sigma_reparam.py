"""Check σReparam: sigma follows the weights, forward passes change no buffer, torch's spectral norm agrees."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from mmqk.model.linear import POWER_STEPS, SigmaLinear
from mmqk.monitors import probe
from mmqk.training import module as training
from tests.peers import Peer
from tests.training.toy import MODEL, apart, cut, fit, module_of, toy_batch, weights

TORCH = Peer(("sigma_reparam",), "torch spectral_norm", 1e-12)
PEERS = [TORCH]
SIGMA = replace(MODEL, weight_reparam="sigma")


def matrices(module) -> dict[str, SigmaLinear]:
    return {name: m for name, m in module.model.named_modules() if isinstance(m, SigmaLinear)}


@cache
def trained():
    module = module_of(SIGMA, lr=0.005)
    fit(module, [toy_batch(seed) for seed in range(8)])
    return module


# Against torch ---------------------------------------------------------------------------------------------


def pair() -> tuple[SigmaLinear, nn.Module]:
    """Return a matrix of a trained model with gamma 1, and torch's spectral norm with the same W, u and v."""
    ours = copy.deepcopy(next(iter(matrices(trained()).values())))
    with torch.no_grad():
        ours.gamma.fill_(1.0)
    plain = nn.Linear(ours.in_features, ours.out_features, bias=False).double()
    plain.weight = nn.Parameter(ours.weight.detach().clone())
    theirs = spectral_norm(plain).eval()  # in evaluation mode it does not change u and v
    theirs.parametrizations.weight[0]._u = ours.u.clone()
    theirs.parametrizations.weight[0]._v = ours.v.clone()
    return ours, theirs


@pytest.mark.parametrize("gamma", [1.0, 1.7])
def test_value_and_gradient_equal_torch_spectral_norm(gamma):
    ours, theirs = pair()
    with torch.no_grad():
        ours.gamma.fill_(gamma)
    generator = torch.Generator().manual_seed(0)
    x, direction = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64)
    out, expected = ours(x), gamma * theirs(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=TORCH.tolerance)
    (grad,) = torch.autograd.grad((out * direction).sum(), ours.weight, retain_graph=True)
    original = theirs.parametrizations.weight.original
    (expected_grad,) = torch.autograd.grad((expected * direction).sum(), original)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=TORCH.tolerance)
    (gamma_grad,) = torch.autograd.grad((out * direction).sum(), ours.gamma)
    torch.testing.assert_close(gamma_grad, (out * direction).sum() / gamma)
    # The controls: a constant sigma gives a different gradient, and the plain matrix gives a different value.
    constant = gamma * (x @ ours.weight.T) / ours.sigma().detach()
    torch.testing.assert_close(constant, expected)
    (wrong,) = torch.autograd.grad((constant * direction).sum(), ours.weight)
    assert float((wrong - expected_grad).abs().max()) > 1e-2
    assert float((x @ ours.weight.T - expected).detach().abs().max()) > 1e-2


def test_one_power_step_is_its_formula():
    ours, _ = pair()
    u, w = ours.u.clone(), ours.weight.detach()
    with torch.no_grad():
        ours.u.copy_(u.flip(0))  # away from the singular vector, so that a power step changes it
    u = ours.u.clone()
    ours.power_step()
    v = w.T @ u
    v = v / v.norm()
    expected = w @ v / (w @ v).norm()
    torch.testing.assert_close(ours.v, v, rtol=0, atol=TORCH.tolerance)
    torch.testing.assert_close(ours.u, expected, rtol=0, atol=TORCH.tolerance)
    assert float((expected - u).abs().max()) > 1e-2


def test_sigma_starts_as_the_largest_singular_value_and_draws_no_number():
    widths = [(64, 64), (170, 64), (64, 170)]
    layers = []
    for d_out, d_in in widths:
        layer = SigmaLinear(d_in, d_out)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(d_out, d_in, generator=torch.Generator().manual_seed(d_out)))
        state = torch.get_rng_state()
        layer.start()
        assert torch.equal(torch.get_rng_state(), state)
        layers.append(layer)
    for layer in layers:
        true = torch.linalg.matrix_norm(layer.weight.detach().double(), 2)
        sigma = float(layer.sigma().detach())
        assert sigma == pytest.approx(float(true), rel=1e-5) == pytest.approx(float(layer.gamma.detach()))
        u = layer.u.clone()
        layer.start()
        assert torch.equal(layer.u, u)
        # The control: thirty power steps from a random direction do not reach the singular value.
        with torch.no_grad():
            layer.u.copy_(torch.randn(len(u), generator=torch.Generator().manual_seed(1)))
        for _ in range(30):
            layer.power_step()
        assert float(layer.sigma().detach()) < 0.9999 * float(true)
    empty = SigmaLinear(3, 4)
    torch.nn.init.zeros_(empty.weight)
    empty.start()
    assert float(empty.sigma().detach()) == 0 and empty.u.isfinite().all()


# In training -----------------------------------------------------------------------------------------------


def test_a_probe_logs_how_near_sigma_is_to_the_true_one():
    module = copy.deepcopy(trained())
    flat = probe(module.model, toy_batch(0)).flat()
    for layer, block in enumerate(module.model.blocks):
        found = [m for m in block.modules() if isinstance(m, SigmaLinear)]
        ratios = [float(m.sigma().detach() / torch.linalg.svdvals(m.weight.detach())[0]) for m in found]
        assert flat[f"sigma_ratio/layer{layer:02d}"] == pytest.approx(min(ratios), rel=1e-6)
    # The controls: a wrong v lowers the ratio of its layer alone, and a model without sigma has no ratio.
    with torch.no_grad():
        wrong = next(m for m in module.model.blocks[0].modules() if isinstance(m, SigmaLinear))
        wrong.v.copy_(torch.nn.functional.one_hot(torch.tensor(0), wrong.in_features))
    changed = probe(module.model, toy_batch(0)).flat()
    assert changed["sigma_ratio/layer00"] < 0.9 < flat["sigma_ratio/layer00"]
    assert changed["sigma_ratio/layer01"] == flat["sigma_ratio/layer01"]
    assert not any(name.startswith("sigma_ratio") for name in probe(module_of(MODEL).model, toy_batch(0)).flat())


def test_a_step_is_the_update_and_then_the_power_steps(monkeypatch):
    """The power steps run after the update of W, once per step, not once per micro-batch."""
    with monkeypatch.context() as patch:
        patch.setattr(training, "power_step", lambda model: None)
        expected = module_of(SIGMA)
        fit(expected, cut(toy_batch(0), 2), accumulate=2)
    before = weights(expected)
    for m in matrices(expected).values():
        for _ in range(POWER_STEPS):
            m.power_step()
    found = module_of(SIGMA)
    fit(found, cut(toy_batch(0), 2), accumulate=2)
    assert apart(weights(found), weights(expected)) == 0
    # The controls: no power step, and an additional power step.
    assert apart(weights(found), before) > 1e-6
    for m in matrices(expected).values():
        m.power_step()
    assert apart(weights(found), weights(expected)) > 1e-6


def test_no_forward_writes_a_buffer_in_training_or_evaluation():
    module, batch = module_of(SIGMA), toy_batch(0)
    before = weights(module)
    outputs = {}
    for mode in (True, False):
        module.model.train(mode)
        outputs[mode] = [module.losses(batch).ce.detach() for _ in range(2)]
        assert torch.equal(*outputs[mode])
    assert torch.equal(outputs[True][0], outputs[False][0])  # evaluation mode computes the same function
    assert apart(before, weights(module)) == 0
    # The control: torch's spectral norm changes its buffers in training mode.
    _, theirs = pair()
    v = theirs.parametrizations.weight[0]._v.clone()
    theirs.train()(torch.ones(1, 16, dtype=torch.float64))
    assert not torch.equal(v, theirs.parametrizations.weight[0]._v)
