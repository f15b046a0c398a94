"""Logs of other tools and of mmqk as one table: `read_log`.

The reader is chosen by the name and the content of the file or folder. No reader executes what it reads: no pickle, no
YAML tags.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mmqk.diagnose.names import counts_units, fields_of, step_of, tags_of
from mmqk.diagnose.text import Raw, pick, read_text, table_of, value_of
from mmqk.store import UserError, flatten, read_regular
from mmqk.store.formatting import some

GAP = 3  # times the usual interval
NULLS_AFTER = 10  # numbers of a column before a null of JSON can mean NaN
TENSOR = r"^\s*tensor\(([^,)]*).*"  # a cell such as tensor(2.31, device='cuda:0')


@dataclass(frozen=True)
class Log:
    """One run, read from files of any supported tool.

    Attributes:
        source: the path as given.
        format: "W&B export", "TensorBoard", "trainer_state.json", ...
        metrics: a row per step and a column per tag of docs/statistics.md. The index ``step`` is int, increasing and
            unique. NaN means not logged; a value that the log gives as NaN or infinite is ``np.inf``. Its ``attrs``
            have ``counts``: what the index counts, "steps", "epochs", or "rows" if the log counts neither.
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
    raw = _read(Path(path))
    raw.columns = {name: cells.replace(TENSOR, r"\1", regex=True) for name, cells in raw.columns.items()}
    columns = tags_of(raw.columns, mapping, str(path), raw.format == "run of mmqk")
    notes = list(raw.notes)
    rates = [pd.to_numeric(raw.columns[column], errors="coerce") for column, tag in columns.items() if tag == "lr"]
    trained = rates[0].notna() if rates else pd.Series(dtype=bool)
    series = {tag: _numbers(raw.columns[column], column, trained, notes) for column, tag in columns.items()}
    loss = min(tag for tag in series if tag == "loss" or tag.startswith("loss/"))
    steps = _steps(raw, step, str(path), series[loss].index, notes)
    later = _restarts(steps, series[loss].index, notes)
    table, repeated = {}, 0
    for tag, values in series.items():
        at = steps.reindex(values.index)
        values = values[at.notna() & (at < later.reindex(values.index))]
        by_step = pd.Series(values.to_numpy(), index=steps.reindex(values.index).astype("int64"))
        table[tag] = by_step.groupby(level=0).last()
        repeated = max(repeated, len(by_step) - len(table[tag]))
    if repeated:
        notes.append(f"Up to {repeated} steps are logged more than once: the last value is used.")
    metrics = pd.concat(table, axis=1).sort_index().rename_axis("step").dropna(axis=1, how="all")
    if loss not in metrics:
        raise UserError(f"{path} has no numeric loss with a step: check its columns (--map, --step)")
    metrics.attrs["counts"] = steps.attrs.get("counts", "steps")
    _intervals(metrics, loss, notes)
    used = {*columns, step, step_of(tuple(raw.columns))}
    unused = [column for column in raw.columns if column not in used]
    return Log(str(path), raw.format, metrics, columns, unused, notes, fields_of(raw.config))


def _numbers(column: pd.Series, name: str, trained: pd.Series, notes: list[str]) -> pd.Series:
    """Return the logged values of a column; NaN and infinities are inf.

    "nan" in most rows, between numbers, is an empty cell of a wide table. A null is an empty cell, too. Two kinds of
    null count as NaN: those at the end of a column, if there are at least `GAP`, and `GAP` times as many as between any
    two numbers; and those in rows with a learning rate (``trained``), after `NULLS_AFTER` numbers and if they are few.
    """
    numbers = pd.to_numeric(column, errors="coerce").astype("float64")
    text, other = numbers.isin([np.inf, -np.inf]), column[numbers.isna()].astype(object)
    text[other.index[[value == value and str(value).strip().lower() == "nan" for value in other]]] = True
    finite = (numbers.notna() & ~text).to_numpy()
    if text.sum() > finite.sum() and (finite[1:] & text.to_numpy()[:-1]).sum() > GAP:
        text[:] = False
    is_null = column.index.isin(other.index[[value is None for value in other]])
    nulls = is_null.cumsum()
    before = nulls[finite]  # of each number
    lost = is_null & trained.reindex(column.index, fill_value=False).to_numpy() & (finite.cumsum() >= NULLS_AFTER)
    lost &= GAP * lost.sum() < finite.sum()
    if len(before) >= NULLS_AFTER and nulls[-1] - before[-1] >= GAP * max(1, np.diff(before).max()):
        lost |= nulls > before[-1]
    if lost.any():
        notes.append(f"{name} is null in {lost.sum()} places after {NULLS_AFTER} or more numbers: read as NaN.")
    return numbers.mask(text | lost, np.inf).dropna()


