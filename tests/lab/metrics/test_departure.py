"""Check the step at which a planted series leaves the range of healthy runs. Check the table of such steps that a
report has for a planted grid."""

import json
import math

import pytest

from mmqk.lab import load_study
from mmqk.lab.metrics.departure import departures
from mmqk.lab.page.page import write_report
from mmqk.lab.verdicts.failure_order import failure_order
from tests.lab.small_runs import config, small_run

STEPS = range(100, 2001, 100)
CONFIG = config(steps=2000) | {"monitor": {"every_n_steps": 100}}


def run_of(folder, seed=0, leaves=None, status="completed", returns=False, spike_at=0):
    """Return a run whose image entropy in layer 1 falls from step ``leaves``; healthy values are 2.0 to 2.3."""
    entropy = {s: 2.0 + seed / 10 for s in STEPS}
    for step in STEPS:
        if leaves and step >= leaves and not (returns and step == STEPS[-1]):
            entropy[step] = 1.0
    loss = {s: 5.0 - s / 1000 + seed / 100 for s in range(1, 2001)}
    if status == "diverged":
        entropy, loss = ({s: v for s, v in series.items() if s <= 1800} for series in (entropy, loss))
    grad_norm = {s: 50.0 if spike_at and s >= spike_at else 1.0 + seed / 10 for s in loss}
    series = {
        "attn_entropy/image/layer01": entropy,
        "attn_entropy/image/layer00": {s: 2.5 + seed / 10 for s in entropy},
        "loss/text": loss,
        "grad_norm": grad_norm,
    }
    return small_run(folder, series, status=status, config=CONFIG, seed=seed)


def found(run, healthy):
    return [(*key, d.layer, d.step) for key, d in departures(run, healthy).items() if d]


@pytest.fixture
def healthy(tmp_path):
    return [run_of(tmp_path / f"healthy{seed}", seed) for seed in range(4)]


def test_the_step_from_which_a_series_stays_outside(tmp_path, healthy):
    failing = run_of(tmp_path / "failing", leaves=700, status="diverged", spike_at=1450)
    # The windows of the gradient norm end at probes: it is high from the window of steps 1401 to 1500 on.
    assert found(failing, healthy) == [("attn_entropy", "image", 1, 700), ("grad_norm", "", None, 1500)]
    # The control: three probes are too few.
    short = run_of(tmp_path / "short", leaves=700, status="diverged", spike_at=1550)
    assert [statistic for statistic, *_ in found(short, healthy)] == ["attn_entropy"]


def test_a_series_that_returns_or_stays_within_the_widened_range_has_not_left(tmp_path, healthy):
    assert found(run_of(tmp_path / "back", leaves=700, returns=True), healthy) == []
    # Entropies of the healthy runs are 2.0 to 2.3, so the widened range is 1.7 to 2.6.
    assert found(run_of(tmp_path / "inside", seed=5), healthy) == []
    assert ("attn_entropy", "image", 1, 100) in found(run_of(tmp_path / "outside", seed=7), healthy)
    assert [found(run, [h for h in healthy if h is not run]) for run in healthy] == [[]] * 4


def test_a_value_that_is_not_finite_is_outside_and_no_range(tmp_path, healthy):
    for name, value in (("nan", math.nan), ("inf", math.inf)):
        steps = {s: 2.0 if s < 700 else value for s in STEPS}
        broken = small_run(tmp_path / name, {"final_norm/text": steps}, config=CONFIG)
        calm = [
            small_run(tmp_path / f"{name}{k}", {"final_norm/text": dict.fromkeys(STEPS, 2.0 + k / 10)}, config=CONFIG)
            for k in range(4)
        ]
        assert found(broken, calm) == [("final_norm", "text", None, 700)]
        large = small_run(tmp_path / f"{name}large", {"final_norm/text": dict.fromkeys(STEPS, 50.0)}, config=CONFIG)
        # One healthy run that breaks does not make every value lie inside.
        assert found(large, [*calm, broken]) == [("final_norm", "text", None, 100)]


def test_fewer_than_three_healthy_runs_with_the_series_are_no_range(tmp_path, healthy):
    failing = run_of(tmp_path / "failing", leaves=700, status="diverged")
    without = small_run(tmp_path / "without", {"loss/text": {s: 5.0 for s in range(1, 2001)}}, config=CONFIG)
    assert found(failing, [*healthy[:3], without]) == found(failing, healthy[:3]) != []
    assert found(failing, [*healthy[:2], without]) == []


