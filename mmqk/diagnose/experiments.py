"""Experiments on a run that failed: forks from before the event, each with one change. Is the event gone, or does it
remain?

`run` writes a grid of forks, trains it with ``mmqk ablate`` and compares all forks by one rule, on the series of the
event: ``before`` is its median over the last `SMOOTH` values up to the forks, ``most`` its largest later median of
`Event.values` values, up to a little past the event. The event *remains* if ``most`` exceeds ``before`` by at least
half as much as in the control; a value that is not finite counts as infinite.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from mmqk.bench.traces import LASTING, SMOOTH, metrics_table
from mmqk.diagnose.findings import TABLES
from mmqk.inspection.step import Position
from mmqk.lab.runs import Run, read_runs
from mmqk.store import UserError
from mmqk.store.checkpoint_files import checkpoints_in, step_of
from mmqk.store.files import write_folder

SHORT = 5  # values of a median that shows an event of more than one step
NOT_FINITE = 1e30  # stands for a value that is not finite
PAST = 50  # steps that the forks train past the event, if the run is as long
# These rules compare medians of 50 losses, so their alarms come late.
LATE = {"rise": 50, "divergence": 50}
BATCHES_BEFORE, MOST_BATCHES = 4, 50
CONTROL = "same"
ARMS: dict[str, dict[str, str]] = TABLES["arms"]


@dataclass(frozen=True)
class Event:
    """What the experiments ask about: ``tag`` left its range at ``step``, in the words of ``sentence``."""

    step: int
    tag: str
    sentence: str
    alarm: str = ""

    @property
    def values(self) -> int:
        """Number of values of the median that shows the event."""
        return 1 if self.alarm.startswith("spike") or self.alarm == "non_finite" else SHORT

    @property
    def sign(self) -> int:
        """-1 for a series that falls at the event."""
        return -1 if self.tag.startswith(("attn_entropy", "attn_rank")) else 1


def run(folder: Path, step: int | None, fields: Mapping[str, Any]) -> tuple[Event, pd.DataFrame, list[str]]:
    """Train the forks of a run around an event, and say in which of them the event is gone. The same call continues
    an interrupted one. The forks are in ``FOLDER-experiments/step<event>``.

    Args:
        folder: a run folder of mmqk.
        step: step of the event; None for the first alarm that is not a spike or, without one, the first alarm.
        fields: fields that all forks set too, such as ``data.patch`` of the run, which a fork must name again.

    Returns:
        The event; a row per arm, with the columns ``change``, ``outcome`` of the event (gone, remains or unknown),
        ``before``, ``most`` and ``final`` (values of its series), and ``means``; and sentences on the forks.

    Raises:
        UserError: the folder is no run with an event, has no checkpoint before the event, or a fork failed.
    """
    from mmqk.ablate import main as ablate

    found = read_runs(folder)
    if len(found) != 1 or not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not the folder of one run of mmqk train: name one that has a config.yaml.")
    one, metrics = found[0], metrics_table(found[0])
    event = _event(one, step)
    start, checkpoint = _start(folder, event)
    end = min(one.planned_steps, event.step + PAST)
    loud = _loud(metrics[event.tag], event)
    earlier = loud.loc[:start].iloc[-SMOOTH:]
    # A fork that begins at the event has no earlier values.
    before = float(earlier.median() if len(earlier) else loud.iloc[0])
    left_out = _sequences(one, metrics, event, start, before)
    wide = not str(one.setting("trainer.precision", "32-true")).startswith("bf16")
    settings: dict[str, dict[str, Any]] = {
        CONTROL: {}, "batches": {"fork_skip_batches": end - start}, "sequences": {"fork_skip": left_out},
        "precision": {"trainer.precision": "bf16-mixed" if wide else "32-true"}, "moments": {"fork_new_moments": True},
        "slower": {"optim.lr": one.setting("optim.lr") / 3}, "noise": {"fork_noise": 1e-6},
    }  # fmt: skip
    common = {
        "trainer.max_steps": end, "checkpoint.every_n_steps": 0, "checkpoint.at": [], "logging": [],
        "optim.schedule_steps": one.setting("optim.schedule_steps") or one.planned_steps, **fields,
    }  # fmt: skip
    arms = {
        name: {"label": ARMS[name]["what"], "fork": {"checkpoint": str(checkpoint.resolve())}, "set": common | changed}
        for name, changed in settings.items()
    }
    grid = {"name": "experiments", "title": f"Experiments on {folder.name}", "base": [], "seeds": [one.seed]}
    out = folder.parent / f"{folder.name}-experiments" / f"step{event.step}"
    file = out.with_suffix(".yaml")
    write_folder(file.parent, {file.name: yaml.safe_dump({**grid, "arms": arms}, sort_keys=False)})
    with contextlib.redirect_stdout(sys.stderr):
        code = ablate([str(file), "--out", str(out)])
    if code:
        raise UserError(f"a fork in {out} failed or was interrupted: run the same command again.")
    forks = {fork.arm: metrics_table(fork).loc[start + 1 :] for fork in read_runs(out)}
    notes = [
        f"Event: {event.sentence}; series: {event.tag}.",
        f"Forks of {folder} from step {start} to {end}, in {out}.",
        f"Sequences left out: {left_out}.",
    ]
    return event, _table(forks, event, before), notes


def _sequences(one: Run, metrics: pd.DataFrame, event: Event, start: int, before: float) -> str:
    """Return the sequences of the steps from which the series is above half of its rise until it is below a quarter,
    and of a few steps before."""
    loud = _loud(metrics[event.tag].loc[: event.step + PAST], event).loc[start + 1 :]
    rise = loud.max() - before
    above = loud >= before + rise / 2
    first = int(above.idxmax()) if above.any() else event.step
    below = [int(step) for step in loud.index[loud < before + rise / 4] if step > first]
    last = min([first + MOST_BATCHES, *below]) - 1
    position = Position.of(one.path)
    return f"{position.numbers(max(start + 1, first - BATCHES_BEFORE))[0]}-{position.numbers(last)[-1]}"


def _table(found: Mapping[str, pd.DataFrame], event: Event, before: float) -> pd.DataFrame:
    """Return the table of `run`."""
    rows: dict[str, dict[str, Any]] = {}
    for name in (name for name in ARMS if name in found):
        loud = _loud(found[name].get(event.tag, pd.Series(dtype=float)), event)
        final = loud.iloc[-SHORT:].median()
        rows[name] = {"change": ARMS[name]["what"], "outcome": "", "before": before, "most": loud.max(), "final": final}
    control = rows[CONTROL]["most"] - before
    for name, row in rows.items():
        remains = control > 0 and row["most"] - before >= control / 2
        row["outcome"] = "unknown" if math.isnan(row["most"] - control) else "remains" if remains else "gone"
        row["means"] = ARMS[name].get(row["outcome"], "nothing was logged")
        if name != CONTROL and rows[CONTROL]["outcome"] != "remains":
            row["means"] = ""  # nothing to compare with
        for value in ("before", "most", "final"):
            row[value] = math.inf if row[value] >= NOT_FINITE else row[value] * event.sign
    return pd.DataFrame(rows).T


def _loud(series: pd.Series, event: Event) -> pd.Series:
    """Return the series of an event as numbers that rise at the event, each the median of `Event.values` values."""
    rising = (series.dropna() * event.sign).replace([np.inf, -np.inf], NOT_FINITE)
    return rising.rolling(event.values, 1).median()


def _event(one: Run, step: int | None) -> Event:
    """Return the event at ``step``, or the first one of the run."""
    alarms = sorted(one.alarms, key=lambda alarm: alarm.step)
    if step is not None:
        if not 0 < step <= one.last_step:
            raise UserError(f"{one.path} has no step {step}: name one from 1 to {one.last_step}.")
        at = next((alarm for alarm in alarms if alarm.step == step), None)
        return Event(step, "loss", f"step {step}") if at is None else Event(step, at.tag, at.line(), at.name)
    lasting = [alarm for alarm in alarms if alarm.name in LASTING] or alarms
    if not lasting:
        raise UserError(f"{one.path} has no alarm: name the step of the event with --step.")
    first = lasting[0]
    return Event(first.step, first.tag, first.line(), first.name)


def _start(folder: Path, event: Event) -> tuple[int, Path]:
    """Return the newest checkpoint before the event and its step."""
    latest = event.step - LATE.get(event.alarm, 1)
    earlier = [path for path in checkpoints_in(folder / "checkpoints") if step_of(path) <= latest]
    if not earlier:
        at = max(1, min(latest, event.step - 20))
        again = f'mmqk train --config {folder / "config.yaml"} --checkpoint.at "[{at}]" --out {folder}-again'
        raise UserError(f"{folder} has no checkpoint before step {latest}: write one with {again} and name its folder.")
    return step_of(earlier[-1]), earlier[-1]
