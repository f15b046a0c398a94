"""Compares the curvature with known Hessians, with differences of gradients, and with the learning rates above which
Adam diverges."""

from __future__ import annotations

import copy
from dataclasses import replace

import lightning as L
import pytest
import torch

from mmqk.config import LossConfig, MonitorConfig
from mmqk.model import QKNormConfig
from mmqk.monitors.formulas.curvature import adam_scale, curvature, gradient_and_product
from mmqk.monitors.own.callback import RunMonitor
from mmqk.monitors.own.gradient_curvature import batch_loss, gradient_curvature
from mmqk.training.step.losses import total_loss
from tests.training.toy import MODEL, apart, fit, module_of, toy_batch, weights

MONITOR = MonitorConfig(every_n_steps=2, probe_sequences=2, curvature=True)
LOSS = LossConfig(z_loss=1e-2, weights={"image": 0.5})


def quadratic(n: int, seed: int = 0):
    """Return the symmetric matrix and the linear term of a quadratic function, and a point."""
    random = torch.Generator().manual_seed(seed)
    a, b, w = (torch.randn(size, generator=random, dtype=torch.float64) for size in ((n, n), (n,), (n,)))
    return a + a.T, b, w


def test_a_quadratic_has_its_known_curvature():
    a, b, w = quadratic(7)
    parts = [w[:3].clone().requires_grad_(), w[3:].view(2, 2).clone().requires_grad_()]
    unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
    x = torch.cat([part.flatten() for part in parts])
    found = gradient_and_product(x @ a @ x / 2 + b @ x, [*parts, unused])
    g = a @ w + b
    flat = [torch.cat([part.flatten() for part in tensors[:2]]) for tensors in found]
    torch.testing.assert_close(flat, [g, a @ g])
    assert all(not tensors[2].any() for tensors in found) and parts[0].grad is None
    assert float(curvature(*found)) == pytest.approx(float(g @ a @ g / (g @ g)))
    scale = torch.linspace(0.1, 3, 7, dtype=torch.float64)
    scales = [scale[:3], scale[3:].view(2, 2), torch.ones(2)]
    assert float(curvature(*found, scales)) == pytest.approx(float(g @ (scale * (a @ g)) / (g @ g)))
    assert float(curvature(*found, scales)) != pytest.approx(float(curvature(*found)), rel=1e-2)


@pytest.mark.parametrize(("share", "grows"), [(0.97, False), (1.03, True)])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adam_diverges_above_two_over_it(share, grows, beta1):
    """With a large epsilon Adam's preconditioner is constant, so the limit of the learning rate is known exactly for
    a quadratic loss of one weight."""
    h, eps, betas = 3.0, 1e6, (beta1, 0.95)
    w = torch.nn.Parameter(torch.full((1,), 1e-150, dtype=torch.float64))  # so small that v stays far below epsilon
    scale = adam_scale(torch.zeros(1), 10**6, betas, eps).double()
    limit = 2 / float(curvature([torch.ones(1)], [h * torch.ones(1)], [scale]))
    optimizer = torch.optim.AdamW([w], lr=share * limit, betas=betas, eps=eps, weight_decay=0.0)
    sizes = []
    for _ in range(300):
        w.grad = h * w.detach()
        optimizer.step()
        sizes.append(abs(float(w.detach())))
    # The first steps are left out, because the momentum builds up in them.
    late, early = max(sizes[250:]), max(sizes[100:150])
    assert (late > 10 * early) == grows and (late < 0.1 * early) != grows


def test_adam_scale_is_written_out():
    v, step, (beta1, beta2), eps = torch.tensor([0.04, 0.0]), 3, (0.9, 0.95), 1e-3
    expected = [0.1 / 1.9 / (1 - 0.9**3) / ((x / (1 - 0.95**3)) ** 0.5 + 1e-3) for x in (0.04, 0.0)]
    assert adam_scale(v, step, (beta1, beta2), eps).tolist() == pytest.approx(expected, rel=1e-5)


# On a model -------------------------------------------------------------------------------------------------


def variant(name: str):
    changes = {
        "plain": {},
        "caps": {"attn_softcap": 5.0, "final_softcap": 3.0, "window": 5, "attn_gate": "element", "attn_sink": True},
        "norms": {"qk_norm": QKNormConfig("rms"), "post_norm": True, "residual_dropout": 0.3, "mlp": "geglu"},
        "sigma": {"weight_reparam": "sigma", "tie_embeddings": True, "attention": "sigmoid"},
    }[name]
    module = module_of(replace(MODEL, **changes), LOSS)
    with torch.no_grad():  # gains of 1 would hide errors
        for p in module.model.parameters():
            if p.ndim < 2:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    return module


def loss_of(module, batch) -> torch.Tensor:
    """Return the loss of the training module over the trained targets of the batch."""
    own = replace(batch, step_targets=batch.target_mask_BT.sum())
    return total_loss(module.losses(own), *module.loss_weighting(own))


