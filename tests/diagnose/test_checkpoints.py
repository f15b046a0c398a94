"""Reading checkpoints: the tensors of each format are those that were saved, and no file executes code."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from mmqk.checkpoint import PREFIX, save_checkpoint
from mmqk.diagnose.tensors import read
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.store import UserError

CONFIG = ModelConfig(vocab_sizes={"text": 20, "image": 12}, d_model=16, n_layers=2, n_heads=2)


@pytest.fixture(scope="module")
def state():
    return EarlyFusionTransformer(CONFIG).state_dict()


def sharded(folder: Path, state, ending: str) -> None:
    """Write two shards with an index, as Hugging Face does."""
    from safetensors.torch import save_file

    stem, names = ("model", list(state)) if ending == "safetensors" else ("pytorch_model", list(state))
    shards = {f"{stem}-0000{i + 1}-of-00002.{ending}": names[i::2] for i in range(2)}
    for shard, part in shards.items():
        write = save_file if ending == "safetensors" else torch.save
        write({name: state[name] for name in part}, folder / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"num_attention_heads": 2}')
    (folder / "trainer_state.json").write_text('{"global_step": 70}')


def written(kind: str, folder: Path, state) -> Path | str:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    if kind == "mmqk checkpoint":
        path = folder / "run/checkpoints/step00000070.ckpt"
        weights = {PREFIX + name: x for name, x in state.items()}
        save_checkpoint({"mmqk_model": asdict(CONFIG), "state_dict": weights, "global_step": 70}, path)
        return path
    if kind == "run folder":
        return written("mmqk checkpoint", folder, state).parents[1]
    if kind in ("safetensors", "bin"):
        sharded(folder, state, kind)
        return folder
    if kind == "distributed":
        optimizer = {"step": 70, "exp_avg": torch.ones(3)}
        dcp.save({"model": dict(state), "optimizer": optimizer}, checkpoint_id=folder / "step-70", no_dist=True)
        return folder / "step-70"
    if kind == "nanoGPT":
        compiled = {f"_orig_mod.{name}": x for name, x in state.items()}
        content = {"model": compiled, "model_args": {"n_head": 2}, "iter_num": 70, "optimizer": {"state": {0: state}}}
        torch.save(content, folder / "ckpt.pt")
        return folder / "ckpt.pt"
    if kind == "one file":
        save_file(state, folder / "checkpoint-70.safetensors")
        return folder / "checkpoint-70.safetensors"
    (folder / "my_weights.py").write_text("import torch\ndef step_70():\n    return torch.load('state.pt')\n")
    torch.save(dict(state), folder / "state.pt")
    return "my_weights:step_70"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "kind",
    ["mmqk checkpoint", "run folder", "safetensors", "bin", "distributed", "nanoGPT", "one file", "module:function"],
)
def test_every_format_has_the_saved_tensors(kind, tmp_path, monkeypatch, state):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = read(written(kind, tmp_path, state))
    prefix = "model." if kind == "distributed" else ""
    assert set(found.readers) == {prefix + name for name in state}
    for name, x in state.items():
        assert torch.equal(found.readers[prefix + name](), x)
    assert found.step == 70
    assert bool(found.config) == (kind not in ("distributed", "one file", "module:function"))


class Planted:
    """Its pickle creates a file when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_file_executes_code(tmp_path, monkeypatch, state):
    import torch.distributed.checkpoint as dcp

    monkeypatch.chdir(tmp_path)
    for name in ("weights.pt", "folder/pytorch_model.bin"):
        Path(name).parent.mkdir(exist_ok=True)
        torch.save({"state_dict": state, "planted": Planted()}, name)
    dcp.save(dict(state), checkpoint_id="distributed", no_dist=True)
    index = Path("distributed/.metadata")
    metadata = pickle.loads(index.read_bytes())
    metadata.planner_data = Planted()
    index.write_bytes(pickle.dumps(metadata))
    for source in ("weights.pt", "folder", "distributed"):
        with pytest.raises(UserError, match="cannot be read"):
            read(source)
    assert not Path("executed").exists()
    pickle.loads(index.read_bytes())  # negative control
    assert Path("executed").exists()


@pytest.mark.parametrize(("held", "named"), [(argparse.Namespace(lr=1.0), "Namespace"), (Path("x"), "PosixPath")])
def test_a_checkpoint_with_python_objects_is_not_called_incomplete(tmp_path, state, held, named):
    torch.save({"model": state, "args": held}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-100])
    for name, said in (("whole.pt", named), ("cut.pt", "complete")):
        with pytest.raises(UserError, match=said):
            read(tmp_path / name)


def test_a_folder_without_one_of_its_shards_is_refused(tmp_path, state):
    sharded(tmp_path, state, "safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00002"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter"):
        read(tmp_path)
