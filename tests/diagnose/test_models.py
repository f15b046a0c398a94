"""Checkpoints with a batch: a probe has the numbers of mmqk's probe, and growth is found where it is planted."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch

from mmqk.checkpoint import PREFIX, save_checkpoint
from mmqk.data.batch import TokenBatch
from mmqk.diagnose import block_of
from mmqk.diagnose.tensors import load, probe_with, read_batch
from mmqk.diagnose.weights import tables_of
from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.model.transformer import modality_of_ids
from mmqk.monitors import probe
from mmqk.store import UserError

CONFIG = ModelConfig(
    vocab_sizes={"text": 20, "image": 12}, d_model=16, n_layers=4, n_heads=2, qk_norm=QKNormConfig("rms")
)
IDS = torch.arange(48).view(2, 24) * 7 % 32


def saved(folder, name: str, edit=None):
    model = EarlyFusionTransformer(CONFIG)
    with torch.no_grad():
        if edit is not None:
            edit(model)
    state = {PREFIX + name: x for name, x in model.state_dict().items()}
    path = folder / f"{name}.ckpt"
    save_checkpoint({"mmqk_model": asdict(CONFIG), "state_dict": state}, path)
    return path


def test_a_probe_has_the_numbers_of_the_probe_of_training(tmp_path):
    modality_BT = modality_of_ids(IDS, CONFIG.vocab_sizes)
    seen = torch.ones_like(IDS, dtype=torch.bool)
    expected = probe(EarlyFusionTransformer(CONFIG), TokenBatch(IDS, modality_BT, seen, seen, torch.tensor(1.0))).flat()
    found = probe_with(saved(tmp_path, "a"), {"input_ids": IDS})
    for name in ("attn_logit_absmax/text-image/layer02", "attn_entropy/image/layer01", "q_norm/text/layer03"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)
    other = probe_with(tmp_path / "a.ckpt", {"input_ids": IDS}, {"image": range(10, 32)})
    assert abs(other[name := "attn_entropy/image/layer01"] - expected[name]) > 1e-3


def test_hugging_face_folders_and_functions_are_probed(tmp_path, monkeypatch):
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=40, **size)).eval()
    model.save_pretrained(tmp_path / "a")
    (tmp_path / "mine.py").write_text(
        "import transformers\n"
        "def a():\n    return transformers.GPTNeoXForCausalLM.from_pretrained('a')\n"
        "def name():\n    return 'a'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    batch = {"input_ids": IDS}
    found = probe_with(tmp_path / "a", batch, {"image": range(20, 40)})
    assert found["attn_logit_absmax/text-image/layer01"] > 0
    assert probe_with("mine:a", batch, {"image": range(20, 40)}) == found
    with pytest.raises(UserError, match="returned a str"):
        load("mine:name")
    config = json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "a/config.json").write_text(json.dumps(config | {"architectures": ["pipeline"]}))
    with pytest.raises(UserError, match="pipeline"):
        load(tmp_path / "a")


def test_batches_of_each_format_are_equal(tmp_path):
    torch.save({"input_ids": IDS, "pixel_values": torch.ones(2, 3)}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", input_ids=IDS.numpy())
    (tmp_path / "a.json").write_text(json.dumps(IDS.tolist()))
    for name in ("a.pt", "a.npz", "a.json"):
        assert torch.equal(read_batch(tmp_path / name)["input_ids"], IDS)
    assert read_batch(tmp_path / "a.pt")["pixel_values"].shape == (2, 3)
    with pytest.raises(UserError, match=r"absent\.npy does not exist"):
        read_batch(tmp_path / "absent.npy")
    (tmp_path / "ragged.json").write_text("[[1, 2], [3]]")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "object.pt")
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in ("ragged.json", "object.pt", "object.npy"):
        with pytest.raises(UserError, match=name):
            read_batch(tmp_path / name)


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(UserError, match="id 32"):
        probe_with(saved(tmp_path, "a"), {"input_ids": IDS + 1})


def test_tables_of_checkpoints_have_findings_only_where_something_is_planted(tmp_path):
    def scaled(factor):
        def edit(model):
            for block in model.blocks:
                block.attention.q_norm.weight *= factor

        return edit

    for step in range(1, 4):
        saved(tmp_path, f"same_step{step}")
        saved(tmp_path, f"grows_step{step}", scaled(3.0**step))
    batch, blocks = {"input_ids": IDS}, {"image": range(20, 32)}
    same = [tmp_path / f"same_step{step}.ckpt" for step in (1, 2, 3)]
    tables, _, found = tables_of(same, batch, blocks)
    assert not found and (tables["growth"].law == "does not grow").all()
    tables, _, found = tables_of([tmp_path / f"grows_step{step}.ckpt" for step in (1, 2, 3)], batch, blocks)
    growth = tables["growth"].set_index("tag")
    for name in ("attn_logit_bound/layer03", "attn_logit_absmax/text-image/layer03"):
        assert growth.law[name] == "exponential" and found
    assert growth.law["w_q_norm/layer03"] == "does not grow"
    assert tables_of([tmp_path / f"grows_step{step}.ckpt" for step in (1, 2)])[2] and not tables_of(same[:2])[2]
    tables, notes, _ = tables_of(same[1::-1])
    assert "growth" not in tables and "do not rise" in notes[-1]


def test_a_modality_has_a_name_and_two_ids():
    assert block_of("image=4:8196") == ("image", range(4, 8196))
    for text in ("image", "image=4", "image=9:4", "=4:8"):
        with pytest.raises(argparse.ArgumentTypeError, match="image=4:8196"):
            block_of(text)
