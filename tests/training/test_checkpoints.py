"""A checkpoint is used only if its content is valid, and a run always has a valid checkpoint to continue from."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmqk.checkpoint import load_checkpoint, load_model, save_checkpoint
from mmqk.config.training import CheckpointConfig
from mmqk.interop.folders import read_model
from mmqk.store import UserError, cli_main, read_status
from mmqk.store.checkpoints import checkpoints_in, step_of
from mmqk.train import main
from mmqk.training.checkpoint import Checkpoints
from tests.training.test_resume import rewind, series, state


@pytest.fixture(scope="module")
def whole(tiny_args, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*tiny_args, "--checkpoint.keep=9", f"--out={out}"]) == 0
    return out


def step(folder: Path, number: int) -> Path:
    return folder / f"checkpoints/step{number:08d}.ckpt"


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


def test_a_changed_byte_anywhere_is_refused(whole, tmp_path):
    path = tmp_path / "checkpoints/step00000012.ckpt"
    path.parent.mkdir()
    content = step(whole, 12).read_bytes()
    path.write_bytes(content)
    # The control: the unchanged file is read.
    assert load_checkpoint(path)["global_step"] == 12
    places = random.Random(0).sample(range(len(content)), 60)
    for byte in [place_of_weights(path), *places, *range(len(content) - 100, len(content))]:
        flip(path, byte)
        with pytest.raises(UserError) as error:
            load_checkpoint(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        path.write_bytes(content)
    for end in (b"", content[-78:]):  # the footer is missing, or occurs twice
        path.write_bytes(content[:-78] + end + end)
        with pytest.raises(UserError, match="is damaged"):
            load_checkpoint(path)


def foreign_model(path: Path) -> None:
    config = torch.load(path, weights_only=True)["mmqk_model"]
    change(path, mmqk_model={**config, "attn_softcap": 30.0})  # a softcap adds no weights


def foreign_run(path: Path) -> None:
    record = torch.load(path, weights_only=True)["mmqk_run"]
    change(path, mmqk_run={**record, "id": "0123456789"})


HARMS = {
    "one bit of a weight": (lambda path: flip(path, place_of_weights(path)), "is damaged"),
    "cut": (lambda path: os.truncate(path, 2000), "is damaged or was not written"),
    "emptied": (lambda path: os.truncate(path, 0), "is damaged or was not written"),
    "of another model": (foreign_model, "is of another model (different: model.attn_softcap)"),
    "of another run": (foreign_run, "is of run 0123456789"),
    "without weights": (lambda path: change(path, state_dict={}), "lacks the weights model."),
    "without moments": (lambda path: change(path, optimizer_states=None), "lacks the part optimizer_states"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_bad_checkpoint_is_named_and_the_one_before_is_taken(whole, tmp_path, capsys, harm):
    out = tmp_path / "again"
    args = rewind(whole, out, 8, status="interrupted")
    do, says = HARMS[harm]
    do(step(out, 8))
    assert main([*args, f"--out={out}"]) == 0
    said = capsys.readouterr().err
    assert f"{step(out, 8)} {says}" in said and "resuming from step 4" in said
    assert step(out, 8).with_name("step00000008.ckpt.refused").exists() and step(out, 8).is_file()
    assert series(out) == series(whole)
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(out).items())


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


@pytest.mark.parametrize("name", [10, 99])
def test_a_name_is_not_believed(whole, tmp_path, capsys, name):
    """If a resume trusted the file name, step 99 would complete a run of 12 steps without training."""
    out = tmp_path / "again"
    args = rewind(whole, out, 8)
    step(out, 8).rename(step(out, name))
    assert main([*args, f"--out={out}"]) == 0
    said = capsys.readouterr().err
    assert f"{step(out, name)} holds step 8, but its name has another step" in said and "from step 4" in said
    assert read_status(out).step == 12 and series(out) == series(whole)
    with pytest.raises(UserError, match="holds step 12"):
        load_checkpoint(Path(step(out, 12).rename(step(out, 13))))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: change(path, loops=None), "lacks the part loops"),
        (lambda path: change(path, global_step="8"), "has no step number"),
        (lambda path: change(path, mmqk_ranks=None), "lacks the part mmqk_ranks"),
        (lambda path: change(path, state_dict={**torch.load(path)["state_dict"], "model.head.weight": torch.ones(3)}),
         "has weights model.head.weight that are not of shape"),
    ],
)  # fmt: skip
def test_missing_and_misshapen_parts_are_a_sentence(whole, tmp_path, capsys, harm, says):
    out = tmp_path / "again"
    args = rewind(whole, out, 8, status="interrupted")
    step(out, 4).unlink()
    harm(step(out, 8))
    said = refused(capsys, *args, f"--out={out}")
    assert said.startswith(f"The checkpoint {step(out, 8)} {says}")


def test_one_without_a_digest_is_refused(whole, tmp_path, capsys):
    out = tmp_path / "parent"
    rewind(whole, out, 12, status="completed")
    content = torch.load(step(out, 12), weights_only=True)
    torch.save(content, step(out, 12))
    sentence = f"{step(out, 12)} is damaged or was not written by mmqk train (the sha256 at its end is missing)"
    fork = [f"--fork={out}", "--trainer.max_steps=13", f"--out={tmp_path / 'fork'}"]
    assert sentence in refused(capsys, *fork)
    with pytest.raises(UserError, match="the sha256 at its end is missing"):
        load_model(out)
    save_checkpoint(content, step(out, 12))  # the control
    assert main([*fork, "--quiet"]) == 0


def without_newer_fields(path: Path) -> None:
    """Remove a field that an earlier version of mmqk did not have, and its default."""
    config = dict(torch.load(path, weights_only=True)["mmqk_model"])
    assert config.pop("attn_sink") is False and not config["qk_norm"].pop("normalize_v")
    change(path, mmqk_model=config)


def test_one_that_lacks_a_newer_field_of_the_model_is_used(whole, tmp_path, capsys):
    out = tmp_path / "again"
    args = rewind(whole, out, 8)
    without_newer_fields(step(out, 8))
    assert main([*args, f"--out={out}"]) == 0
    assert "resuming from step 8" in capsys.readouterr().err
    assert series(out) == series(whole)


def test_forks_and_readers_refuse_a_flipped_bit(whole, tmp_path, capsys):
    out = tmp_path / "parent"
    rewind(whole, out, 12, status="completed")
    fork = [f"--fork={out}", "--trainer.max_steps=14", f"--out={tmp_path / 'fork'}"]
    flip(step(out, 12), place_of_weights(step(out, 12)))
    assert f"{step(out, 12)} is damaged" in refused(capsys, *fork)
    assert not (tmp_path / "fork").exists()
    for read in (load_model, lambda run: read_model(step(run, 12))):
        with pytest.raises(UserError, match=r"step00000012\.ckpt is damaged") as error:
            read(out)
        assert "\n" not in str(error.value)
    flip(step(out, 12), place_of_weights(step(whole, 12)))  # the control: with the bit flipped back, it is read
    load_model(out)
    assert cli_main(main)([*fork, "--quiet"]) == 0


@pytest.mark.parametrize("keep", [1, 2])
def test_a_good_one_is_there_at_every_moment(tiny_args, tmp_path, monkeypatch, keep):
    """From step 8 on, the disk flips a bit in each checkpoint: the run ends, and its earlier checkpoint is valid."""
    out, sync = tmp_path / "run", os.fsync
    args = [*tiny_args, f"--checkpoint.keep={keep}", f"--out={out}"]

    def lose(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name in ("step00000008.partial", "step00000012.partial"):
            flip(path, 5000)

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises((OSError, UserError)):
        main(args)
    good = [path for path in sorted((out / "checkpoints").glob("*.ckpt")) if load_checkpoint(path)]
    assert [path.name for path in good] == ["step00000004.ckpt"]
    monkeypatch.setattr(os, "fsync", sync)
    assert main(args) == 0  # the control: with a working disk the run completes
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left == ["step00000008.ckpt", "step00000012.ckpt"][-keep:]


@pytest.mark.parametrize("keep", range(1, 7))
def test_the_newest_checkpoints_are_kept_whatever_their_number(tmp_path, keep):
    log = SimpleNamespace(flush=lambda *_: None, divergence=None)
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep=keep, at=[2]), log)
    checkpoints.folder.mkdir()
    module = SimpleNamespace(model=torch.nn.Linear(1, 1))
    for number in range(1, 10):
        trainer = SimpleNamespace(
            global_step=number, optimizers=[], loggers=[], is_global_zero=True, save_checkpoint=Path.touch
        )
        checkpoints.save(trainer, module)
        newest = range(max(1, number + 1 - keep), number + 1)
        kept = sorted({*newest, *([2] if number >= 2 else [])})
        assert [step_of(path) for path in checkpoints_in(checkpoints.folder)] == kept
