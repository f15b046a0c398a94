"""The tokenizer that an export writes next to the model."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from mmqk.data.tokenizers.files import TextTokenizer, tokenizers_hash
from mmqk.interop.folders import tokenizer_files

FOLDER = Path(__file__).parents[2] / "data/tokenizers"
TEXT = "Hello w\u00f6rld, a red moon \u263e 12"


@pytest.mark.parametrize("missing", ["text.json", "image.safetensors"])
def test_a_folder_that_lacks_a_file_gives_a_sentence(tmp_path, missing):
    shutil.copytree(FOLDER, tmp_path / "some")
    recorded = tokenizers_hash(FOLDER)
    assert tokenizer_files(str(tmp_path / "some"), recorded)[0]
    (tmp_path / "some" / missing).unlink()
    files, said = tokenizer_files(str(tmp_path / "some"), recorded)
    assert not files and "does not have the tokenizers of the run" in said


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
