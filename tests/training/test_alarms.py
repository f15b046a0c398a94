"""Alarms raised during training equal those computed afterwards and those of a resumed run; they act only if
configured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from mmqk.lab.runner.watch import follow
from mmqk.lab.runs import read_runs
from mmqk.store import alarms_of, read_alarms, read_metrics, read_status, rules
from mmqk.store.checkpoint_files import checkpoints_in, step_of
from mmqk.train import main
from mmqk.training.module import TrainingModule
from tests.training.runs import rewind, same, series, weights

# A run of 60 steps, in which `plant` plants the events.
HOT = ["--optim.lr=0.001", "--optim.schedule=constant", "--trainer.max_steps=60", "--model.residual_dropout=0.1"]
SPIKE, COLLAPSES = 23, (34, 46)  # the step of the spike, and the step at which each layer's attention collapses
training_step = TrainingModule.training_step


def planted(self: TrainingModule, *rest):
    """Take a step whose weights give a spike or a collapse. The embeddings grow in every step."""
    step = self.trainer.global_step + 1
    with torch.no_grad():
        self.model.embed.weight.mul_(1.05)
        if step == SPIKE:
            self.model.final_norm.weight.mul_(100)
        if step == SPIKE + 1:
            self.model.final_norm.weight.div_(100)
        for block, collapse in zip(self.model.blocks, COLLAPSES, strict=True):
            if step == collapse:
                block.attention.w_q.weight.mul_(1000)
    return training_step(self, *rest)


def plant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrainingModule, "training_step", planted)
    patch.setattr(rules, "SPIKE_FEWEST", 20)


@pytest.fixture(autouse=True)
def planted_events(monkeypatch):
    plant(monkeypatch)


@pytest.fixture(scope="module")
def reporting(tiny_args, tmp_path_factory):
    """Train a run whose alarms only report; return its folder."""
    out = tmp_path_factory.mktemp("alarms") / "run"
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert main([*tiny_args, *HOT, f"--out={out}"]) == 0
    return out


def afterwards(folder: Path, max_steps=60) -> str:
    lines = read_metrics(folder / "metrics.jsonl")
    return repr(sorted(map(repr, alarms_of(lines, 4, max_steps, ("text", "image")))))


def live(folder: Path) -> str:
    return repr(sorted(map(repr, read_alarms(folder))))


def test_alarms_are_those_that_the_numbers_give_afterwards(reporting):
    folder = reporting
    found = read_alarms(folder)
    assert {alarm.step for alarm in found if alarm.name == "spike" and alarm.tag == "loss"} == {SPIKE}
    # The first probes after the collapses.
    assert {a.tag[-7:]: a.step for a in found if a.name == "collapse"} == {"layer00": 36, "layer01": 48}
    assert live(folder) == afterwards(folder)
    # They are marked in metrics.jsonl at their step.
    counts = Counter((alarm.step, alarm.name) for alarm in found)
    assert marks(folder) == counts and max(counts.values()) > 1
    # The analysis reads the alarm counts as series; they change neither the modalities nor the other series.
    run, view = read_runs(folder)[0], follow([folder])[0].look()
    assert len(run.series("loss")[0]) == 60 == run.last_step == view.step and view.modalities == ["text", "image"]


def marks(folder: Path) -> Counter[tuple[int, str]]:
    """Return the values of ``alarm/<name>`` in metrics.jsonl by step and name."""
    lines = read_metrics(folder / "metrics.jsonl")
    values = [(line["step"], key, value) for line in lines for key, value in line.items()]
    return Counter({(step, key[6:]): value for step, key, value in values if key.startswith("alarm/")})


def test_reporting_and_acting_change_no_bit_of_training(reporting, tiny_args, tmp_path, monkeypatch):
    """The runs end soon after the spike. Regular probes are off in the acting run."""
    acting, end = ["--alarm.checkpoint=[spike]", "--alarm.probe=[spike]", "--alarm.probe_steps=3"], 29
    args = [*tiny_args, *HOT, f"--trainer.max_steps={end}", "--monitor.every_n_steps=0"]
    assert main([*args, *acting, f"--out={tmp_path / 'acting'}"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr("mmqk.training.callbacks.AlarmRules.update", lambda *_: [])
        assert main([*args, f"--out={tmp_path / 'none'}"]) == 0
    assert not read_alarms(tmp_path / "none") and not marks(tmp_path / "none")
    losses = [
        {line["step"]: line["loss"] for line in series(folder, after=0) if line["step"] <= end}
        for folder in (reporting, tmp_path / "acting", tmp_path / "none")
    ]
    assert len(losses[0]) == end and losses[0] == losses[1] == losses[2]
    assert same(weights(tmp_path / "acting"), weights(tmp_path / "none"))
    # The actions were taken: the 3 steps after the flush that raised the first spike alarm are probed, and one
    # checkpoint is kept.
    spike = next(alarm for alarm in read_alarms(tmp_path / "acting") if alarm.name == "spike")
    probed = [line["step"] for line in series(tmp_path / "acting") if "final_norm/text" in line]
    seen_at = 24  # the flush that raised the alarm
    assert spike.step == SPIKE and probed == [seen_at + 1, seen_at + 2, seen_at + 3]
    (kept,) = (tmp_path / "acting/checkpoints").glob("alarm_*")
    assert kept.name == f"alarm_spike_step{seen_at:08d}.ckpt"
    assert torch.load(kept, weights_only=True)["global_step"] == seen_at
    assert live(tmp_path / "acting") == afterwards(tmp_path / "acting", end)


def test_an_alarm_that_stops_interrupts_and_the_same_command_goes_on(reporting, tiny_args, tmp_path, capsys):
    out = tmp_path / "stopped"
    args = [*tiny_args, *HOT, "--alarm.stop=[collapse]", f"--out={out}"]
    assert main(args) == 130
    status = read_status(out)
    assert status is not None and status.status == "interrupted" and "collapse" in status.reason
    first = next(alarm for alarm in read_alarms(out) if alarm.name == "collapse")
    assert status.step == first.step == 36
    assert main(args) == 130 and read_status(out).step == 48  # the collapse of the other layer
    assert main(args) == 0
    capsys.readouterr()
    assert read_status(out).status == "completed"
    assert same(weights(reporting), weights(out))
    assert live(out) == live(reporting), "a resume neither loses nor repeats an alarm"
    assert marks(out) == marks(reporting)


def test_a_resume_drops_alarms_that_come_again(reporting, tmp_path):
    """The killed run has alarms of steps after its checkpoint. The resume trains these steps again."""
    oldest = min(step_of(path) for path in checkpoints_in(reporting / "checkpoints"))
    args = rewind(reporting, tmp_path / "killed", oldest)
    assert main([*args, f"--out={tmp_path / 'killed'}"]) == 0
    assert live(tmp_path / "killed") == live(reporting) and marks(tmp_path / "killed") == marks(reporting)
