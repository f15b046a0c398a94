"""Test AdaGC, SkipStep and MSign where they must change nothing: absent gradients, skipped steps, diverged runs."""

from __future__ import annotations

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import Tensor

from mmqk.model import PerModalityConfig
from mmqk.training.guards import AdaGC
from tests.training.toy import MODEL, apart, fit, module_of, toy_batch, weights

OTHER_OPTIMIZERS = [{"matrices": "muon"}, {"matrices": "adamh"}, {"update_clip": True}, {"split_second_moment": True}]


def clipped(steps: dict[int, float]) -> tuple[list[float], float]:
    """Return the clipped gradients of one element, and gamma; ``steps`` has the gradient by step number."""
    guard, after = AdaGC(1, 1.05, warmup=3), []
    for step, value in steps.items():
        gradient = torch.tensor([value])
        guard.clip([gradient], [gradient.norm()], step)
        after.append(float(gradient))
    return after, float(guard.state["gamma_P"])


@pytest.mark.parametrize("absent", [1, 4], ids=["in warm-up", "after warm-up"])
def test_adagc_ignores_a_step_without_a_gradient(absent):
    present = {0: 1.0, 2: 2.0, 3: 1.5, 5: 0.7, 6: 1.2}
    after, gamma = clipped(dict(sorted({**present, absent: 0.0}.items())))
    assert [x for x in after if x] == clipped(present)[0] and gamma == clipped(present)[1]
    # Control: a small gradient counts.
    assert clipped(dict(sorted({**present, absent: 0.5}.items())))[1] != gamma


def test_matrices_of_a_modality_that_the_warm_up_lacks_train_later():
    config = replace(MODEL, per_modality=PerModalityConfig(mlp=True))
    batches = [toy_batch(0, only="text"), toy_batch(1), toy_batch(2)]
    ends = []
    for n in (1, 3):
        module = module_of(config, adagc=1.05, warmup_steps=1, weight_decay=0.0)
        fit(module, batches[:n])
        ends.append(weights(module))
    untied = [name for name in ends[0] if "mlp.copies.1." in name]
    assert len(untied) == 6
    for name in untied:
        assert torch.equal(ends[0][name], module_of(config).model.state_dict()[name]), name  # the control: absent
        assert not torch.equal(ends[1][name], ends[0][name]), name


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


class NotFinite(L.Callback):
    """Makes the gradient of one step, counted from 0, NaN."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_after_backward(self, trainer, pl_module) -> None:
        if trainer.global_step == self.step:
            pl_module.model.embed.weight.grad.fill_(torch.nan)


def test_msign_keeps_the_weights_of_a_diverged_run():
    def end(steps: int, bad: int | None = None, **optim) -> dict[str, Tensor]:
        module = module_of(**optim)
        fit(module, [toy_batch(seed) for seed in range(steps)], callbacks=[NotFinite(bad)])
        return weights(module)

    assert apart(end(4, bad=2, msign_every=4), end(2)) == 0
    assert apart(end(4, msign_every=4), end(4)) > 1e-3  # the control
