"""Train without the image loss, and until an error."""

from __future__ import annotations

import pytest
import torch

from mmqk.config import resolve
from mmqk.train import main
from mmqk.training import module as training
from mmqk.training.losses import LossSums, total_loss
from tests.tiny import data_of
from tests.training.runs import series, status

OFF = "--loss.weights.image=0"


# Image loss off --------------------------------------------------------------------------------------------


def first_step(args: list[str]) -> tuple[training.TrainingModule, LossSums, torch.Tensor]:
    """Return the module of a run at its start, the loss sums of its first batch, and the number of targets of its
    first step."""
    run, data = resolve(args), data_of(args)
    module = training.TrainingModule(run.model, run.loss, run.optim, run.seed, run.backend)
    batch = data.builder.batch([data.order.row(index) for index in range(run.data.batch_size)])
    return module, module.losses(batch), batch.step_targets


def gradients(module: training.TrainingModule, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(module.model.parameters()), retain_graph=True))


def test_image_loss_off_leaves_the_text_gradient_of_the_mixed_run(tiny_args):
    """Without the image loss, the gradient is that of the text targets in the mixed run: the tokens and the number of
    targets, by which the loss is divided, do not change."""
    module, sums, targets = first_step(tiny_args)
    text, image = (gradients(module, sums.ce[m] / targets) for m in (0, 1))
    whole = gradients(module, total_loss(sums, module.loss_weights_M, module.loss_config.z_loss, targets))
    other, other_sums, other_targets = first_step([*tiny_args, OFF])
    assert other_targets == targets == sums.count.sum() and torch.equal(other_sums.count, sums.count)
    loss = total_loss(other_sums, other.loss_weights_M, other.loss_config.z_loss, other_targets)
    off = gradients(other, loss)
    for a, b in zip(off, text, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
    # The controls: the mixed gradient differs, and it is the sum of the gradients of both modalities.
    assert any(float((a - b).abs().max()) > 1e-3 for a, b in zip(off, whole, strict=True))
    for a, b, c in zip(whole, text, image, strict=True):
        torch.testing.assert_close(a, b + c, rtol=1e-4, atol=1e-7)
    # Dividing by the number of text targets alone would give a different gradient.
    assert any(float((a * targets / sums.count[0] - b).abs().max()) > 1e-3 for a, b in zip(off, text, strict=True))


# Ends ------------------------------------------------------------------------------------------------------


def test_a_run_that_fails_says_so_and_why(tiny_args, tmp_path, monkeypatch):
    calls = []

    def failing(*given):
        calls.append(given)
        if len(calls) == 6:
            raise RuntimeError("a planted\nfailure")
        return total_loss(*given)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(training, "total_loss", failing)
        with pytest.raises(RuntimeError, match="planted"):
            main([*tiny_args, f"--out={out}"])
    found = status(out)
    assert (found["status"], found["step"]) == ("failed", 5)
    assert found["reason"] == "RuntimeError: a planted failure"
    assert [line["step"] for line in series(out, after=0)] == [1, 2, 3, 4, 5]  # all steps before the failure
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step00000004.ckpt"]
    # The control: without the fault the same command continues and completes.
    assert main([*tiny_args, f"--out={out}"]) == 0
    assert (status(out)["status"], status(out)["reason"], status(out)["step"]) == ("completed", "", 12)
