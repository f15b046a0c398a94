"""Train arms of the demonstration: without the image loss, on one modality alone, ended by a signal or an error. Load
the trained models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmqk.checkpoint import load_model
from mmqk.config import resolve
from mmqk.data.datamodule import TokenDataModule
from mmqk.store import read_metrics
from mmqk.train import main
from mmqk.training import module as training
from mmqk.training.losses import LossSums, total_loss
from tests.training.runs import status

OFF = "--loss.weights.image=0"
TEXT, IMAGE = '--data.mix={"text":1}', '--data.mix={"image":1}'


def training_series(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without the values measured on the validation sequences."""
    return [
        {tag: value for tag, value in line.items() if not tag.startswith("val_")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def by_step(folder: Path, tag: str) -> dict[int, float]:
    return {line["step"]: line[tag] for line in training_series(folder) if tag in line}


def tags_of_image(folder: Path) -> set[str]:
    return {tag for line in training_series(folder) for tag in line if "image" in tag}


@pytest.fixture(scope="module")
def kept() -> dict[Path, training.TrainingModule]:
    """Return a dictionary in which `mixed` stores its training module, by run folder."""
    return {}


@pytest.fixture(scope="module")
def args(tiny_args) -> list[str]:
    """Return a command line whose probes read the training batch, so that a run on one modality has no statistic of
    the other modality."""
    return [*tiny_args, "--monitor.probe_split=current"]


@pytest.fixture(scope="module")
def mixed(args, tmp_path_factory, kept) -> Path:
    out = tmp_path_factory.mktemp("arms") / "mixed"

    configure = training.TrainingModule.configure_optimizers

    def keeping(self):
        kept[out] = self
        return configure(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.TrainingModule, "configure_optimizers", keeping)
        assert main([*args, f"--out={out}"]) == 0
    return out


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


def test_text_only_has_nothing_of_images(args, tmp_path, mixed):
    assert main([*args, TEXT, f"--out={tmp_path / 'text'}"]) == 0
    assert status(tmp_path / "text")["status"] == "completed"
    assert tags_of_image(tmp_path / "text") == set()
    assert set(by_step(tmp_path / "text", "loss/text")) == set(range(1, 13))
    assert by_step(tmp_path / "text", "loss") == pytest.approx(by_step(tmp_path / "text", "loss/text"))
    assert {"loss/image", "log_z/image", "q_norm/image/layer00"} <= tags_of_image(mixed)


def test_image_only_trains_images(args, tmp_path, mixed):
    assert main([*args, IMAGE, f"--out={tmp_path / 'image'}"]) == 0
    found = by_step(tmp_path / "image", "loss/image")
    assert set(found) == set(range(1, 13)) and found[12] < found[1] - 0.1
    first, both = (
        next(line for line in training_series(f) if line["step"] == 1) for f in (tmp_path / "image", mixed)
    )

    def share(line: dict) -> float:
        return (line["loss"] - line["loss/text"]) / (line["loss/image"] - line["loss/text"])

    # 64 of the 67 targets are codes, the others are <image>, </image> and <eos>; the mixed run has more text targets.
    assert share(first) == pytest.approx(64 / 67, abs=1e-3) and share(both) < 0.8


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
    assert set(by_step(out, "loss")) == {1, 2, 3, 4, 5}  # all steps before the failure are on disk
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step00000004.ckpt"]
    # The control: without the fault the same command continues and completes.
    assert main([*args, f"--out={out}"]) == 0
    assert (status(out)["status"], status(out)["reason"], status(out)["step"]) == ("completed", "", 12)


# Load a trained model from its folder ---------------------------------------------------------------------


def test_loaded_model_is_the_trained_one(mixed, kept):
    trained, loaded = kept[mixed].model.eval(), load_model(mixed, backend="sdpa")
    assert not loaded.training and loaded.config == trained.config
    ids_BT = torch.randint(0, trained.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = trained(ids_BT)
        assert torch.equal(loaded(ids_BT), expected)
        torch.testing.assert_close(load_model(mixed)(ids_BT), expected, rtol=1e-4, atol=1e-5)
        # The control: an untrained model gives different logits.
        fresh = type(trained)(trained.config, "sdpa", seed=0)(ids_BT)
        assert float((fresh - expected).abs().max()) > 1e-2
