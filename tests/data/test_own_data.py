"""Run the commands of the README section on your own data, with shards in img2dataset's layout."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmqk.cli import main
from mmqk.data.tokens.folder import open_tokens
from mmqk.store import cli_main, read_metrics
from tests.data.tars import write_samples

REPO = Path(__file__).resolve().parents[2]
WORDS = "a red bicycle leans on an old wall near the river while two people walk their dog past it".split()  # noqa: SIM905
# Options that make a command small enough for a test; its other arguments are those of the README.
SMALLER = {
    "data tokenize": ["--workers=0"],
    "inspect": ["--sequences=2", "--tokens=2000", "--data.val_sequences=4", "--monitor.probe_sequences=2"],
    "data tokenizers": ["--steps=2", "--codes=64"],
    "train": ["--trainer.max_steps=2", "--data.val_sequences=4", "--monitor.probe_sequences=2", "--quiet"],
}


def photograph(random: np.random.Generator, encoding: str) -> bytes:
    """Return an encoded image of random size, with smooth random colors."""
    height, width = random.integers(50, 300, 2)
    coarse = Image.fromarray(random.integers(0, 255, (6, 5, 3), dtype=np.uint8)).resize((width, height))
    buffer = io.BytesIO()
    coarse.save(buffer, encoding)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write four shards with 12 samples each, and link configs, data and the token cache.

    One of the 48 images is broken.
    """
    root = tmp_path_factory.mktemp("own")
    (root / "shards").mkdir()
    (REPO / ".cache").mkdir(exist_ok=True)
    for name in ("configs", "data", ".cache"):
        (root / name).symlink_to(REPO / name)
    random = np.random.default_rng(0)
    for shard in range(4):
        samples = []
        for i in range(12):
            key, field = f"{shard:05d}{i:04d}", ("jpg", "png", "webp")[i % 3]
            image = photograph(random, {"jpg": "JPEG"}.get(field, field.upper()))
            caption = " ".join(random.choice(WORDS, 12))
            if (shard, i) == (2, 5):
                image = image[: len(image) // 2]
            about = json.dumps({"url": f"https://example.org/{key}", "caption": caption, "width": 64}).encode()
            samples.append((key, {field: image, "txt": caption.encode(), "json": about}))
        write_samples(root / f"shards/{shard:05d}.tar", samples)
    return root


def commands() -> list[list[str]]:
    """Return the command lines of README's section on own data, then those of docs/data.md on own tokenizers."""
    sections = [
        (REPO / page).read_text().partition(head)[2].partition("\n## ")[0]
        for page, head in (("README.md", "## Own data"), ("docs/data.md", "## Tokenizers"))
    ]
    blocks = [block for section in sections for block in re.findall(r"```\n(.*?)```", section, re.DOTALL)]
    return [shlex.split(line) for block in blocks for line in block.strip().splitlines()]


@pytest.mark.slow
def test_the_commands_of_the_pages_work_as_they_stand(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    lines = commands()
    names = ["data tokenize", "inspect", "train", "data tokenizers", "data tokenize", "train"]
    for name, line in zip(names, lines, strict=True):
        assert line[: 1 + len(name.split())] == ["mmqk", *name.split()]
        assert cli_main(main)([*line[1:], *SMALLER[name]]) == 0, capsys.readouterr().err
    for name in ("mine", "better"):
        stores = open_tokens(folder / "tokens" / name)
        record = json.loads((folder / "tokens" / name / "tokens.json").read_text())
        assert len(stores["val"]) in (15, 16)  # one of the held-out images may be the broken one
        assert sum(map(len, stores.values())) == 47 and record["dropped"] == {"image cannot be decoded": 1}
    assert open_tokens(folder / "tokens/mine")["train"].image_tokens == 66
    assert open_tokens(folder / "tokens/better")["train"].image_tokens == 258
    page = re.sub(r"<[^>]+>", "", (folder / "reports/data/index.html").read_text())
    assert "bicycle" in page or "river" in page or "wall" in page
    runs = list((folder / "runs").rglob("metrics.jsonl"))
    assert sorted(run.parts[-3] for run in runs) == ["better", "mine"]  # the names of the data
    assert len(runs) == 2 and all(list(read_metrics(run))[-1]["step"] == 2 for run in runs)
