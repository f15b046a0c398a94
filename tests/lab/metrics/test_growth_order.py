"""Check the order of growth for series with a known order."""

import json
import math

import pytest

from mmqk.lab.metrics.probes import growth_order
from mmqk.lab.runs import read_runs

STEPS = range(0, 201, 20)


def run_of(folder, warmup=40, **series):
    """Return a run with these series, given as functions of the step; ``__`` in a name means ``/``."""
    folder.mkdir(parents=True)
    config = {"optim": {"warmup_steps": warmup}} if warmup is not None else {}
    (folder / "run.json").write_text(json.dumps({"id": "0", "details": {"config": config}}))
    (folder / "status.json").write_text(json.dumps({"status": "completed", "step": 200}))
    lines = []
    for step in STEPS:
        values = {name.replace("__", "/"): value(step) for name, value in series.items()}
        finite = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
        lines.append(json.dumps({"step": step, **finite}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = read_runs(folder)
    return run


def places(run):
    return [(g.statistic, g.modality, g.layer, g.step) for g in growth_order(run)]


def test_series_are_in_the_order_in_which_they_left_for_good(tmp_path):
    run = run_of(
        tmp_path / "run",
        q_norm__text__layer01=lambda step: 1.0 if step < 120 else 2.5,
        k_norm__image__layer00=lambda step: 1.0 if step < 80 else 9.0,
        resid_norm__image__layer01=lambda step: 1.0 if step < 80 else 3.0,
        attn_entropy__text__layer00=lambda step: 3.0 if step < 160 else 1.0,
    )
    assert places(run) == [
        ("k_norm", "image", 0, 80),
        ("resid_norm", "image", 1, 80),
        ("q_norm", "text", 1, 120),
        ("attn_entropy", "text", 0, 160),
    ]
    assert [g.ratio for g in growth_order(run)] == [9.0, 3.0, 2.5, 3.0]


def test_a_calm_run_names_nothing(tmp_path):
    calm = run_of(
        tmp_path / "run",
        q_norm__text__layer01=lambda step: 1.0 + step / 250,  # less than twofold
        attn_entropy__text__layer00=lambda step: 3.0 - step / 200,
        attn_logit_absmax__text_image__layer00=lambda step: 50.0 if step == 100 else 5.0,  # only one large value
        lr=lambda step: 1e-3 * (step + 1),  # not a statistic whose growth counts
    )
    assert places(calm) == []


def test_growth_during_the_warm_up_is_no_growth(tmp_path):
    def risen(step):
        return 1.0 if step < 40 else 4.0

    assert places(run_of(tmp_path / "a", q_norm__text__layer00=risen)) == []
    assert places(run_of(tmp_path / "b", warmup=0, q_norm__text__layer00=risen)) == [("q_norm", "text", 0, 40)]
    assert places(run_of(tmp_path / "c", warmup=None, q_norm__text__layer00=risen)) == [("q_norm", "text", 0, 40)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_beyond(tmp_path, value):
    run = run_of(tmp_path / "run", final_norm__image=lambda step: 1.0 if step < 180 else value)
    (growth,) = growth_order(run)
    assert (growth.step, growth.layer, growth.ratio) == (180, None, math.inf)


def test_it_agrees_with_a_brute_force_search(tmp_path):
    import random

    draw = random.Random(0)
    values = {(layer, step): draw.lognormvariate(0, 0.6) for layer in range(40) for step in STEPS}
    series = {
        f"k_norm__text__layer{layer:02d}": (lambda step, layer=layer: values[layer, step]) for layer in range(40)
    }
    expected = set()
    for layer in range(40):
        start = values[layer, 40]
        for step in STEPS:
            if step >= 40 and all(values[layer, later] > 2 * start for later in STEPS if later >= step):
                expected.add((layer, step))
                break
    found = {(g.layer, g.step) for g in growth_order(run_of(tmp_path / "run", **series))}
    assert found == expected and 2 < len(expected) < 40
