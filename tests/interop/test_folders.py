"""`mmqk interop` converts folders both ways. If it cannot convert a folder, it refuses the folder with one
sentence."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from mmqk.checkpoint import load_model, save_checkpoint
from mmqk.data.batch import TokenBatch
from mmqk.interop.folders import main
from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.monitors import probe
from mmqk.store import cli_main
from tests.interop.models import logits_of, some_ids, tiny

LLAMA, CHAMELEON = "LlamaForCausalLM", "ChameleonForConditionalGeneration"


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
    assert convert(folders / name, tmp_path / "run") == 0
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


@pytest.mark.parametrize("name", ["llama", "tied", "chameleon"])
def test_load_model_and_probe(name, folders, tmp_path):
    assert convert(folders / name, tmp_path / "run", "--vocab-sizes=text=64,image=32") == 0
    model = load_model(tmp_path / "run")
    assert model.config.vocab_sizes == {"text": 64, "image": 32} and list(model.config.vocab_sizes) == ["text", "image"]
    assert (model.head.weight is model.embed.weight) == (name == "tied")
    import transformers

    hf_model = transformers.AutoModelForCausalLM if name != "chameleon" else getattr(transformers, CHAMELEON)
    hf_model = hf_model.from_pretrained(folders / name, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        assert (model(some_ids()) - logits_of(hf_model.eval(), some_ids())).abs().max() < 1e-4
    ids = some_ids()
    seen = torch.ones_like(ids, dtype=torch.bool)
    flat = probe(model, TokenBatch(ids, (ids >= 64).long(), seen, seen, torch.tensor(64.0))).flat()
    assert flat["attn_logit_absmax/text-image/layer00"] > 0
    assert all(value == value for value in flat.values())
    if name == "chameleon":
        assert flat["attn_logit_absmax/text-image/layer02"] <= flat["attn_logit_bound/layer02"]


def test_a_run_of_ours_is_exported(tmp_path, capsys):
    import transformers

    config = ModelConfig(
        vocab_sizes={"text": 64, "image": 32}, d_model=32, n_layers=2, qk_norm=QKNormConfig("rms"), residual_dropout=0.1
    )
    model = EarlyFusionTransformer(config, seed=3).eval()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for step, scale in ((4, 0.0), (12, 1.0)):  # the newest checkpoint is exported
        stored = {f"model.{n}": scale * t for n, t in model.state_dict().items()}
        save_checkpoint(
            {"mmqk_model": asdict(config), "state_dict": stored, "global_step": step},
            tmp_path / f"run/checkpoints/step{step:08d}.ckpt",
        )
    assert convert(tmp_path / "run", tmp_path / "hf") == 0
    said = capsys.readouterr().out
    assert "step00000012" in said and "model.residual_dropout 0.1 is dropped" in said
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert (hf_model(some_ids()).logits - model(some_ids())).abs().max() < 1e-5
    # config.json stores the vocabulary sizes in order, so an import does not need --vocab-sizes.
    assert convert(tmp_path / "hf", tmp_path / "again") == 0
    assert list(load_model(tmp_path / "again").config.vocab_sizes.items()) == [("text", 64), ("image", 32)]


def test_a_head_that_only_claims_to_be_tied(folders, tmp_path, capsys):
    """transformers does not tie two different matrices of a checkpoint, even if its configuration has
    tie_word_embeddings."""
    copy(folders / "llama", tmp_path / "hf", tie_word_embeddings=True)
    assert convert(tmp_path / "hf", tmp_path / "run") == 0
    model = load_model(tmp_path / "run")
    assert not model.config.tie_embeddings and not torch.equal(model.head.weight, model.embed.weight)


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
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: len(whole) // 2])
    assert "step00000000.ckpt is damaged or was not written" in refuses(capsys, tmp_path / "run", out)
    middle = len(whole) // 2
    checkpoint.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert "step00000000.ckpt is damaged" in refuses(capsys, tmp_path / "run", out)
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
