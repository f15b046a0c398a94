"""Train arms of the demonstration: without the image loss, on one modality alone, ended by a signal or an error. Load
the trained models."""

from __future__ import annotations

import pytest
import torch

from mmqk.checkpoint import load_model
from mmqk.config import resolve
from mmqk.data.datamodule import TokenDataModule
from mmqk.model import EarlyFusionTransformer
from mmqk.train import main
from mmqk.training import module as training
from mmqk.training.losses import LossSums, total_loss
from tests.training.runs import command, series, status, weights

OFF = "--loss.weights.image=0"


@pytest.fixture(scope="module")
def args(tiny_args) -> list[str]:
    """Return a command line whose probes read the training batch, so that a run on one modality has no statistic of
    the other modality."""
    return [*tiny_args, "--monitor.probe_split=current"]


# Image loss off --------------------------------------------------------------------------------------------


def first_step(args: list[str]) -> tuple[training.TrainingModule, LossSums, torch.Tensor]:
    """Return the module of a run at its start, the loss sums of its first batch, and the number of targets of its
    first step."""
    run = resolve(args)
    module = training.TrainingModule(run.model, run.loss, run.optim, run.seed, run.backend)
    data = TokenDataModule(run.data, run.seed)
    data.setup()
    batch = data.builder.batch([data.order.row(index) for index in range(run.data.batch_size)])
    return module, module.losses(batch), batch.step_targets


def gradients(module: training.TrainingModule, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(module.model.parameters()), retain_graph=True))


def test_image_loss_off_leaves_the_text_gradient_of_the_mixed_run(args):
    """Without the image loss, the gradient is that of the text targets in the mixed run: the tokens and the number of
    targets, by which the loss is divided, do not change."""
    module, sums, targets = first_step(args)
    text, image = (gradients(module, sums.ce[m] / targets) for m in (0, 1))
    whole = gradients(module, total_loss(sums, module.loss_weights_M, module.loss_config.z_loss, targets))
    other, other_sums, other_targets = first_step([*args, OFF])
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


# One modality alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "other"), [("text", "image"), ("image", None)])
def test_a_run_on_one_modality_trains_it_and_has_nothing_of_the_other(args, tmp_path, name, other):
    """A sequence of one image has text targets too: <image>, </image> and <eos>."""
    assert main([*args, f'--data.mix={{"{name}":1}}', f"--out={tmp_path / 'run'}"]) == 0
    lines = [
        {tag: value for tag, value in line.items() if not tag.startswith("val_")} for line in series(tmp_path / "run")
    ]
    found = [line[f"loss/{name}"] for line in lines[1:]]
    assert len(found) == 12 and found[-1] < found[0] - 0.1
    if other is not None:
        assert not any(other in tag for line in lines for tag in line)
        assert [line["loss"] for line in lines[1:]] == pytest.approx(found)
    else:  # 64 of the 67 targets are codes
        share = (lines[1]["loss"] - lines[1]["loss/text"]) / (found[0] - lines[1]["loss/text"])
        assert share == pytest.approx(64 / 67, abs=1e-3)


# Ends ------------------------------------------------------------------------------------------------------


def test_a_run_that_fails_says_so_and_why(args, tmp_path, monkeypatch):
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
            main([*args, f"--out={out}"])
    found = status(out)
    assert (found["status"], found["step"]) == ("failed", 5)
    assert found["reason"] == "RuntimeError: a planted failure"
    assert [line["step"] for line in series(out, after=0)] == [1, 2, 3, 4, 5]  # all steps before the failure
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step00000004.ckpt"]
    # The control: without the fault the same command continues and completes.
    assert main([*args, f"--out={out}"]) == 0
    assert (status(out)["status"], status(out)["reason"], status(out)["step"]) == ("completed", "", 12)


# Load a trained model from its folder ---------------------------------------------------------------------


def test_loaded_model_is_the_trained_one(whole):
    loaded = load_model(whole, backend="sdpa")
    trained = EarlyFusionTransformer(resolve(command(whole)).model, "sdpa").eval()
    ids_BT = torch.randint(0, trained.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert float((trained(ids_BT) - loaded(ids_BT)).abs().max()) > 1e-2  # the control: an untrained model
        trained.load_state_dict({name.removeprefix("model."): value for name, value in weights(whole).items()})
        assert not loaded.training and loaded.config == trained.config
        assert torch.equal(loaded(ids_BT), trained(ids_BT))
        torch.testing.assert_close(load_model(whole)(ids_BT), trained(ids_BT), rtol=1e-4, atol=1e-5)
