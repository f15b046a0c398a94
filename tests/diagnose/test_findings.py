"""What mmqk diagnose says of logs in which one thing happens, and of runs of the bench."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import mmqk
from docs.experiments.bench_evidence import logs_of, rescue, zoo
from mmqk.bench.evidence import Rates, evidence, first_sign
from mmqk.bench.kinds import SIGNS, findings
from mmqk.bench.rules import departures, facts
from mmqk.bench.traces import LASTING, labelled, split_hash
from mmqk.diagnose import main
from mmqk.diagnose.findings import TABLES, diagnose
from mmqk.diagnose.logs import Log, read_log
from mmqk.store import UserError

STEPS = np.arange(1, 601)
HOSTILE = "<script>alert(1)</script>\x1b[31m"


def table(**changes: np.ndarray) -> pd.DataFrame:
    random = np.random.default_rng(0)
    columns = {
        "loss": 5 + 3 * np.exp(-STEPS / 50) + 0.1 * random.normal(size=600),
        "grad_norm": np.exp(0.1 * random.normal(size=600)),
        "lr": 0.01 * np.minimum(STEPS / 50, 1),
    }
    return pd.DataFrame(columns | changes, index=pd.Index(STEPS, name="step"))


def log(metrics: pd.DataFrame, **fields: object) -> Log:
    given = {"source": "run.csv", "format": "CSV", "columns": {}, "unused": [], "notes": [], "config": {}}
    return Log(metrics=metrics, **(given | fields))


def from_step(step: int, values: np.ndarray, later: np.ndarray) -> np.ndarray:
    return np.where(step <= STEPS, later, values)


def written(folder: Path, metrics: pd.DataFrame, *options: str) -> tuple[int, dict, str]:
    metrics.to_csv(folder / "run.csv")
    code = main([str(folder / "run.csv"), "--out", str(folder / "out"), *options])
    record = json.loads((folder / "out" / "diagnosis.json").read_text())
    return code, record, (folder / "out" / "index.html").read_text()


def test_a_healthy_log_has_no_finding(tmp_path, capsys):
    code, record, page = written(tmp_path, table())
    assert code == 0 and not record["found"] and record["kinds"] == [] and record["remedies"] == []
    assert capsys.readouterr().out.startswith("run.csv: no rule fired\n") and "no rule fired" in page


def test_a_rise_of_the_rate_is_named_with_its_rate_of_success(tmp_path, capsys):
    base = table()
    metrics = table(lr=from_step(300, base["lr"], base["lr"] * 30), loss=from_step(310, base["loss"], base["loss"] + 2))
    code, record, page = written(tmp_path, metrics)
    first, second = record["kinds"]
    assert code == 1 and (first["kind"], first["step"], first["series"]) == ("rate", 300, "lr")
    assert second["kind"] == "data" and "no statistic of the model" in second["meaning"]
    assert record["departures"][0]["tag"] == "loss" and record["departures"][0]["step"] == 310
    assert first["bench"]["right"] <= first["bench"]["named"] and first["bench"]["healthy"] == 44
    assert {"rise", "divergence"} <= {alarm["name"] for alarm in record["alarms"]}
    assert set(record["experiment"]["between"]) == {"rate", "data"} and record["experiment"]["what"]
    assert any("saved none" in row["measured"] for row in record["remedies"])
    said = capsys.readouterr().out
    assert said.startswith("run.csv: first at step 300: sign of rate\n")
    assert "cause" not in said.lower() and "data:image/png" in page


def test_the_title_names_a_series_that_left_its_range_before_a_rule_fired(tmp_path, capsys):
    base = table()
    grown = from_step(250, base["grad_norm"], base["grad_norm"] * 20)
    late = table(grad_norm=grown, lr=from_step(400, base["lr"], base["lr"] * 30))
    written(tmp_path, late)
    assert capsys.readouterr().out.startswith("run.csv: first at step 250: grad_norm left its range; at step 400: ")


def test_a_loss_alone_that_becomes_nan():
    metrics = table()[["loss"]]
    metrics.loc[400:, "loss"] = np.inf
    found = diagnose(log(metrics))
    assert found["found"] and {a["name"] for a in found["alarms"]} == {"non_finite", "divergence"}
    assert all(a["series"] == "loss" and a["step"] == 400 for a in found["alarms"])
    assert found["departures"][0]["step"] == 400 and found["departures"][0]["back"] is None
    assert {"lr", "grad_norm", "attn_logit_absmax"} <= {row["statistic"] for row in found["missing"]}


@pytest.mark.parametrize(("first", "fails", "named"), [(1, True, True), (100, True, False), (1, False, False)])
@pytest.mark.parametrize("last", [0.001, 0.01])
def test_a_sign_of_the_first_value_needs_the_start_of_the_run_and_a_failure(first, fails, named, last):
    metrics = table(lr=np.linspace(0.01, last, 600))
    metrics.loc[400:, "loss"] *= np.inf if fails else 1
    found = diagnose(log(metrics.loc[first:]))
    assert found["found"] == fails and named == any(kind["kind"] == "warm-up" for kind in found["kinds"])
    assert named != any(row["kind"] == "warm-up" for row in found["not_read"])


@pytest.mark.parametrize(
    ("first", "steps", "counts", "kinds"),
    [(8, 600, "step", ["leak"]), (8, 600, "epoch", []), (11, 600, "step", []), (5, 600, "step", []),
     (8, 800, "step", []), (8, 6000, "step", [])],
)  # fmt: skip
def test_a_limit_of_the_bench_holds_for_runs_of_its_size(tmp_path, first, steps, counts, kinds):
    index = pd.Index(np.arange(1, steps + 1), name=counts)
    losses = pd.DataFrame({"loss": first * (0.3 + 0.7 * np.exp(-index / (steps / 3)))}, index=index)
    losses.to_csv(tmp_path / "run.csv")
    found = diagnose(read_log(tmp_path / "run.csv"))
    assert [kind["kind"] for kind in found["kinds"]] == kinds
    assert (not kinds) == any(row["kind"] == "leak" for row in found["not_read"])


def test_a_slow_warm_up_is_no_rise_of_the_rate():
    steps = np.arange(0, 6000, 50)
    slow = pd.DataFrame({"loss": 8.0 - steps / 6000, "lr": np.minimum(steps / 2000, 1) * 1e-3}, index=steps)
    assert not [f for f in findings(slow) if f.sign.kind == "rate"]
    slow.loc[4000:, "lr"] *= 3
    assert [f.step for f in findings(slow) if f.sign.kind == "rate"] == [4000]


def test_departures_find_the_planted_step_and_its_end():
    limits = evidence()["departures"]
    assert departures(table(), limits) == []
    base = table()["grad_norm"].to_numpy()
    away = np.where((STEPS >= 350) & (STEPS < 380), base * 30, base)
    (found,) = departures(table(grad_norm=away), limits)
    assert (found.tag, found.step, found.back) == ("grad_norm", 350, 380)
    assert departures(table(grad_norm=np.where(STEPS == 350, base * 30, base)), limits) == []  # one value is a spike


def test_hostile_names_are_escaped(tmp_path, capsys):
    metrics = table().rename(columns={"grad_norm": HOSTILE})
    code, _, page = written(tmp_path, metrics)
    assert code == 0 and "<script>" not in page and "&lt;script&gt;" in page
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--batch x.npy", "--set a=1", "--limit 5", "--modality a=1:2"])
def test_an_option_that_would_do_nothing_is_refused(tmp_path, option):
    with pytest.raises(UserError, match=option.split()[0]):
        written(tmp_path, table(), *option.split())
    with pytest.raises(UserError, match=r"run\.csv"):
        main([str(tmp_path / "run.csv"), "--model", "x.pt"])


def test_the_tables_know_every_kind():
    kinds = {sign.kind for sign in SIGNS}
    assert kinds == set(TABLES["remedies"])
    named = {kind for row in TABLES["experiments"] for kind in (*row["gone"], *row["remains"])}
    assert named == kinds and all(not set(row["gone"]) & set(row["remains"]) for row in TABLES["experiments"])
    assert {row["change"] for row in [*evidence()["rescue"], *evidence()["late_rescue"]]} - {"none"} <= set(
        TABLES["changes"]
    )


def test_rates_count_the_records():
    every = {sign.name.split()[1] for sign in SIGNS} | {s for sign in SIGNS for s in sign.statistic.split()}
    every |= {"grad_norm", "q_norm", "k_norm", "final_norm", "attn_entropy"}
    rates = Rates("judge", every, 1, True)
    records = [run for run in evidence()["runs"] if run["side"] == "judge"]
    logs = [run["logs"]["1 modality"] for run in records]
    first = [first_sign(of["signs"], every, any(key.split()[0] in LASTING for key in of["alarms"])) for of in logs]
    right = sum(
        bool(run["kind"]) and name.split()[:1] == [run["kind"]] for run, name in zip(records, first, strict=True)
    )
    assert (rates.faults, rates.healthy) == (114, 44)
    assert rates.right() == right == 61  # docs/bench.md
    assert sum(rates.sign(sign.name)["accused"] for sign in SIGNS) == 6
    scores = {row["rule"]: row for row in json.loads(Path("reports/bench/judge.json").read_text())}
    for name in ("spike", "rise", "growth", "collapse", "divergence"):
        found = rates.alarm(name)
        assert (found["hits"], found["accused"]) == (
            scores[f"alarm {name}"]["hits"],
            scores[f"alarm {name}"]["accused"],
        )
    assert Rates("judge", {"loss"}, 1, False).right() < right
    named = [Rates("judge", of, 1, True).sign("warm-up lr")["named"] for of in ({"loss", "lr"}, every)]
    assert named[0] == 0 < named[1]  # without another statistic nothing fires beside it


@pytest.mark.slow
def test_the_evidence_is_that_of_the_packs():
    traces = {t.run.name: t for t in labelled([*mmqk.load_runs("reports/bench/bench.zip")])}
    records = {run["run"]: run for run in evidence()["runs"]}
    assert set(records) == set(traces) and evidence()["split"] == split_hash()
    for name in [*traces][::25]:
        assert dict(logs_of(traces[name])) == records[name]["logs"], name
    assert rescue() == evidence()["rescue"] and zoo() == evidence()["zoo"]
    for arm, kind in {"healthy": "", "rate-middle": "rate", "loud-head": "logits", "new-moments": "moments"}.items():
        trace = next(t for t in traces.values() if (t.run.arm, t.run.seed) == (arm, 1))
        found = diagnose(log(trace.metrics))
        assert found["found"] == bool(kind) and [k["kind"] for k in found["kinds"]][:1] == ([kind] if kind else [])


# Plain facts ------------------------------------------------------------------------------------------------


def seen(**series: list[float]) -> list[tuple[str, int]]:
    columns = {name: pd.Series(values, index=range(1, 1 + len(values))) for name, values in series.items()}
    return [(fact.name, fact.step) for fact in facts(pd.DataFrame(columns))]


@pytest.mark.parametrize(
    ("fact", "other", "expected"),
    [
        ({"loss": [2.0, 1.0, 0.0, 0.0]}, {"loss": [2.0, 0.0, 0.5, 0.0]}, ("zero loss", 3)),
        ({"loss": [2.0, 0.009, 0.008, 0.009]}, {"loss": [2.0, 0.009, 0.02, 0.009]}, ("tiny loss", 2)),
        ({"loss": [3.0, 2.9], "grad_norm": [0.0, 0.0]}, {"loss": [3.0, 2.9], "grad_norm": [0.0, 1.0]},
         ("zero gradient", 1)),
        ({"loss": [2.0, 2.1, 4.3]}, {"loss": [2.0, 2.1, 4.0]}, ("loss jumps", 3)),
        ({"loss": [0.3, 0.2, 1.3]}, {"loss": [0.3, 0.2, 1.1]}, ("loss jumps", 3)),
        ({"loss": [2.0, 1.9, 2.1, 5, 5, 5, 2.0]}, {"loss": [2.0, 1.9, 2.1, 5, 5, 2.0, 2.0]}, ("loss jumps", 4)),
        ({"loss": [2.0, 2.1, 2.0, 6.0, 6.0]}, {"loss": [4.0, 4.1, 4.0, 1.8, 4.0]}, ("loss jumps", 4)),  # one easy batch
    ],
)  # fmt: skip
def test_a_fact_has_its_first_step_and_a_neighbor_is_none(fact, other, expected):
    assert seen(**fact) == [expected]
    assert seen(**other) == []


def test_no_progress_is_a_loss_that_falls_by_less_than_its_noise():
    noise = 0.1 * np.random.default_rng(0).normal(size=300)
    assert seen(loss=list(5 + noise)) == [("no progress", 300)]
    assert seen(loss=list(5 - np.linspace(0, 1, 300) + noise)) == []
    assert seen(loss=list(5 + noise[:99])) == []  # too short to tell
    falls = np.exp(-np.arange(300) / 5)
    assert seen(loss=list(7 + 3 * falls + noise)) == [("no progress", 300)]  # the unigram loss is learned
    assert seen(loss=list(1.1 + falls + noise)) == []  # a fine-tuning that has converged
    assert seen(loss=list(1.1 + 5 * noise)) == []  # too noisy to tell
    late = pd.DataFrame({"loss": 2.6 + noise}, index=range(95_000, 95_300))
    assert facts(late) == []


@pytest.mark.parametrize("scatter", [0.25, 0.35, 0.8])
def test_a_noisy_fine_tuning_is_healthy(scatter):
    steps, noise = np.arange(1500), scatter * np.random.default_rng(1).normal(size=1500)
    record = diagnose(log(pd.DataFrame({"loss": 1.1 + 0.8 * np.exp(-steps / 150) + noise})))
    assert not record["found"] and ("divergence" in {a["name"] for a in record["alarms"]}) == (scatter == 0.8)
    jumped, climbed = (diagnose(log(pd.DataFrame({"loss": 1.1 + noise + rise}))) for rise in (  # controls
        6 * (steps >= 900), 2.5 * (steps / 300 - 3).clip(0, 1)))  # fmt: skip
    assert "loss jumps" in {fact["name"] for fact in jumped["facts"]}
    assert "divergence" in {alarm["name"] for alarm in climbed["alarms"] if alarm["lasting"]}


@pytest.mark.parametrize(
    ("bad", "found"), [([0, 1, 2, 480], False), (range(600), True), (range(400, 420), True), ([599], True)]
)
def test_a_step_that_fp16_skips_is_no_finding(bad, found):
    metrics = table()
    metrics.iloc[[*bad], 1] = np.inf
    record = diagnose(log(metrics))
    assert record["found"] == found == bool(record["alarms"])
    assert any("fp16" in note for note in record["notes"]) == (len(bad) in (4, 20))


@pytest.mark.parametrize(("last", "found"), [(0.0, False), (0.3, True)])
def test_a_rise_in_a_long_log_counts_if_it_stays(last, found):
    steps = np.arange(1, 2001)
    loss = 5 - steps / 4_000 + 0.05 * np.random.default_rng(0).normal(size=2000)
    loss += 0.3 * ((steps >= 1500) & (steps < 1700)) + last * (steps >= 1700)
    record = diagnose(log(pd.DataFrame({"loss": loss}, index=steps)))
    assert "rise" in {alarm["name"] for alarm in record["alarms"]} and record["found"] == found


def test_a_warm_restart_of_the_rate_is_no_rise_of_it():
    cosine = np.tile(0.01 * (1 + np.cos(np.linspace(0, 3.1, 150))), 4)
    rate = [f.sign.kind for f in findings(table(lr=np.where(STEPS < 20, cosine * STEPS / 20, cosine)))]
    assert "rate" not in rate
    higher = [f.sign.kind for f in findings(table(lr=np.where(STEPS > 450, 3 * cosine, cosine)))]
    assert "rate" in higher


def test_a_loss_of_a_modality_counts_and_a_nan_is_not_a_fact_of_its_own():
    table = {"loss": [2.0, 2.0, 2.0], "loss/image": [3.0, 0.0, 0.0]}
    assert seen(**table) == [("zero loss", 2)]
    assert seen(loss=[2.0, np.inf, 2.1]) == []
