"""Reads files of other tools and of mmqk: a series per column, in the order in which the tool wrote them.

No reader executes what it reads: no pickle, no YAML tags. `read` chooses the reader by the name and the content.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import gzip
import io
import json
import re
import sqlite3
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from mmqk.diagnose.names import counts_units, step_of, tag_of
from mmqk.store import UserError, flatten, read_regular


@dataclass
class Raw:
    """What a file has, before names and steps are known.

    Attributes:
        format: name of the format.
        columns: values of each column; the index is the place of the value in the order of time, shared by all
            columns. A value is a number, or a text such as "nan", or None for a null of JSON.
        steps: the step at each place, if the format defines it; else one of the columns is the step.
        notes: what is unusual in the file, a sentence each.
        config: flat fields that the files state.
    """

    format: str
    columns: Mapping[str, pd.Series]
    steps: pd.Series | None = None
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


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


def _pick(runs: Iterable[str], name: str | None, path: Path, notes: list[str]) -> str:
    """Return the run to read, the first one unless ``name`` is given, and note that there are others."""
    known = list(runs)
    if name is not None and name not in known:
        raise UserError(f"{path} has no run {name!r}: give one of {', '.join(known[:40])}")
    if name is None and len(known) > 1:
        others = ", ".join(known[1:6]) + (", …" if len(known) > 6 else "")
        notes.append(f"{len(known)} runs are in {path}: {known[0]} is read; give {path}:RUN for another ({others}).")
    return name or known[0]


def _value(text: str) -> Any:
    """Return the number, truth value, None or list that a text is, else the text."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


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
    raw = runs[_pick(runs, name, path, notes)]()
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
    text = text.replace("\r\n", "\n")
    if text.lstrip()[:1] in ("{", "[") and (raw := _json(text, path, name)) is not None:
        return raw
    first, _, rest = text.partition("\n")
    delimiter = max(";\t,", key=first.count)
    header = [] if "\r" in first else next(csv.reader([first], delimiter=delimiter), [])
    even = rest.partition("\n")[0].count(delimiter) >= len(header) - 1 > 0
    known = step_of(tuple(header)) or any(tag_of(column.rpartition(" - ")[2]) for column in header)
    return _csv(text, delimiter, path, name) if even and known else _lines(text)


# ---------------------------------------------------------------- tables


def _csv(text: str, delimiter: str, path: Path, name: str | None) -> Raw:
    notes = []
    last = text[text.rstrip("\n").rfind("\n") + 1 :]
    if not text.endswith("\n") and last.count(delimiter) < text.partition("\n")[0].count(delimiter):
        text = text[: -len(last)]
        notes.append("The last line is cut off and left out.")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pd.errors.ParserWarning)
        table = pd.read_csv(
            io.StringIO(text), sep=delimiter, keep_default_na=False, na_values=[""], on_bad_lines="warn"
        )
    if caught:
        longer = str(caught[0].message).count("Skipping line")
        notes.append(f"{longer} lines with more fields than the header are left out.")
    if delimiter == ";":
        table = table.apply(lambda column: column.str.replace(",", ".") if column.dtype == "str" else column)
    config: dict[str, Any] = {}
    if (path.parent / "hparams.yaml").exists():
        try:
            config = yaml.safe_load(read_regular(path.parent / "hparams.yaml")) or {}
        except yaml.YAMLError:
            notes.append("hparams.yaml has objects of Python and is not read.")
    kind = "Lightning metrics.csv" if path.name == "metrics.csv" else "CSV"
    return _table(kind, table, path, name, notes, config)


def _table(kind: str, table: Any, path: Path, name: str | None, notes: list[str], config: Mapping[str, Any]) -> Raw:
    """Return one run of a table: a run can be the prefix of its columns (W&B), or a value in a column."""
    table.columns = [str(column) for column in table.columns]
    lower = {column.lower(): column for column in table}
    run = next((lower[c] for c in ("run", "run_id", "run_name", "_run") if c in lower), None)
    if prefixes := dict.fromkeys(c.rpartition(" - ")[0] for c in table if " - " in c):
        kind, prefix = "W&B export", f"{_pick(prefixes, name, path, notes)} - "
        table = table[[c for c in table if " - " not in c or c.startswith(prefix)]]
        table.columns = [column.removeprefix(prefix) for column in table]
    elif {"wall time", "step", "value"} <= set(lower):
        known = tag_of(re.sub(r".*tag-|\.(csv|json)(\.gz)?$", "", path.name).replace("_", " ")) or "loss"
        notes.append(f"The column Value is read as {known}: the file has no other name for it.")
        kind, table = "TensorBoard export", table.rename(columns={lower["value"]: known})
    elif run and table[run].nunique() > 1:
        table = table[table[run].astype(str) == _pick(map(str, table[run].unique()), name, path, notes)]
    bounds = [c for c in table if c.endswith(("__MIN", "__MAX"))]
    averaged = [c for c in bounds if c[:-5] in table and (table[c].notna() & (table[c] != table[c[:-5]])).any()]
    if averaged:
        notes.append(
            f"{averaged[0]} differs from {averaged[0][:-5]}: the export averages several steps per row, so single steps"
            " that stood out are flattened; export the full history."
        )
    return Raw(kind, dict(table.drop(columns=bounds).reset_index(drop=True).items()), None, notes, flatten(config))