@pytest.mark.parametrize("name", ["plain", "caps", "norms", "sigma"])
def test_it_equals_a_difference_of_gradients(name):
    module, batch = variant(name).eval(), toy_batch(1, padding=3, documents=name == "plain")
    weights_M, z_loss, _ = module.loss_weighting(batch)
    model = module.model
    losses = batch_loss(model, batch, weights_M, z_loss), loss_of(module, batch)
    torch.testing.assert_close(*losses, rtol=1e-10, atol=0)

    def gradient(shift: float, along: list[torch.Tensor]) -> list[torch.Tensor]:
        moved = copy.deepcopy(module)
        parameters = list(moved.model.parameters())
        with torch.no_grad():
            for p, direction in zip(parameters, along, strict=True):
                p += shift * direction
        return list(torch.autograd.grad(loss_of(moved, batch), parameters))

    g = gradient(0.0, [torch.zeros_like(p) for p in model.parameters()])
    length = torch.stack([x.square().sum() for x in g]).sum()
    near = 1e-5 / float(length.sqrt())
    change = [(a - b) / (2 * near) for a, b in zip(gradient(near, g), gradient(-near, g), strict=True)]
    expected = float(torch.stack([(a * b).sum() for a, b in zip(g, change, strict=True)]).sum() / length)
    found = gradient_curvature(model, batch, weights_M, z_loss)
    assert found.keys() == {"curvature"}
    assert found["curvature"] == pytest.approx(expected, rel=1e-5)
    # Controls: another batch, and the loss without z-loss, have another curvature.
    assert gradient_curvature(model, toy_batch(2), weights_M, z_loss) != pytest.approx(found, rel=1e-3)
    assert gradient_curvature(model, batch, weights_M, 0.0) != pytest.approx(found, rel=1e-5)


def test_it_changes_nothing_and_needs_a_target():
    module, batch = variant("norms").train(), toy_batch(0)
    model = module.model
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    before, state = weights(module), torch.get_rng_state()
    found = gradient_curvature(model, batch, *module.loss_weighting(batch)[:2])
    assert apart(before, weights(module)) == 0 and torch.equal(state, torch.get_rng_state())
    assert all((p.grad == 2).all() for p in model.parameters())
    assert model.training and model.backend == "math"
    with torch.no_grad():  # as in a callback during Lightning's evaluation
        assert gradient_curvature(model, batch, *module.loss_weighting(batch)[:2]) == found
    nothing = replace(batch, target_mask_BT=torch.zeros_like(batch.target_mask_BT))
    assert gradient_curvature(model, nothing, *module.loss_weighting(batch)[:2]) == {}


@pytest.fixture
def logged(monkeypatch) -> dict[int, dict[str, float]]:
    """Return the curvature values that RunMonitor logs, by step."""
    lines: dict[int, dict[str, float]] = {}

    def keep(trainer, values) -> None:
        found = {tag: value for tag, value in values.items() if tag.startswith("curvature")}
        if found:
            lines[trainer.global_step] = found

    monkeypatch.setattr("mmqk.monitors.own.callback._log", keep)
    return lines


class Kept(L.Callback):
    """Stores the optimizer of a run."""

    def on_train_end(self, trainer, pl_module) -> None:
        self.optimizer = trainer.optimizers[0]


def test_a_run_logs_it_with_adams_preconditioner_and_keeps_its_weights(logged):
    modules, kept = [], Kept()
    for on in (True, False):
        logged.clear()
        modules.append(module_of(loss=LOSS))
        monitor = RunMonitor(replace(MONITOR, curvature=on))
        callbacks = [monitor, kept] if on else [monitor]
        fit(modules[-1], [toy_batch(step) for step in range(3)], clip=0.05, callbacks=callbacks)
        if on:
            found = copy.deepcopy(logged)
    assert not logged and apart(*(weights(module) for module in modules)) == 0
    assert found.keys() == {2, 3} and found[3].keys() == {"curvature", "curvature_adam"}
    module, batch = modules[0], toy_batch(2).first(2)
    parameters = list(module.model.parameters())
    g, hg = gradient_and_product(loss_of(module.eval(), batch), parameters)
    scales = [
        0.1 / 1.9 / (1 - 0.9**3) / ((kept.optimizer.state[p]["exp_avg_sq"] / (1 - 0.95**3)).sqrt() + 1e-8)
        for p in parameters
    ]
    along = torch.stack([(a * s * b).sum() for a, s, b in zip(g, scales, hg, strict=True)]).sum()
    expected = float(along / torch.stack([a.square().sum() for a in g]).sum())
    assert found[3]["curvature_adam"] == pytest.approx(expected, rel=1e-5)
    assert found[3]["curvature_adam"] != pytest.approx(found[3]["curvature"], rel=1e-2)


@pytest.mark.parametrize("optim", [{"matrices": "muon"}, {"matrices": "adamh"}, {"split_second_moment": True}])
def test_without_adams_moments_it_is_the_plain_one(logged, optim):
    fit(module_of(**optim), [toy_batch(0), toy_batch(1)], callbacks=[RunMonitor(MONITOR)])
    assert logged[2].keys() == {"curvature"}