def _steps(raw: Raw, step: str | None, source: str, losses: pd.Index, notes: list[str]) -> pd.Series:
    """Return the step at each place of the file: an index of optimizer steps, NaN where there is none. Its attribute
    ``counts`` is "rows" or "epochs" if it counts these."""
    if step is not None and step not in raw.columns:
        raise UserError(f"{source} has no column {step!r}: name another with --step; it has {', '.join(raw.columns)}")
    name = step or (None if raw.steps is not None else step_of(tuple(raw.columns)))
    places = pd.RangeIndex(max(column.index.max() for column in raw.columns.values() if len(column)) + 1)
    numbered = pd.Series(places, places, dtype="float64")
    numbered.attrs["counts"] = "rows"
    if name is None and raw.steps is None:
        notes.append("No column counts the steps: the rows are numbered.")
        return numbered
    values = raw.steps if name is None else raw.columns[name].replace(r"(?<=\d),(?=\d{3}\b)", "", regex=True)  # 1,230
    steps = pd.to_numeric(values, errors="coerce").reindex(places).astype("float64")  # type: ignore[call-overload]
    steps[~((steps >= 0) & (steps < 2**53))] = np.nan
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
        steps.attrs["counts"] = "epochs"
    steps = _within_epochs(steps, raw, losses, notes)
    unit = int(np.gcd.reduce(steps.dropna().to_numpy(np.int64))) if steps.notna().any() else 0
    named = counts_units(name)
    if unit > 1 and (named or unit >= 20_000) and steps.nunique() > 2:
        counted = f"{name or 'step'} counts samples or tokens by its {'name' if named else 'values'}"
        notes.append(f"{counted}: it is divided by {unit:,}; --step names another column.")
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
        shown = some((f"{int(step):,}" for step in first), 5)
        notes.append(f"The restart at step {shown} replaces the earlier values from there on.")
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
        parts = [f"{some(tags)} every {steps:,}" for steps, tags in sorted(every.items())]
        notes.append(f"Logging intervals in steps: {'; '.join(parts)}.")
    logged = metrics[loss].dropna().index.to_numpy()
    widths = np.diff(logged)
    if len(widths) and (gaps := int((widths > GAP * np.median(widths)).sum())):
        start, end = logged[widths.argmax()], logged[widths.argmax() + 1]
        notes.append(f"{loss} has {gaps} gaps, the largest from step {start:,} to {end:,}.")


# Files and folders ----------------------------------------------------------------------------------------------------


def _read(path: Path) -> Raw:
    """Return what a file or a folder has; ``FILE:RUN`` reads one of several runs."""
    name = None
    if not path.exists() and ":" in str(path):
        whole, _, name = str(path).rpartition(":")
        path = Path(whole)
    if not path.exists():
        raise UserError(f"{path} does not exist: give a log file, or the folder of a run")
    return _folder(path, name) if path.is_dir() else _file(path, name)


