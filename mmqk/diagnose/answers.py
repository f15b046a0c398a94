"""The answers of ``mmqk diagnose`` to one log, two logs, checkpoints and experiments: text, data and one HTML page."""

from __future__ import annotations

import argparse
import base64
import io
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mmqk.bench.evidence import evidence
from mmqk.diagnose.findings import HOLD, apart, at_the_end, diagnose, gradient_growth, part
from mmqk.diagnose.logs import Log, read_log
from mmqk.lab.formatting import number, render, short
from mmqk.lab.page.drawing import PALETTE, RC
from mmqk.store import UserError, differing_fields, parse_tag
from mmqk.store.formatting import plural, some, text_table

MOST_ROWS, MOST_LINES, WIDEST = 8, 20, 56  # departures; rows of a table; characters of a cell in the terminal
Record = dict[str, Any]
Section = tuple[str, list[Record], list[str]]  # title, rows of a table, notes


@dataclass(frozen=True)
class Answer:
    """What a way of diagnosing found.

    Attributes:
        title: the first line.
        parts: the parts of the text and of the page.
        record: the content of diagnosis.json, plain data; ``found`` is whether there is a finding.
        image: a PNG of the log, in base64.
    """

    title: str
    parts: list[Section]
    record: Record
    image: str = ""

    def text(self) -> str:
        """Return the answer for the terminal; cells are cut at `WIDEST` characters, except in the last column."""
        lines = [self.title]
        for title, rows, notes in self.parts:
            lines += ["", title.upper()]
            cut = [[*(one_line(cell, WIDEST) for cell in row), one_line(last)] for *row, last in _cells(rows)]
            lines += [f"  {row.rstrip()}" for row in text_table(cut, range(len(cut[0])))] if cut else []
            lines += [f"  {one_line(note)}" for note in notes]
        return "\n".join(lines)

    def page(self) -> str:
        """Return the answer as one HTML file."""
        parts = [(title, _cells(rows), notes) for title, rows, notes in self.parts]
        return render("diagnose.html", {**vars(self), "parts": parts}, Path(__file__).with_name("templates"))


def _cells(rows: list[Record]) -> list[list[str]]:
    """Return a table as text, first its head; empty without rows."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return number(value)
        return "–" if value is None else f"{value:,}" if type(value) is int else str(value)

    return [list(rows[0]), *(list(map(cell, row.values())) for row in rows)] if rows else []


def of_log(options: argparse.Namespace) -> Answer:
    """Diagnose one log."""
    log = read_log(options.files[0], dict(options.map), options.step)
    found = diagnose(log)
    return Answer(title_of(found), sections(found), found, figure(log, found))


def of_pair(options: argparse.Namespace) -> Answer:
    """Say where the first run parts from the second."""
    run, reference = (read_log(file, dict(options.map), options.step) for file in options.files)
    partings, losses, last = part(run, reference), apart(run, reference), at_the_end(run, reference)
    fields = [(f, run.config.get(f), reference.config.get(f)) for f in differing_fields(run.config, reference.config)]
    tables = {
        "series that part, the first one first": pd.DataFrame(partings),
        "losses that are apart to the end": pd.DataFrame(losses),
        f"at the last common step, {last.attrs['step']:,}": last,
        "fields that differ": pd.DataFrame(fields, columns=["field", "run", "reference"]),
    }
    if any(str(tag).startswith("grad_norm/") for tag in run.metrics):
        tables["growth of grad_norm² of the first run, by group"] = gradient_growth(run)
    notes = [f"{log.source}: {note}" for log in (run, reference) for note in log.notes]
    title = f"{run.source} and {reference.source} do not part beyond their spread"
    if last.attrs["steps"] < 2 * HOLD:
        title = f"{run.source} and {reference.source} have {last.attrs['steps']} steps in common, too few to compare"
    if losses:
        since = "the first step" if losses[0]["first"] else f"step {losses[0]['step']:,}"
        title = f"{run.source} is apart from {reference.source} from {since} to the end: {losses[0]['tag']}"
    if partings:
        title = "{} parts from {} at step {step:,}: {tag}".format(run.source, reference.source, **partings[0])
    return _answer(title, tables, notes, bool(partings or losses))


def of_models(options: argparse.Namespace) -> Answer:
    """Say what checkpoints show, without a batch or with one."""
    from mmqk.diagnose.tensors import read_batch
    from mmqk.diagnose.weights import tables_of

    batch = None if options.batch is None else read_batch(options.batch)
    tables, notes, found = tables_of(options.model, batch, dict(options.modality) or None, options.limit)
    title = f"{', '.join(map(str, options.model))}: {'a finding' if found else 'no rule fired'}"
    return _answer(title, tables, notes, found)


def of_experiments(options: argparse.Namespace) -> Answer:
    """Train forks of a run from before its event."""
    from mmqk.diagnose.experiments import CONTROL, run

    if len(options.files) != 1:
        raise UserError("--experiments needs the folder of one run of mmqk: mmqk diagnose runs/mine --experiments")
    if options.step and not options.step.isdecimal():
        raise UserError(f"--step is {options.step}: with --experiments, give the step of the event")
    folder = options.files[0]
    event, table, notes = run(folder, int(options.step) if options.step else None, dict(options.fields))
    tables, found = {"experiments": table.reset_index(names="experiment")}, table["outcome"][CONTROL] == "remains"
    return _answer(f"Experiments on {folder}", tables, notes, bool(found), event=asdict(event))


def _answer(title: str, tables: dict[str, pd.DataFrame], notes: list[str], found: bool, **extra: Any) -> Answer:
    """Return the answer of a way that finds tables; ``extra`` is for diagnosis.json alone."""
    plain: dict[str, list[Any]] = {name: table.astype(object).to_dict("records") for name, table in tables.items()}
    parts: list[Section] = []
    for name, rows in plain.items():
        more = [f"and {plural(len(rows) - MOST_LINES, 'row')} more"] if len(rows) > MOST_LINES else []
        parts += [(name, rows[:MOST_LINES], more)] if rows else []
    parts += [("notes", [], notes)] if notes else []
    return Answer(title, parts, {"title": title, "notes": notes, "found": found, **plain, **extra})


def one_line(text: object, most: int = sys.maxsize) -> str:
    """Return a text of a file for the terminal: on one line, without control characters, cut at ``most`` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def events_of(found: Record) -> list[tuple[int, str]]:
    """Return the facts, signs and lasting alarms of a log: the step and the words of each, the first one first."""
    events = [(fact["step"], fact["name"]) for fact in found["facts"]]
    events += [(kind["step"], f"sign of {kind['kind']}") for kind in found["kinds"]]
    return sorted(events + [(a["step"], f"alarm {a['name']}") for a in found["alarms"] if a["lasting"]])


