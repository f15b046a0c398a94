"""Reads text: CSV, JSON, JSON lines, and the output of a training.

A reader returns a series for each column, in the order in which the tool wrote them.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from mmqk.diagnose.names import TABLE, counts_units, step_of, tag_of
from mmqk.store import UserError, flatten, read_regular
from mmqk.store.formatting import some


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


def pick(runs: Iterable[str], name: str | None, path: Path, notes: list[str]) -> str:
    """Return the run to read, the first one unless ``name`` is given, and note that there are others."""
    known = list(runs)
    if name is not None and name not in known:
        raise UserError(f"{path} has no run {name!r}: give one of {some(known, 40)}")
    if name is None and len(known) > 1:
        others = some(known[1:], 5)
        notes.append(f"{len(known)} runs are in {path}: {known[0]} is read; give {path}:RUN for another ({others}).")
    return name or known[0]


def value_of(text: str) -> Any:
    """Return the number, truth value, None or list that a text is, else the text."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


def read_text(text: str, path: Path, name: str | None) -> Raw:
    """Read the text of a file: JSON if it begins with a bracket, a CSV if its header has known names, else lines."""
    text = text.replace("\r\n", "\n")
    if text.lstrip()[:1] in ("{", "[") and (raw := _json(text, path, name)) is not None:
        return raw
    first, _, rest = text.partition("\n")
    delimiter = max(";\t,", key=first.count)
    header = [] if "\r" in first else next(csv.reader([first], delimiter=delimiter), [])
    even = rest.partition("\n")[0].count(delimiter) >= len(header) - 1 > 0
    known = step_of(tuple(header)) or any(tag_of(column.rpartition(" - ")[2]) for column in header)
    return _csv(text, delimiter, path, name) if even and known else _lines(text)


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
    return table_of(kind, table, path, name, notes, config)


def table_of(kind: str, table: Any, path: Path, name: str | None, notes: list[str], config: Mapping[str, Any]) -> Raw:
    """Return one run of a table: a run can be the prefix of its columns (W&B), or a value in a column."""
    table.columns = [str(column) for column in table.columns]
    lower = {column.lower(): column for column in table}
    run = next((lower[c] for c in ("run", "run_id", "run_name", "_run") if c in lower), None)
    if prefixes := dict.fromkeys(c.rpartition(" - ")[0] for c in table if " - " in c):
        kind, prefix = "W&B export", f"{pick(prefixes, name, path, notes)} - "
        table = table[[c for c in table if " - " not in c or c.startswith(prefix)]]
        table.columns = [column.removeprefix(prefix) for column in table]
    elif {"wall time", "step", "value"} <= set(lower):
        known = tag_of(re.sub(r".*tag-|\.(csv|json)(\.gz)?$", "", path.name).replace("_", " ")) or "loss"
        notes.append(f"The column Value is read as {known}: the file has no other name for it.")
        kind, table = "TensorBoard export", table.rename(columns={lower["value"]: known})
    elif run and table[run].nunique() > 1:
        table = table[table[run].astype(str) == pick(map(str, table[run].unique()), name, path, notes)]
    if split := next((lower[c] for c in ("split", "mode", "phase", "stage") if c in lower), None):
        held = table[split].astype(str).str.fullmatch(TABLE["words"]["EVAL"], case=False)
        losses = {column: f"val {column}" for column in table if tag_of(column) == "loss" and not held.all()}
        others = table[held].drop(columns=[c for c in losses if losses[c] in table])  # have a column of their own
        table = pd.concat([table[~held], others.rename(columns=losses)]).sort_index()
    bounds = [c for c in table if c.endswith(("__MIN", "__MAX"))]
    averaged = [c for c in bounds if c[:-5] in table and (table[c].notna() & (table[c] != table[c[:-5]])).any()]
    if averaged:
        differ = f"{averaged[0]} differs from {averaged[0][:-5]}"
        notes.append(f"{differ}: each row averages several steps, which hides single ones; export the full history.")
    return Raw(kind, dict(table.drop(columns=bounds).reset_index(drop=True).items()), None, notes, flatten(config))


def _json(text: str, path: Path, name: str | None) -> Raw | None:
    """Return JSON or JSON lines; None if the text is neither. NaN and Infinity stay texts, as a null stays None."""
    notes: list[str] = []
    config: dict[str, Any] = {}
    kind = "JSON"
    if '"log_history": [' in text and not text.rstrip().endswith("}"):
        text = text[: text.rfind("}") + 1] + "]}"
        notes.append("The file is cut off: what follows its last whole record is left out.")
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
    return table_of(kind, table, path, name, notes, config)


