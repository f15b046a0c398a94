"""Score alarm rules on runs of the bench: hits, lead and false alarms, at equal false alarms."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)


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
    hits: dict[int, list[bool]] = {}
    kinds: dict[str, tuple[int, int]] = {}
    leads, accused, alarms, steps = [], 0, 0, 0
    for trace, series in zip(traces, scores, strict=True):
        at = begins(series, threshold)
        if trace.healthy:
            accused += len(at) > 0
            alarms, steps = alarms + len(at), steps + trace.run.last_step
            continue
        early = at[at <= trace.label.begins]
        alarms, steps = alarms + len(early), steps + trace.label.begins
        late = at[at > trace.label.begins]
        hits.setdefault(trace.run.seed, []).append(len(late) > 0)
        hit, runs = kinds.get(trace.label.kind, (0, 0))
        kinds[trace.label.kind] = hit + (len(late) > 0), runs + 1
        if len(late) and trace.failed_at is not None:
            leads.append((trace.failed_at - late[0]) / trace.run.last_step)
    shares = [float(np.mean(of_seed)) for of_seed in hits.values()]
    low, high = (
        stats.t.interval(0.95, len(shares) - 1, np.mean(shares), stats.sem(shares))
        if len(shares) > 1 and np.std(shares) > 0
        else (np.mean(shares or [math.nan]),) * 2
    )
    return Score(
        rule=name,
        threshold=threshold,
        hits=sum(map(sum, hits.values())),
        faults=sum(map(len, hits.values())),
        low=max(0.0, float(low)),
        high=min(1.0, float(high)),
        accused=accused,
        healthy=sum(trace.healthy for trace in traces),
        per_1000=1000 * alarms / max(1, steps),
        lead=float(np.median(leads)) if leads else math.nan,
        kinds=kinds,
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