def _below(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern in the folder, or in the nearest of four levels below that has one."""
    return next((found for i in range(5) if (found := sorted(folder.glob("*/" * i + pattern)))), [])


def _folder(path: Path, name: str | None) -> Raw:
    if _below(path, "run.json") or _below(path, "metrics.jsonl"):
        return _mmqk(path, name)
    if states := _below(path, "trainer_state.json"):
        return _file(max(states, key=lambda file: int((re.findall(r"\d+", file.parent.name) or [0])[-1])), name)
    runs: dict[str, Callable[[], Raw]] = {}
    if files := _below(path, "*.wandb"):
        runs = {file.resolve().parent.name: partial(_wandb, file) for file in files}
    elif files := _below(path, "metrics.csv"):
        runs = {str(file.parent.relative_to(path)): partial(_file, file, None) for file in files}
    elif files := [file for file in sorted(path.glob("**/meta.yaml")) if (file.parent / "metrics").is_dir()]:
        runs = {file.parent.name: partial(_mlflow_folder, file.parent) for file in files}
    elif files := _below(path, "mlflow.db"):
        return _file(files[0], name)
    else:
        for file in sorted(path.glob("**/*tfevents*"), key=lambda file: (len(file.parts), file)):
            runs.setdefault(str(file.parent.relative_to(path)), partial(_tensorboard, file.parent))
    if not runs:
        raise UserError(f"{path} has no log: give a file, or the folder of a run of a tool in docs/diagnose.md")
    notes: list[str] = []
    raw = runs[pick(runs, name, path, notes)]()
    raw.notes[:0] = notes
    return raw


def _file(path: Path, name: str | None) -> Raw:
    if path.suffix == ".zip":
        return _mmqk(path, name)
    if path.suffix == ".wandb":
        return _wandb(path)
    if "tfevents" in path.name:
        return _tensorboard(path)
    content = read_regular(path)
    if content[:2] == b"\x1f\x8b":
        content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(2**31)
    if content[:15] == b"SQLite format 3":
        return _mlflow_base(path, name)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):  # Windows PowerShell writes UTF-16
        text = content.decode("utf-16", errors="replace")
    elif b"\0" in content[:4096]:
        raise UserError(f"{path} is a binary file: give a log, such as a CSV, JSON lines or the output of the training")
    else:
        text = content.decode("utf-8-sig", errors="replace")
    return read_text(text, path, name)


def _long(kind: str, cells: list[tuple[str, int, Any]], notes: list[str], config: Mapping[str, Any]) -> Raw:
    """Return series from (column, step, value) in the order of time."""
    table = pd.DataFrame(cells, columns=["column", "step", "value"])
    table["value"] = table["value"].astype(object).where(table["value"].notna(), "nan")
    columns = {str(column): rows for column, rows in table.groupby("column", sort=False)["value"]}
    return Raw(kind, columns, table["step"], notes, flatten(config))


def _mmqk(path: Path, name: str | None) -> Raw:
    from mmqk.api import load_runs

    runs = {run.name: run for run in load_runs(path)}
    notes: list[str] = []
    run = runs[pick(runs, name, path, notes)]
    series = {tag: zip(*(part.tolist() for part in run.history(tag)), strict=True) for tag in run.tags}
    cells = [(tag, step, value) for tag, values in series.items() for step, value in values]
    return _long("run of mmqk", cells, [*notes, *run.notes], run.config)


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of an event file: length, checksum, data, checksum. An empty one stands for one cut off."""
    start = 0
    while start < len(content):
        length = int.from_bytes(content[start : start + 8], "little")
        if start + 16 + length > len(content):
            yield b""
            return
        yield content[start + 12 : start + 12 + length]
        start += 16 + length


def _tensorboard(path: Path) -> Raw:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    cells, notes = [], []
    for file in sorted(path.glob("*tfevents*")) if path.is_dir() else [path]:  # a restart begins a new file
        content = read_regular(file)
        for data in _records(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content):
            if not data:
                notes.append(f"{file.name} is cut off: the last record is left out.")
                break
            event = Event.FromString(data)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    cells.append((value.tag, event.step, value.simple_value))
                elif value.tensor.dtype in (1, 2, 3, 9) and not value.tensor.tensor_shape.dim:  # a number
                    cells.append((value.tag, event.step, float(make_ndarray(value.tensor))))
    return _long("TensorBoard", cells, notes, {})


def _mlflow_folder(run: Path) -> Raw:
    cells = []
    for file in sorted(path for path in (run / "metrics").rglob("*") if path.is_file()):
        tag = file.relative_to(run / "metrics").as_posix()
        for line in file.read_text(encoding="utf-8").splitlines():
            if len(parts := line.split()) >= 3:
                cells.append((int(parts[0]), tag, int(parts[2]), parts[1]))
    cells.sort(key=lambda cell: cell[0])
    fields = {file.name: file.read_text(encoding="utf-8").strip() for file in (run / "params").glob("*")}
    return _long("MLflow", [cell[1:] for cell in cells], [], {k: value_of(v) for k, v in fields.items()})


def _mlflow_base(path: Path, name: str | None) -> Raw:
    notes: list[str] = []
    base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    runs = [row[0] for row in base.execute("select distinct run_uuid from metrics")]
    if not runs:
        raise UserError(f"{path} has no run with metrics: give another file")
    run = (pick(runs, name, path, notes),)
    rows = base.execute("select key, step, value, is_nan from metrics where run_uuid = ? order by timestamp", run)
    cells = [(key, step, "nan" if nan or abs(value) > 1e308 else value) for key, step, value, nan in rows]
    config = {k: value_of(v) for k, v in base.execute("select key, value from params where run_uuid = ?", run)}
    base.close()
    return _long("MLflow", cells, notes, config)


def _blocks(content: bytes, notes: list[str]) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format with blocks of 32 KiB, after a header of 7 bytes; a
    record is whole (1) or the first (2), a middle (3) or the last part (4) of one."""
    start, whole = 7, b""
    while start + 7 <= len(content):
        if (left := 32768 - start % 32768) < 7:
            start += left
            continue
        length, kind = struct.unpack_from("<HB", content, start + 4)
        if not kind:
            return
        if start + 7 + length > len(content):
            notes.append("The file ends in the middle of a record: its run may still write.")
            return
        whole += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def _wandb(path: Path) -> Raw:
    try:
        from wandb.proto import wandb_internal_pb2 as proto
    except ImportError:
        raise UserError(f"{path} needs wandb: pip install wandb, or export the history as CSV") from None
    rows, config, notes = [], {}, list[str]()
    for data in _blocks(read_regular(path), notes):
        record = proto.Record.FromString(data)  # type: ignore[attr-defined]
        for item in (*record.run.config.update, *record.config.update):
            config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        items = record.history.item
        row = {i.key or ".".join(i.nested_key): json.loads(i.value_json, parse_constant=str) for i in items}
        rows += [flatten({"_step": record.history.step.num} | row)] if row else []
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    return table_of("W&B run", pd.DataFrame(rows, dtype=object), path, None, notes, config)