def test_a_loss_is_compared_only_with_runs_that_train_it(tmp_path):
    low, high = ({s: value for s in range(1, 2001)} for value in (5.0, 20.0))
    both = [
        small_run(tmp_path / f"both{k}", {"loss": low, "loss/text": low, "loss/image": low}, config=CONFIG)
        for k in range(3)
    ]
    losses = {"loss": low, "loss/text": high, "loss/image": high}
    off = CONFIG | {"loss": {"weights": {"image": 0.0}}}
    assert departures(small_run(tmp_path / "off", losses, config=off), both).keys() == {("loss", "text")}
    # The control: with a trained image loss all three are compared.
    assert departures(small_run(tmp_path / "on", losses, config=CONFIG), both).keys() == {
        ("loss", ""), ("loss", "text"), ("loss", "image")
    }  # fmt: skip


def planted_grid(tmp_path, healthy_seeds=4):
    """Write a grid. `bad` leaves the healthy range at steps 700 and 800 (by seed) and fails, `calm` stays in it, and
    `other` leaves it at step 900 and survives."""
    folder = tmp_path / "grid"
    runs = []
    for arm, seeds in (("bad", 2), ("calm", healthy_seeds), ("other", 1)):
        for seed in range(seeds):
            leaves = {"bad": 700 + 100 * seed, "other": 900}.get(arm)
            run_of(folder / arm / f"seed{seed}", seed, leaves, "diverged" if arm == "bad" else "completed",
                   spike_at=1450 if arm == "bad" else 0)  # fmt: skip
            runs.append({"arm": arm, "seed": seed, "folder": f"{arm}/seed{seed}"})
    basic = {"metric": "time_of_failure", "min_effect": 0.1, "statement": "s", "status": "exploratory"}
    # Claim `a` names the failing arm as its control.
    claims = [basic | {"id": "a", "direction": "greater", "treatment": "calm", "control": "bad"},
              basic | {"id": "b", "direction": "less", "treatment": "bad", "control": "other"}]  # fmt: skip
    grid = {"name": "grid", "arms": {"bad": {}, "calm": {}, "other": {}}, "claims": claims}
    (folder / "ablation.json").write_text(json.dumps({"name": "grid", "grid": grid, "runs": runs}))
    return folder


def test_the_table_counts_failing_surviving_and_healthy_runs(tmp_path):
    folder = planted_grid(tmp_path)
    order = failure_order(load_study(folder))
    rows = {(r.statistic, r.modality): r for r in order.rows}
    entropy, gradient = rows["attn_entropy", "image"], rows["grad_norm", ""]
    assert list(entropy.steps.values()) == [700, 800] and list(entropy.before.values()) == [1100, 1000]
    assert (entropy.layer, entropy.surviving, entropy.healthy) == (1, (1, 1), (0, 4))
    assert (gradient.layer, gradient.surviving, gradient.healthy) == (None, (0, 1), (0, 4))
    write_report(folder, tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    row = "| 1 | 2 of 2 | 750 (700 to 800) | 1,050 (1,000 to 1,100) | 1 of 1 | 0 of 4 |"
    assert f"| attention entropy, image {row}" in page
    assert "figures/survival.png" in page and 'id="failure-order"' in (tmp_path / "out" / "index.html").read_text()


def test_a_run_without_a_statistic_is_not_counted_as_inside(tmp_path):
    folder = planted_grid(tmp_path)
    metrics = folder / "other" / "seed0" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text(
        "".join(json.dumps({k: v for k, v in line.items() if "image" not in k}) + "\n" for line in lines)
    )
    rows = {(r.statistic, r.modality): r for r in failure_order(load_study(folder)).rows}
    assert rows["attn_entropy", "image"].surviving == (0, 0) and rows["grad_norm", ""].surviving == (0, 1)


def test_the_page_says_that_failed_runs_of_other_arms_do_not_count(tmp_path):
    folder = planted_grid(tmp_path)
    about = "Not counted: 1 failed runs of other arms (other)."
    for failed in (False, True):
        if failed:
            status = folder / "other" / "seed0" / "status.json"
            status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "diverged"}))
        write_report(folder, tmp_path / "out")
        assert (about in (tmp_path / "out" / "report.md").read_text()) == failed


def test_too_few_healthy_runs_have_no_range(tmp_path):
    folder = planted_grid(tmp_path, healthy_seeds=3)
    assert failure_order(load_study(folder)) is None
    write_report(folder, tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "left the range" not in page and "figures/survival.png" in page
