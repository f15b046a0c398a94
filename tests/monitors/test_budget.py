"""Tests the radial budget under torch's AdamW: its parts sum to the measured change of |W|^2 and have known
values."""

import pytest
import torch

from mmqk.monitors.formulas.weights import AdamUpdate, RadialBudget

BETAS, EPS = (0.9, 0.95), 1e-8


def trained(steps, weight_decay=0.1, lr=0.02, start=0, clip=None, noise=0.3, tamper=None):
    """Train a matrix on two losses with AdamW; return the budget of the steps from `start` on, and the change
    of |W|^2 over them."""
    random = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(6, 5, generator=random))
    pulls = [torch.randn(6, 5, generator=random) for _ in range(2)]
    optimizer = torch.optim.AdamW([w], lr=lr, betas=BETAS, eps=EPS, weight_decay=weight_decay)
    budget, first = None, 0.0
    for step in range(steps):
        losses = [((w - p) * torch.randn(6, 5, generator=random)).square().sum() * noise for p in pulls]
        gradients = [torch.autograd.grad(loss, w)[0] for loss in losses]
        w.grad = gradients[0] + gradients[1]
        if clip:
            factor = min(1.0, clip / float(w.grad.norm()))
            w.grad *= factor
            gradients = [factor * g for g in gradients]
        if step == start:
            state = optimizer.state.get(w, {})
            budget, first = (
                RadialBudget(state["exp_avg"].clone() if state else None, 2),
                float(w.detach().double().square().sum()),
            )
        before = w.detach().clone()
        optimizer.step()
        if tamper:
            w.data.mul_(tamper)
        if budget is not None:
            state = optimizer.state[w]
            update = AdamUpdate(before, w.detach().clone(), state["exp_avg_sq"], int(state["step"]), lr, BETAS, EPS,
                                weight_decay)  # fmt: skip
            budget.add(gradients, update)
    return budget, float(w.detach().double().square().sum()) - first


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("start", [0, 30])
def test_the_parts_sum_to_the_measured_change(clip, start):
    budget, change = trained(80, start=start, clip=clip)
    assert float(budget.total) == pytest.approx(change, rel=1e-9)
    parts = [*budget.by_modality, budget.decay, budget.step, budget.unattributed, budget.rest]
    assert float(sum(parts)) == pytest.approx(change, rel=1e-9)
    # AdamW's formula explains the whole change except rounding; without the part of weight decay it would not.
    assert abs(float(budget.rest)) < 1e-4 * abs(change) < abs(float(budget.decay))
    assert (float(budget.unattributed) != 0) == (start > 0)


def test_what_was_before_the_window_fades():
    early = abs(float(trained(31, start=30)[0].unattributed))
    first_ten = abs(float(trained(40, start=30)[0].unattributed))
    later = abs(float(trained(300, start=30)[0].unattributed) - float(trained(200, start=30)[0].unattributed))
    assert early < first_ten and later < 1e-6 * first_ten


def test_what_adam_did_not_do_is_the_rest():
    budget, change = trained(40, tamper=0.99)
    parts = [*budget.by_modality, budget.decay, budget.step, budget.unattributed]
    assert float(budget.rest) < -0.05
    assert float(sum(parts) + budget.rest) == pytest.approx(change, rel=1e-9)


def test_without_decay_and_with_gradients_at_right_angles_only_the_step_makes_it_longer():
    """The first step is orthogonal to W, as for W_q under QK-Norm, so all growth comes from the size of the step."""
    w = torch.nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 3.0]]))
    optimizer = torch.optim.AdamW([w], lr=0.1, betas=BETAS, eps=EPS, weight_decay=0.0)
    gradient = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    w.grad = gradient.clone()
    before = w.detach().clone()
    optimizer.step()
    budget = RadialBudget(None, 1)
    budget.add([gradient], AdamUpdate(before, w.detach(), optimizer.state[w]["exp_avg_sq"], 1, 0.1, BETAS, EPS, 0.0))
    assert float(budget.by_modality[0]) == pytest.approx(0, abs=1e-12)
    assert float(budget.step) == pytest.approx(2 * 0.1**2, rel=1e-5) == pytest.approx(float(budget.total), rel=1e-4)


def test_a_modality_that_does_not_reach_it_has_no_part():
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([w], lr=0.1, betas=BETAS, eps=EPS, weight_decay=0.0)
    w.grad = torch.ones(3)
    before = w.detach().clone()
    optimizer.step()
    budget = RadialBudget(None, 2)
    update = AdamUpdate(before, w.detach(), optimizer.state[w]["exp_avg_sq"], 1, 0.1, BETAS, EPS, 0.0)
    budget.add([torch.ones(3), None], update)
    assert float(budget.by_modality[1]) == 0 and float(budget.by_modality[0]) == pytest.approx(-0.6, rel=1e-5)
