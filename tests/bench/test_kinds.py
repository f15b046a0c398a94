"""The table of signs, on made-up logs in which one thing happens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from mmqk.bench.kinds import DONT_KNOW, NO_FAULT, confusion, findings, kind_of, places
from mmqk.bench.traces import Label, Trace

STEPS = np.arange(1, 601)
PROBED = STEPS % 10 == 0


def log(**changes: np.ndarray) -> pd.DataFrame:
    random = np.random.default_rng(0)
    table = {
        "lr": 0.01 * np.minimum(STEPS / 50, 1),
        "loss/text": 5 + 2 * np.exp(-STEPS / 50) + 0.1 * random.normal(size=600),
        "loss/image": 6 + np.exp(-STEPS / 50) + 0.1 * random.normal(size=600),
    }
    for name, size in (
        ("attn_logit_absmax/text-image/layer01", 8.0), ("q_norm_max/text/layer01", 6.0),
        ("k_norm_max/image/layer01", 6.0), ("attn_rank/layer01", 10.0), ("w_q_norm/layer01", 9.0),
        ("adam_below_eps/embed.weight", 0.1), ("embed_row_norm/image", 1.0), ("update_rms/head.weight", 0.01),
    ):  # fmt: skip
        table[name] = np.where(PROBED, size * (1 + 0.02 * random.normal(size=600)), np.nan)
    return pd.DataFrame(table | changes, index=STEPS)


def trace(table: pd.DataFrame, **label: object) -> Trace:
    made = Trace(SimpleNamespace(seed=1), Label(**label), "develop")
    made.__dict__["metrics"] = table
    return made


def from_300(tag: str, factor: float = 1.0, plus: float = 0.0) -> pd.DataFrame:
    values = log()[tag].to_numpy()
    return log(**{tag: np.where(STEPS >= 300, values * factor + plus, values)})


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (log(), NO_FAULT),
        (from_300("lr", 10), "rate"),
        (log(lr=np.linspace(0.01, 0.001, 600)), "warm-up"),
        (from_300("attn_logit_absmax/text-image/layer01", 8), "logits"),
        (from_300("attn_logit_absmax/text-image/layer01", 2), NO_FAULT),
        (log(**{"attn_logit_absmax/text-image/layer01": np.where(PROBED, 25.0, np.nan)}), "logits"),
        (from_300("attn_rank/layer01", 0.1), "dead"),
        (from_300("w_q_norm/layer01", 0.5), "decay"),
        (from_300("embed_row_norm/image", 10), "embedding"),
        (from_300("adam_below_eps/embed.weight", 1, 0.3), "moments"),
        (from_300("update_rms/head.weight", 0), "precision"),
        (from_300("loss/text", 1, 1), "data"),
        (from_300("loss/image", 0.2), "repeats"),
        (from_300("loss/text", 1, 0.2), NO_FAULT),
    ],
)
def test_one_event_has_one_kind(table, kind):
    assert kind_of(table) == kind


def test_the_first_sign_counts_and_is_located():
    table = from_300("loss/text", 1, 1)
    table["w_q_norm/layer01"] = np.where(PROBED, np.where(STEPS >= 200, 4.0, 9.0), np.nan)
    first, second = findings(table)
    assert (first.sign.kind, first.step, first.series) == ("decay", 200, "w_q_norm/layer01")
    assert second.sign.kind == "data" and second.series == "loss/text" and 300 < second.step < 306


def test_a_sign_needs_no_later_step():
    table = from_300("loss/text", 1, 1)
    assert kind_of(table.loc[:299]) == NO_FAULT and kind_of(table.loc[:310]) == "data"


def test_an_alarm_without_a_sign_is_not_a_guess():
    assert kind_of(log(), alarmed=True) == DONT_KNOW
    runs = [trace(from_300("lr", 10), kind="rate"), trace(log(), kind="leak"), trace(from_300("lr", 10))]
    assert confusion(runs, [False, True, False]).splitlines() == [
        "| true kind | rate | don't know | no fault |",
        "| --- | --: | --: | --: |",
        "| leak |  | 1 |  |",
        "| no fault | 1 |  |  |",
        "| rate | **1** |  |  |",
    ]


def test_places_of_the_right_kind_are_counted():
    shrinks = log(**{"w_q_norm/layer01": np.where(STEPS >= 300, 4.0, 9.0)})
    runs = [trace(shrinks, kind="decay", layer=1), trace(shrinks, kind="decay", layer=0)]
    others = [trace(shrinks, kind="decay"), trace(shrinks, kind="data", layer=1), trace(log(), kind="decay", layer=1)]
    assert places([*runs, *others]).endswith("right in 1 of 2 runs")
    images = from_300("embed_row_norm/image", 5)
    runs = [trace(images, kind="embedding", modality=name) for name in ("image", "text")]
    assert places(runs).endswith("right in 1 of 2 runs")