def _json(text: str, path: Path, name: str | None) -> Raw | None:
    """Return JSON or JSON lines; None if the text is neither. NaN and Infinity stay texts, as a null stays None."""
    notes: list[str] = []
    config: dict[str, Any] = {}
    kind = "JSON"
    try:
        content = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        content, kind = _json_lines(text, notes), "JSON lines"
    if isinstance(content, dict):
        config = {k: v for k, v in content.items() if isinstance(v, int | float | str) and v != ""}
        if "log_history" in content:
            kind = "trainer_state.json"
        rows = next((content[k] for k in ("log_history", "history", "data", "rows", "logs") if k in content), None)
        if isinstance(rows, list) and rows and isinstance(rows[0], list) and "columns" in content:
            rows = [dict(zip(content["columns"], row, strict=False)) for row in rows]
        if rows is None and all(isinstance(value, dict | list) for value in content.values()):
            rows = pd.DataFrame(content, dtype=object).to_dict("records")
        content = [content] if rows is None else rows
    if content and isinstance(content[0], list) and len(content[0]) == 3:  # TensorBoard's download
        content = [dict(zip(("Wall time", "Step", "Value"), row, strict=True)) for row in content]
    if not isinstance(content, list) or not content or not all(isinstance(row, dict) for row in content):
        return None
    records = []
    for row in content:
        for key in ("config", "args", "hparams", "hyperparameters"):
            if isinstance(row.get(key), dict):
                config |= row.pop(key)
        records.append(flatten(row) if any(isinstance(value, dict) for value in row.values()) else row)
    table = pd.DataFrame([record for record in records if record], dtype=object)
    if kind.startswith("JSON") and "_runtime" in table and "_step" in table:
        kind = "W&B history"
    return _table(kind, table, path, name, notes, config)


def _json_lines(text: str, notes: list[str]) -> list[Any] | None:
    lines = [line for line in text.split("\n") if line.strip()]
    try:  # one call of the parser is faster than a call per line
        return json.loads(f"[{','.join(lines)}]", parse_constant=str)
    except (ValueError, RecursionError):
        pass
    records, decode = [], json.JSONDecoder(parse_constant=str).decode
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            records.append(decode(line))
    records = [record for record in records if isinstance(record, dict)]
    if 2 * len(records) < len(lines):
        return None
    bad = len(lines) - len(records)
    cut = " (the last one is cut off)" if not text.endswith("\n") else ""
    notes.append(f"{bad} of {len(lines)} lines cannot be read and are left out{cut}.")
    return records


# ---------------------------------------------------------------- lines of stdout

