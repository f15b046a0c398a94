"""The notebooks of examples/ run to the end and show the values that are in the files."""

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from mmqk.store import read_metrics

ROOT = Path(__file__).parents[1]


def cells(notebook: Path, kind: str) -> list[str]:
    return ["".join(c["source"]) for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == kind]


def names_after(notebook: Path) -> dict[str, Any]:
    """Return the variables of a notebook after its last cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells(notebook, "code"):
        exec(compile(cell, notebook.name, "exec"), names)
    return names


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """Run the test in an empty folder examples/ next to the shipped pack, and check that it wrote nothing into
    examples/."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "reports/examples").mkdir(parents=True)
    shutil.copy(ROOT / "reports/examples/demo.zip", tmp_path / "reports/examples")
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    matplotlib.use("agg")
    yield
    matplotlib.pyplot.close("all")
    assert list((tmp_path / "examples").iterdir()) == []


@pytest.mark.usefixtures("examples")
def test_reading_a_grid_gives_the_verdicts_of_the_page():
    names = names_after(ROOT / "examples/read_a_grid.ipynb")
    assert len(names["runs"]) == 14 and len(names["axes"][0].lines) == 2
    table = names["verdicts"].set_index("claim")
    shipped = {v["claim"]: v for v in json.loads((ROOT / "reports/examples/demo/verdicts.json").read_text())}
    assert table["verdict"].to_dict() == {claim: v["verdict"] for claim, v in shipped.items()}
    assert table.at["C2", "effect"] == shipped["C2"]["effect"]
    assert (names["table"].loc[3].iloc[-1]["mixed"] / names["table"].loc[3].iloc[-1]["mixed-qk"]) > 2


@pytest.mark.parametrize("name", ["watch_your_lightning_model", "watch_a_hugging_face_model"])
@pytest.mark.usefixtures("examples")
def test_watching_shows_the_numbers_of_the_run_folder(name):
    if "hugging_face" in name:
        pytest.importorskip("transformers")
    names = names_after(ROOT / f"examples/{name}.ipynb")
    lines = read_metrics(Path(names["out"]) / "metrics.jsonl")
    table = names["table"][names["table"]["step"] == lines[-1]["step"]]
    for row in table.itertuples():
        parts = [row.metric, row.modality, *([] if row.metric.startswith("final") else [f"layer{row.layer:02d}"])]
        assert row.value == lines[-1]["/".join(parts)]
    assert {"text", "image", "image-text"} <= set(table["modality"]) and set(table["layer"].dropna()) == {0, 1, 2}


def test_the_minimal_example_prints_logits_that_qk_norm_bounds(capsys):
    """At step 0 all gains are 1, so with QK-Norm no logit exceeds the root of head_dim 16 (Cauchy-Schwarz)."""
    minimal = runpy.run_path(str(ROOT / "examples/minimal.py"))
    minimal["main"](["--steps", "2", "--every", "1", "--documents", "16", "--batch-size", "8"])
    logits = [float(value) for value in re.findall(r"largest logit/\w+ ([\d.]+)", capsys.readouterr().out)]
    none, rms = logits[:6], logits[6:]
    assert len(rms) == 6 and max(rms[:2]) <= 4.0 < max(none[:2])
