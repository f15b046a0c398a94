"""Train runs from the command line: repeated, diverged, failed and refused runs."""

from __future__ import annotations

import importlib
import math
import re

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from mmqk.config import resolve
from mmqk.store import RunFolder, cli_main, read_alarms, read_metrics
from mmqk.train import main
from mmqk.training import module as training
from mmqk.training.losses import total_loss
from mmqk.training.module import TrainingModule
from tests.training.runs import WHOLE, series, status

WILD = ["--optim.lr=1e30", "--trainer.max_steps=200", "--trainer.gradient_clip_val=0"]


def test_finished_run_is_left_alone(whole, tiny_args, capsys):
    before = (whole / "metrics.jsonl").read_bytes()
    assert main([*tiny_args, *WHOLE, f"--out={whole}"]) == 0
    assert "nothing to train" in capsys.readouterr().out
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_folder_of_another_run_or_in_use_is_refused_and_left_alone(whole, tiny_args, capsys):
    before = sorted((p, p.stat().st_mtime_ns) for p in whole.rglob("*") if p.name != "run.lock")
    assert cli_main(main)([*tiny_args, "--optim.lr=0.02", f"--out={whole}"]) == 2
    assert re.search(r"optim\.lr .*model\.|model\..*optim\.lr", capsys.readouterr().err)
    with RunFolder.open(whole, resolve([*tiny_args, *WHOLE]).identity, {}):
        assert cli_main(main)([*tiny_args, *WHOLE, f"--out={whole}"]) == 2
    assert "a process is already training" in capsys.readouterr().err
    assert sorted((p, p.stat().st_mtime_ns) for p in whole.rglob("*") if p.name != "run.lock") == before


@pytest.mark.parametrize("step", [7, 11])  # each is followed by a checkpoint; step 11 is the last of the run
def test_a_state_that_is_not_finite_ends_the_run_before_its_checkpoint(tiny_args, tmp_path, monkeypatch, step):
    """The gradients of the step are finite, but the updated weights are not; without a check, only the gradients of
    the next step would reveal it."""
    training_step = TrainingModule.training_step

    def faulty(self, *rest):
        if self.trainer.global_step == step:
            next(iter(self.trainer.optimizers[0].state.values()))["exp_avg"].view(-1)[0] = math.inf
        return training_step(self, *rest)

    monkeypatch.setattr(TrainingModule, "training_step", faulty)
    out = tmp_path / "run"
    assert main([*tiny_args, "--checkpoint.keep=1", f"--out={out}"]) == 3
    found = status(out)
    assert (found["status"], found["step"]) == ("diverged", step + 1)
    assert found["reason"] == "the weight embed.weight is NaN"
    (kept,) = (out / "checkpoints").glob("*.ckpt")
    assert kept.name == f"step{step - 3:08d}.ckpt"
    assert all(w.isfinite().all() for w in torch.load(kept, weights_only=True)["state_dict"].values())


def test_a_diverged_run_goes_on_if_it_may_and_ends_if_a_value_is_not_finite(tiny_args, tmp_path, monkeypatch):
    """Step 51 multiplies the logits by 100, and the learning rate is too low to repair it. At step 75, with 25 such
    losses among the last 50, the median of the losses has risen too far."""
    args = [*tiny_args, "--optim.lr=1e-6", "--optim.schedule=constant", "--trainer.max_steps=80",
            "--monitor.every_n_steps=0", "--checkpoint.every_n_steps=25"]  # fmt: skip
    training_step = TrainingModule.training_step

    def worse(self, *rest):
        if self.trainer.global_step == 50:
            with torch.no_grad():
                self.model.final_norm.weight.mul_(100)
        return training_step(self, *rest)

    monkeypatch.setattr(TrainingModule, "training_step", worse)
    assert main([*args, f"--out={tmp_path / 'stopped'}"]) == 3
    stopped = status(tmp_path / "stopped")
    assert "nat above its" in stopped["reason"] and stopped["step"] == 75
    # The control: the run goes on if a divergence may not stop it.
    assert main([*args, "--alarm.stop_diverged=false", f"--out={tmp_path / 'on'}"]) == 0
    assert status(tmp_path / "on")["status"] == "completed"

    def losses(name):
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    assert len(losses("on")) == 80 and losses("on").items() > losses("stopped").items()
    assert min(a.step for a in read_alarms(tmp_path / "on") if a.name == "divergence") == 75
    assert main([*args, *WILD, "--alarm.stop_diverged=false", f"--out={tmp_path / 'broken'}"]) == 3


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


# Lightning --------------------------------------------------------------------------------------------------


def test_the_private_parts_exist():
    """Another version of Lightning may rename a private part; assigning to the old name would then have no effect."""
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert callable(trainer._signal_connector.register_signal_handlers)
    assert callable(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    assert callable(ModelParallelStrategy._setup_distributed)
    assert importlib.import_module("lightning.pytorch.trainer.connectors.checkpoint_connector")
