"""`mmqk interop` converts folders both ways. If it cannot convert a folder, it refuses the folder with one
sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mmqk.checkpoint import load_model, save_checkpoint
from mmqk.interop.folders import main
from mmqk.store import cli_main
from tests.interop.models import CHAMELEON, LLAMA, tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Write llama/, tied/ and chameleon/ in bf16 with `save_pretrained`, and return their parent folder."""
    root = tmp_path_factory.mktemp("hf")
    tiny(LLAMA, torch.bfloat16).save_pretrained(root / "llama")
    tiny("Gemma2ForCausalLM", torch.bfloat16).save_pretrained(root / "tied")
    tiny(CHAMELEON, torch.bfloat16, swin_norm=True).save_pretrained(root / "chameleon")
    return root


def convert(source: Path, to: Path, *more: str) -> int:
    return cli_main(main)(["--from", str(source), "--to", str(to), *more])


def refuses(capsys, source: Path, to: Path, *more: str) -> str:
    """Check that a conversion fails and writes nothing; return the one sentence that it prints to stderr."""
    before = sorted(to.parent.rglob("*"))
    assert convert(source, to, *more) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mmqk: ") and err.count("\n") == 1 and "Traceback" not in err
    assert sorted(to.parent.rglob("*")) == before
    return err


def weights(hf_model) -> dict[str, torch.Tensor]:
    return {n: t for n, t in hf_model.state_dict().items() if ".vqmodel." not in n}


@pytest.mark.parametrize("name", ["llama", "chameleon"])
def test_there_and_back(name, folders, tmp_path, capsys):
    import transformers

    kind = getattr(transformers, {"llama": LLAMA, "chameleon": CHAMELEON}[name])
    assert convert(folders / name, tmp_path / "run", "--vocab-sizes=text=64,image=32") == 0
    sizes = load_model(tmp_path / "run").config.vocab_sizes
    assert list(sizes.items()) == [("text", 64), ("image", 32)]
    said = capsys.readouterr()
    assert "tokenizers stay in" in said.out and said.err == ""
    assert ("(vqmodel) is not converted" in said.out) == (name == "chameleon")
    assert convert(tmp_path / "run", tmp_path / "back") == 0
    said = capsys.readouterr()
    assert "no tokenizer is included, because run.json names none" in said.out and said.err == ""
    assert ("(vqmodel) is untrained" in said.out) == (name == "chameleon")
    first, back = (kind.from_pretrained(f, dtype="auto") for f in (folders / name, tmp_path / "back"))
    assert back.dtype == first.dtype == torch.bfloat16
    assert weights(first).keys() == weights(back).keys()
    assert all(torch.equal(t, weights(back)[n]) for n, t in weights(first).items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "run"]


def copy(source: Path, to: Path, **changed) -> Path:
    """Copy a Hugging Face folder, and change these fields of its config.json."""
    to.mkdir()
    for path in source.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changed))
    return to


def test_a_folder_that_is_taken_is_left_alone(folders, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/note").write_text("mine")
    assert "is not an empty folder" in refuses(capsys, folders / "llama", tmp_path / "taken")
    assert "is not an empty folder" in refuses(capsys, folders / "llama", tmp_path / "taken/note")
    assert "cannot be written" in refuses(capsys, folders / "llama", tmp_path / "taken/note/out")
    (tmp_path / "free").mkdir()
    assert convert(folders / "llama", tmp_path / "free") == 0


def test_damaged_huggingface_folders(folders, tmp_path, capsys):
    out = tmp_path / "out"
    hf = copy(folders / "llama", tmp_path / "a", architectures=["BertForMaskedLM"])
    assert "has the architecture BertForMaskedLM: mmqk reads" in refuses(capsys, hf, out)
    hf = copy(folders / "llama", tmp_path / "c")
    (hf / "config.json").write_text("{")
    assert "config.json cannot be read" in refuses(capsys, hf, out)
    hf = copy(folders / "llama", tmp_path / "d")
    weights = hf / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{hf} cannot be loaded" in refuses(capsys, hf, out)
    weights.unlink()
    assert f"{hf} cannot be loaded" in refuses(capsys, hf, out)
    hf = copy(folders / "llama", tmp_path / "e", num_hidden_layers=4)
    assert "has no weights for model.layers.3." in refuses(capsys, hf, out)
    hf = copy(folders / "llama", tmp_path / "k", model_type="mistral", sliding_window=4)
    assert "the architecture LlamaForCausalLM but the model_type mistral, not llama" in refuses(capsys, hf, out)
    hf = copy(folders / "llama", tmp_path / "l")
    (hf / "adapter_config.json").write_text("{}")
    assert "has an adapter (adapter_config.json): merge it" in refuses(capsys, hf, out)


@pytest.mark.parametrize("stated", ["float16", "bfloat16"])
def test_weights_keep_their_dtype_whatever_the_configuration_states(stated, tmp_path):
    whole = tiny(LLAMA, torch.float32)
    with torch.no_grad():
        whole.model.norm.weight[0] = 1e5  # infinite in float16
    whole.save_pretrained(tmp_path / "whole")
    hf = copy(tmp_path / "whole", tmp_path / "hf", dtype=stated)
    assert convert(hf, tmp_path / "run") == 0
    content = torch.load(next((tmp_path / "run/checkpoints").glob("*.ckpt")), weights_only=True)
    assert {x.dtype for x in content["state_dict"].values()} == {torch.float32}
    (norm,) = (x for n, x in content["state_dict"].items() if x.ndim == 1 and ".blocks." not in n)
    assert torch.equal(norm, whole.model.norm.weight)


def test_damaged_runs(folders, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert(folders / "tied", tmp_path / "run") == 0
    capsys.readouterr()
    assert "model.norm_gain is zero_centered" in refuses(capsys, tmp_path / "run", out)
    checkpoint = tmp_path / "run/checkpoints/step00000000.ckpt"
    for stored, said in (
        ({"state_dict": {}}, "has no model configuration"),
        ({"mmqk_model": {"width": 3}, "state_dict": {}}, "has a model that this version of mmqk does not support"),
    ):
        save_checkpoint(stored, checkpoint)
        assert said in refuses(capsys, tmp_path / "run", out)


def test_nothing_half_made_stays(folders, tmp_path, monkeypatch, capsys):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert "cannot be written (No space left on device)" in refuses(capsys, folders / "llama", tmp_path / "out")


def test_the_page_shows_what_works(folders, tmp_path, monkeypatch, capsys):
    """Run the Python code of docs/interop.md on a small Chameleon. The copied image tokenizer equals the original."""
    import transformers

    page = (Path(__file__).parents[2] / "docs/interop.md").read_text()
    _, both_ways, with_tokenizer, probing = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    copy(folders / "chameleon", tmp_path / "chameleon-7b")
    exec(both_ways, {})
    exec(with_tokenizer, {})
    assert convert(tmp_path / "chameleon-7b", tmp_path / "runs/chameleon-7b") == 0
    capsys.readouterr()
    exec(probing, {})
    assert float(capsys.readouterr().out) > 0
    kind = getattr(transformers, CHAMELEON)
    whole, bare, original = (kind.from_pretrained(f) for f in ("mine-whole", "mine", "chameleon-7b"))
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = original.model.get_image_tokens(pixels)
    assert torch.equal(whole.model.get_image_tokens(pixels), expected)
    assert not torch.equal(bare.model.get_image_tokens(pixels)[:, : expected.shape[1]], expected)
    assert all(torch.equal(t, weights(original)[n]) for n, t in weights(whole).items())
