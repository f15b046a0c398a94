"""A run on two processes equals the run on one process, and each can resume or fork a checkpoint of the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmqk.checkpoint import load_model
from mmqk.store import is_locked, read_metrics, read_status
from mmqk.train import main
from tests.training.batches import recorded
from tests.training.gates import wait_for
from tests.training.ranks import end, start, train
from tests.training.runs import rewind, same, same_run, series, state

pytestmark = pytest.mark.slow

# Each process has two micro-batches of two sequences. A probe has three sequences: two of the first process and one
# of the second.
STEP = ['--data.mix={"dial": 1}', "--data.seq_len=96", "--data.batch_size=8", "--trainer.accumulate_grad_batches=2",
        "--loss.z_loss=1e-3", "--monitor.probe_split=current", "--monitor.probe_sequences=3",
        "--monitor.gradient_agreement=true",
        "--checkpoint.keep=9"]  # fmt: skip
INSIDE = ["--monitor.parameters=true", "--monitor.budget_every_n_steps=4", "--monitor.budget_steps=3"]
# The terms of these values cancel, so the values are small and need a larger absolute tolerance.
CANCELS = ("_growth_rest/", "_growth_unattributed/", "logit_mean/")

WHERE = ("--trainer.devices", "--trainer.num_nodes", "--trainer.strategy")
RUNS = {
    "ddp": ("ddp", INSIDE),
    "fsdp": ("fsdp", ["--model.tie_embeddings=true", "--model.qk_norm.kind=rms"]),
    "ddp on two machines, qk-clip and split moments": (
        "ddp", [*INSIDE, "--optim.qk_clip=0.1", "--optim.split_second_moment=true"],
    ),
    "ddp, sigma reparam, untied, loss in chunks": (
        "ddp", [*INSIDE, "--model.weight_reparam=sigma", "--model.per_modality.norms=true", "--loss.chunk_size=50"],
    ),
}  # fmt: skip
# Only these two are resumed and forked.
OF_EACH_STRATEGY = pytest.mark.parametrize(
    "pair", [RUNS["ddp"], RUNS["fsdp"]], ids=["ddp", "fsdp"], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def pair(request, tiny_args, tmp_path_factory) -> tuple[str, Path, Path]:
    """Return the strategy, the run of one process and the run of two processes."""
    strategy, extra = request.param
    folder = tmp_path_factory.mktemp("pair")
    args = [*tiny_args, *STEP, *extra]
    assert main([*args, f"--out={folder / 'one'}"]) == 0
    out = [*args, f"--out={folder / 'two'}"]
    if extra is INSIDE:  # as on a user's machine, Lightning starts the second process
        flags = [f"--trainer.strategy={strategy}", "--trainer.devices=2"]
        done = subprocess.run(
            [sys.executable, "-m", "mmqk.train", *out[:-1], *flags, out[-1]],
            capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("captions are longer") <= 1
    else:
        nodes = 2 if "--optim.qk_clip=0.1" in extra else 1
        assert train(out, folder / "log", strategy, nodes) == [0, 0], (folder / "log0").read_text()
    return strategy, folder / "one", folder / "two"


def close(ours: list[dict], theirs: list[dict], rtol: float = 2e-3) -> None:
    """Check that all values of every step are equal up to rounding."""
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for name in a:
            tolerance = 1e-5 if any(c in name for c in CANCELS) else 1e-6
            assert a[name] == pytest.approx(b[name], rel=rtol, abs=tolerance), (name, a["step"])


def test_two_processes_train_what_one_does(pair):
    _, one, two = pair
    close(series(two), series(one))
    names = set().union(*series(one))
    for wanted in ("loss/image", "log_z/text", "excess/text", "grad_norm", "val_loss/text", "q_norm/image/layer01",
                   "grad_noise/text"):  # fmt: skip
        assert wanted in names
    ours, theirs = state(two), state(one)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name].float(), theirs[name].float(), rtol=2e-2, atol=2e-5)
    assert [p.name for p in sorted((two / "checkpoints").iterdir())] == [
        "step00000004.ckpt", "step00000008.ckpt", "step00000012.ckpt"]  # fmt: skip
    assert len(list(two.glob("events.out*"))) == 1
    assert read_status(two).status == "completed" and not is_locked(two)
    assert json.loads((two / "run.json").read_text())["id"] == json.loads((one / "run.json").read_text())["id"]
    trainer = json.loads((two / "run.json").read_text())["details"]["config"]["trainer"]
    assert trainer["devices"] * trainer["num_nodes"] == 2


def test_half_of_the_batch_is_another_run(tiny_args, tmp_path):
    """The control of the comparison: processes that do not communicate would each train on half of the batch."""
    args = [*tiny_args, *STEP, "--monitor.probe_sequences=2"]
    for size in (8, 4):
        assert main([*args, f"--data.batch_size={size}", f"--out={tmp_path / str(size)}"]) == 0
    half, whole = (series(tmp_path / name)[-1] for name in ("4", "8"))
    for name in ("loss/image", "excess/text", "grad_norm", "q_norm/image/layer01"):
        assert half[name] != pytest.approx(whole[name], rel=5e-3), name


# All remedies that change the optimizer. SkipStep can skip a step only after 64 others. With the low learning rate
# the loss does not fall, so SkipStep skips some steps.
FEW = ["--monitor.every_n_steps=0", "--data.val_every_n_steps=0", "--checkpoint.every_n_steps=0"]
OPTIMIZERS = {
    "muon, adagc": ["--optim.matrices=muon", "--optim.adagc=1.05"],
    "adamh, msign": ["--optim.matrices=adamh", "--optim.msign_every=5"],
    "skip_step": ["--optim.skip_step=0.1", "--trainer.max_steps=80", "--optim.lr=1e-4", "--optim.update_clip=true"],
}


def test_remedies_of_the_optimizer_act_alike_in_both_processes(tiny_args, tmp_path):
    for name, fields in OPTIMIZERS.items():
        one, two, log = (tmp_path / f"{name} {what}" for what in ("one", "two", "log"))
        args = [*tiny_args, "--data.batch_size=8", *FEW, *fields]
        assert main([*args, f"--out={one}"]) == 0
        assert train([*args, f"--out={two}"], log) == [0, 0], Path(f"{log}0").read_text()
        first, second = (torch.load(f"{log}{rank}.weights") for rank in (0, 1))
        assert same(first, second), name
        alone = load_model(one).state_dict()
        for parameter, weight in first.items():
            torch.testing.assert_close(weight, alone[parameter], rtol=2e-2, atol=5e-4, msg=f"{name}: {parameter}")
        if name == "skip_step":
            guards = torch.load(next(iter((two / "checkpoints").iterdir())), weights_only=True)["mmqk_guards"]
            assert 0 < int(guards["skip_step"]["skipped"]) < 16


def test_a_spike_on_one_of_two_ranks_is_skipped_by_both(tiny_args, tmp_path):
    """The loss of the second rank rises in step 71, the last, so the final weights are exactly those of step 70."""
    args = [*tiny_args, "--data.batch_size=8", *FEW, "--optim.skip_step=6", "--trainer.max_steps=71",
            "--optim.lr=1e-4", "--checkpoint.at=[70]", "--checkpoint.keep=9"]  # fmt: skip
    for name, spike in (("spike", 71), ("control", 0)):
        out = tmp_path / name
        assert train([*args, f"--out={out}"], tmp_path / f"{name} log", spike=spike) == [0, 0]
        first, second = (torch.load(tmp_path / f"{name} log{rank}.weights") for rank in (0, 1))
        assert same(first, second)
        before, after = (torch.load(out / f"checkpoints/step000000{step}.ckpt", weights_only=True) for step in (70, 71))
        equal = [torch.equal(before["state_dict"][f"model.{n}"], first[n]) for n in first]
        skipped = int(after["mmqk_guards"]["skip_step"]["skipped"])
        assert (all(equal), skipped) == ((True, 1) if spike else (False, 0)) and (spike or not any(equal))


@OF_EACH_STRATEGY
def test_one_process_goes_on_where_two_were_killed_and_is_killed_itself(pair, tmp_path, monkeypatch, capsys):
    """It reads exactly the tokens of the run of one process. Killed once more, it is the same run, bit for bit."""
    strategy, one, two = pair
    ids = []
    for before, name, step in ((one, "straight", 0), (two, "alone", 4), (tmp_path / "alone", "again", 8)):
        args = [a for a in rewind(before, tmp_path / name, step) if not a.startswith(WHERE)]
        ids.append(recorded(monkeypatch, args, tmp_path / name))
    assert sorted(ids[2]) == [9, 10, 11, 12] and ids[2].items() < ids[1].items() < ids[0].items()
    assert len(ids[0]) == 12 and ids[0][11] != ids[0][12]
    assert same_run(tmp_path / "again", tmp_path / "alone")
    said = capsys.readouterr().err
    assert f"2 processes ({strategy}) and the run continues with one process" in said and "up to rounding" in said
    close(series(tmp_path / "alone"), series(one))
    if strategy == "fsdp":
        rewind(one, tmp_path / "more", 4)
        assert train([*args, f"--out={tmp_path / 'more'}"], tmp_path / "log", strategy) == [0, 0]
        close(series(tmp_path / "more"), series(one))
        assert "one process and the run continues with 2 processes (fsdp)" in (tmp_path / "log0").read_text()
        assert torch.equal(load_model(two).embed.weight, state(two)["model.embed.weight"])


@OF_EACH_STRATEGY
def test_resume_is_exact_among_as_many(pair, tmp_path):
    strategy, _, two = pair
    args = rewind(two, tmp_path / "again", 8)
    args = [a for a in args if not a.startswith(WHERE)]
    assert train([*args, f"--out={tmp_path / 'again'}"], tmp_path / "log", strategy) == [0, 0]
    assert same_run(tmp_path / "again", two)
    said = (tmp_path / "log0").read_text()
    assert "resuming from step 8" in said and "bit for bit" not in said
    assert (tmp_path / "log1").read_text() == ""


@OF_EACH_STRATEGY
def test_a_fork_leaves_it(pair, tmp_path, capsys):
    _, one, two = pair
    for parent in (one, two):
        alone = [f"{where}={value}" for where, value in zip(WHERE, (1, 1, "auto"), strict=True)]
        fork = [f"--fork={parent / 'checkpoints/step00000008.ckpt'}", "--quiet", "--loss.z_loss=1e-2"]
        assert main([*fork, *alone, f"--out={tmp_path / parent.name}"]) == 0
    close(series(tmp_path / "two"), series(tmp_path / "one"))
    said = [json.loads((tmp_path / n / "fork.json").read_text())["changed"] for n in ("one", "two")]
    assert said[0] == said[1] == [{"field": "loss.z_loss", "from": 0.001, "to": 0.01}]


@OF_EACH_STRATEGY
def test_parameters_that_a_fork_adds_start_alike(pair, tmp_path):
    strategy, _, two = pair
    fork = [f"--fork={two / 'checkpoints/step00000008.ckpt'}", "--quiet", "--model.layer_scale=0.5"]
    alone = [f"{where}={value}" for where, value in zip(WHERE, (1, 1, "auto"), strict=True)]
    assert main([*fork, *alone, f"--out={tmp_path / 'one'}"]) == 0
    assert train([*fork, f"--out={tmp_path / 'two'}"], tmp_path / "log", strategy) == [0, 0]
    close(series(tmp_path / "two"), series(tmp_path / "one"))


LONG = ["--trainer.max_steps=100000", "--checkpoint.every_n_steps=0", "--monitor.every_n_steps=0",
        "--data.val_every_n_steps=0"]  # fmt: skip


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_any_process_ends_all_in_order(tiny_args, tmp_path, signum):
    out = tmp_path / "run"
    args = [*tiny_args, *LONG, f"--out={out}"]
    both = start(args, tmp_path / "log", "ddp" if signum == signal.SIGTERM else "fsdp")
    wait_for((out / "metrics.jsonl").exists)
    os.kill(both[1].pid, signum)  # the process that does not own the run folder
    assert end(both) == [128 + signum, 0]
    status = read_status(out)
    assert status.status == "interrupted" and not is_locked(out) and status.step % 10 == 0
    steps = [line["step"] for line in read_metrics(out / "metrics.jsonl")]
    assert max(steps) == status.step == int(next(iter((out / "checkpoints").iterdir())).stem[4:])


def test_a_rank_without_data_ends_all_with_the_reason(tiny_args, tmp_path):
    assert train([*tiny_args, f"--out={tmp_path / 'run'}"], tmp_path / "log", spike=-1) == [2, 2]
    assert "planted" in read_status(tmp_path / "run").reason
    assert all("planted" in (tmp_path / f"log{rank}").read_text() for rank in (0, 1))


def test_a_divergence_ends_all_in_order(tiny_args, tmp_path):
    args = [*tiny_args, "--optim.lr=1e18", "--optim.warmup_steps=1", "--trainer.gradient_clip_val=0"]
    assert main([*args, f"--out={tmp_path / 'one'}"]) == 3
    assert train([*args, f"--out={tmp_path / 'two'}"], tmp_path / "log") == [3, 0]
    one, two = (read_status(tmp_path / name) for name in ("one", "two"))
    assert two.status == one.status == "diverged" and two.step == one.step and " is " in two.reason
    assert not list((tmp_path / "two/checkpoints").glob("*.partial"))
