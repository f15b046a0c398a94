"""Reads files and folders of other tools and of mmqk. `read` chooses the reader by the name and the content.

No reader executes what it reads: no pickle, no YAML tags.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from mmqk.diagnose.text import Raw, pick, read_text, table_of, value_of
from mmqk.store import UserError, flatten, read_regular


def read(path: Path) -> Raw:
    """Read a file or a folder; ``FILE:RUN`` reads one of several runs.

    Raises:
        UserError: there is no such file, no run of this name, or nothing that a reader knows.
    """
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
        raise UserError(
            f"{path} has no log: give a file, or the folder of a run of mmqk, W&B, TensorBoard, MLflow, Lightning or"
            " transformers"
        )
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


# ---------------------------------------------------------------- folders and databases


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
    cells = [
        (tag, step, value)
        for tag in run.tags
        for step, value in zip(*(part.tolist() for part in run.history(tag)), strict=True)
    ]
    return _long("run of mmqk", cells, [*notes, *run.notes], run.config)


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of an event file: length, checksum, data, checksum; a record that is cut off ends the file with
    an empty one."""
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
    query = "select key, step, value, is_nan from metrics where run_uuid = ? order by timestamp"
    rows = base.execute(query, run)
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
