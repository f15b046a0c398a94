"""Tests `BudgetWindow`, which splits the change of ``|W|^2`` of W_q and W_k over a window of steps into parts.

The tests need no Lightning. They check known answers, saving and resuming, and parts that must be 0.
"""

from __future__ import annotations

import io

import pytest
import torch
from torch.nn import functional as F

from mmqk.config import MonitorConfig
from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig
from mmqk.monitors.formulas.weights import AdamUpdate, RadialBudget
from mmqk.monitors.own.callback import StepMonitor
from mmqk.monitors.own.gradients import BudgetWindow, watched_matrices

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


def take(model, optimizer, window, steps, after=lambda: None) -> None:
    for step in steps:
        parts_M = parts_of(model, ids_of(step))
        window.add_gradients(parts_M)
        optimizer.zero_grad()
        parts_M.sum().backward()
        window.before_update(optimizer, None)
        optimizer.step()
        window.after_update(optimizer)
        after()
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


def test_untied_copies_are_counted_together():
    model = make_model(per_modality=PerModalityConfig(qk=True))
    assert [len(own) for own in watched_matrices(model).values()] == [2, 2, 2, 2]
    window = BudgetWindow(model, [0, 1])
    take(model, adam(model), window, range(3))
    of_copies = [float(b.total) for b in window.budgets[:2]]
    assert min(map(abs, of_copies)) > 0
    assert window.values()["w_q_growth_total/layer00"] == pytest.approx(sum(of_copies))


def test_what_comes_after_the_update_is_the_rest_and_no_other_part():
    """Two windows cover the same step; in one of them, the weights are scaled after the update."""

    def shrink(model):
        with torch.no_grad():
            model.blocks[1].attention.w_q.weight.mul_(0.99)

    plain, clipped = make_model(), make_model()
    windows = [BudgetWindow(m, [0, 1]) for m in (plain, clipped)]
    take(plain, adam(plain), windows[0], [0])
    start = squares(clipped)
    take(clipped, adam(clipped), windows[1], [0], lambda: shrink(clipped))
    one, two = (parts_in(w.values(), "w_q/layer01") for w in windows)
    assert two["rest"] < -0.01 * start["w_q/layer01"] and abs(one["rest"]) < 1e-12
    assert {k: v for k, v in one.items() if k != "rest"} == {k: v for k, v in two.items() if k != "rest"}
    assert sum(two.values()) == pytest.approx(squares(clipped)["w_q/layer01"] - start["w_q/layer01"])


@pytest.mark.parametrize("cut", [1, 4])
def test_a_window_taken_up_from_its_saved_state_is_the_straight_one(cut):
    straight, broken = make_model(), make_model()
    optimizers = [adam(m) for m in (straight, broken)]
    for model, optimizer in zip((straight, broken), optimizers, strict=True):
        take(model, optimizer, BudgetWindow(model, [0, 1]), range(2))  # so Adam has a first moment before the window
    whole = BudgetWindow(straight, [0, 1])
    take(straight, optimizers[0], whole, range(2, 8))
    first = BudgetWindow(broken, [0, 1])
    take(broken, optimizers[1], first, range(2, 2 + cut))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = BudgetWindow(broken, [0, 1])
    second.load_state_dict(torch.load(file, weights_only=True))
    take(broken, optimizers[1], second, range(2 + cut, 8))
    assert second.values() == whole.values()
    assert whole.values()["w_q_growth_unattributed/layer00"] != 0
    # Control: the values differ from those of the window at the time of the save.
    assert second.values() != first.values()


def test_a_modality_without_a_target_is_an_absent_key():
    model = make_model()
    window, optimizer = BudgetWindow(model, [0, 1]), adam(model)
    parts_M = parts_of(model, ids_of(0) % 9)
    window.add_gradients(parts_M)
    parts_M.sum().backward()
    window.before_update(optimizer, None)
    optimizer.step()
    window.after_update(optimizer)
    window.settle()
    assert {
        tag for tag in window.values() if "/image" in tag
    } == set() and "w_q_growth/text/layer00" in window.values()


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


def test_without_qk_norm_the_radial_gradient_is_that_of_the_logits_and_alike_on_both_sides(monkeypatch):
    """For each head, <W_q, dL/dW_q> = <W_k, dL/dW_k> = sum z dL/dz, where z are the raw logits."""
    kept = []

    def attention(q_BHTK, k_BHSK, v_BHSK, mask, *, scale, **_):
        z_BHTS = scale * q_BHTK @ k_BHSK.transpose(-1, -2)
        z_BHTS.retain_grad()
        kept.append(z_BHTS)
        hidden = torch.ones(z_BHTS.shape[-2:], dtype=torch.bool).triu(1)
        return torch.softmax(z_BHTS.masked_fill(hidden, -torch.inf), -1) @ v_BHSK, None

    monkeypatch.setattr("mmqk.model.attention.attention", attention)
    model = make_model(n_layers=1)
    parts_of(model, ids_of(0)).sum().backward()
    found = radial(model)
    z_dz_H = (kept[0] * kept[0].grad).sum((0, 2, 3)).detach()
    assert z_dz_H.abs().min() > 1e-8
    for side in ("w_q", "w_k"):
        torch.testing.assert_close(found[side], z_dz_H, rtol=1e-9, atol=1e-14)


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


def test_windows_begin_and_end_where_the_configuration_says():
    config = MonitorConfig(every_n_steps=0, budget_every_n_steps=5, budget_steps=3)
    model = make_model()
    monitor, optimizer = StepMonitor(model, config, 20, [0, 1]), adam(model)
    closed, attributed = [], []
    for step in range(1, 13):
        monitor.before_step(step)
        monitor.before_step(step)  # a second micro-batch
        parts_M = parts_of(model, ids_of(step))
        if monitor.attributing:
            attributed.append(step)
            monitor.before_backward(parts_M)
        optimizer.zero_grad()
        parts_M.sum().backward()
        monitor.before_update(optimizer, None, {})
        optimizer.step()
        monitor.after_update(optimizer)
        if found := monitor.after_step():
            closed.append((step, found["budget_window"]))
    assert closed == [(3, 3), (8, 3)] and attributed == [1, 2, 3, 6, 7, 8, 11, 12]
    assert monitor.close()["budget_window"] == 2 and monitor.close() == {}
