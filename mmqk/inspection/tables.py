"""The tables of ``python -m mmqk.inspect`` for the page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mmqk.analysis.formatting import listed, nats, number
from mmqk.store.formatting import text_table

Row = dict[str, Any]


def statistics_rows(plain: dict[str, Any]) -> list[Row]:
    """Return the table of statistics: label, note, and one cell per modality."""
    names = list(plain["modalities"])

    def row(label: str, note: str, cell: Callable[[str, dict[str, Any]], str]) -> Row:
        return {"label": label, "note": note, "cells": [cell(m, plain["modalities"][m]) for m in names]}

    rows = [
        row("targets", "predicted tokens that were read", lambda m, s: f"{plain['targets'][m]:,}"),
        row("share", "of all targets", lambda m, s: percent(s["share"])),
        row("ids used", "of the block", lambda m, s: f"{s['used']:,} of {s['block']:,}"),
        row("uniform", "ln of the block size, nats per token", lambda m, s: nats(math.log(s["block"]))),
        row("sample", "tokens of the estimates below", lambda m, s: f"{s['tokens']:,}"),
        row("unigram entropy", "nats per token, Miller-Madow", lambda m, s: nats(s["unigram"])),
        row("compressed", "LZMA, nats per token", lambda m, s: nats(s["compressed"])),
        row("n-gram model", "held-out nats per token, ± standard error", lambda m, s: _measured(s)),
        row("n-gram context", "tokens back", lambda m, s: _context(s)),
    ]
    if "dial" in plain:
        met, floors = plain["dial"]["met"], plain["dial"]["floors"]
        rows.append(row("true loss", "−log p of these targets, nats", lambda m, s: f"{met[m]:.3f}"))
        rows.append(row("floor", "mean over all tokens, nats", lambda m, s: f"{floors[m]:.3f}"))
    rows += [
        row("repeated", "tokens in 8-token passages read before", lambda m, s: percent(s["repeated"])),
        row(
            "held-out, repeated",
            "held-out tokens in 8-token passages of the training data",
            lambda m, s: _optional(s["repeated_held_out"]),
        ),
        row("duplicates", "documents equal to an earlier one", lambda m, s: percent(s["duplicates"])),
        row("loss weight", "0: no loss", lambda m, s: f"{plain['loss_weights'][m]:g}"),
    ]
    return rows


def step_rows(plain: dict[str, Any]) -> list[Row]:
    """Return the table of the LZMA estimates by amount of data and of the n-gram losses by length of context."""
    statistics = plain["modalities"]
    rows: list[Row] = []
    for label, divisor in (("a hundredth", 100), ("a tenth", 10), ("all", 1)):
        cells = []
        for s in statistics.values():
            size = s["tokens"] // divisor
            at = s["compressed_by_tokens"].get(size)
            cells.append("" if at is None else f"{nats(at)} ({size:,})")
        if any(cells):
            rows.append({"label": f"compressed, {label} of the tokens", "cells": cells})
    for context in next(iter(statistics.values()))["model_by_context"] if statistics else {}:
        label = "no context" if context == "none" else f"{context.replace(',', ', ')} tokens back"
        values = [s["model_by_context"].get(context) for s in statistics.values()]
        rows.append(
            {"label": f"n-gram model, {label}", "cells": ["" if v is None else nats(v) for v in values]}
        )
    return rows


def dial_rows(plain: dict[str, Any]) -> list[Row]:
    """Return the table of the dial: one row per statistic."""
    table = plain["dial"]["table"] if "dial" in plain else []
    keys = [key for key in (table[0] if table else {}) if key != "modality"]
    return [{"label": key, "cells": [_value(entry[key]) for entry in table]} for key in keys]


def table_lines(names: list[str], rows: list[Row]) -> list[str]:
    """Return the table as text for a terminal."""
    cells = [["", *names], *([row["label"], *row["cells"]] for row in rows)]
    notes = ["", *(row["note"] for row in rows)]
    return [f"{line}  {note}".rstrip() for line, note in zip(text_table(cells, {0}), notes, strict=True)]


def percent(share: float) -> str:
    """Format a share in percent."""
    return f"{number(100 * share)} %"


def _optional(share: float | None) -> str:
    return "no held-out data" if share is None else percent(share)


def _measured(s: dict[str, Any]) -> str:
    return "no held-out data" if s["model"] is None else f"{nats(s['model'])} ± {nats(s['model_error'])}"


def _context(s: dict[str, Any]) -> str:
    return listed([str(distance) for distance in s["model_context"]]) or "none"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return number(value, digits=4)
    return f"{value:,}" if isinstance(value, int) else str(value)
