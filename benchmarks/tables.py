"""Write results as Markdown: medians and quartiles over rounds, and ratios within each round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.flops import peak_flops
from benchmarks.harness import MEASURED, Row, quartiles

SCENARIOS = (  # of benchmarks.streams
    "two epochs", "new order", "resume", "second resume", "at epoch's end", "2 workers", "0 to 2 workers",
    "2 ranks to 1", "uneven tars", "broken sample", "same tar", "tars in 64",
)  # fmt: skip
Unit = Mapping[str, Any]
Cell = Callable[[Row, Row | None, Unit], str]
HEADINGS = {
    "peers": "The same model elsewhere",
    "variants": "What a remedy costs",
    "monitors": "What the monitors cost",
    "sizes": "Sizes, lengths and vocabularies",
    "together": "Many small runs at once",
    "data": "Speed of the data",
    "loss": "Head and loss alone",
}


def speed(row: Row, what: str) -> list[float]:
    """Return the work per second in each round."""
    return [row["work"][what] / seconds for seconds in row["seconds"]]


def times(row: Row, base: Row) -> list[float]:
    """Return the seconds of the row divided by those of the base, for each round."""
    return [a / b for a, b in zip(row["seconds"], base["seconds"], strict=True)]


def faster(row: Row, base: Row, what: str) -> list[float]:
    """Return the speed of the row divided by that of the base, for each round."""
    return [a / b for a, b in zip(speed(row, what), speed(base, what), strict=True)]


def mfu(row: Row, device: str) -> float | None:
    """Return the median model FLOPs utilization; None if the device's peak is not known."""
    peak = peak_flops(device)
    if peak is None or "flops" not in row["work"]:
        return None
    return quartiles(speed(row, "flops"))[1] / peak


def against(row: Row, unit: Unit) -> Row | None:
    """Return the row with which this row is compared; None if it was not measured or is this row itself."""
    name = row["against"] or unit["base"]
    base = next((other for other in unit["rows"] if other["name"] == name), None)
    return None if base is None or base is row or base["status"] != MEASURED else base


def _ms(row: Row, base: Row | None, unit: Unit) -> str:
    return f"{1e3 * quartiles(row['seconds'])[1]:,.2f}"


def _ms_spread(row: Row, base: Row | None, unit: Unit) -> str:
    low, _, high = quartiles(row["seconds"])
    return f"{1e3 * low:,.2f} to {1e3 * high:,.2f}"


def _rate(what: str) -> Cell:
    def cell(row: Row, base: Row | None, unit: Unit) -> str:
        return _rounded(quartiles(speed(row, what))[1]) if row["work"].get(what) else ""

    return cell


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}"


def _rate_spread(what: str) -> Cell:
    def cell(row: Row, base: Row | None, unit: Unit) -> str:
        low, _, high = quartiles(speed(row, what))
        return f"{_rounded(low)} to {_rounded(high)}"

    return cell


def _mfu(row: Row, base: Row | None, unit: Unit) -> str:
    share = mfu(row, unit["machine"]["device"])
    return "" if share is None else f"{share:.1%}"


def _memory(row: Row, base: Row | None, unit: Unit) -> str:
    return "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"


def _memory_share(row: Row, base: Row | None, unit: Unit) -> str:
    if base is None or not base["peak_bytes"] or row["peak_bytes"] is None:
        return ""
    return f"{row['peak_bytes'] / base['peak_bytes']:.2f}"


def _first(row: Row, base: Row | None, unit: Unit) -> str:
    return "" if row["first_seconds"] is None else f"{row['first_seconds']:.0f}"


def _times(row: Row, base: Row | None, unit: Unit) -> str:
    return "" if base is None else f"{quartiles(times(row, base))[1]:.2f}"


def _times_spread(row: Row, base: Row | None, unit: Unit) -> str:
    low, _, high = quartiles(times(row, base)) if base else (0.0, 0.0, 0.0)
    return f"{low:.2f} to {high:.2f}" if base else ""


def _cost(row: Row, base: Row | None, unit: Unit) -> str:
    return "" if base is None else f"{quartiles(times(row, base))[1] - 1:+.1%}"


def _cost_spread(row: Row, base: Row | None, unit: Unit) -> str:
    low, _, high = quartiles(times(row, base)) if base else (0.0, 0.0, 0.0)
    return f"{low - 1:+.1%} to {high - 1:+.1%}" if base else ""


def _faster(what: str) -> Cell:
    def cell(row: Row, base: Row | None, unit: Unit) -> str:
        return "" if base is None else f"{quartiles(faster(row, base, what))[1]:.2f}"

    return cell