def _json_lines(text: str, notes: list[str]) -> list[Any] | None:
    lines = [line for line in text.split("\n") if line.strip()]
    records, decode = [], json.JSONDecoder(parse_constant=str).decode
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            records.append(decode(line))
    records = [record for record in records if isinstance(record, dict)]
    if bad := len(lines) - len(records):
        cut = " (the last one is cut off)" if not text.endswith("\n") else ""
        notes.append(f"{bad} of {len(lines)} lines cannot be read and are left out{cut}.")
    return None if 2 * bad > len(lines) else records


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
# A line in which a word such as val or test comes before the first loss; a loss without such a word just before it.
EVALUATION = re.compile(rf"((?!loss).){{,300}}\b{TABLE['words']['EVAL']}\b((?!loss).){{,300}}\bloss\b", re.IGNORECASE)
TRAINING = re.compile(r"(?<!val.)(?<!valid.)(?<!ation.)(?<!test.)loss['\"]?[:= ]+(\d|nan|inf)", re.IGNORECASE)
MEGATRON = re.compile(r"validation (?:loss|results) at iteration (\d+)[^|\n]*\| lm[ _]loss value")
# OpenMMLab: Epoch(train) [1][200/735], Epoch [1][54/30895], Iter [50/10548].
WITHIN = re.compile(r"\b(?:Epoch(?:\(train\))? *\[(\d+)\]|Iter(?:\(train\))?) *\[ *(\d+)/\d+\]")


def _lines(text: str) -> Raw:
    """Return the pairs of name and number of each line; a line without a step belongs to the step before it."""
    notes: list[str] = []
    # litgpt prints "val: 3.1"; DeepSpeed prints the learning rates of its parameter groups as a list
    text = ANSI.sub("", text).replace(", val: ", ", val loss: ").replace(" lr=[", " learning rate pg0=")
    text = MEGATRON.sub(r"iteration \1 | val loss", text)
    text = re.sub(r"^(?:s:)?(\d+)(?= \| loss | t[er]l:)", r"step \1", text, flags=re.MULTILINE)  # llama2.c, llm.c
    text = WITHIN.sub(lambda at: f"epoch: {at[1] or 0} step: {at[2]} ", text)
    ranks = set(RANK.findall("\n".join(line for line in text.split("\n") if "loss" in line.lower())))
    if len(ranks) > 1:
        kept = min(ranks, key=int)
        notes.append(f"The lines are those of {len(ranks)} ranks: rank {kept} is read.")
        text = "\n".join(line for line in text.split("\n") if not (m := RANK.match(line)) or m[1] == kept)
    rows, bar, longest = [dict[str, str]()], 0, 0
    lines = re.split(r"[\r\n]+", text)
    marked = [EVALUATION.match(line) is not None for line in lines]
    training = sum(TRAINING.search(line) is not None for line, mark in zip(lines, marked, strict=True) if not mark)
    is_name = training < sum(marked)  # the word is part of the name of the run or of a file
    for line, mark in zip(lines, marked, strict=True):
        if (position := " [" in line and BAR.search(line)) and int(position[2]) >= longest:
            bar, longest = int(position[1]), int(position[2])
        pairs = {key: value.replace(",", "") for key, value in PAIR.findall(LEVEL.sub("", line, 1))}
        if not pairs:
            continue
        if mark and not is_name and "val_loss" not in map(tag_of, pairs):
            losses = {key: f"val {key}" for key in pairs if tag_of(key) == "loss" and "train" not in key.lower()}
            pairs = {losses.get(key, key): value for key, value in pairs.items()}
        step = step_of(tuple(pairs))
        if step is not None and step.lower() not in ("epoch", "train time/batch") and not counts_units(step):
            rows.append({"step": pairs.pop(step)})
        elif position or "step" not in rows[-1] or (bar and pairs.keys() & rows[-1].keys()):
            rows.append({"step": str(bar)} if longest else {})
        elif pairs.keys() & rows[-1].keys():
            rows.append({"step": rows[-1]["step"]})
        rows[-1].update(pairs)
    table: Any = pd.DataFrame([row for row in rows if row.keys() - {"step"}], dtype=object)
    tool = next((tool for tool, pattern in TABLE["tools"].items() if re.search(pattern, text, re.MULTILINE)), "")
    if tool in ("Megatron", "GPT-NeoX") and "learning rate" in table:
        _omitted_losses(table, notes)
    config = {name: value_of(value) for name, value in ARGUMENT.findall(text)}
    return Raw(f"{tool} output".strip(), dict(table.items()), None, notes, config)


def _omitted_losses(table: pd.DataFrame, notes: list[str]) -> None:
    """Set the loss of Megatron's lines that have none: it prints a loss only if it is above 0, which a NaN is not."""
    losses = [str(column) for column in table if tag_of(str(column)) == "loss"] or ["lm loss"]
    skipped = pd.to_numeric(table.get("number of skipped iterations", 0.0), errors="coerce") > 0
    omitted = table["learning rate"].notna() & ~skipped & table.reindex(columns=losses).isna().all(axis=1)
    if omitted.any():
        table.loc[omitted, losses[0]] = "nan"
        lines = f"{int(omitted.sum())} lines without one, the first at step {table['step'][omitted].iloc[0]}"
        notes.append(f"Megatron leaves out a loss that is NaN: {lines}, are read as NaN.")
