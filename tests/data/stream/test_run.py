"""Runs that read shards, from the command line: ranks that change, forks, and samples that cannot be used."""

from __future__ import annotations

import json

import pytest
import torch

from mmqk.data.order import STREAMS
from mmqk.data.shards.manifest import split_shards
from mmqk.data.stream import Account, Lane
from mmqk.store import UserError, cli_main, read_status
from mmqk.train import main
from tests.data.stream.test_loader import write_pairs
from tests.training.ranks import train
from tests.training.runs import rewind, saved, series

SHARDS = ["--data.read=shards", "--trainer.accumulate_grad_batches=2", "--checkpoint.keep=9", "--data.val_sequences=4"]


def data_state(folder, step=12):
    return saved(folder, step)["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]


@pytest.fixture(scope="module")
def whole(tiny_args, tmp_path_factory):
    """A run of one process over 2.2 epochs of 7 shards."""
    root = tmp_path_factory.mktemp("whole")
    pattern = write_pairs(root / "shards", broken=(4, 19))
    args = [*tiny_args, *SHARDS, f"--data.pairs={pattern}", "--data.seq_len=120", "--data.batch_size=8"]
    assert main([*args, f"--out={root / 'run'}"]) == 0
    return root / "run"


def test_forks_continue_at_the_next_sample_and_cannot_skip(whole, tmp_path):
    fork = [f"--fork={whole / 'checkpoints/step00000004.ckpt'}", "--quiet", "--optim.lr=0.02"]
    for n, flag in enumerate(("--fork_skip_batches=1", "--fork_skip=[900]", "--data.batch_size=4")):
        with pytest.raises(UserError, match="reads shards"):
            main([*fork, flag, f"--out={tmp_path / str(n)}"])
        assert not (tmp_path / str(n) / "checkpoints").exists()
    assert main([*fork, "--data.shard_cache=copies", f"--out={tmp_path / 'fork'}"]) == 0
    changed = json.loads((tmp_path / "fork/fork.json").read_text())["changed"]
    assert [change["field"] for change in changed] == ["optim.lr"]
    cursors = [data_state(f)["streams"]["cursors"] for f in (whole, tmp_path / "fork")]
    assert torch.equal(*cursors) and not torch.equal(cursors[0], data_state(whole, 8)["streams"]["cursors"])


FORKS = {
    "without a kind": (['--data.mix={"pair": 1, "image": 1}'], ['--data.mix={"pair": 1}']),
    "with other pieces": (['--data.mix={"text": 1}', "--data.pack=documents"], ["--data.seq_len=300"]),
    "with another seed": (['--data.mix={"pair": 1}'], ["--seed=1"]),
    "with shards after token arrays": (["--data.read=tokens"], ["--data.read=shards", "--data.batch_size=8"]),
}


@pytest.mark.parametrize(("before", "changed"), FORKS.values(), ids=FORKS)
def test_a_fork_trains_and_resumes(tiny_args, tmp_path, before, changed):
    for f in range(3):
        lines = [json.dumps({"text": f"document {f} {n} " + "word " * 300}) for n in range(4)]
        (tmp_path / f"{f}.jsonl").write_text("\n".join(lines) + "\n")
    pairs, text = f"--data.pairs={write_pairs(tmp_path / 'shards')}", f"--data.text={tmp_path}/*.jsonl"
    if "--data.read=shards" in changed:
        before, changed = [a for a in (*tiny_args, *before) if "pairs=" in a or "=tokens" in a], [*changed, pairs, text]
    else:
        before = [*before, "--data.read=shards", pairs, text]
    few = ["--data.val_sequences=2", "--monitor.every_n_steps=0", "--checkpoint.keep=9", "--data.seq_len=120",
           "--checkpoint.every_n_steps=2"]  # fmt: skip
    parent, fork = tmp_path / "parent", [f"--fork={tmp_path / 'parent'}", *changed, "--trainer.max_steps=16"]
    assert main([*tiny_args, *few, *before, f"--out={parent}"]) == 0
    assert main([*fork, "--quiet", f"--out={tmp_path / 'fork'}"]) == 0
    if "streams" in (state := data_state(parent)):  # with another seed the fork starts again, else it continues
        places = [s["streams"]["cursors"][:, :-1].tolist() for s in (state, data_state(tmp_path / "fork", 16))]
        assert (places[1] >= places[0]) == ("--seed=1" not in changed)
    rewind(tmp_path / "fork", tmp_path / "again", 14)
    assert main([*fork, "--quiet", f"--out={tmp_path / 'again'}"]) == 0
    assert series(tmp_path / "again") == series(tmp_path / "fork")


@pytest.mark.slow
def test_the_rank_that_cannot_go_on_prints_the_reason(tiny_args, tmp_path):
    """Half of the samples of the shards that only the second rank reads first cannot be used."""
    shards = [str(tmp_path / f"shards/{s:05d}.tar") for s in range(40)]
    pattern = write_pairs(tmp_path / "shards", 40, 40)
    train_shards = split_shards(pattern, None)[0]
    lanes = [Lane(train_shards, str, Account(), n, 32, (0, STREAMS["pair"])) for n in range(16, 32)]
    second = {shards.index(lane._dealt(0, 0)[0]) for lane in lanes}
    write_pairs(tmp_path / "shards", 40, 40, broken=[40 * s + i for s in second for i in range(0, 40, 2)])
    args = [*tiny_args, "--data.read=shards", f"--data.pairs={pattern}", '--data.mix={"pair": 1}', "--data.seq_len=120"]
    codes = train([*args, "--data.batch_size=32", f"--out={tmp_path / 'run'}"], tmp_path / "log")
    assert codes == [2, 2], (tmp_path / "log0").read_text()
    assert "more than 10%" in (tmp_path / "log1").read_text()
    assert "more than 10%" not in (tmp_path / "log0").read_text()
    assert "another process" in read_status(tmp_path / "run").reason


@pytest.mark.slow
def test_two_ranks_continue_one_and_one_continues_two(whole, tmp_path):
    args = rewind(whole, tmp_path / "two", 4)
    assert train([*args, f"--out={tmp_path / 'two'}"], tmp_path / "log") == [0, 0], (tmp_path / "log0").read_text()
    rewind(tmp_path / "two", tmp_path / "one", 8)
    assert main([*args, "--data.workers=2", f"--out={tmp_path / 'one'}"]) == 0
    ours, theirs = series(tmp_path / "one"), series(whole)
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss/image", "loss/text", "grad_norm"):
            assert name not in b or a[name] == pytest.approx(b[name], rel=2e-3)
    states = [data_state(f)["streams"] for f in (whole, tmp_path / "two", tmp_path / "one")]
    assert all(torch.equal(s["cursors"], states[0]["cursors"]) for s in states)
    # The control: neighboring steps have other losses.
    assert ours[6]["loss/image"] != pytest.approx(ours[7]["loss/image"], rel=2e-3)


def test_a_run_goes_on_where_samples_cannot_be_used(tiny_args, whole, tmp_path, capfd):
    record = json.loads((whole / "skipped.json").read_text())
    assert record["counts"]["image cannot be decoded"] >= len(record["names"]) > 0
    assert {name.split()[1] for name in record["names"]} <= {"k4", "k19"}
    rewind(whole, tmp_path / "again", 8)
    args = [a for a in json.loads((whole / "run.json").read_text())["details"]["command"][3:-1]]
    assert main([*args, f"--out={tmp_path / 'again'}"]) == 0
    assert json.loads((tmp_path / "again/skipped.json").read_text()) == record
    assert "samples and shards were skipped" in capfd.readouterr().err
    pattern = write_pairs(tmp_path / "many", broken=range(0, 42, 2))
    argv = [*tiny_args, *SHARDS, f"--data.pairs={pattern}", "--data.seq_len=120", f"--out={tmp_path / 'out'}"]
    assert cli_main(main)([*argv, "--data.workers=2"]) == 2
    err = capfd.readouterr().err
    assert "more than 10%" in err and "Traceback" not in err
    status = read_status(tmp_path / "out")
    assert status is None or status.status == "failed"