def title_of(found: Record) -> str:
    """Return the first line: that no rule fired; else what fired first, and whether a series left its range before."""
    name = one_line(Path(found["source"]).name)
    if not found["found"]:
        brief = " but spikes or rises that ended, which hard batches give too" if found["alarms"] else ""
        return f"{name}: no rule fired{brief}"
    step, what = events_of(found)[0]
    if found["departures"] and (left := found["departures"][0])["step"] < step:
        first = f"{one_line(left['tag'])} left its range"
        return f"{name}: first at step {left['step']:,}: {first}; at step {step:,}: {what}"
    return f"{name}: first at step {step:,}: {what}"


def sections(found: Record) -> list[Section]:
    """Return the parts of the answer, in the order in which they are read."""
    steps = f"steps {found['first_step']:,} to {found['last_step']:,}"
    columns = [f"{column} = {tag}" if column != tag else tag for column, tag in found["columns"].items()]
    notes = [f"{found['format']}, {steps}. Read: {some(columns, 6)}."]
    if unused := found["unused"]:
        notes.append(f"Not recognized: {', '.join(unused[:6])}; name a column with --map TAG=COLUMN.")
    parts: list[Section] = [("The log", [], [*notes, *found["notes"], *found["warnings"]]), *_events(found)]
    parts.append(("Nearest failure of the zoo", [], [_near(found["nearest"])]))
    if e := found["experiment"]:
        apart = f"{e['what']}: gone would speak for {e['gone']}, remains for {e['remains']}. {e['command']}."
        said = apart if e["what"] else "No experiment in the table tells them apart."
        parts.append((f"What would tell {e['between'][0]} and {e['between'][1]} apart", [], [said]))
        rows = [{"change": r["change"], "switched on in a run that fails": r["measured"]} for r in found["remedies"]]
        parts.append((f"Remedies against {found['kinds'][0]['kind']}", rows, []))
    rows = [
        {"not logged": m["statistic"], "would decide": m["decides"], "more runs named right": f"{m['more']:+d}",
         "how": m["how"]}
        for m in found["missing"]
    ]  # fmt: skip
    last = f"Log next: {rows[0]['not logged']}." if rows else "It has all statistics that the signs read."
    return [*parts, ("What this log cannot tell", rows, [last])]


def _rates(hits: int, faults: int, accused: int, healthy: int) -> Record:
    return {"faults found": f"{hits} of {faults}", "healthy accused": f"{accused} of {healthy}"}


