"""An impossible fork is refused in one sentence that names the reason, and nothing is created."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmqk.store import cli_main
from mmqk.train import main


@pytest.fixture(scope="module")
def parent(tiny_args, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("parent") / "run"
    fields = ["--model.qk_norm.kind=layer", "--model.qk_norm.bias=true", "--model.per_modality.qk=true"]
    assert main([*tiny_args, "--trainer.max_steps=4", *fields, f"--out={out}"]) == 0
    return out


def said(capsys, *args: str) -> str:
    assert cli_main(main)([*args, "--quiet"]) == 2
    notices, *found = capsys.readouterr().err.strip().split("mmqk: ")
    assert len(found) == 1 and "\n" not in found[0] and "Traceback" not in notices
    return found[0]


@pytest.mark.parametrize(
    "field",
    ["--model.n_layers=3", "--model.tie_embeddings=true", "--model.per_modality.qk=false", "--trainer.max_steps=4"],
)
def test_a_fork_that_cannot_be(parent, tmp_path, capsys, field):
    name, steps = field[2:].partition("=")[0], [] if "max_steps" in field else ["--trainer.max_steps=8"]
    assert name in said(capsys, f"--fork={parent}", *steps, field, f"--out={tmp_path / 'fork'}")
    assert not (tmp_path / "fork").exists()


def test_a_folder_with_another_run_is_left_alone(parent, tmp_path, capsys):
    """A fork is refused in its parent's folder. A fork that skips one batch is refused in the folder of a fork that
    skips none."""
    fields = [f"--fork={parent}/checkpoints/step00000004.ckpt", "--trainer.max_steps=6"]
    assert "fork.parent" in said(capsys, *fields, f"--out={parent}")
    assert main([*fields, "--quiet", f"--out={tmp_path / 'fork'}"]) == 0
    capsys.readouterr()
    before = (tmp_path / "fork/metrics.jsonl").read_bytes()
    assert "fork.skip_batches (0 in the folder, 1 now)" in said(
        capsys, *fields, "--fork_skip_batches=1", f"--out={tmp_path / 'fork'}"
    )
    assert (tmp_path / "fork/metrics.jsonl").read_bytes() == before
