"""Tests `BudgetWindow`, which splits the change of ``|W|^2`` of W_q and W_k over a window of steps into parts.

The tests need no Lightning. They check known answers, saving and resuming, and parts that must be 0.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig
from mmqk.monitors.formulas.weights import AdamUpdate, RadialBudget
from mmqk.monitors.own.updates import BudgetWindow, watched_matrices

BLOCKS = {"text": 9, "image": 7}
PARTS = ("decay", "step", "unattributed", "rest")


def make_model(seed=0, **changes) -> EarlyFusionTransformer:
    config = ModelConfig(**{"d_model": 16, "n_layers": 2, "n_heads": 4, "vocab_sizes": BLOCKS, **changes})
    return EarlyFusionTransformer(config, backend="math", seed=seed).double()


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(0, 16, (4, 12), generator=torch.Generator().manual_seed(step))


def parts_of(model, ids_BT) -> torch.Tensor:
    """Return the part of the cross-entropy from each target modality, divided by the number of all targets."""
    logits_NV, targets_N = model(ids_BT)[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
    ce_N = F.cross_entropy(logits_NV, targets_N, reduction="none")
    return torch.stack([ce_N[targets_N < 9].sum(), ce_N[targets_N >= 9].sum()]) / len(targets_N)


def take(model, optimizer, window, steps) -> None:
    for step in steps:
        parts_M = parts_of(model, ids_of(step))
        window.add_gradients(parts_M)
        optimizer.zero_grad()
        parts_M.sum().backward()
        window.before_update(optimizer, None)
        optimizer.step()
        window.after_update(optimizer)
        window.settle()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def squares(model) -> dict[str, float]:
    return {
        f"{name}/layer{layer:02d}": sum(float(w.detach().square().sum()) for w in own)
        for (name, layer), own in watched_matrices(model).items()
    }


def parts_in(values, where) -> dict[str, float]:
    name, layer = where.split("/")
    found = {part: values[f"{name}_growth_{part}/{layer}"] for part in PARTS}
    return found | {m: values[f"{name}_growth/{m}/{layer}"] for m in BLOCKS}


@pytest.mark.parametrize(
    "changes",
    [{}, {"per_modality": PerModalityConfig(qk=True)}, {"weight_reparam": "sigma"}, {"n_kv_heads": 2}],
    ids=["plain", "untied", "sigma", "shared keys"],
)
def test_the_parts_sum_to_the_measured_change(changes):
    model = make_model(**changes)
    optimizer, start = adam(model), squares(model)
    window = BudgetWindow(model, [0, 1])
    take(model, optimizer, window, range(6))
    values, end = window.values(), squares(model)
    assert values["budget_window"] == 6 and values["budget_clip_factor"] == 1
    for where in start:
        parts = parts_in(values, where)
        change = end[where] - start[where]
        name, layer = where.split("/")
        assert sum(parts.values()) == pytest.approx(change, rel=1e-9)
        assert values[f"{name}_growth_total/{layer}"] == pytest.approx(change, rel=1e-9)
        assert values[f"{name}_sq/{layer}"] == pytest.approx(end[where], rel=1e-12)
        # Adam's formula explains the whole change: the rest is 0, and would not be 0 without a modality's part.
        assert abs(parts["rest"]) < 1e-9 * abs(change) and parts["unattributed"] == 0
        assert min(abs(parts[m]) for m in BLOCKS) > 1e-6 * abs(change)


def test_without_decay_and_with_gradients_at_right_angles_only_the_step_makes_it_longer():
    """The first step is orthogonal to W, as for W_q under QK-Norm, so all growth comes from the size of the step."""
    w = torch.nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 3.0]]))
    optimizer = torch.optim.AdamW([w], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    gradient = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    w.grad = gradient.clone()
    before = w.detach().clone()
    optimizer.step()
    budget = RadialBudget(None, 1)
    v = optimizer.state[w]["exp_avg_sq"]
    budget.add([gradient], AdamUpdate(before, w.detach(), v, 1, 0.1, (0.9, 0.95), 1e-8, 0.0))
    assert float(budget.by_modality[0]) == pytest.approx(0, abs=1e-12)
    assert float(budget.step) == pytest.approx(2 * 0.1**2, rel=1e-5) == pytest.approx(float(budget.total), rel=1e-4)


def radial(model) -> dict[str, torch.Tensor]:
    """Return <W, gradient> of each head, by matrix."""
    attention = model.blocks[0].attention
    return {
        name: (w.weight * w.weight.grad).detach().view(4, -1).sum(1)
        for name, w in (("w_q", attention.w_q), ("w_k", attention.w_k))
    }


@pytest.mark.parametrize("place", ["before_rope", "after_rope"])
def test_under_qk_norm_the_radial_gradient_is_zero_and_the_weights_still_grow(place):
    model = make_model(n_layers=1, qk_norm=QKNormConfig(kind="rms", eps=1e-20, place=place))
    parts_of(model, ids_of(0)).sum().backward()
    sizes = [float((p.grad.norm() * p.norm()).detach()) for p in [model.blocks[0].attention.w_q.weight]]
    for along in radial(model).values():
        assert float(along.abs().max()) < 1e-12 * max(sizes)
    window = BudgetWindow(model, [0, 1])
    take(model, adam(model), window, range(5))
    assert window.values()["w_q_growth_step/layer00"] > 0
    # Control: without QK-Norm the radial gradient is not 0.
    plain = make_model(n_layers=1)
    parts_of(plain, ids_of(0)).sum().backward()
    assert float(radial(plain)["w_q"].abs().max()) > 1e-6 * max(sizes)
