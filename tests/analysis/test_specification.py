"""Test the specification curve: the effect for each choice, compared with plain arithmetic on planted numbers."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mmqk.lab import load_study
from mmqk.lab.grid import load_grid
from mmqk.lab.page.page import write_report
from mmqk.lab.verdicts.specification import RUNS, specifications
from mmqk.store import UserError
from tests.analysis.fake_runs import Planted, write_grid

ROOT = Path(__file__).parents[2]
ALIKE = {"declared": "planted numbers"}


def study_of(folder, treated, control, seeds=5):
    runs = [
        ({"arm": arm, "seed": seed}, planted, {})
        for arm, of_seeds in (("treated", treated), ("control", control))
        for seed, planted in enumerate(of_seeds[:seeds])
    ]
    claim = {"id": "K", "treatment": "treated", "control": "control", "min_effect": 0.4055, "unchecked": ALIKE}
    grid = {
        "arms": {"treated": {}, "control": {}},
        "claims": [claim | {"status": "exploratory"}],
        "report": {"specification": ["K"]},
    }
    return load_study(write_grid(folder, grid, runs))


def test_the_effect_of_each_choice_is_plain_arithmetic(tmp_path):
    low = {"text": 0.02, "image": 0.03}
    treated = [Planted(60.0 + 4 * seed, spread=0, excess=low) for seed in range(5)]
    control = [Planted(20.0 + seed, spread=0, excess=low) for seed in range(5)]
    study = study_of(tmp_path, treated, control)
    made = {(one.metric, one.window, one.runs): one.effect for one in specifications(study)}
    assert {runs for *_, runs in made} == {"all"}  # no run diverged, and every loss is near its floor
    logs = [np.log([planted.logit for planted in arm]) for arm in (treated, control)]
    effect = made["largest_attention_logit", "last 3 probes", "all"]
    assert effect.value == pytest.approx(logs[0].mean() - logs[1].mean(), abs=1e-6)
    welch = stats.ttest_ind(*logs, equal_var=False).confidence_interval()
    pooled = stats.ttest_ind(*logs).confidence_interval()
    # The Welch interval if its standard error is larger, else the pooled interval.
    assert effect.of in ("two arms", "pooled")
    ends = tuple(welch if effect.of == "two arms" else pooled)
    assert (effect.low, effect.high) == pytest.approx(ends, abs=1e-6)
    steps, _ = study.runs[0].combined("attn_logit_absmax", np.max)
    runs = {(run.arm, run.seed): run.combined("attn_logit_absmax", np.max)[1] for run in study.runs}
    half = {key: np.log(of[steps >= 0.5 * steps[-1]]).mean() for key, of in runs.items()}
    means = [np.mean([half[arm, seed] for seed in range(5)]) for arm in ("treated", "control")]
    assert made["largest_attention_logit", "second half", "all"].value == pytest.approx(means[0] - means[1])
    # The control: a different window gives a different number.
    other = made["largest_attention_logit", "after warm-up", "all"].value
    assert other != pytest.approx(means[0] - means[1], abs=1e-3)


def test_runs_above_the_floor_or_diverged_are_excluded_by_name(tmp_path):
    low, high = {"text": 0.02, "image": 0.03}, {"text": 0.02, "image": 0.3}
    treated = [Planted(60.0, spread=0.1, excess=high if seed == 0 else low) for seed in range(5)]
    control = [Planted(20.0, spread=0.1, excess=low) for seed in range(4)]
    control.append(Planted(20.0, spread=0.1, excess=low, diverges=140, validated=False))
    made = specifications(study_of(tmp_path, treated, control))
    seeds = {one.runs: one.effect.n for one in made if one.metric == "largest_attention_logit"}
    assert list(RUNS) == list(seeds)
    assert seeds["all"] == 5 and seeds["completed"] == 4 and list(seeds.values())[2] in (3, 4)


def test_the_page_has_the_figure_and_every_number(tmp_path):
    arm = [Planted(60.0, spread=0.1) for _ in range(3)]
    study_of(tmp_path / "runs", arm, [Planted(20.0, spread=0.1) for _ in range(3)])
    write_report(tmp_path / "runs", tmp_path / "page")
    rows = list(csv.DictReader((tmp_path / "page/specification.csv").open()))
    logits = [row for row in rows if row["metric"] == "largest_attention_logit"]
    assert [row["window"] for row in logits] == ["last 3 probes", "second half", "after warm-up"]
    assert float(logits[0]["effect"]) == pytest.approx(math.log(3), abs=0.3)
    pages = [(tmp_path / "page" / name).read_text(encoding="utf-8") for name in ("index.html", "report.md")]
    assert f"Of {len(rows)} specifications" in pages[1] and 'id="fig-specification"' in pages[0]
    assert (tmp_path / "page/figures/specification.svg").exists()


def test_the_table_of_an_earlier_report_is_removed(tmp_path, without_figures):
    study_of(tmp_path / "runs", [Planted(60.0)] * 3, [Planted(20.0)] * 3)
    write_report(tmp_path / "runs", tmp_path / "page")
    assert (tmp_path / "page/specification.csv").exists()
    write_report(next((tmp_path / "runs").glob("control-*")), tmp_path / "page")
    assert not (tmp_path / "page/specification.csv").exists()


def test_a_grid_without_it_has_no_such_figure_and_an_unknown_claim_is_refused(tmp_path):
    text = (ROOT / "configs/ablations/demo.yaml").read_text()
    text = text.replace("../demo.yaml", str(ROOT / "configs/demo.yaml"))
    (tmp_path / "g.yaml").write_text(text)
    assert "specification" not in load_grid(tmp_path / "g.yaml").raw["report"]
    for wrong in ("C99", "P1"):
        named = text.replace("  headline: C2", f"  headline: C2\n  specification: [{wrong}]")
        (tmp_path / "g.yaml").write_text(named)
        with pytest.raises(UserError, match=f"'{wrong}' is not a claim with a treatment and a control"):
            load_grid(tmp_path / "g.yaml")
