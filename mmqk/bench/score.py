"""Score alarm rules on runs of the bench: hits, lead and false alarms, at equal false alarms."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from mmqk.bench.rules import Rule
from mmqk.bench.traces import LASTING, Trace
from mmqk.lab.formatting import markdown_table
from mmqk.store import UserError
from mmqk.store.alarms import NAMES

FALSE_ALARMS = 1 / 20  # of the healthy runs, at which rules are compared
WARMUP = 50  # steps at the start of every run without alarms of the candidates


@dataclass(frozen=True)
class Score:
    """A rule on one side of the split.

    Attributes:
        threshold: the score above which an alarm begins.
        hits, faults: runs with an alarm after the fault began, and all runs with a fault.
        low, high: 95 % interval of the share of hits, from the seeds.
        accused, healthy: healthy runs with an alarm, and all healthy runs.
        per_1000: alarms in 1,000 healthy steps; the steps before a fault begins are healthy too.
        lead: median number of steps from the alarm to the failure, as a share of the run, over the runs that fail and
            are hit; NaN if there are none.
        kinds: (hits, runs) by kind of fault.
    """

    rule: str
    threshold: float
    hits: int
    faults: int
    low: float
    high: float
    accused: int
    healthy: int
    per_1000: float
    lead: float
    kinds: dict[str, tuple[int, int]]


def threshold_of(scores: Sequence[pd.Series]) -> float:
    """Return the lowest threshold that at most a share of `FALSE_ALARMS` of the runs exceeds."""
    largest = sorted(series.max() if len(series.dropna()) else -math.inf for series in scores)
    return float(largest[len(largest) - 1 - math.floor(FALSE_ALARMS * len(largest))])


def begins(score: pd.Series, threshold: float) -> np.ndarray:
    """Return the steps at which an alarm begins: the score exceeds the threshold, and its previous value did not."""
    known = score.dropna()
    above = known > threshold
    return known.index[above & ~above.shift(1, fill_value=False)].to_numpy()


def score(name: str, traces: Sequence[Trace], scores: Sequence[pd.Series], threshold: float) -> Score:
    """Score a rule on some runs.

    Args:
        name: name of the rule.
        traces: the runs.
        scores: the scores of the rule for each run, from the end of the warm-up on.
        threshold: its threshold.
    """
    rows: list[tuple[Any, ...]] = []
    for trace, series in zip(traces, scores, strict=True):
        at, until = begins(series, threshold), trace.run.last_step if trace.healthy else trace.label.begins
        late = at[at > until]
        fails = trace.failed_at if len(late) else None
        lead = math.nan if fails is None else (fails - late[0]) / trace.run.last_step
        rows.append((trace.label.kind, trace.run.seed, len(late) > 0, len(at) - len(late), until, lead))
    runs = pd.DataFrame(rows, columns=["kind", "seed", "hit", "false_alarms", "steps", "lead"])
    faults, healthy = runs[runs["kind"] != ""], runs[runs["kind"] == ""]
    shares = faults.groupby("seed")["hit"].mean()
    low = high = float(shares.mean())
    if len(shares) > 1 and np.std(shares) > 0:
        low, high = stats.t.interval(0.95, len(shares) - 1, low, stats.sem(shares))
    return Score(
        rule=name,
        threshold=threshold,
        hits=int(faults["hit"].sum()),
        faults=len(faults),
        low=max(0.0, float(low)),
        high=min(1.0, float(high)),
        accused=int((healthy["false_alarms"] > 0).sum()),
        healthy=len(healthy),
        per_1000=float(1000 * runs["false_alarms"].sum() / max(1, runs["steps"].sum())),
        lead=float(faults["lead"].median()),
        kinds={str(kind): (int(hit.sum()), len(hit)) for kind, hit in faults.groupby("kind", sort=False)["hit"]},
    )


def table(
    traces: Sequence[Trace], rules: Sequence[Rule], side: str, known: Mapping[str, float] | None = None
) -> list[Score]:
    """Score rules on a side, with thresholds from the healthy runs of the side ``develop``, or with ``known`` ones by
    the name of the rule; then the present rules of docs/alarms.md, which have their own thresholds."""
    develop = [] if known else [trace for trace in traces if trace.side == "develop"]
    chosen = [trace for trace in traces if trace.side == side]
    scores = {trace: {rule.__name__: scored(rule, trace) for rule in rules} for trace in {*develop, *chosen}}
    rows = []
    for name in (rule.__name__ for rule in rules):
        healthy = [scores[trace][name] for trace in develop if trace.healthy]
        threshold = known[name] if known else threshold_of(healthy)
        rows.append(score(name, chosen, [scores[trace][name] for trace in chosen], threshold))
    for name in NAMES:
        rows.append(score(f"alarm {name}", chosen, [trace.alarms[name] for trace in chosen], 0.5))
    lasting = [pd.DataFrame(trace.alarms)[LASTING].max(axis=1) for trace in chosen]
    limits = {row.rule: row.threshold for row in rows}
    some = [
        pd.concat([lasting[i], *(of > limits[name] for name, of in scores[trace].items())], axis=1).max(axis=1)
        for i, trace in enumerate(chosen)
    ]
    rows.append(score("any alarm but spikes", chosen, lasting, 0.5))
    return [*rows, score("some rule", chosen, [found.astype(float) for found in some], 0.5)]


def scored(rule: Rule, trace: Trace) -> pd.Series:
    """Return the scores of a run after the warm-up.

    Raises:
        UserError: the rule raised an error.
    """
    try:
        return rule(trace.metrics).loc[WARMUP + 1 :]
    except Exception as error:
        name = f"{rule.__module__}:{rule.__name__}"
        raise UserError(f"the rule {name} failed on {trace.run.name}: {error!r}") from error


def thresholds(path: Path) -> dict[str, float]:
    """Return the threshold of each rule from the scores that ``mmqk bench --json`` wrote.

    Raises:
        UserError: the file cannot be read, or has no scores.
    """
    try:
        return {row["rule"]: float(row["threshold"]) for row in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} has no thresholds ({error}): give a file that mmqk bench --json wrote") from error


def markdown(rows: Sequence[Score]) -> str:
    """Return the scores as a table in Markdown, the rules with most hits first."""
    heads = ["rule", "hits (95 % interval)", "healthy runs accused", "false alarms in 1,000 steps", "lead", "threshold"]
    lines = []
    for row in sorted(rows, key=lambda row: -row.hits):
        share = row.hits / max(1, row.faults)
        hits = f"{row.hits} of {row.faults}, {share:.0%} ({row.low:.0%} to {row.high:.0%})"
        lead = "" if math.isnan(row.lead) else f"{row.lead:.0%}"
        accused = f"{row.accused} of {row.healthy}"
        lines.append([row.rule, hits, accused, f"{row.per_1000:.2f}", lead, f"{row.threshold:.3g}"])
    return markdown_table(heads, lines)


def by_kind(rows: Sequence[Score]) -> str:
    """Return the hits of each rule by kind of fault as a table in Markdown, the rules with most hits first."""
    kinds = sorted({kind for row in rows for kind in row.kinds})
    ordered = sorted(rows, key=lambda row: -row.hits)
    lines = [[row.rule, *("{} of {}".format(*row.kinds.get(kind, (0, 0))) for kind in kinds)] for row in ordered]
    return markdown_table(["rule", *kinds], lines)
