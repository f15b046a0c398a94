"""Runs of the bench with their labels: what is wrong, from which step, on which side of the split, when a run has
failed, and what a change does to failing runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import yaml

from mmqk.bench.rules import noise
from mmqk.lab.formatting import markdown_table
from mmqk.lab.runs import Run
from mmqk.store import AlarmRules, UserError, find_file, identity_hash
from mmqk.store.alarms import NAMES, RISE_BACK, RISE_MEDIAN
from mmqk.store.formatting import some
from mmqk.store.rules import Alarm

LABELS = "configs/failures/bench/labels.yaml"
WORSE_NATS = 0.25  # above the healthy run of the seed: the run has failed
SMOOTH = 50  # steps of a median of losses
LASTING = [name for name in NAMES if not name.startswith("spike")]  # a spike alone can be one hard batch
BENCH_STEPS = 600  # length of the runs of the bench
# In standard deviations of one loss. The medians of 50 values of noise around a constant span at most 1.5 of them, in
# 50,000 values; the first loss is a single value.
MEDIANS, FIRST = 1.5, 5.0
MOST_SKIPS = 0.1  # share of steps, after the first; a scale is doubled after 2,000 good ones
HALVINGS = 16  # of the initial scale of torch's GradScaler, 65,536, down to 1: each skips a step
WHOLE = "loss/all"  # the name under which the rules read a loss that is not split by modality
Side = Literal["develop", "judge"]


@dataclass(frozen=True)
class Label:
    """What is known of an arm.

    Attributes:
        kind: kind of the fault; empty for a healthy arm.
        begins: number of optimizer steps before the first bad step.
        side: whether rules are developed or judged on the arm.
        modality, layer: where the fault is; None if it is everywhere.
        remedy: the field that mends it; empty if there is none.
    """

    kind: str = ""
    begins: int = 0
    side: Side = "develop"
    modality: str | None = None
    layer: int | None = None
    remedy: str = ""


@dataclass(frozen=True, eq=False)
class Trace:
    """One run, its label and its side: a run of a judged seed is judged, whatever its arm. ``twin`` is the healthy
    run of the same seed."""

    run: Run
    label: Label
    side: Side
    twin: Trace | None = None

    @property
    def healthy(self) -> bool:
        return not self.label.kind

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Everything that the run logged: a row per step, a column per tag; a fork begins with its parent's rows."""
        return metrics_table(self.run)

    @cached_property
    def alarms(self) -> dict[str, pd.Series]:
        """Return, for each rule of docs/alarms.md, 1 where one of its alarms begins and 0 elsewhere."""
        off = {modality for modality, weight in (self.run.setting("loss.weights") or {}).items() if not weight}
        trained = {str(tag)[5:] for tag in self.metrics if str(tag).startswith("loss/")} - off
        rules = AlarmRules(self.run.warmup_steps, self.run.planned_steps, trained)
        scores = {name: pd.Series(0.0, index=self.metrics.index) for name in NAMES}
        for alarm in alarms_in(self.metrics, rules):
            scores[alarm.name][alarm.step] = 1.0
        return scores

    @cached_property
    def failed_at(self) -> int | None:
        """The first step after the fault began at which the run has failed (`fails_from`); None if it has not."""
        twin = None if self.twin is None else self.twin.metrics
        return fails_from(self.run, self.metrics, twin, self.label.begins)


def metrics_table(run: Run) -> pd.DataFrame:
    """Return all series of a run as a table: the index is the step, the columns are tags."""
    tags = {**(run.parent.tags if run.parent is not None else {}), **run.tags}
    columns = {tag: pd.Series(values, index=steps) for tag in tags for steps, values in [run.history(tag)]}
    return pd.DataFrame(columns).sort_index()


def alarms_in(metrics: pd.DataFrame, rules: AlarmRules) -> list[Alarm]:
    """Return the alarms of a table in the order in which they begin. A loss that is not split by modality is read as
    that of one modality, so that the rules of a modality hold for it."""
    whole = not any(str(tag).startswith("loss/") for tag in metrics)
    tags = np.array([WHOLE if whole and tag == "loss" else str(tag) for tag in metrics], dtype=object)
    alarms = []
    for step, row, has in zip(metrics.index, metrics.to_numpy(), metrics.notna().to_numpy(), strict=True):
        alarms += rules.update(int(step), dict(zip(tags[has], row[has].tolist(), strict=True)))

    def named(text: str) -> str:
        return text.replace(WHOLE, "loss").replace("all loss", "loss")

    return [replace(a, tag=named(a.tag), sentence=named(a.sentence)) if whole else a for a in alarms]


