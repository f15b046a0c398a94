"""The tokenizer that an export writes next to the model."""

import json
from pathlib import Path

import pytest

from mmqk.interop.tokenizer import tokenizer_files
from mmqk.tokenizers.files import tokenizers_hash
from mmqk.tokenizers.text import TextTokenizer

FOLDER = Path(__file__).parents[2] / "data/tokenizers"
TEXT = "Hello w\u00f6rld, a red moon \u263e 12"


def test_the_sentence_about_a_damaged_record_is_short(tmp_path):
    for recorded in ("0" * 100_000, ["["] * 50_000):
        record = {
            "identity": {"data": {"tokenizers": recorded}},
            "details": {"config": {"data": {"tokenizers": str(FOLDER)}}},
        }
        (tmp_path / "run.json").write_text(json.dumps(record))
        _, said = tokenizer_files(tmp_path)
        assert "does not have the tokenizers of the run" in said and len(said) < 400


@pytest.mark.parametrize("known", [True, False])
def test_transformers_opens_the_text_tokenizer_with_the_ids_of_the_model(tmp_path, known):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "run").mkdir()
    of_run = tokenizers_hash(FOLDER) if known else "0123456789"
    record = {
        "identity": {"data": {"tokenizers": of_run}},
        "details": {"config": {"data": {"tokenizers": str(FOLDER)}}},
    }
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    files, said = tokenizer_files(tmp_path / "run")
    for name, text in files.items():
        (out / name).write_text(text)
    if not known:  # the control: a tokenizer is not exported if its hash differs from the run's
        assert "no tokenizer is included" in said and not list(out.iterdir())
        return
    theirs = transformers.AutoTokenizer.from_pretrained(str(out), local_files_only=True)
    ids = theirs(TEXT)["input_ids"]
    assert ids == [i + 5 for i in TextTokenizer.load(FOLDER).encode(TEXT)] and theirs.decode(ids) == TEXT
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    assert theirs("<bos>a<image></image><eos>")["input_ids"][::4] == [0, 1]
