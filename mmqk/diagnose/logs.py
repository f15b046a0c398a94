"""Logs of other tools and of mmqk as one table: `read_log`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mmqk.diagnose.formats import Raw, read
from mmqk.diagnose.names import counts_units, fields_of, step_of, tags_of
from mmqk.store import UserError

LAST_STEP = 2**53
GAP = 3  # times the usual interval
NULLS_AFTER = 10  # numbers of a column before a null of JSON can mean NaN
NOT_FINITE = ("nan", "inf", "-inf", "+inf", "infinity", "-infinity", "+infinity")


@dataclass(frozen=True)
class Log:
    """One run, read from files of any supported tool.

    Attributes:
        source: the path as given.
        format: "W&B export", "TensorBoard", "trainer_state.json", ...
        metrics: a row per step and a column per tag of docs/statistics.md. The index ``step`` is int, increasing and
            unique. NaN means not logged; a value that the log gives as NaN or infinite is ``np.inf``. Its ``attrs``
            have ``numbered``: whether the rows are numbered, because the log counts no steps.
        columns: the file's name of each column that was used, and its tag.
        unused: columns that no tag was found for.
        notes: gaps, restarts, repeated steps, units of step and logging intervals, a sentence each.
        config: fields that the files state, flat and dotted, by mmqk's names where known; empty if there are none.
    """

    source: str
    format: str
    metrics: pd.DataFrame
    columns: dict[str, str]
    unused: list[str]
    notes: list[str]
    config: dict[str, Any]


def read_log(path: Path, mapping: Mapping[str, str] = {}, step: str | None = None) -> Log:
    """Read a log of any supported tool; ``PATH:RUN`` reads one of several runs.

    Args:
        path: a file (CSV, JSON, JSON lines, lines of stdout, event file, .wandb, mlflow.db; also gz) or a folder.
        mapping: {tag: column} for columns whose name is not known.
        step: the column that counts the steps.

    Raises:
        UserError: the file does not exist or cannot be read, or no column is a loss.
    """
    raw = read(Path(path))
    columns = tags_of(raw.columns, mapping, str(path), raw.format == "run of mmqk")
    notes = list(raw.notes)
    series = {tag: _numbers(raw.columns[column], column, notes) for column, tag in columns.items()}
    loss = min(tag for tag in series if tag == "loss" or tag.startswith("loss/"))
    steps = _steps(raw, step, str(path), series[loss].index, notes)
    later = _restarts(steps, series[loss].index, notes)
    table, repeated = {}, 0
    for tag, values in series.items():
        at = steps.reindex(values.index)
        values = values[at.notna() & (at < later.reindex(values.index))]
        by_step = pd.Series(values.to_numpy(), index=steps.reindex(values.index).astype("int64"))
        null = np.isneginf(by_step)  # a null counts as NaN, unless the step has a number as well
        twice = by_step[~null].index.duplicated(keep="last")
        repeated = max(repeated, int(twice.sum()))
        numbers = by_step[~null][~twice]
        table[tag] = numbers.combine_first(by_step[null][~by_step[null].index.duplicated()] * -1)
    if repeated:
        notes.append(f"Up to {repeated} steps are logged more than once: the last value is used.")
    metrics = pd.concat(table, axis=1).sort_index().rename_axis("step").dropna(axis=1, how="all")
    if loss not in metrics:
        raise UserError(f"{path} has no loss with a step: name the column of the step with --step")
    metrics.attrs["numbered"] = steps.attrs.get("numbered", False)
    _intervals(metrics, loss, notes)
    used = {*columns, step, step_of(tuple(raw.columns))}
    unused = [column for column in raw.columns if column not in used]
    return Log(str(path), raw.format, metrics, columns, unused, notes, fields_of(raw.config))


def _numbers(column: pd.Series, name: str, notes: list[str]) -> pd.Series:
    """Return the logged values of a column: NaN and infinities are inf, a null that may be a NaN is -inf.

    "nan" or null in most rows, between numbers, are empty cells of a wide table.
    """
    numbers = pd.to_numeric(column, errors="coerce").astype("float64")
    text = numbers.isin([np.inf, -np.inf])
    other = column[numbers.isna()].astype(object)
    named = [index for index, value in other.items() if str(value).strip().lower() in NOT_FINITE and value == value]
    text[pd.Index(named)] = True
    null = column.index.isin([index for index, value in other.items() if value is None])
    finite = numbers.notna() & ~text
    for kind in (text, null):
        returns = (finite.to_numpy()[1:] & np.asarray(kind)[:-1]).sum()
        if kind.sum() > finite.sum() and returns > GAP:
            kind[:] = False
    before = int(finite[: null.argmax()].sum())
    if null.any() and before >= NULLS_AFTER:
        notes.append(f"{name} is null in {int(null.sum())} places after {before} numbers: read as NaN.")
        numbers[null] = -np.inf
    return numbers.mask(text, np.inf).dropna()


def _steps(raw: Raw, step: str | None, source: str, losses: pd.Index, notes: list[str]) -> pd.Series:
    """Return the step at each place of the file: an index of optimizer steps, NaN where there is none. Its attribute
    ``numbered`` says that the rows are numbered."""
    if step is not None and step not in raw.columns:
        raise UserError(f"{source} has no column {step!r}: name another with --step; it has {', '.join(raw.columns)}")
    name = step or (None if raw.steps is not None else step_of(tuple(raw.columns)))
    places = pd.RangeIndex(max(column.index.max() for column in raw.columns.values() if len(column)) + 1)
    numbered = pd.Series(places, places, dtype="float64")
    numbered.attrs["numbered"] = True
    if name is None and raw.steps is None:
        notes.append("No column counts the steps: the rows are numbered.")
        return numbered
    values = raw.steps if name is None else pd.to_numeric(raw.columns[name], errors="coerce")
    steps = values.reindex(places).astype("float64")  # type: ignore[union-attr]
    steps[~((steps >= 0) & (steps < LAST_STEP))] = np.nan
    missing = int(steps.reindex(losses).isna().sum())
    if 2 * missing > len(losses):
        notes.append(f"{missing} of {len(losses)} losses have no readable step: the rows are numbered instead.")
        return numbered
    if missing:
        notes.append(f"{missing} losses have no readable step and are left out.")
    if (steps.dropna() % 1 != 0).any():
        notes.append(f"{name} has fractions: the rows are numbered instead.")
        return numbered
    if name and name.lower() == "epoch":
        notes.append("No column counts the steps: epochs are read as steps.")
    steps = _within_epochs(steps, raw, losses, notes)
    unit = int(np.gcd.reduce(steps.dropna().to_numpy(np.int64))) if steps.notna().any() else 0
    named = counts_units(name)
    # Intervals of logging are round numbers; batches of tokens and samples are not, or they are large.
    if unit > 1 and (named or unit >= 20_000 or (unit >= 256 and unit % 50)) and steps.nunique() > 2:
        notes.append(
            f"All values of {name or 'step'} are multiples of {unit:,}, as counts of samples or tokens are: they are"
            " divided by it; --step names another column."
        )
        steps /= unit
    return steps


def _within_epochs(steps: pd.Series, raw: Raw, losses: pd.Index, notes: list[str]) -> pd.Series:
    """Return steps that go on where the epoch begins them again."""
    name = next((column for column in raw.columns if column.lower() in ("epoch", "train/epoch")), None)
    at = steps.reindex(losses).dropna()
    back = at.diff() < 0
    if name is None or not back.any():
        return steps
    epochs = pd.to_numeric(raw.columns[name], errors="coerce").reindex(at.index).ffill() // 1
    if not (epochs.diff()[back] > 0).all():
        return steps
    jump = (at.shift() + at.diff()[~back].median() - at).where(back, 0.0).fillna(0.0)
    notes.append("The step begins again in each epoch: the steps of the epochs before are added.")
    return steps + jump.cumsum().reindex(steps.index).ffill().fillna(0.0)


def _restarts(steps: pd.Series, losses: pd.Index, notes: list[str]) -> pd.Series:
    """Return for each place the first step that is logged again after it; inf if none is."""
    at = steps.reindex(losses).dropna()
    back = at.diff() < 0
    later = pd.Series(np.inf, index=steps.index)
    if back.sum() > max(GAP, 0.2 * len(at)):
        notes.append("The rows are not in the order of their steps: they are sorted.")
    elif back.any():
        first = at[back]
        shown = ", ".join(f"{int(step):,}" for step in first[:5]) + (", …" if len(first) > 5 else "")
        notes.append(
            f"The run was restarted: at step {shown} the step goes back, and from there on later values replace the"
            " earlier ones."
        )
        # A row before the restart is dropped if its step is not below that of the restart.
        later[first.index] = first
        later = later[::-1].cummin()[::-1].shift(-1, fill_value=np.inf)
    return later


def _intervals(metrics: pd.DataFrame, loss: str, notes: list[str]) -> None:
    """Note the logging intervals, if there are several, and the gaps of the loss."""
    every: dict[int, list[str]] = {}
    for tag in metrics:
        at = metrics[tag].dropna().index.to_series().diff().dropna()
        if len(at):
            every.setdefault(int(at.median()), []).append(str(tag))
    if len(every) > 1:
        parts = [
            f"{', '.join(tags[:3])}{f' and {len(tags) - 3} more' if len(tags) > 3 else ''} every {steps:,}"
            for steps, tags in sorted(every.items())
        ]
        notes.append(f"Logging intervals in steps: {'; '.join(parts)}.")
    logged = metrics[loss].dropna().index.to_numpy()
    widths = np.diff(logged)
    if len(widths) and (gaps := int((widths > GAP * np.median(widths)).sum())):
        start, end = logged[widths.argmax()], logged[widths.argmax() + 1]
        notes.append(f"{loss} has {gaps} gaps, the largest from step {start:,} to {end:,}.")
