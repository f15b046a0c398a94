"""An exported run has a model, a tokenizer and a model card, and the Auto classes of transformers load it offline."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, processors

from mmqk.checkpoint import load_model
from mmqk.data.tokenizers.files import TextTokenizer, tokenizers_hash
from mmqk.interop.folders import main, tokenizer_files
from mmqk.train import main as train
from tests.interop.models import logits_of

transformers = pytest.importorskip("transformers")
KINDS = {"none": "LlamaForCausalLM", "layer": "ChameleonForConditionalGeneration"}


@pytest.fixture(scope="module", params=KINDS)
def exported(request, tiny_args, tmp_path_factory) -> tuple[str, Path, Path]:
    """Train and export a run; return (kind of QK-Norm, run folder, exported folder)."""
    folder = tmp_path_factory.mktemp("export")
    bias = ["--model.qk_norm.bias=true", "--model.qk_norm.eps=1e-5"] if request.param == "layer" else []
    short = ["--trainer.max_steps=2", "--monitor.every_n_steps=0", "--model.residual_dropout=0.1"]
    short += [f"--model.qk_norm.kind={request.param}", *bias]
    assert train([*tiny_args, *short, f"--out={folder / 'run'}"]) == 0
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
    assert str(run.parent) not in card_of(folder)
    ours, theirs = load_model(run), names["model"].eval()
    ids = [0, *(5 + i for i in TextTokenizer.load(tiny_data / "tokenizers").encode("a red circle"))]
    assert names["ids"].tolist() == [ids]
    random_ids = torch.randint(0, ours.config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    for ids_BT in (names["ids"], random_ids):
        with torch.no_grad():
            assert (logits_of(theirs, ids_BT) - ours(ids_BT)).abs().max() < 1e-4
            # The control: other ids give other logits.
            assert (logits_of(theirs, ids_BT) - ours(ids_BT.roll(1, -1))).abs().max() > 1e-3


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


def test_a_damaged_record_is_named_and_the_weights_are_exported(exported, tmp_path, capsys):
    _, run, _ = exported
    (tmp_path / "run").mkdir()
    shutil.copytree(run / "checkpoints", tmp_path / "run/checkpoints")
    (tmp_path / "run/run.json").write_text("half a fi")
    assert main(["--from", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().out
    assert f"because {tmp_path / 'run/run.json'} cannot be read" in said
    assert "model.residual_dropout 0.1 is dropped" in said
    assert "AutoTokenizer" not in card_of(tmp_path / "hf")


# A tokenizer that adds a token ------------------------------------------------------------------------------


FOLDER = Path(__file__).parents[2] / "data/tokenizers"
TEXT = "Hello w\u00f6rld, a red moon \u263e 12"


def test_an_export_adds_no_token_to_a_text(tmp_path):
    """The folder has a tokenizer whose post-processor adds an entry of the vocabulary at the start of each text."""
    folder = shutil.copytree(FOLDER, tmp_path / "some")
    own = Tokenizer.from_file(str(folder / "text.json"))
    own.post_processor = processors.TemplateProcessing("a $A", None, [("a", own.token_to_id("a"))])
    own.save(str(folder / "text.json"))
    files, _ = tokenizer_files(str(folder), tokenizers_hash(folder))
    assert json.loads(files["tokenizer.json"])["post_processor"] is None
    ids = [i + 5 for i in TextTokenizer.load(folder).encode(TEXT)]
    assert Tokenizer.from_str(files["tokenizer.json"]).encode(TEXT).ids == ids
    # The control: the tokenizer before the export.
    assert [i + 5 for i in own.encode(TEXT).ids] == [own.token_to_id("a") + 5, *ids]
