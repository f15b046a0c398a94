"""Scores of rules on runs that are made up, so that every number is known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from mmqk.bench import rules
from mmqk.bench.score import begins, by_kind, score, scored, threshold_of
from mmqk.bench.traces import Label, Trace, worse_from
from mmqk.store import Status, UserError

STEPS = np.arange(1, 601)


def trace(label: Label, seed: int = 1, **series: np.ndarray) -> Trace:
    run = SimpleNamespace(seed=seed, last_step=600, warmup_steps=50, status=Status("completed"))
    made = Trace(run, label, label.side)
    made.__dict__["metrics"] = pd.DataFrame({k.replace("__", "/"): v for k, v in series.items()}, index=STEPS)
    return made


def spikes(*steps: int) -> pd.Series:
    return pd.Series(np.isin(STEPS, steps).astype(float), index=STEPS)


def test_the_threshold_accuses_one_healthy_run_in_twenty():
    scores = [pd.Series([0.0, float(i)]) for i in range(40)]
    threshold = threshold_of(scores)
    assert sum(series.max() > threshold for series in scores) == 2
    assert sum(series.max() > threshold - 1 for series in scores) == 3  # no lower threshold would do


def test_an_alarm_begins_once_and_waits_over_steps_without_a_number():
    values = pd.Series([0.0, 2.0, math.nan, 2.0, 0.0, 2.0], index=[1, 2, 3, 4, 5, 6])
    assert begins(values, 1.0).tolist() == [2, 6]


def test_hits_leads_and_false_alarms_are_counted():
    loss = np.where(STEPS < 420, 3.0, 5.0)  # the median of 50 losses is above 3.25 from step 444 on
    failing, silent, healthy = Label("rate", begins=300), Label("dead", begins=300), Label()
    twin = trace(healthy, loss__text=np.full(600, 3.0))
    traces = [
        trace(failing, seed=1, loss__text=loss),
        trace(failing, seed=2, loss__text=loss),
        trace(silent, seed=1, loss__text=np.full(600, 3.0)),
        trace(silent, seed=2, loss__text=np.full(600, 3.0)),
        trace(healthy, seed=1),
        trace(healthy, seed=2),
    ]
    for one in traces:
        object.__setattr__(one, "twin", twin)
    assert [t.failed_at for t in traces[:4]] == [444, 444, None, None]
    scores = [spikes(385), spikes(100, 415), spikes(), spikes(300), spikes(50, 60), spikes()]
    found = score("made up", traces, scores, 0.5)
    assert (found.hits, found.faults, found.accused, found.healthy) == (2, 4, 1, 2)
    # An alarm before the fault, or at its last good step, is a false alarm: 100, 300, 50 and 60.
    assert found.per_1000 == pytest.approx(1000 * 4 / (4 * 300 + 2 * 600))
    assert found.lead == pytest.approx(np.median([(444 - 385) / 600, (444 - 415) / 600]))
    assert found.low <= 0.5 <= found.high
    assert found.kinds == {"rate": (2, 2), "dead": (0, 2)} and "| made up | 0 of 2 | 2 of 2 |" in by_kind([found])


def test_a_run_that_recovers_or_is_better_has_not_failed():
    twin = pd.DataFrame({"loss/text": np.full(600, 3.0)}, index=STEPS)

    def failed(loss: np.ndarray, begins: int = 0) -> int | None:
        return worse_from(pd.DataFrame({"loss/text": loss}, index=STEPS), twin, begins)

    assert failed(np.where((STEPS > 300) & (STEPS < 340), 7.0, 3.0)) is None  # recovers
    assert failed(np.full(600, 2.0)) is None and failed(np.full(600, 3.2)) is None
    assert failed(np.full(600, 4.0)) == 1 and failed(np.full(600, 4.0), begins=300) == 301
    assert failed(np.where(STEPS > 580, 4.0, 3.0)) is None  # too late to be judged


def test_a_rule_that_fails_is_named_with_its_run():
    one = trace(Label(), loss=np.ones(600))
    one.run.name = "text-only-0123456789/seed1"
    with pytest.raises(UserError, match=r"the rule .*:wrong failed on text-only-0123456789/seed1: KeyError"):
        scored(wrong, one)


def wrong(metrics: pd.DataFrame) -> pd.Series:
    return metrics["loss/image"]


@pytest.mark.parametrize("rule", [*rules.BASELINES, *rules.CANDIDATES], ids=lambda rule: rule.__name__)
def test_no_rule_reads_a_later_step(rule):
    """The score of a step is the same whether or not the table goes on."""
    random = np.random.default_rng(0)
    names = ["loss", "loss/text", "loss/image", "grad_norm", "log_z/text", "log_z/image"]
    table = pd.DataFrame({name: 3 + random.normal(size=600) * 0.1 for name in names}, index=STEPS)
    probed = STEPS % 10 == 0
    for name in (
        "attn_logit_absmax/text-image/layer00", "attn_entropy/text/layer00", "attn_rank/layer00",
        "w_q_stable_rank/layer00", "w_k_stable_rank/layer00", "w_q_grad_over_v/layer00", "update_rms/head.weight",
        "grad_norm/head.weight", "grad_norm/embed.weight", "final_norm/text", "resid_norm/text/layer00",
    ):  # fmt: skip
        table[name] = np.where(probed, np.exp(random.normal(size=600)), np.nan)
    whole, part = rule(table), rule(table.loc[:400])
    assert part.notna().any()
    pd.testing.assert_series_equal(whole.loc[:400].reindex(part.index), part, check_names=False)
