"""The numbers of figures are those of the runs, in their CSV and in the charts of the page."""

import csv
import io
import json
import math

import numpy as np
import pytest

from mmqk.lab.page.drawing import Drawing, arm_colors, first_arms
from mmqk.lab.page.figures import ALL_POINTS, FEWEST, binned, by_layer, hero, layer_lines, points_a_line, thinned
from mmqk.lab.page.sweeps import learning_rates, sweeps
from mmqk.lab.study import load_study
from tests.lab.fake_runs import LAYERS, START, Planted, write_demo, write_run
from tests.lab.page.report_runs import RATES, WIDTHS, planted_loss, write_sweep
from tests.lab.small_runs import small_run


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return the folder of the demonstration's runs, and its study."""
    folder = write_demo(tmp_path_factory.mktemp("demo") / "demo")
    return folder, load_study(folder)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Load a study of two families over learning rate and width, with one seed."""
    return load_study(write_sweep(tmp_path_factory.mktemp("sweep") / "sweep", seeds=(0,)))


def rows_of(figure):
    return list(csv.DictReader(io.StringIO(figure.csv())))


# Curves of runs ----------------------------------------------------------------------------------------------------


def test_binned_is_the_mean_of_its_steps():
    steps, values = np.arange(1, 8), np.array([1.0, 2, 3, 4, 5, np.nan, 8])
    at, means = binned((steps, values), 3)
    assert at.tolist() == [2, 4.5, 7]
    assert means.tolist() == [2, 4.5, 8]


def test_thinning_keeps_spikes_and_ends():
    rng = np.random.default_rng(0)
    steps, values = np.arange(5000), rng.normal(size=5000)
    values[1234], values[4321] = 50.0, -50.0
    at, kept = thinned((steps, values), 60)
    assert len(at) <= 60 and at[0] == 0 and at[-1] == 4999 and (np.diff(at) > 0).all()
    assert {1234, 4321} <= set(at.tolist()) and (kept == values[at]).all()
    same = thinned((steps[:50], values[:50]), 60)
    assert (same[1] == values[:50]).all()
    # The negative control: taking every 100th value loses the spike.
    assert 50.0 not in values[::100]
    assert points_a_line(1) == points_a_line(100) == 120 and points_a_line(10_000) == FEWEST
    assert points_a_line(300) * 300 <= ALL_POINTS


def test_plotted_numbers_are_those_of_the_runs(demo):
    runs, study = demo
    rows = rows_of(hero(study, "hero", "", first_arms(study)))
    logits = {
        (row["arm"], row["seed"]): float(row["value"])
        for row in rows
        if row["statistic"] == "attn_logit_absmax/text" and row["step"] == "200"
    }
    for seed in (0, 1, 2):
        lines = (runs / "mixed-0000000000" / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()
        expected = max(v for k, v in json.loads(lines[-1]).items() if k.startswith("attn_logit_absmax/text-"))
        assert logits["mixed", str(seed)] == pytest.approx(expected, rel=1e-5)
    assert logits["mixed", "median"] == pytest.approx(60.0, rel=1e-5)
    assert {row["arm"] for row in rows} == {"mixed", "mixed-qk", "image-off"}
    assert {row["arm"] for row in rows if row["statistic"] == "attn_logit_bound"} == {"mixed-qk"}


def test_charts_have_the_numbers_of_the_csv(demo):
    study = demo[1]
    figure = hero(study, "hero", "", first_arms(study))
    panel, *_ = json.loads(Drawing(study, arm_colors(study), figure).chart())
    line = next(li for li in panel["lines"] if (li["seed"], li["group"]) == ("seed 1", study.label("mixed")))
    points = [
        (float(row["step"]), float(row["value"]))
        for row in rows_of(figure)
        if (row["statistic"], row["arm"], row["seed"]) == ("loss/text", "mixed", "1")
    ]
    drawn = list(zip(line["at"], line["is"], strict=True))
    assert len(drawn) > 20 and np.array(drawn) == pytest.approx(np.array(points), rel=1e-4)


@pytest.mark.parametrize("seeds", [1, 2])
def test_lines_of_layers_are_medians_of_the_layers_that_have_attention(tmp_path, seeds):
    for seed in range(seeds):
        logits = {layer: {step: v + step + 2 * seed for step in (0, 50, 100)} for layer, v in ((3, 10.0), (7, 300.0))}
        series = {f"attn_logit_absmax/text-text/layer{layer:02d}": values for layer, values in logits.items()}
        small_run(tmp_path / f"hybrid/seed{seed}", {"loss/text": {100: 3.0}, **series}, seed=seed)
    study = load_study(tmp_path)
    lines = layer_lines(study, "hybrid", "text")
    assert [line.layer for line in lines] == [3, 7]
    assert [line.y.tolist() for line in lines] == [
        [v + step + seeds - 1 for step in (0, 50, 100)] for v in (10.0, 300.0)
    ]
    assert [row["layer"] for row in rows_of(by_layer(study))] == ["3"] * 3 + ["7"] * 3
    assert layer_lines(study, "hybrid", "audio") == []


# Sweeps ------------------------------------------------------------------------------------------------------------


def parameters(width):
    """Return the number of parameters: in each layer attention has 4 d², and a gated MLP has width 8/3 d, rounded up
    to a multiple of 16."""
    return LAYERS * (4 * width**2 + 3 * width * 16 * math.ceil(8 * width / 3 / 16))


def rates_of(sweep):
    return sorted({run.setting("optim.lr") for run in sweep.runs})


def test_sweeps_are_runs_that_differ_in_rate_and_size_alone(sweep, tmp_path):
    found = {s.label: s for s in sweeps(sweep)}
    assert set(found) == {"no QK-Norm", "QK-Norm"}
    for one in found.values():
        assert rates_of(one) == list(RATES) and one.sizes == [parameters(w) for w in WIDTHS]
        assert {run.setting("model.qk_norm.kind") for run in one.runs} in ({"none"}, {"rms"})
    # Runs without a grid are also a sweep; runs with two learning rates are not.
    for number, rate in enumerate(RATES):
        for folder in ("plain", "two")[: 2 if number < 2 else 1]:
            write_run(tmp_path / folder / f"r{number}", Planted(9.0), settings={"optim.lr": rate})
    assert [rates_of(s) for s in sweeps(load_study(tmp_path / "plain"))] == [list(RATES)]
    assert sweeps(load_study(tmp_path / "two")) == []


def test_final_losses_by_rate_are_those_of_the_files_capped_at_initialization(tmp_path):
    study = load_study(write_sweep(tmp_path / "sweep", seeds=(0,), widths=WIDTHS[1:]))
    rows = [row for row in rows_of(learning_rates(study)) if row["run"]]
    points = {row["run"]: row for row in rows if row["statistic"] == "final_loss/text"}
    assert len(points) == len(study.runs)
    capped = 0
    for run in study.runs:
        last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
        died = run.status.status == "diverged"
        capped += died
        assert float(points[run.name]["optim.lr"]) == run.setting("optim.lr")
        expected = START["text"] if died else last["val_loss/text"]
        assert float(points[run.name]["value"]) == pytest.approx(expected, rel=1e-5)
    assert capped == 2


def test_sensitivity_is_the_mean_above_the_best_rate(sweep):
    drawn = {
        (float(row["parameters"]), float(row["value"]))
        for row in rows_of(learning_rates(sweep))
        if row["statistic"] == "lr_sensitivity/text"
    }
    expected = []
    for qk in (False, True):
        for number, width in enumerate(WIDTHS):
            losses = [planted_loss(number, lr, qk) for lr in RATES]
            if not qk and width >= 128:
                losses[-1] = START["text"]
            expected.append((parameters(width), sum(loss - min(losses) for loss in losses) / len(losses)))
    assert np.array(sorted(drawn)) == pytest.approx(np.array(sorted(expected)), rel=1e-4)
