"""Compares the rank of the update of W_q^T W_k and the sharpness with dense matrices in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from mmqk.monitors.formulas.weights import product_update_rank
from mmqk.monitors.own.callback import sharpness
from tests.monitors.test_halves import make_batch, make_model, parts

LR, BETAS, EPS, STEPS = 0.01, (0.9, 0.95), 1e-8, 3


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "inputs"), [(4, 2, 3, 24), (2, 2, 8, 6)])
def test_rank_of_an_update_equals_that_of_the_dense_product(heads, kv_heads, head_dim, inputs):
    torch.manual_seed(0)
    q, k = torch.randn(heads * head_dim, inputs), torch.randn(kv_heads * head_dim, inputs)
    dq, dk = 0.1 * torch.randn_like(q), 0.3 * torch.randn_like(k)
    found_H = product_update_rank(q, q + dq, k, k + dk, head_dim)
    for head, found in enumerate(found_H):
        q_rows, k_rows = (slice(n * head_dim, (n + 1) * head_dim) for n in (head, head // (heads // kv_heads)))
        dense_II = dq[q_rows].T.double() @ k[k_rows].double() + q[q_rows].T.double() @ dk[k_rows].double()
        power = torch.linalg.svdvals(dense_II).square()
        share = power[power > 1e-20] / power.sum()
        assert float(found) == pytest.approx(float(torch.exp(-(share * share.log()).sum())), rel=1e-4)


def test_an_update_in_one_direction_has_rank_1_and_one_that_is_not_finite_has_none():
    torch.manual_seed(0)
    q, k = torch.randn(8, 24), torch.randn(8, 24)
    one = torch.outer(torch.randn(8), torch.randn(24))
    assert product_update_rank(q, q + one, k, k, 8).tolist() == pytest.approx([1.0], rel=1e-3)
    assert product_update_rank(q, q + torch.randn_like(q), k, k, 8) > 3  # control
    assert product_update_rank(q, q * torch.nan, k, k, 8).isnan().all()
    assert product_update_rank(q, q, k, k, 8).isnan().all()


def test_sharpness_equals_the_hessian_written_out(monkeypatch):
    monkeypatch.setattr("mmqk.monitors.own.callback.MOVED", 1e-7)  # in fp64: no error of the differences
    torch.manual_seed(0)
    model, batch = make_model(), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS)

    def loss() -> torch.Tensor:
        return 1e9 / 40 * parts(model, batch).sum()

    moments = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert sharpness(model, optimizer, loss) == {}  # no second moment yet
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        for name, p in model.named_parameters():
            moments[name] = BETAS[1] * moments[name] + (1 - BETAS[1]) * p.grad.square()
        optimizer.step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = sharpness(model, optimizer, loss)["sharpness"]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    def of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        class At:
            def __call__(self, ids_BT):
                return functional_call(model, weights, (ids_BT,))

        return 1e9 / 40 * parts(At(), batch).sum()

    weights = {name: p.requires_grad_() for name, p in before.items()}
    grads = torch.autograd.grad(of(weights), list(weights.values()), create_graph=True)
    product = sum((g * g.detach()).sum() for g in grads)
    hessian = torch.autograd.grad(product, list(weights.values()))
    total = sum(
        (LR / (1 - BETAS[0] ** STEPS) * g / ((v / (1 - BETAS[1] ** STEPS)).sqrt() + EPS) * h).sum()
        for g, h, v in zip(grads, hessian, moments.values(), strict=True)
    )
    expected = float((total / sum(g.square().sum() for g in grads)).detach())
    assert found == pytest.approx(expected, rel=1e-4)
    assert found != pytest.approx(expected * (1 - BETAS[0] ** STEPS), rel=1e-2)  # control: without bias correction
