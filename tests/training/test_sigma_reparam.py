"""Check σReparam: sigma follows the weights, and forward passes change no buffer. `test_peers` compares the matrix
with torch's spectral norm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmqk.model.linear import POWER_STEPS, SigmaLinear
from mmqk.training import module as training
from tests.training.toy import MODEL, apart, cut, fit, module_of, toy_batch, weights

SIGMA = replace(MODEL, weight_reparam="sigma")


def matrices(module) -> dict[str, SigmaLinear]:
    return {name: m for name, m in module.model.named_modules() if isinstance(m, SigmaLinear)}


def test_one_power_step_is_its_formula():
    ours = next(iter(matrices(module_of(SIGMA)).values()))
    u, w = ours.u.clone(), ours.weight.detach()
    with torch.no_grad():
        ours.u.copy_(u.flip(0))  # away from the singular vector, so that a power step changes it
    u = ours.u.clone()
    ours.power_step()
    v = w.T @ u
    v = v / v.norm()
    expected = w @ v / (w @ v).norm()
    torch.testing.assert_close(ours.v, v, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.u, expected, rtol=0, atol=1e-12)
    assert float((expected - u).abs().max()) > 1e-2


def test_sigma_starts_as_the_largest_singular_value_and_draws_no_number():
    for d_out, d_in in ((64, 64), (170, 64), (64, 170)):
        layer = SigmaLinear(d_in, d_out)
        layer.weight.data = torch.randn(d_out, d_in, generator=torch.Generator().manual_seed(d_out))
        state = torch.get_rng_state()
        layer.start()
        assert torch.equal(torch.get_rng_state(), state)
        true = torch.linalg.matrix_norm(layer.weight.detach().double(), 2)
        sigma = float(layer.sigma().detach())
        assert sigma == pytest.approx(float(true), rel=1e-5) == pytest.approx(float(layer.gamma.detach()))
        # The control: thirty power steps from a random direction do not reach the singular value.
        layer.u.copy_(torch.randn(len(layer.u), generator=torch.Generator().manual_seed(1)))
        for _ in range(30):
            layer.power_step()
        assert float(layer.sigma().detach()) < 0.9999 * float(true)
    empty = SigmaLinear(3, 4)
    torch.nn.init.zeros_(empty.weight)
    empty.start()
    assert float(empty.sigma().detach()) == 0 and empty.u.isfinite().all()


# In training -----------------------------------------------------------------------------------------------


def test_a_step_is_the_update_and_then_the_power_steps(monkeypatch):
    """The power steps run after the update of W, once per step, not once per micro-batch."""
    with monkeypatch.context() as patch:
        patch.setattr(training, "power_step", lambda model: None)
        expected = module_of(SIGMA)
        fit(expected, cut(toy_batch(0), 2), accumulate=2)
    before, first = weights(expected), weights(module_of(SIGMA))
    vectors = [name for name in first if name.endswith((".u", ".v"))]
    assert vectors and all(torch.equal(before[name], first[name]) for name in vectors)  # no forward pass writes them
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
