"""The plain facts of logs with known answers; each has a neighbor that is no fact."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from mmqk.bench.facts import facts


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
        ({"loss": [2.0, 2.1, 4.3]}, {"loss": [2.0, 2.1, 4.1]}, ("loss jumps", 3)),
        ({"loss": [0.3, 0.2, 1.3]}, {"loss": [0.3, 0.2, 1.1]}, ("loss jumps", 3)),
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


def test_a_loss_of_a_modality_counts_and_a_nan_is_not_a_fact_of_its_own():
    table = {"loss": [2.0, 2.0, 2.0], "loss/image": [3.0, 0.0, 0.0]}
    assert seen(**table) == [("zero loss", 2)]
    assert seen(loss=[2.0, np.inf, 2.1]) == []
