"""Figures in the form of the papers' figures: their numbers, and the runs for which they are drawn."""

import csv
import io
import json
import math

import numpy as np
import pytest

from mmqk.lab import load_study
from mmqk.lab.grid.claims import FIGURE_KINDS
from mmqk.lab.metrics import extrapolate
from mmqk.lab.metrics.scaling import fit_quadratic
from mmqk.lab.page.figures.draw import Brush
from mmqk.lab.page.figures.files import _legend_columns
from mmqk.lab.page.figures.interactive import chart_data
from mmqk.lab.page.figures.papers import KINDS, paper_figures
from mmqk.lab.page.figures.shapes import Key
from mmqk.lab.page.figures.sweep_figures import logit_by_size, loss_and_logit_by_lr, lr_sensitivity
from mmqk.lab.page.figures.sweeps import sweeps
from mmqk.store import UserError
from tests.analysis.fake_runs import write_demo
from tests.report.report_runs import BASE, RATES, START, WIDTHS, planted_logit, write, write_sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Load a study of two families over learning rate and width, with one seed."""
    return load_study(write_sweep(tmp_path_factory.mktemp("sweep") / "sweep", seeds=(0,)))


def rows_of(figure):
    return list(csv.DictReader(io.StringIO(figure.csv())))


def parameters(width):
    """Return the number of parameters of 2 layers: attention has 4 d², and a gated MLP has width 8/3 d, rounded up to
    a multiple of 16."""
    return 2 * (4 * width**2 + 3 * width * 16 * math.ceil(8 * width / 3 / 16))


def test_quadratic_is_least_squares_in_logs():
    sizes, values = [1e5, 4e5, 2e6, 9e6], [3.0, 8.0, 50.0, 90.0]
    x, y = np.log(sizes), np.log(values)
    powers = np.stack([x**2, x, np.ones(4)], axis=1)
    brute = np.linalg.solve(powers.T @ powers, powers.T @ y)
    at = np.array([5e4, 1e6, 5e7])
    expected = np.exp(np.polyval(brute, np.log(at)))
    assert fit_quadratic(sizes, values)(at) == pytest.approx(expected, rel=1e-6)
    # Three points determine a quadratic. The fourth point is not on it.
    through = fit_quadratic(sizes[:3], values[:3])(np.array(sizes))
    assert through[:3] == pytest.approx(values[:3]) and through[3] != pytest.approx(values[3], rel=0.1)


def test_sweeps_are_runs_that_differ_in_rate_and_size_alone(sweep, tmp_path):
    found = {s.label: s for s in sweeps(sweep)}
    assert set(found) == {"no QK-Norm", "QK-Norm"}
    for one in found.values():
        assert one.rates == list(RATES) and one.sizes == [parameters(w) for w in WIDTHS]
        assert {run.setting("model.qk_norm.kind") for run in one.runs} in ({"none"}, {"rms"})
    # Runs without a grid are also a sweep; runs with two learning rates are not.
    for number, rate in enumerate(RATES):
        write(tmp_path / "plain" / f"r{number}", settings={"optim.lr": rate})
        if number < 2:
            write(tmp_path / "two" / f"r{number}", settings={"optim.lr": rate})
    assert [s.rates for s in sweeps(load_study(tmp_path / "plain"))] == [list(RATES)]
    assert sweeps(load_study(tmp_path / "two")) == []


def test_final_losses_by_rate_are_those_of_the_files_capped_at_initialization(sweep):
    figure = lr_sensitivity(sweep, (), "Wortsman Fig. 1")
    points = {
        (row["run"], row["x_is"]): row
        for row in rows_of(figure)
        if row["statistic"] == "final_loss/text" and row["run"]
    }
    assert len(points) == 2 * len(RATES) * len(WIDTHS)
    capped = 0
    for run in sweep.runs:
        row = points[run.name, "optim.lr"]
        last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
        died = run.status.status == "diverged"
        capped += died
        assert float(row["x"]) == run.setting("optim.lr")
        assert float(row["value"]) == pytest.approx(
            START["text"] if died else last["val_loss/text"], rel=1e-5
        )
    assert capped == 2


def test_sensitivity_is_the_mean_above_the_best_rate(sweep):
    figure = lr_sensitivity(sweep, (), "Wortsman Fig. 1")
    drawn = [
        (float(row["x"]), float(row["value"]))
        for row in rows_of(figure)
        if row["statistic"] == "lr_sensitivity/text"
    ]
    expected = []
    for qk in (False, True):
        for number, width in enumerate(WIDTHS):
            losses = [4.5 - 0.2 * number + abs(math.log10(lr / 0.01)) * (0.2 if qk else 0.5) for lr in RATES]
            if not qk and width >= 128:
                losses[-1] = START["text"]
            expected.append((parameters(width), sum(loss - min(losses) for loss in losses) / len(losses)))
    assert np.array(sorted(drawn)) == pytest.approx(np.array(sorted(expected)), rel=1e-4)
    assert f"{expected[3][1]:.2f} (no QK-Norm)" in figure.reading and "1.58M parameters" in figure.reading


def test_largest_size_is_held_out_of_the_fit(sweep, tmp_path):
    figure = logit_by_size(sweep, (), "Wortsman Fig. 9")
    rows = rows_of(figure)
    fits = [r for r in rows if r["statistic"].endswith("(fit)")]
    largest = parameters(WIDTHS[-1])
    ends = sorted(
        float(r["value"]) for r in fits if float(r["parameters"]) == pytest.approx(largest, rel=1e-4)
    )
    metric = []
    for one in sweeps(sweep):
        found, why = extrapolate([run for run in one.runs])
        assert not why
        metric += [e.predicted for e in found]
    # With one seed, the fitted curve ends at the prediction behind `logit_extrapolation`, the metric of claims.
    assert ends == pytest.approx(sorted(metric), rel=1e-4)
    assert "predicted" in figure.reading and "held out" in figure.reading
    three = load_study(write_sweep(tmp_path / "three", seeds=(0,), widths=WIDTHS[:3]))
    assert logit_by_size(three, (), "") is None and lr_sensitivity(three, (), "") is not None


def test_a_line_without_an_arm_is_named_by_what_it_is(sweep):
    """A median over the runs of a sweep belongs to no arm."""
    figure = loss_and_logit_by_lr(sweep, (), "Wortsman Fig. 2")
    rows = json.loads(chart_data(sweep, Brush.of(sweep), figure))["rows"]
    names = {line["name"] for row in rows for panel in row for line in panel["lines"]}
    assert "median over seeds" in names and not [name for name in names if name.startswith(",")]
    assert f"QK-Norm, lr {RATES[0]}, d_model {WIDTHS[0]}, seed 0" in names  # the control: the point of a run


def test_a_caption_has_the_number_of_configurations_if_not_all_are_drawn(tmp_path):
    for number in range(4):
        for rate in RATES:
            settings = {"optim.lr": rate, "model.residual_dropout": number / 10}
            write(tmp_path / f"d{number}" / f"r{rate}", settings=settings)
        if number == 2:
            assert "configurations" not in lr_sensitivity(load_study(tmp_path), (), "").caption
    figure = lr_sensitivity(load_study(tmp_path), (), "")
    assert "Shown: 3 of 4 configurations." in figure.caption and "One point per run (12)" in figure.caption
    assert "configurations" not in loss_and_logit_by_lr(load_study(tmp_path), (), "").caption  # all 4 are drawn


def test_planted_logits_are_what_the_files_hold(sweep):
    run = next(r for r in sweep.runs if r.family == "qk" and r.setting("model.d_model") == 64)
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    expected = planted_logit(64, run.setting("optim.lr"), True)
    assert last["attn_logit_absmax/text-text/layer00"] == pytest.approx(expected)


def likes(study):
    return [figure.like for figure in paper_figures(study)]


def test_figures_stand_where_the_runs_have_them(sweep, tmp_path):
    assert likes(sweep) == [
        "Chameleon Fig. 5b", "Chameleon Fig. 6a", "Wortsman Fig. 1", "Wortsman Fig. 2", "Wortsman Fig. 9",
    ]  # fmt: skip
    assert likes(load_study(write_demo(tmp_path / "demo"))) == ["Chameleon Fig. 5b", "Chameleon Fig. 6b"]
    place = {"model.pre_norm": False, "model.post_norm": True}
    for name, settings in {
        "a": {}, "b": {"model.residual_dropout": 0.1}, "c": place, "d": {**place, "model.residual_dropout": 0.1},
    }.items():  # fmt: skip
        write(tmp_path / "square" / name, settings=settings)
    figures = {f.like: f for f in paper_figures(load_study(tmp_path / "square"))}
    assert set(figures) == {"Chameleon Fig. 5c", "Chameleon Fig. 6c"}
    assert figures["Chameleon Fig. 6c"].arms == ("a", "b", "c", "d")
    assert set(figures["Chameleon Fig. 5c"].arms) in ({"a", "b"}, {"c", "d"})
    # Arms that also differ in a second field are not compared.
    qk = {"model.qk_norm": {**BASE["model"]["qk_norm"], "kind": "rms"}}
    write(tmp_path / "apart" / "plain")
    write(tmp_path / "apart" / "qk", settings={**qk, "optim.lr": 0.02})
    assert likes(load_study(tmp_path / "apart")) == []
    write(tmp_path / "apart" / "qk2", settings=qk)
    assert likes(load_study(tmp_path / "apart")) == ["Chameleon Fig. 5b"]


def test_selection_runs_do_not_choose_the_runs_of_a_figure(tmp_path):
    """A selection run without QK-Norm at the learning rate of the others is not the run without QK-Norm that the
    figure of QK-Norm needs."""
    entries = []

    def likes_with(arm, family, role, rate, kind):
        settings = {"optim.lr": rate, "model.qk_norm.kind": kind}
        seed = 8 if role == "selection" else 1
        write(tmp_path / arm / f"seed{seed}", seed=seed, settings=settings)
        folder = f"{arm}/seed{seed}"
        entries.append({"arm": arm, "seed": seed, "folder": folder, "id": arm, "family": family, "role": role})
        grid = {"name": "best", "arms": {"plain": {}, "again": {}, "rms": {}, "l2": {}}}
        (tmp_path / "ablation.json").write_text(json.dumps({"name": "best", "grid": grid, "runs": entries}))
        return {figure.like: figure.arms for figure in paper_figures(load_study(tmp_path))}

    likes_with("plain-lr0.1", "plain", "selection", 0.1, "none")
    likes_with("plain", "plain", "verdict", 0.01, "none")
    likes_with("rms", "rms", "verdict", 0.1, "rms")
    assert likes_with("l2", "l2", "verdict", 0.1, "l2") == {}
    assert likes_with("again", "again", "verdict", 0.1, "none") == {"Chameleon Fig. 5b": ("again", "rms", "l2")}


def asked(tmp_path, figures, **kwargs):
    def change(grid):
        grid["report"]["figures"] = figures

    return load_study(write_demo(tmp_path / "demo", change=change, **kwargs))


def test_the_kinds_that_a_grid_may_name_are_those_that_can_be_drawn():
    assert sorted(FIGURE_KINDS) == sorted(KINDS)


def test_a_figure_without_numbers_is_left_out_while_runs_are_to_come(tmp_path):
    entry = {"kind": "training_loss", "arms": ["mixed-qk"], "like": "Some Fig. 1"}
    assert "Some Fig. 1" in likes(asked(tmp_path / "whole", [entry]))
    study = asked(tmp_path / "missing", [entry, {"kind": "output_norm"}], leave_out=("mixed-qk",))
    assert "Some Fig. 1" not in likes(study) and likes(study)[0] == "Chameleon Fig. 5a"
    study = asked(tmp_path / "unfinished", [{"kind": "logit_by_size"}])
    status = next(study.folder.glob("mixed-qk-*/seed1/status.json"))
    status.write_text(status.read_text().replace("completed", "running"))
    assert "Wortsman Fig. 9" not in likes(load_study(study.folder))
    status.write_text(status.read_text().replace("running", "completed"))
    with pytest.raises(UserError, match="no numbers for logit_by_size"):
        paper_figures(load_study(study.folder))


def test_a_grid_names_its_figures(tmp_path):
    entry = {"kind": "training_loss", "arms": ["high-pre", "high-post"], "like": "Chameleon Fig. 6c"}
    figures = paper_figures(asked(tmp_path, [entry, {"kind": "output_norm"}]))
    assert [f.like for f in figures[:2]] == ["Chameleon Fig. 6c", "Chameleon Fig. 5a"]
    assert figures[0].arms == ("high-pre", "high-post") and "1 of 1 diverged" in figures[0].reading
    assert [f.name for f in figures[:2]] == ["chameleon-fig-6c", "chameleon-fig-5a"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"kind": "pie"}, "kind 'pie' is unknown: use one of output_norm"),
        ("hero", "figures.0. is \"hero\" and not an object"),
        ({"kind": "training_loss", "arms": ["nobody"]}, "names the arm 'nobody'"),
        ({"kind": "logit_by_size"}, "no numbers for logit_by_size"),
    ],
)
def test_a_wrong_figure_is_one_sentence(tmp_path, entry, words):
    with pytest.raises(UserError, match=words) as raised:
        paper_figures(asked(tmp_path, [entry]))
    assert "\n" not in str(raised.value)


def test_a_legend_has_as_many_columns_as_fit():
    short, long = Key("an arm", "black"), Key("a claim of seventy letters" * 3, "black")
    assert [_legend_columns(keys, 10.4) for keys in ([short] * 3, [long, short], [long] * 2, [])] == [3, 3, 1, 3]
