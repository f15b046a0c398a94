"""A checkpoint is used only if its content is valid, and a run always has a valid checkpoint to continue from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mmqk.checkpoint import load_checkpoint, load_model, save_checkpoint
from mmqk.config import resolve
from mmqk.interop.folders import main as interop
from mmqk.store import RunFolder, UserError, cli_main
from mmqk.store.checkpoint_files import step_of
from mmqk.train import main
from mmqk.training.saving import last_checkpoint
from tests.training.runs import checkpoint as step
from tests.training.runs import rewind, same_run, series, status


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 16
    path.write_bytes(content)


def place_of_weights(path: Path) -> int:
    """Return the position of a byte inside the largest weight matrix; zip readers do not check this byte if the file
    is memory-mapped."""
    saved = torch.load(path, weights_only=True)
    largest = max(saved["state_dict"].values(), key=torch.Tensor.numel)
    return path.read_bytes().index(largest.numpy().tobytes()) + 40


def change(path: Path, **parts) -> None:
    """Replace parts of a checkpoint and write it with a new digest; None removes a part."""
    content = {**torch.load(path, weights_only=True), **parts}
    save_checkpoint({name: part for name, part in content.items() if part is not None}, path)


def refused(capsys, *args: str) -> str:
    """Run a command that is refused and return its error message."""
    assert cli_main(main)([*args, "--quiet"]) in (1, 2)
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.count("mmqk: ") == 1
    return said.split("mmqk: ")[1].strip()


def found(args: list[str], out: Path) -> Path | None:
    """Return the checkpoint from which a run would resume."""
    run = resolve([*args, f"--out={out}"])
    with RunFolder.open(run.out, run.identity, {}) as folder:
        return last_checkpoint(run, folder, 0)


def foreign_model(path: Path) -> None:
    config = torch.load(path, weights_only=True)["mmqk_model"]
    change(path, mmqk_model={**config, "attn_softcap": 30.0})  # a softcap adds no weights


def foreign_run(path: Path) -> None:
    record = torch.load(path, weights_only=True)["mmqk_run"]
    change(path, mmqk_run={**record, "id": "0123456789"})


def misshapen(path: Path) -> None:
    change(path, state_dict={**torch.load(path)["state_dict"], "model.head.weight": torch.ones(3)})


def newer_model(path: Path) -> None:
    change(path, mmqk_model={**torch.load(path, weights_only=True)["mmqk_model"], "of_a_later_version": 1})


HARMS = {
    "one bit of a weight": (lambda path: flip(path, place_of_weights(path)), "is damaged"),
    "cut": (lambda path: os.truncate(path, 2000), "is damaged or was not written"),
    "emptied": (lambda path: os.truncate(path, 0), "is damaged or was not written"),
    "of another model": (foreign_model, "is of another model (different: model.attn_softcap)"),
    "of another run": (foreign_run, "is of run 0123456789"),
    "without weights": (lambda path: change(path, state_dict={}), "has weights that do not fit its model"),
    "misshapen": (misshapen, "has weights that do not fit its model"),
    "of a newer model": (newer_model, "has a model that this version of mmqk does not support"),
    "of another step": (lambda path: change(path, global_step=10), "holds step 10, but its name has another step"),
}


def test_a_bad_checkpoint_is_named_and_the_one_before_is_taken(whole, tmp_path, capsys):
    for name, (harm, says) in HARMS.items():
        out = tmp_path / name
        args = rewind(whole, out, 8, status="interrupted")
        harm(step(out, 8))
        assert found(args, out) == step(out, 4), name
        said = capsys.readouterr().err
        assert f"{step(out, 8)} {says}" in said and "resuming from step 4" in said
        assert step(out, 8).with_name("step00000008.ckpt.refused").exists() and not step(out, 8).exists()
        # Without the one before, nothing is touched.
        step(out, 8).with_name("step00000008.ckpt.refused").rename(step(out, 8))
        step(out, 4).unlink()
        with pytest.raises(UserError) as error:
            found(args, out)
        assert str(error.value).startswith(f"The checkpoint {step(out, 8)} {says}")


def test_the_run_goes_on_exactly_from_the_one_before(whole, tmp_path, capsys):
    out = tmp_path / "again"
    args = [*rewind(whole, out, 8, status="interrupted"), f"--out={out}"]
    step(out, 8).unlink()
    step(out, 8).mkdir()  # a folder is no checkpoint
    assert main(args) == 0
    assert f"{step(out, 8)} is not a file" in capsys.readouterr().err
    assert step(out, 8).is_file() and same_run(out, whole)


def test_where_none_is_good_nothing_is_touched(whole, tmp_path, capsys):
    out = tmp_path / "again"
    args = rewind(whole, out, 8, status="interrupted")
    for number in (4, 8):
        os.truncate(step(out, number), 3000)
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.suffix in (".ckpt", ".jsonl")}
    said = refused(capsys, *args, f"--out={out}")
    assert said.startswith(f"The checkpoint {step(out, 8)} is damaged or was not") and "train from step 0" in said
    assert {path: path.read_bytes() for path in before} == before
    for number in (4, 8):
        step(out, number).unlink()  # as the error message advises
    assert main([*args, f"--out={out}"]) == 0
    assert series(out) == series(whole)


def without_digest(path: Path) -> None:
    torch.save(torch.load(path, weights_only=True), path)


@pytest.mark.parametrize(
    ("harm", "says"),
    [(without_digest, "is damaged or was not written by mmqk train (the sha256 at its end is missing)"),
     (lambda path: flip(path, place_of_weights(path)), "is damaged")],
)  # fmt: skip
def test_forks_and_readers_refuse_a_harmed_one(whole, tmp_path, capsys, harm, says):
    out = tmp_path / "parent"
    rewind(whole, out, 12, status="completed")
    content = step(out, 12).read_bytes()
    harm(step(out, 12))
    fork = [f"--fork={out}", "--trainer.max_steps=13", f"--out={tmp_path / 'fork'}"]
    assert f"{step(out, 12)} {says}" in refused(capsys, *fork)
    assert not (tmp_path / "fork").exists()
    for read in (load_model, lambda run: interop([f"--from={run}", f"--to={tmp_path / 'hf'}"])):
        with pytest.raises(UserError, match=r"step00000012\.ckpt is damaged") as error:
            read(out)
        assert "\n" not in str(error.value)
    step(out, 12).write_bytes(content)  # the control: the unharmed file is read
    load_model(out)
    assert resolve(fork).fork is not None


def test_one_that_lacks_a_newer_field_of_the_model_is_used(whole, tmp_path):
    """Earlier versions of mmqk did not have all fields."""
    out = tmp_path / "again"
    args = rewind(whole, out, 8)
    config = dict(torch.load(step(out, 8), weights_only=True)["mmqk_model"])
    assert config.pop("attn_sink") is False and not config["qk_norm"].pop("normalize_v")
    change(step(out, 8), mmqk_model=config)
    assert found(args, out) == step(out, 8)


def test_a_good_one_is_there_at_every_moment(tiny_args, tmp_path, monkeypatch):
    """From step 8 on, the disk flips a bit in each checkpoint: the run ends, and its earlier checkpoint is valid."""
    out, sync = tmp_path / "run", os.fsync
    args = [*tiny_args, "--checkpoint.keep=1", "--checkpoint.at=[6]", f"--out={out}"]

    def lose(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name in ("step00000008.partial", "step00000012.partial"):
            flip(path, 5000)

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises((OSError, UserError)):
        main(args)
    good = [step_of(path) for path in sorted((out / "checkpoints").glob("*.ckpt")) if load_checkpoint(path)]
    assert good == [6]
    monkeypatch.setattr(os, "fsync", sync)
    assert main(args) == 0  # the control: with a working disk the run completes
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step00000006.ckpt", "step00000012.ckpt"]
    assert resolve(args).id == resolve(tiny_args).id and status(out)["status"] == "completed"
