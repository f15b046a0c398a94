"""Compare the ranking of remedies with numbers computed by hand, on runs written without mmqk's writers."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from mmqk.lab.page.ranking import _effect, ranking, ranking_table
from mmqk.lab.study import load_study
from tests.lab.small_runs import config, small_run

RATES = (0.003, 0.01, 0.03, 0.1)
# SELECTION has the final loss of the selection run at each learning rate. VERDICT has the final losses of the verdict
# runs.
SELECTION = {
    "plain": (4.9, 4.7, 5.2, 5.7),
    "good": (4.8, 4.6, 4.5, 4.7),
    "wide": (4.75, 4.74, 4.73, 4.72),
    "bad": (5.5, 5.4, 5.6, 5.9),
}
VERDICT = {
    "plain": (4.70, 4.72, 4.68), "good": (4.50, 4.53, 4.47), "wide": (4.72, 4.73, 4.70), "bad": (5.4, 5.5, 5.3),
}  # fmt: skip
LOGIT = {"plain": 40.0, "good": 10.0, "wide": 20.0, "bad": 40.0}
SPEED = {"plain": 1000.0, "good": 800.0, "wide": 1000.0, "bad": 500.0}
PARAMETERS = {"plain": 100, "good": 120, "wide": 100, "bad": 90}


def one(folder, arm, rate, loss, seed, backend="sdpa", status="completed", machine="a"):
    end = {0: 7.0, 100: loss}
    logits = {0: 1.0, 60: LOGIT[arm], 80: LOGIT[arm], 100: LOGIT[arm] * (1 + seed)}
    small_run(
        folder,
        {
            "val_loss/text": end, "val_loss/image": end, "loss": end, "loss/text": end, "loss/image": end,
            "attn_logit_absmax/text-text/layer00": logits,
            "final_norm/text": {0: 8.0, 100: 16.0 * (1 + seed)}, "final_norm/image": {0: 8.0, 100: 8.0},
            "tokens_per_s": {50: SPEED[arm], 100: SPEED[arm] * (1 + 0.01 * seed)},
        },
        config=config(lr=rate, backend=backend, loss={"weights": {}}),
        status=status,
        seed=seed,
    )  # fmt: skip
    record = json.loads((folder / "run.json").read_text())
    record["details"] |= {"parameters": PARAMETERS[arm], "machine": {"name": machine}, "device": {"name": "cpu"}}
    (folder / "run.json").write_text(json.dumps(record))


def grid_of(tmp_path, arms=tuple(VERDICT), more=None, report=None):
    entries = []
    for arm in arms:
        for rate, loss in zip(RATES, SELECTION[arm], strict=True):
            name = f"{arm}-lr{rate:g}"
            one(tmp_path / name / "seed8", arm, rate, loss, 8)
            entries.append({"arm": name, "seed": 8, "family": arm, "role": "selection", "point": {"optim.lr": rate}})
        for seed, loss in enumerate(VERDICT[arm], 1):
            best = RATES[int(np.argmin(SELECTION[arm]))]
            one(tmp_path / arm / f"seed{seed}", arm, best, loss, seed, **(more or {}).get(arm, {}))
            entries.append({"arm": arm, "seed": seed, "family": arm, "role": "verdict", "point": {}})
    runs = [{"folder": f"{e['arm']}/seed{e['seed']}", "id": "i", "claims": "c", **e} for e in entries]
    record = {
        "name": "t",
        "grid": {
            "name": "t",
            "arms": {arm: {"label": arm} for arm in arms},
            "lr": {"rule": "own_best", "metric": "final_loss"},
            "report": {"ranking": ["plain"]} if report is None else report,
        },
        "runs": runs,
    }
    (tmp_path / "ablation.json").write_text(json.dumps(record))
    return load_study(tmp_path)


def test_the_numbers_of_the_ranking(tmp_path):
    made = ranking(grid_of(tmp_path))
    assert made is not None and not made.unfinished
    assert [row.arm for row in made.rows] == ["good", "wide", "bad"] and made.controls[0].arm == "plain"
    good = made.rows[0]
    a, b = (np.array(VERDICT[arm]) for arm in ("good", "plain"))
    assert good.difference.value == pytest.approx(a.mean() - b.mean()) and good.loss == pytest.approx(a.mean())
    spread = math.sqrt(np.mean([np.var(VERDICT[arm], ddof=1) for arm in VERDICT]))
    half = stats.t.ppf(0.975, 8) * spread * math.sqrt(2 / 3)
    assert good.difference.high - good.difference.value == pytest.approx(half)
    assert good.sensitivity == pytest.approx(np.mean([0.3, 0.1, 0.0, 0.2]))
    assert (good.rate, good.at_edge) == (0.03, False) and good.trains == dict.fromkeys(RATES, True)
    # An arm trains at a learning rate if its loss is at most 0.25 nat above 4.7, the best loss without a remedy.
    assert made.controls[0].trains == {0.003: True, 0.01: True, 0.03: False, 0.1: False}
    # The median of the last three probes.
    assert good.logit == pytest.approx(10.0) and math.exp(good.logit_ratio.value) == pytest.approx(0.25)
    assert good.growth == pytest.approx({"text": 2 * (2 * 3 * 4) ** (1 / 3), "image": 1.0})
    assert math.exp(good.time.value) == pytest.approx(1.25) and good.parameters == 20
    wide = made.rows[1]
    assert (wide.rate, wide.at_edge) == (0.1, True) and wide.sensitivity == pytest.approx(0.015)
    assert made.front == {"good", "wide"}


def test_a_remedy_that_is_worse_in_both_is_not_on_the_front(tmp_path):
    """The control: without `wide`, `bad` is still worse than `good` in loss and in sensitivity."""
    made = ranking(grid_of(tmp_path, ("plain", "good", "bad")))
    assert made.front == {"good"}


def test_an_arm_is_compared_within_its_backend_and_on_its_machine(tmp_path):
    made = ranking(grid_of(tmp_path, more={"good": {"backend": "math"}, "wide": {"machine": "b"}}))
    assert made.unfinished == ["good"]  # no arm without a remedy has backend math
    assert {row.arm: row.time for row in made.rows}["wide"] is None
    assert {row.arm: row.time for row in made.rows}["bad"] is not None


def test_a_run_that_diverged_ranks_last(tmp_path):
    study = grid_of(tmp_path, more={"good": {"status": "diverged"}})
    made = ranking(study)
    assert made.rows[-1].arm == "good" and made.rows[-1].failed == 3 and made.rows[-1].runs == 7
    assert ranking_table(study, made).rows[-2][1].text == "diverged" and "good" not in made.front


def test_a_difference_without_a_value_is_none_and_not_infinite(tmp_path):
    whole = {1: 4.0, 2: 4.1, 3: 4.2}
    assert _effect({**whole, 2: math.nan}, whole, None) is None
    assert _effect(whole, {**whole, 2: math.nan}, None) is None
    assert _effect(whole, {**whole, 2: math.inf}, None) is None
    assert _effect({**whole, 2: math.inf}, whole, None).value == math.inf  # the controls
    assert _effect(whole, whole, None).value == 0
    study = grid_of(tmp_path, more={"plain": {"status": "diverged"}})
    made = ranking(study)
    assert [row.difference for row in made.rows] == [None] * 3
    assert [row[1].text for row in ranking_table(study, made).rows[:3]] == ["–"] * 3