def _parameters(row: Row, base: Row | None, unit: Unit) -> str:
    return f"{row['work']['parameters'] / 1e6:,.1f}M"


def _stored(heading: str) -> Cell:
    def cell(row: Row, base: Row | None, unit: Unit) -> str:
        return row.get("cells", {}).get(heading, "")

    return cell


_TIME: dict[str, Cell] = {"ms a step": _ms, "quartiles": _ms_spread}
_MIB: dict[str, Cell] = {"peak MiB": _memory}
_COST: dict[str, Cell] = {"cost": _cost, "quartiles of the cost": _cost_spread}
COLUMNS: dict[str, dict[str, Cell]] = {
    "peers": {
        **_TIME, "tokens/s": _rate("tokens"), "MFU": _mfu, **_MIB, "first step, s": _first,
        "time over mmqk's": _times, "quartiles of that": _times_spread,
    },
    "variants": {**_TIME, "tokens/s": _rate("tokens"), "MFU": _mfu, **_MIB, **_COST},
    "monitors": {**_TIME, "tokens/s": _rate("tokens"), **_COST},
    "sizes": {
        "parameters": _parameters, **_TIME, "tokens/s": _rate("tokens"), "MFU": _mfu, **_MIB,
        "peak over dense": _memory_share, "time over dense": _times,
    },
    "together": {
        "steps/s of all": _rate("steps"), "quartiles": _rate_spread("steps"), "over one process": _faster("steps"),
    },
    "data": {
        **{heading: _stored(heading) for heading in SCENARIOS},
        "samples/s": _rate("samples"), "tokens/s": _rate("tokens"), "over WebDataset": _faster("samples"),
    },
    "loss": {**_TIME, **_MIB, "peak over dense": _memory_share, "time over dense": _times},
}  # fmt: skip


def markdown(units: Sequence[Unit]) -> str:
    """Return the tables of all units, sorted by table and device."""
    order = list(HEADINGS)
    units = sorted(units, key=lambda u: (order.index(u["table"]), u["machine"]["device"]))
    parts = []
    for name, group in groupby(units, key=lambda u: u["table"]):
        parts.append(f"## {HEADINGS[name]}")
        parts += [one(unit) for unit in group]
    return "\n\n".join(parts)


def one(unit: Unit) -> str:
    """Return the table of a unit. Columns without a value are left out."""
    rows, columns = unit["rows"], COLUMNS[unit["table"]]
    cells = {
        heading: [
            cell(row, against(row, unit), unit) if row["status"] == MEASURED and row["seconds"] else "" for row in rows
        ]
        for heading, cell in columns.items()
    }
    cells = {heading: column for heading, column in cells.items() if any(column)}
    lines = [f"### {unit['title']}", "", _about(unit), ""]
    lines.append("| | " + " | ".join(cells) + " |")
    lines.append("| --- |" + " --: |" * len(cells))
    for i, row in enumerate(rows):
        if row["status"] == MEASURED:
            lines.append(f"| {row['name']} | " + " | ".join(column[i] for column in cells.values()) + " |")
        else:
            repeats = row["status"] in row["reason"]
            reason = row["reason"] if repeats else f"{row['status']}: {row['reason']}"
            lines.append(f"| {row['name']} | {reason} |" + " |" * (len(cells) - 1))
    notes = [f"{row['name']}: {row['note']}" for row in rows if row["note"]]
    same = _losses(rows) if unit["table"] == "peers" else []  # in other tables the models differ
    return "\n".join([*lines, *(["", *notes] if notes else []), *same])


def _about(unit: Unit) -> str:
    m = unit["machine"]
    device = m["device"] if m["device"] == m["cpu"] else f"{m['device']}, {m['cpu']}"
    packages = ", ".join(f"{name} {version}" for name, version in unit["versions"].items() if version)
    facts = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in unit["facts"].items() if v is not None)
    rounds = max((len(row["seconds"]) for row in unit["rows"]), default=0)
    return (
        f"{device} ({m['threads']} of {m['cpus']} CPU threads, load {m['load']} at the start); {packages}."
        f" {facts}; medians of {rounds} interleaved rounds. `{unit['command']}`"
    )


def _losses(rows: Sequence[Row]) -> list[str]:
    """Return a line with the range of the first losses, which are equal if all rows began with the same model and
    batch."""
    values = [row["first_loss"] for row in rows if row["first_loss"] is not None]
    if len(values) < 2:
        return []
    apart = (max(values) - min(values)) / max(values)
    ends = f"{min(values):.4f} to {max(values):.4f} nats"
    return ["", f"Losses of the first step: {ends}, a relative difference of {apart:.1e}."]