def is_lasting(alarm: Alarm, metrics: pd.DataFrame) -> bool:
    """Return whether an alarm of a table is no spike, no rise that ended, and no divergence that noise explains.

    In more than twice as many losses as runs of the bench have, half of a rise must be left at the end. After a
    divergence the median of 50 losses must be more than `MEDIANS` standard deviations of one loss above the lowest
    median before it, or more than `FIRST` above the first loss.
    """
    if alarm.name not in ("rise", "divergence") or not np.isfinite(alarm.value):
        return alarm.name in LASTING
    losses = metrics[alarm.tag].dropna()
    medians = losses.rolling(RISE_MEDIAN).median()
    before = medians.loc[: alarm.step]
    if alarm.name == "rise":
        lowest = before.iloc[-RISE_BACK:].min()
        return len(losses) <= 2 * BENCH_STEPS or bool(2 * medians.iloc[-1] > lowest + alarm.value)
    deviation, highest = noise(losses).loc[: alarm.step].median(), medians.loc[alarm.step :].max()
    return bool(highest > min(before.min() + MEDIANS * deviation, losses.iloc[0] + FIRST * deviation))


def without_skips(metrics: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Return a table without the infinite gradient norms of steps that a gradient scaler (fp16) skips: the losses of
    the step are finite, and so is one of the next `HALVINGS` norms. A note says at which steps."""
    norm = metrics.get("grad_norm", pd.Series(dtype=float)).dropna()
    soon = np.isfinite(norm)[::-1].rolling(HALVINGS + 1, min_periods=1).max()[::-1] > 0
    skipped = np.isinf(norm) & soon & ~metrics.filter(regex="^loss(/|$)").isin([np.inf]).any(axis=1)[norm.index]
    if not skipped.any() or skipped.iloc[HALVINGS:].mean() > MOST_SKIPS:
        return metrics
    steps = some((f"{step:,}" for step in skipped.index[skipped]), 5)
    notes.append(f"grad_norm is infinite at step {steps}, and soon finite again, as where fp16 skips steps: left out.")
    return metrics.assign(grad_norm=norm[~skipped])


def fails_from(run: Run, metrics: pd.DataFrame, twin: pd.DataFrame | None, begins: int = 0) -> int | None:
    """Return the step at which a run ended as diverged, or else the first step after ``begins`` from which on it is
    worse than its healthy twin (`worse_from`); None if it has not failed."""
    if run.status.status == "diverged":
        return run.status.step
    return None if twin is None else worse_from(metrics, twin, begins)


def worse_from(metrics: pd.DataFrame, twin: pd.DataFrame, begins: int = 0) -> int | None:
    """Return the first step after ``begins`` from which on, to the end, the median of `SMOOTH` losses of a modality
    is more than `WORSE_NATS` above that of the twin; None if there is none before the last `SMOOTH` steps."""
    starts = []
    for tag in [tag for tag in metrics if str(tag).startswith("loss/") and tag in twin]:
        median, other = (table[tag].dropna().rolling(SMOOTH, 1).median() for table in (metrics, twin))
        better = median.index[~(median > other.reindex(median.index, method="ffill") + WORSE_NATS)]
        later = median.index[median.index > max([begins, *better])]
        starts += [later[0]] if len(later) else []
    return int(min(starts)) if starts and min(starts) <= metrics.index[-1] - SMOOTH else None


def split_hash(labels: str = LABELS) -> str:
    """Return a hash of the labels and the split; another order of the arms has the same hash."""
    return identity_hash(yaml.safe_load(Path(find_file(labels)).read_text(encoding="utf-8")))


def labelled(runs: list[Run], labels: str = LABELS) -> list[Trace]:
    """Return the finished runs with their labels.

    Raises:
        UserError: an arm has no label.
    """
    content = yaml.safe_load(Path(find_file(labels)).read_text(encoding="utf-8"))
    by_arm = {arm: Label(**fields) for arm, fields in content["faults"].items()}
    by_arm |= {arm: Label(side=side) for arm, side in content["healthy"].items()}
    # A parent that was trained again for its checkpoint repeats a run.
    finished = [run for run in runs if run.status.finished and not run.name.endswith("-again")]
    if unknown := {run.arm for run in finished} - by_arm.keys():
        raise UserError(f"{labels} has no arm {min(unknown)}: add it under faults or under healthy")
    traces = []
    for run, label in [(run, by_arm[run.arm]) for run in finished]:
        judged = label.side == "judge" or run.seed in content["judged_seeds"]
        traces.append(Trace(run, label, "judge" if judged else "develop"))
    twins = {trace.run.seed: trace for trace in traces if trace.run.arm == content["twin"]}
    return [replace(trace, twin=twins.get(trace.run.seed)) for trace in traces]


# What a change does to runs that fail: the zoo, and the rescue map --------------------------------------------------

# The grid has an arm ``healthy``; arms that fail, named ``none-FAILURE``; and arms with a change, named
# ``CHANGE-FAILURE``, or ``CHANGE-FAILURE-STEP`` if they are forks.
HEALTHY, NONE = "healthy", "none"
DELAYED = 0.1  # of the run: how much later a delayed failure is


def outcomes(runs: Iterable[Run]) -> pd.DataFrame:
    """Return a row for each run of a change.

    Columns: ``change``; ``failure``; ``at``, the step of the fork, 0 for a run from the start; ``seed``;
    ``outcome``: saved (it does not fail), delayed (it fails, but later by a tenth of the run than without the
    change) or lost; empty if the run without the change does not fail either; ``cost``: final loss minus that of the
    healthy run, nats, mean of the modalities.

    Raises:
        UserError: a run of the arm ``healthy`` or ``none`` is missing.
    """
    found = [run for run in runs if run.status.finished]
    named = {(*parts_of(run), run.seed): run for run in found}
    tables = {run.name: metrics_table(run) for run in found}
    rows = []
    for run in (run for run in found if run.arm != HEALTHY):
        change, failure, at = parts_of(run)
        healthy, parent = named.get((HEALTHY, "", 0, run.seed)), named.get((NONE, failure, 0, run.seed))
        if healthy is None or parent is None:
            raise UserError(f"{run.name} has no finished run of the arms {HEALTHY} and {NONE} beside it: train them")
        twin = tables[healthy.name]
        fails, would = (fails_from(one, tables[one.name], twin) for one in (run, parent))
        late = fails is not None and would is not None and fails >= would + DELAYED * parent.planned_steps
        cost = (_final(tables[run.name]) - _final(twin)).mean()
        outcome = "" if would is None else "saved" if fails is None else "delayed" if late else "lost"
        rows.append((change, failure, at, run.seed, outcome, cost))
    return pd.DataFrame(rows, columns=["change", "failure", "at", "seed", "outcome", "cost"])


def parts_of(run: Run) -> tuple[str, str, int]:
    """Return the change, the failure and the step of the fork that the name of an arm has."""
    name, _, last = run.arm.rpartition("-")
    at = int(last) if name and last.isdecimal() else 0
    change, _, failure = (name if at else run.arm).rpartition("-")
    return (change, failure, at) if change else (failure, "", 0)


def _final(metrics: pd.DataFrame) -> pd.Series:
    """Return the median of the last `SMOOTH` losses of each modality."""
    return metrics.filter(regex="^loss/").apply(lambda loss: loss.dropna().iloc[-SMOOTH:].median())


def outcomes_table(table: pd.DataFrame) -> str:
    """Return a row per change and a column per failure and step: how many seeds were saved or delayed, and the mean
    cost."""
    cells: dict[Any, str] = {}  # by change, failure and step
    for key, rows in table.groupby(["change", "failure", "at"]):
        counts = rows["outcome"].value_counts()
        said = ", ".join(f"{counts[name]} {name}" for name in ("saved", "delayed") if name in counts)
        said = said or ("lost" if (rows["outcome"] != "").any() else "did not fail")
        cells[key] = f"{said} {rows['cost'].mean():+.2f}"
    columns = sorted({key[1:] for key in cells})
    names = [f"{failure} @{at}" if at else failure for failure, at in columns]
    changes = dict.fromkeys(table["change"])
    return markdown_table(["change", *names], [[c, *(cells.get((c, *of), "") for of in columns)] for c in changes])
