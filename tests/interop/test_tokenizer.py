"""The tokenizer that an export writes next to the model."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, processors

from mmqk.data.tokenizers.files import TextTokenizer, tokenizers_hash
from mmqk.interop.folders import tokenizer_files

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
