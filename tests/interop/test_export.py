"""An exported run has a model, a tokenizer and a model card, and the Auto classes of transformers load it offline."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from mmqk.checkpoint import load_model
from mmqk.data.shards.manifest import manifest_hash
from mmqk.data.tokenizers.files import TextTokenizer
from mmqk.interop.card import model_card
from mmqk.interop.folders import main
from mmqk.model import ModelConfig
from mmqk.store import read_metrics
from mmqk.train import main as train
from tests.interop.models import logits_of

transformers = pytest.importorskip("transformers")
KINDS = {"none": "LlamaForCausalLM", "rms": "Qwen3ForCausalLM", "layer": "ChameleonForConditionalGeneration"}


@pytest.fixture(scope="module", params=KINDS)
def exported(request, tiny_args, tmp_path_factory) -> tuple[str, Path, Path]:
    """Train and export a run; return (kind of QK-Norm, run folder, exported folder)."""
    folder = tmp_path_factory.mktemp("export")
    bias = ["--model.qk_norm.bias=true", "--model.qk_norm.eps=1e-5"] if request.param == "layer" else []
    short = [
        "--trainer.max_steps=2",
        "--monitor.every_n_steps=0",
        f"--model.qk_norm.kind={request.param}",
        *bias,
    ]
    eps = ["--model.qk_norm.eps=1e-6", "--model.norm_eps=1e-6"] if request.param == "rms" else []
    assert train([*tiny_args, *short, *eps, f"--out={folder / 'run'}"]) == 0
    assert main(["--from", str(folder / "run"), "--to", str(folder / "hf")]) == 0
    return request.param, folder / "run", folder / "hf"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_the_code_of_the_card_gives_the_logits_of_the_run(exported, tiny_data):
    kind, run, folder = exported
    code = card_of(folder).partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(code.replace('"PATH"', f"{str(folder)!r}, local_files_only=True"), names)
    assert type(names["model"]).__name__ == KINDS[kind]
    ours, theirs = load_model(run), names["model"].eval()
    ids = [0, *(5 + i for i in TextTokenizer.load(tiny_data / "tokenizers").encode("a red circle"))]
    assert names["ids"].tolist() == [ids]
    random_ids = torch.randint(0, ours.config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    for ids_BT in (names["ids"], random_ids):
        with torch.no_grad():
            assert (logits_of(theirs, ids_BT) - ours(ids_BT)).abs().max() < 1e-4
            # The control: other ids give other logits.
            assert (logits_of(theirs, ids_BT) - ours(ids_BT.roll(1, -1))).abs().max() > 1e-3


def test_the_code_of_the_page_loads_an_export(exported, tmp_path, monkeypatch):
    kind, _, folder = exported
    if kind == "layer":
        pytest.skip("transformers lists Chameleon under AutoModelForImageTextToText, as the page says")
    page = (Path(__file__).parents[2] / "docs/interop.md").read_text()
    (tmp_path / "mine").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    assert names["logits"].shape[-1] == load_model(folder.parent / "run").config.vocab_size


def test_the_tokenizer_gives_the_ids_of_mmqk_on_random_strings(exported, tiny_data):
    _, _, folder = exported
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    ours = TextTokenizer.load(tiny_data / "tokenizers")
    draw = random.Random(0)
    alphabets = [
        "the people of this union ",
        " \t\n0123456789.,;:!?<>/",
        "äöüßéñçøå ",
        "月亮红色的は🌙👍🏽 ",
        "\x00\x7f\u200b\ufeff a",
    ]
    strings = ["".join(draw.choices(draw.choice(alphabets), k=draw.randrange(60))) for _ in range(300)]
    for string in strings:
        ids = theirs(string)["input_ids"]
        assert ids == [5 + i for i in ours.encode(string)], string
        assert theirs.decode(ids) == string
    # The controls: without the offset of 5 the ids differ, and two different strings have different ids.
    assert theirs("trade")["input_ids"] != ours.encode("trade")
    assert theirs("a")["input_ids"] != theirs("b")["input_ids"]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)


def test_the_card_has_the_losses_the_data_the_configuration_and_no_machine_path(exported, tmp_path):
    kind, run, folder = exported
    card = card_of(folder)
    record = json.loads((run / "run.json").read_text())
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    parameters = sum(p.numel() for p in load_model(run).parameters())
    assert record["id"] in body and f"{parameters:,} parameters" in body and "to step 2." in body
    last = {k: v for line in read_metrics(run / "metrics.jsonl") for k, v in line.items()}
    for name in ("loss", "val_loss"):
        assert f"| {last[f'{name}/text']:.4f} | {last[f'{name}/image']:.4f} |" in body
    assert "| text | 0 to 304 |\n| image | 305 to 336 |" in body and "`</image>` 4" in body
    assert record["identity"]["data"]["pairs"] in body and "## License" in body
    config = yaml.safe_load(body.partition("```yaml\n")[2].partition("```")[0])
    assert config["model"]["qk_norm"]["kind"] == kind and config["optim"]["lr"] == 0.01
    assert str(run.parent) not in card and "/tmp" not in card
    shutil.copytree(run, tmp_path / "run")  # a copy of the run in another folder gives an identical card
    assert main(["--from", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
    assert card_of(tmp_path / "hf") == card


def test_a_card_outside_a_checkout_lists_the_sources_of_the_shipped_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hashed = manifest_hash(Path(__file__).parents[2] / "data/emoji")
    data = {"mix": {"pair": 1.0}, "pairs": "data/emoji"}
    record = {"identity": {"data": {"pairs": hashed}}, "details": {"config": {"data": data}}}
    config = ModelConfig({"text": 8, "image": 8}, d_model=16, n_layers=1, n_heads=1)
    checkpoint = tmp_path / "run/checkpoints/step00000002.ckpt"
    card = model_card(checkpoint, config, "LlamaForCausalLM", 1, True, record)
    assert f"| `data/emoji` | {hashed} | emoji-datasource-google 16.0.0, " in card


def test_a_damaged_record_is_named_and_the_weights_are_exported(exported, tmp_path, capsys):
    _, run, _ = exported
    (tmp_path / "run").mkdir()
    shutil.copytree(run / "checkpoints", tmp_path / "run/checkpoints")
    (tmp_path / "run/run.json").write_text("half a fi")
    assert main(["--from", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
    assert f"because {tmp_path / 'run/run.json'} cannot be read" in capsys.readouterr().out
    assert "AutoTokenizer" not in card_of(tmp_path / "hf")


def test_a_checkpoint_without_a_record_has_a_card_of_what_is_known(exported, tmp_path, capsys):
    _, run, _ = exported
    (tmp_path / "imported").mkdir()
    shutil.copytree(run / "checkpoints", tmp_path / "imported/checkpoints")
    assert main(["--from", str(tmp_path / "imported"), "--to", str(tmp_path / "hf")]) == 0
    assert "no tokenizer is included" in capsys.readouterr().out
    card = card_of(tmp_path / "hf")
    assert "# imported" in card and "exported by mmqk" in card and "AutoTokenizer" not in card
    assert not any(
        section in card for section in ("## Losses", "## Data", "## Configuration", "Special tokens")
    )
    assert sorted(p.name for p in (tmp_path / "hf").iterdir() if "token" in p.name) == []
