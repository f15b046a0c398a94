"""Loading a file never executes code that the file contains."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mmqk.checkpoint import save_checkpoint
from mmqk.store import cli_main
from mmqk.train import main


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def one_sentence(capsys) -> str:
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed


def test_a_checkpoint_with_a_payload_is_refused(tiny_args, tmp_path, capsys):
    out, executed = tmp_path / "run", tmp_path / "executed"
    assert main([*tiny_args, f"--out={out}"]) == 0
    for checkpoint in (out / "checkpoints").glob("*.ckpt"):
        content = torch.load(checkpoint, weights_only=True)
        save_checkpoint(content | {"payload": Payload(executed)}, checkpoint)  # with a correct digest
    status = json.loads((out / "status.json").read_text())
    (out / "status.json").write_text(json.dumps(status | {"status": "interrupted"}))
    code = cli_main(main)([*tiny_args, f"--out={out}"])
    assert code == 2 and not executed.exists()
    assert "cannot be read (Weights only load failed)" in one_sentence(capsys)
    # The control: an unsafe load executes the payload.
    torch.load(max((out / "checkpoints").glob("*.ckpt")), weights_only=False)
    assert executed.exists()


TAG = "!!python/object/apply:os.mkdir [{}]"


@pytest.mark.parametrize("kind", ["config", "grid", "set"])
def test_a_yaml_tag_is_not_executed(kind, tiny_args, tmp_path, capsys):
    from mmqk.ablate import main as ablate

    executed, file = tmp_path / "executed", tmp_path / "file.yaml"
    bad = TAG.format(executed)
    if kind == "config":
        file.write_text(f"seed: {bad}\n")
        code = cli_main(main)([*tiny_args, f"--config={file}", f"--out={tmp_path / 'run'}"])
    elif kind == "grid":
        file.write_text(f"name: bad\nseeds: {bad}\narms: {{a: {{}}}}\n")
        code = cli_main(ablate)([str(file), f"--out={tmp_path / 'runs'}"])
    else:
        file.write_text("name: ok\nseeds: [1]\narms: {a: {}}\n")
        code = cli_main(ablate)([str(file), "--only=mine", f"--set=seed={bad}", f"--out={tmp_path / 'runs'}"])
    assert code == 2 and not executed.exists()
    assert one_sentence(capsys)
    import yaml

    # The control: an unsafe load executes the tag.
    yaml.unsafe_load(bad)
    assert executed.exists()


def test_a_pickle_in_an_array_is_not_executed(tmp_path):
    from mmqk.data.tokens.ids import load_ids
    from mmqk.store import UserError

    executed, file = tmp_path / "executed", tmp_path / "ids.npy"
    np.save(file, np.array([Payload(executed)], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="cannot be read as an array"):
        load_ids(file)
    assert not executed.exists()
    # The control: with allow_pickle the payload is executed.
    np.load(file, allow_pickle=True)
    assert executed.exists()


def test_no_file_of_the_package_loads_pickles():
    """The package never calls `pickle`, `joblib`, `torch.load` without weights_only, or an unsafe YAML loader."""
    unsafe = re.compile(
        r"\bpickle\.loads?\(|joblib|allow_pickle=True|weights_only=False|yaml\.(unsafe_load|full_load)|\beval\(\"|"
        r"\bexec\(|shell=True|trust_remote_code=True"
    )
    package = Path(__file__).parents[1] / "mmqk"
    for path in package.rglob("*.py"):
        assert not unsafe.search(path.read_text(encoding="utf-8")), path
    assert unsafe.search("pickle.loads(data)") and unsafe.search("torch.load(path, weights_only=False)")