_NUMBER = r"[-+]?(?:\d+(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
PAIR = re.compile(
    r"(?<![\w/.])([A-Za-z_][\w/.%-]*(?: (?:[A-Za-z_(][\w/.()%-]*|\d+\)))*)(?:['\"]?[:=] *['\"]?(?:tensor\()?|\s+)"
    rf"({_NUMBER})(?![\w.]*\w)",
    re.IGNORECASE,
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RANK = re.compile(r"^\s*\[(?:rank|default|[\w.-]+:)?(\d+)\]:", re.MULTILINE)
LEVEL = re.compile(r"^.{,120}?\b(?:DEBUG|INFO|WARNING|ERROR)\b[\s:|\]-]*(?:\[[^\]=]*\]\s*)?")
BAR = re.compile(r"\b(\d+)/(\d+) \[\d*\d:")
ARGUMENT = re.compile(r"^ *(\w+) \.{3,} *(\S.*)$", re.MULTILINE)
TOOLS = {
    "GPT-NeoX": r"samples/sec: [\d.]+ \| iteration +\d+/",
    "Megatron": r"iteration +\d+/ *\d+ \|",
    "torchtitan": r"step: +\d+  loss: ",
    "nanoGPT": r"\biter \d+: loss",
    "litgpt": r"iter +\d+ step \d+ \| loss train",
    "OLMo": r"\[step=\d+/\d+",
    "transformers": r"^.*\{'loss': ",
    "fairseq": r"\bnum_updates=\d",
    "OpenMMLab": r" - mm\w+ - INFO - ",
}
# OpenMMLab: Epoch(train) [1][200/735], Epoch [1][54/30895], Iter [50/10548].
WITHIN = re.compile(r"\b(?:Epoch(?:\(train\))? *\[(\d+)\]|Iter(?:\(train\))?) *\[ *(\d+)/\d+\]")


def _lines(text: str) -> Raw:
    """Return the pairs of name and number of each line; a line without a step belongs to the step before it."""
    notes: list[str] = []
    text = ANSI.sub("", text).replace(", val: ", ", val loss: ")  # litgpt
    text = WITHIN.sub(lambda at: f"epoch: {at[1] or 0} step: {at[2]} ", text)
    ranks = Counter(RANK.findall("\n".join(line for line in text.split("\n") if "loss" in line.lower())))
    if len(ranks) > 1:
        kept = min(ranks, key=int)
        notes.append(f"The lines are those of {len(ranks)} ranks: rank {kept} is read.")
        text = "\n".join(line for line in text.split("\n") if not (m := RANK.match(line)) or m[1] == kept)
    rows: list[dict[str, str]] = [{}]
    bar = longest = 0
    for line in re.split(r"[\r\n]+", text):
        if (position := " [" in line and BAR.search(line)) and int(position[2]) >= longest:
            bar, longest = int(position[1]), int(position[2])
        pairs = {key: value.replace(",", "") for key, value in PAIR.findall(LEVEL.sub("", line, 1))}
        if not pairs:
            continue
        step = step_of(tuple(pairs))
        if step is not None and step.lower() != "epoch" and not counts_units(step):
            rows.append({"step": pairs.pop(step)})
        elif position or "step" not in rows[-1] or (bar and pairs.keys() & rows[-1].keys()):
            rows.append({"step": str(bar)} if longest else {})
        elif pairs.keys() & rows[-1].keys():
            rows.append({"step": rows[-1]["step"]})
        rows[-1].update(pairs)
    table: Any = pd.DataFrame([row for row in rows if row.keys() - {"step"}], dtype=object)
    tool = next((tool for tool, pattern in TOOLS.items() if re.search(pattern, text, re.MULTILINE)), "")
    if tool in ("Megatron", "GPT-NeoX") and "learning rate" in table:
        _omitted_losses(table, notes)
    config = {name: _value(value) for name, value in ARGUMENT.findall(text)}
    return Raw(f"{tool} output".strip(), dict(table.items()), None, notes, config)


def _omitted_losses(table: pd.DataFrame, notes: list[str]) -> None:
    """Set the loss of Megatron's lines that have none: it prints a loss only if it is above 0, which a NaN is not."""
    losses = [str(column) for column in table if tag_of(str(column)) == "loss"] or ["lm loss"]
    skipped = pd.to_numeric(table.get("number of skipped iterations", 0.0), errors="coerce") > 0
    omitted = table["learning rate"].notna() & ~skipped & table.reindex(columns=losses).isna().all(axis=1)
    if omitted.any():
        table.loc[omitted, losses[0]] = "nan"
        notes.append(
            f"Megatron leaves out a loss that is NaN: lines without a loss ({int(omitted.sum())}, the first at step"
            f" {table['step'][omitted].iloc[0]}) are read as NaN."
        )


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
    run = runs[_pick(runs, name, path, notes)]
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
    return _long("MLflow", [cell[1:] for cell in cells], [], {k: _value(v) for k, v in fields.items()})


def _mlflow_base(path: Path, name: str | None) -> Raw:
    notes: list[str] = []
    base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    runs = [row[0] for row in base.execute("select distinct run_uuid from metrics")]
    if not runs:
        raise UserError(f"{path} has no run with metrics: give another file")
    run = (_pick(runs, name, path, notes),)
    query = "select key, step, value, is_nan from metrics where run_uuid = ? order by timestamp"
    rows = base.execute(query, run)
    cells = [(key, step, "nan" if nan or abs(value) > 1e308 else value) for key, step, value, nan in rows]
    config = {k: _value(v) for k, v in base.execute("select key, value from params where run_uuid = ?", run)}
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
    return _table("W&B run", pd.DataFrame(rows, dtype=object), path, None, notes, config)
