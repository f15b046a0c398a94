"""Runs of the bench with their labels: what is wrong, from which step, and on which side of the split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import yaml

from mmqk.lab.runs import Run
from mmqk.store import AlarmRules, UserError, find_file, identity_hash
from mmqk.store.alarms import NAMES
from mmqk.store.rules import Alarm

LABELS = "configs/failures/bench/labels.yaml"
WORSE_NATS = 0.25  # above the healthy run of the seed: the run has failed
SMOOTH = 50  # steps of a median of losses
WHOLE = "loss/all"  # the name under which the rules read a loss that is not split by modality
# What the rules and the signs read, and so what a pack of the bench has, with this number of digits.
DIGITS = 4
STATISTICS = (
    "loss", "grad_norm", "lr", "log_z", "attn_logit_absmax", "attn_entropy", "attn_rank", "q_norm", "k_norm",
    "q_norm_max", "k_norm_max", "resid_norm", "final_norm", "embed_row_norm", "update_rms", "adam_below_eps",
    "w_q_stable_rank", "w_k_stable_rank", "w_q_norm", "w_k_norm", "w_v_norm", "w_o_norm", "w_gate_norm",
    "w_up_norm", "w_down_norm", "w_q_grad_over_v", "w_k_grad_over_v", "w_v_grad_over_v", "w_o_grad_over_v",
    "w_gate_grad_over_v", "w_up_grad_over_v", "w_down_grad_over_v", "embed_grad_over_v", "head_grad_over_v",
)  # fmt: skip
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