def _events(found: Record) -> list[Section]:
    """Return the tables of facts, departures, alarms and signs."""
    rows = [
        {"step": f["step"], "fact": f["name"], "series": f["series"], "value": f["value"], "before": f["before"],
         **_rates(**found["fact_rates"][f["name"]])}
        for f in found["facts"]
    ]  # fmt: skip
    notes = [f"{f['name']}: {f['meaning']}." for f in found["facts"]] or ["None."]
    parts: list[Section] = [("Plain facts", rows, notes)]
    rows = [
        {"step": d["step"], "series": d["tag"], "value": d["value"], "its past": d["before"], "limit": d["limit"],
         "back at": d["back"], **_rates(*found["departure_rates"][parse_tag(d["tag"]).statistic])}
        for d in found["departures"][:MOST_ROWS]
    ]  # fmt: skip
    said = (
        "On the bench some series left its range in {} of {} runs with a fault and in {} of {} healthy ones; the series"
        " and the rule of three values were chosen with those runs in view, so expect worse."
    ).format(*found["departure_rates"]["any"]) if rows else "No series left its range."  # fmt: skip
    parts.append(("What left its range first (each series against its own past)", rows, [said]))
    rows = [
        {"step": a["step"], "alarm": a["name"], "series": a["series"], "value": a["value"],
         "threshold": a["threshold"], "begins": f"{a['count']}×", **_rates(**a["bench"]),
         **({"faults found": "no such fault"} if a["name"] == "non_finite" else {}),
         "10,000 steps": ", ".join(_rates(**a["late"]).values()) if a["late"] else "not scored"}
        for a in found["alarms"]
    ]  # fmt: skip
    parts.append(("Alarms", rows, [] if rows else ["No alarm fired."]))
    rows = [
        {"step": k["step"], "kind": k["kind"], "series": k["series"], "reading": k["value"], "limit": k["limit"],
         "right when named first": "{right} of {named}".format(**k["bench"]),
         "healthy accused": "{accused} of {healthy}".format(**k["bench"]),
         "found": "{right} of {runs}".format(**k["bench"])}
        for k in found["kinds"]
    ]  # fmt: skip
    notes = [f"{k['kind']}: {k['meaning']}." for k in found["kinds"]] or ["No sign of a kind of fault."]
    notes += ["Not read: the sign of {kind} ({statistic}): {why}.".format(**row) for row in found["not_read"]]
    return [*parts, ("Kinds of fault whose signs fired", rows, notes)]


def _near(nearest: Record) -> str:
    """Return what is said of the nearest failure of the zoo."""
    if nearest["why"]:
        return f"Not compared: {nearest['why']}."
    verdict = "{failure} is near" if nearest["near"] else "None is near"
    said = f"{verdict}: {{failure}} at distance {{distance}}, then {{next}} at {{next_distance}}; near is {{limit}}."
    rates = {key: "{} of {}".format(*count) for key, count in evidence()["near"].items() if key != "limit"}
    return said.format(**nearest) + (
        " Of judged runs of the bench with a fault of the zoo, the near failure was right in {right} and wrong in"
        " {wrong}; a failure was near in {other} runs with another fault and in {healthy} healthy runs. What"
        " is compared was chosen with those runs in view, so expect worse."
    ).format(**rates)


def figure(log: Log, found: Record) -> str:
    """Draw the losses and, below, the first series that left its range and is no loss; mark what fired. Return a PNG
    in base64."""
    losses = [t for t in map(str, log.metrics) if t.startswith("loss/")] or ["loss"]
    left = [(d["tag"], d["step"]) for d in found["departures"]]
    others = [tag for tag, _ in left if not tag.startswith("loss")]
    panels = [losses[:6], *([tag] for tag in others[:1])]
    with matplotlib.rc_context(RC):
        canvas = Figure(figsize=(9.5, 2.9 * len(panels)), layout="constrained")
        for axes, tags in zip(canvas.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            for color, tag in zip(PALETTE, tags, strict=False):
                series = log.metrics[tag].replace(np.inf, np.nan).dropna()
                axes.plot(series.index, series.to_numpy(), color=color, lw=1.1, label=one_line(tag)[:60])
            for step in [step for tag, step in left if tag in tags]:
                axes.axvline(step, color="#59636e", lw=1, ls=":")
            for step, _ in events_of(found):
                axes.axvline(step, color="#a3262a", lw=1, alpha=0.6)
            positive = all((log.metrics[tag].dropna() > 0).all() for tag in tags)
            axes.set(xlabel="optimizer step", yscale="log" if positive and tags == others[:1] else "linear")
            axes.yaxis.set_major_formatter(short)
            axes.legend(frameon=False, loc="upper right", fontsize=9)
        png = io.BytesIO()
        FigureCanvasAgg(canvas).print_png(png, metadata={"Software": None})
    return base64.b64encode(png.getvalue()).decode()
