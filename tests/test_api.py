"""`mmqk.load_runs` gives the numbers of metrics.jsonl, run.json and verdicts.json."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import mmqk
from mmqk.lab.study import load_study
from mmqk.lab.verdicts.judge import judge
from tests.lab.fake_runs import write_demo

PAGE = Path(__file__).parents[1] / "docs/python.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("api") / "demo")


@pytest.fixture(scope="module")
def runs(folder):
    return mmqk.load_runs(folder)


def test_metrics_are_the_lines_of_the_file(runs, folder):
    table = runs.metrics()
    run = next(iter(runs))
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    written = {(line["step"], tag): float(value) for line in lines for tag, value in line.items() if tag != "step"}
    mine = table[table["run"] == run.name]
    read = {}
    for row in mine.itertuples():
        parts = [row.metric, *([] if pd.isna(row.modality) else [row.modality])]
        parts += [] if pd.isna(row.layer) else [f"layer{row.layer:02d}"]
        read[row.step, "/".join(parts)] = row.value
    assert read.keys() == written.keys() and len(mine) == len(written)
    assert all(read[k] == v or (math.isnan(v) and math.isnan(read[k])) for k, v in written.items())
    assert set(mine["arm"]) == {run.arm} and set(mine["seed"]) == {run.seed}
    assert set(table["run"]) == {run.name for run in runs}
    chosen = runs.metrics("loss")
    assert set(chosen["metric"]) == {"loss"} and len(chosen) == (table["metric"] == "loss").sum() > 0
    assert list(runs.metrics("no such").columns) == list(table.columns) and runs.metrics("no such").empty


def test_the_summary_has_a_row_per_run(runs, folder):
    summary = runs.summary().set_index("run")
    assert len(summary) == len(runs) == len(list(folder.rglob("run.json")))
    for run in runs:
        status = json.loads((run.path / "status.json").read_text())
        assert (summary.at[run.name, "status"], summary.at[run.name, "step"]) == (status["status"], status["step"])
        assert summary.at[run.name, "id"] == json.loads((run.path / "run.json").read_text())["id"]
    assert summary.loc[summary["arm"] == "mixed", "largest_attention_logit"].between(40, 90).all()
    assert not summary.loc[summary["arm"] == "mixed-qk", "largest_attention_logit"].between(40, 90).any()
    assert summary["final_loss/image"].notna().any()


def test_the_summary_names_damaged_metrics(runs, tmp_path):
    first = next(iter(runs))
    shutil.copytree(first.path, tmp_path / "whole")
    shutil.copytree(first.path, tmp_path / "damaged")
    (tmp_path / "damaged/metrics.jsonl").write_bytes(b"\x80\x02 not JSON")
    notes = mmqk.load_runs(tmp_path).summary().set_index("arm")["notes"]
    assert "metrics.jsonl" in notes["damaged"] and "metrics.jsonl" not in notes["whole"]


def test_the_verdicts_are_those_of_the_report(runs, folder):
    table = runs.verdicts()
    records = [v.as_record() for v in judge(load_study(folder))]
    assert list(table["claim"]) == [r["claim"] for r in records]
    for row, record in zip(table.itertuples(), records, strict=True):
        assert row.verdict == record["verdict"]
        assert row.n == len(record["runs"])
        assert pd.isna(row.effect) if record["effect"] is None else row.effect == record["effect"]
        if record["interval"]:
            assert [row.low, row.high] == record["interval"]
    assert table["low"].notna().any()


def test_importing_mmqk_imports_no_library():
    code = (
        "import sys, mmqk; heavy = {'pandas', 'numpy', 'torch', 'matplotlib'} & set(sys.modules); assert not heavy;"
        "mmqk.load_runs; assert 'pandas' in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_code_of_the_page_runs(folder, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/demo").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    exec(code, {})
