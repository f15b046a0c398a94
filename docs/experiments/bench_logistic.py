"""An upper bound for the alarm rules of docs/bench.md: a logistic model of all their scores, fitted on the side
"develop".

    python -m docs.experiments.bench_logistic develop
    python -m docs.experiments.bench_logistic judge
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import optimize

from mmqk import load_runs
from mmqk.bench.rules import BASELINES, CANDIDATES
from mmqk.bench.score import markdown, score, scored, threshold_of
from mmqk.bench.traces import Trace, labelled

CLIPPED, RIDGE = (-3.0, 10.0), 1e-3


def fitted(scores: Sequence[Mapping[str, pd.Series]], traces: Sequence[Trace]) -> Callable[..., pd.Series]:
    """Fit a logistic model that tells the steps after a fault from all others; return the function from the scores of
    a run to its log odds. A score is the number of quartile ranges above the median of the healthy runs, within
    `CLIPPED`, and stays until the next one."""
    tables = [pd.DataFrame(of).ffill() for of in scores]
    healthy = pd.concat([table for table, trace in zip(tables, traces, strict=True) if trace.healthy])
    healthy = healthy.replace(math.inf, math.nan)
    center, spread = healthy.median(), (healthy.quantile(0.75) - healthy.quantile(0.25)).clip(lower=1e-9)

    def features(table: pd.DataFrame) -> np.ndarray:
        scaled = ((table - center) / spread).clip(*CLIPPED).fillna(0)
        return np.column_stack([scaled.to_numpy(), np.ones(len(scaled))])

    x = np.concatenate([features(table)[::10] for table in tables])
    bad = [
        np.full(len(table), not trace.healthy) & (table.index > trace.label.begins)
        for table, trace in zip(tables, traces, strict=True)
    ]
    y = np.concatenate([of[::10] for of in bad]).astype(float)

    def cost(weights: np.ndarray) -> tuple[float, np.ndarray]:
        odds = x @ weights
        loss = np.logaddexp(0, odds).mean() - (y * odds).mean() + RIDGE * weights @ weights
        return loss, x.T @ (1 / (1 + np.exp(-odds)) - y) / len(y) + 2 * RIDGE * weights

    weights = optimize.minimize(cost, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x

    def log_odds(of: Mapping[str, pd.Series]) -> pd.Series:
        filled = pd.DataFrame({name: of[name] for name in center.index}).ffill()
        return pd.Series(features(filled) @ weights, index=filled.index)

    return log_odds


def main(side: str) -> None:
    traces = labelled([*load_runs("reports/bench/bench.zip")])
    scores = {trace: {rule.__name__: scored(rule, trace) for rule in (*BASELINES, *CANDIDATES)} for trace in traces}
    develop = [trace for trace in traces if trace.side == "develop"]
    log_odds = fitted([scores[trace] for trace in develop], develop)
    threshold = threshold_of([log_odds(scores[trace]) for trace in develop if trace.healthy])
    chosen = [trace for trace in traces if trace.side == side]
    print(markdown([score("logistic model", chosen, [log_odds(scores[trace]) for trace in chosen], threshold)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
