"""`model.patch` and `data.patch`: the user's own functions, which change the model and the rows of a step."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmqk.checkpoint import load_model
from mmqk.config import resolve
from mmqk.data.loader import MicroBatches
from mmqk.store import UserError
from mmqk.train import main
from tests.tiny import data_of
from tests.training.runs import same, saved

SOURCE = """\
import torch

FACTOR = 8

@torch.no_grad()
def loud(model):
    model.blocks[0].attention.w_q.weight.mul_(FACTOR)

def backwards(rows, step, order):
    return rows[::-1] if step else rows
"""
W_Q = "model.blocks.0.attention.w_q.weight"


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """Return a module ``own_patch`` in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("own_patch", None)
    importlib.invalidate_caches()
    file = tmp_path / "own_patch.py"
    file.write_text(SOURCE)
    return file


def test_the_source_of_a_patch_is_part_of_the_identity(own, tiny_args):
    plain, patched = resolve(tiny_args).id, resolve([*tiny_args, "model.patch=own_patch:loud"]).id
    rows = resolve([*tiny_args, "data.patch=own_patch:backwards"]).id
    assert len({plain, patched, rows}) == 3
    own.write_text(SOURCE.replace("FACTOR = 8", "FACTOR = 9"))
    assert resolve(tiny_args).id == plain
    assert resolve([*tiny_args, "model.patch=own_patch:loud"]).id != patched
    assert resolve([*tiny_args, "data.patch=own_patch:backwards"]).id != rows


def test_a_fork_patches_the_weights_of_its_parent_once(own, tiny_args, tmp_path):
    """The first weights of the fork are the parent's, with W_q times 8; a resume does not multiply it again."""
    parent, fork = tmp_path / "parent", tmp_path / "fork"
    short = [*tiny_args, "--trainer.max_steps=4", "--checkpoint.every_n_steps=2", "--checkpoint.keep=9"]
    assert main([*short, f"--out={parent}"]) == 0
    args = [f"--fork={parent / 'checkpoints/step00000002.ckpt'}", "model.patch=own_patch:loud", "--quiet"]
    assert main([*args, f"--out={fork}"]) == 0
    before, after = saved(parent, 2)["state_dict"], saved(fork, 2)["state_dict"]
    assert torch.equal(after[W_Q], 8 * before[W_Q])
    assert all(torch.equal(after[name], before[name]) for name in before if name != W_Q)
    last = saved(fork, 4)["state_dict"]
    (fork / "checkpoints/step00000004.ckpt").unlink()
    (fork / "status.json").write_text((fork / "status.json").read_text().replace("completed", "interrupted"))
    assert main([*args, f"--out={fork}"]) == 0
    assert same(saved(fork, 4)["state_dict"], last)
    again = [f"--fork={fork}", "--trainer.max_steps=6"]
    with pytest.raises(UserError, match=r"the parent has model\.patch own_patch:loud.* add model\.patch=own"):
        resolve(again)
    assert resolve([*again, "model.patch=own_patch:loud"]).model.patch == "own_patch:loud"


def test_adagc_ignores_a_parameter_without_a_gradient(tiny_args, tmp_path):
    patch = ["model.qk_norm.kind=rms", "model.patch=mmqk.bench.faults:gain_unused"]
    assert main([*tiny_args, *patch, "optim.adagc=1.05", f"--out={tmp_path}"]) == 0


def test_a_checkpoint_runs_no_code_that_it_names(own, tiny_args, tmp_path):
    run, named = tmp_path / "run", "model.patch=own_patch:loud"
    assert main([*tiny_args, "--trainer.max_steps=2", named, f"--out={run}"]) == 0
    assert load_model(run).config.patch == "own_patch:loud"  # this process was given the name
    code = "import sys; from mmqk.checkpoint import load_model; load_model(sys.argv[1])"
    own.write_text(SOURCE + "\nopen('executed', 'w').close()\n")
    for command in (["-c", code, run], ["-m", "mmqk", "train", f"--fork={run}", "trainer.max_steps=4"]):
        ended = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
        assert ended.returncode != 0
        assert "runs only if you name it too (model.patch=own_patch:loud)" in ended.stderr
        assert not (tmp_path / "executed").exists()
    given = ["-m", "mmqk", "train", f"--fork={run}", "trainer.max_steps=4", named, "--quiet"]
    assert subprocess.run([sys.executable, *given], capture_output=True).returncode == 0
    assert (tmp_path / "executed").exists()


def test_rows_are_patched_before_ranks_and_micro_batches_divide_them(tiny_args):
    order = data_of(tiny_args).order

    def patch(rows, step, order):
        return rows[::-1] if step else rows

    def ids(world, accumulate, patch):
        parts = [MicroBatches(order, 8, accumulate, rank, world, 3, patch=patch) for rank in range(world)]
        return [
            torch.cat([parts[rank][step * accumulate + i].ids_BT for i in range(accumulate) for rank in range(world)])
            for step in range(3)
        ]

    plain, whole, divided = ids(1, 1, None), ids(1, 1, patch), ids(2, 2, patch)
    assert all(torch.equal(a, b) for a, b in zip(whole, divided, strict=True))
    assert torch.equal(whole[0], plain[0]) and torch.equal(whole[1], plain[1].flip(0))
    assert not torch.equal(whole[1], plain[1])
