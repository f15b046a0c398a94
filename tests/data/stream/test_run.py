"""Runs that read shards, from the command line: ranks that change, forks, and samples that cannot be used."""

from __future__ import annotations

import json

import pytest
import torch

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
    assert main([*fork, f"--out={tmp_path / 'fork'}"]) == 0
    cursors = [data_state(f)["streams"]["cursors"] for f in (whole, tmp_path / "fork")]
    assert torch.equal(*cursors) and not torch.equal(cursors[0], data_state(whole, 8)["streams"]["cursors"])


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
