"""The answers of ``mmqk diagnose`` to one log, two logs, checkpoints and experiments: text, data and one HTML page."""

from __future__ import annotations

import argparse
import base64
import io
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mmqk.bench.evidence import evidence
from mmqk.diagnose.findings import Diagnosis, diagnose
from mmqk.diagnose.logs import Log, read_log
from mmqk.diagnose.names import mapping_of
from mmqk.diagnose.pair import HOLD, apart, at_the_end, gradient_growth, part
from mmqk.lab.formatting import number, render, short, source
from mmqk.lab.page.arms import PALETTE
from mmqk.lab.page.drawing import RC
from mmqk.store import UserError, differing_fields, parse_tag
from mmqk.store.formatting import plural, text_table

TEMPLATES = Path(__file__).parent / "templates"
MOST_ROWS, MOST_LINES, WIDEST = 8, 20, 56  # departures; rows of a table; characters of a cell in the terminal
Section = tuple[str, list[list[str]], list[str]]  # title, table with its head (left out without rows), notes


@dataclass(frozen=True)
class Answer:
    """What a way of diagnosing found.

    Attributes:
        title: the first line.
        parts: the parts of the text and of the page.
        record: the content of diagnosis.json, plain data.
        found: whether there is a finding.
        image: a PNG of the log.
    """

    title: str
    parts: list[Section]
    record: dict[str, Any]
    found: bool
    image: bytes | None = None

    def text(self) -> str:
        """Return the answer for the terminal; cells are cut at `WIDEST` characters, except in the last column."""
        lines = [self.title]
        for title, table, notes in self.parts:
            lines += ["", title.upper()]
            cut = [
                [
                    cell if len(cell) <= WIDEST or i == len(row) - 1 else f"{cell[: WIDEST - 1]}…"
                    for i, cell in enumerate(map(one_line, row))
                ]
                for row in table
            ]
            lines += [f"  {row.rstrip()}" for row in text_table(cut, range(len(table[0])))] if table[1:] else []
            lines += [f"  {one_line(note)}" for note in notes]
        return "\n".join(lines)

    def page(self) -> str:
        """Return the answer as one HTML file."""
        image = None if self.image is None else base64.b64encode(self.image).decode()
        content = {"title": self.title, "parts": self.parts, "image": image, "css": source("page.css")}
        return render("diagnose.html", content, TEMPLATES)


def of_log(options: argparse.Namespace) -> Answer:
    """Diagnose one log."""
    log = read_log(options.files[0], mapping_of(options.map), options.step)
    found = diagnose(log)
    return Answer(title_of(found), sections(found), asdict(found), found.found, figure(log, found))


def of_pair(options: argparse.Namespace) -> Answer:
    """Say where the first run parts from the second."""
    run, reference = (read_log(file, mapping_of(options.map), options.step) for file in options.files)
    partings, losses, last = part(run, reference), apart(run, reference), at_the_end(run, reference)
    fields = [(f, run.config.get(f), reference.config.get(f)) for f in differing_fields(run.config, reference.config)]
    tables = {
        "series that part, the first one first": pd.DataFrame(map(asdict, partings)),
        "losses that are apart to the end": pd.DataFrame(map(asdict, losses)),
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
        since = "the first step" if losses[0].first else f"step {losses[0].step:,}"
        title = f"{run.source} is apart from {reference.source} from {since} to the end: {losses[0].tag}"
    if partings:
        first = partings[0]
        title = f"{run.source} parts from {reference.source} at step {first.step:,}: {first.tag}"
    return _answer(title, tables, notes, bool(partings or losses))


def of_models(options: argparse.Namespace) -> Answer:
    """Say what checkpoints show, without a batch or with one."""
    from mmqk.diagnose.models import blocks_of, read_batch, tables_of

    batch = None if options.batch is None else read_batch(options.batch)
    tables, notes, found = tables_of(options.model, batch, blocks_of(options.modality) or None, options.limit)
    title = f"{', '.join(map(str, options.model))}: {'a finding' if found else 'no rule fired'}"
    return _answer(title, tables, notes, found)


def of_experiments(options: argparse.Namespace) -> Answer:
    """Train forks of a run from before its event."""
    from mmqk.diagnose.experiments import CONTROL, run

    if len(options.files) != 1:
        raise UserError("--experiments needs the folder of one run of mmqk: mmqk diagnose runs/mine --experiments")
    if options.step and not options.step.isdecimal():
        raise UserError(f"--step is {options.step}: with --experiments, give the step of the event")
    if bad := [text for text in options.fields if "=" not in text]:
        raise UserError(f"--set {bad[0]} is not of the form FIELD=VALUE")
    fields = dict(text.split("=", 1) for text in options.fields)
    done = run(options.files[0], int(options.step) if options.step else None, fields)
    notes = [
        f"Event: {done.event.sentence}; series: {done.event.tag}.",
        f"Forks of {done.run} from step {done.start} to {done.end}, in {done.out}.",
        f"Sequences left out: {done.left_out}.",
    ]
    tables = {"experiments": done.table.reset_index(names="experiment")}
    answer = _answer(f"Experiments on {done.run}", tables, notes, bool(done.table["outcome"][CONTROL] == "remains"))
    return replace(answer, record=answer.record | {"event": asdict(done.event)})


def _answer(title: str, tables: dict[str, pd.DataFrame], notes: list[str], found: bool) -> Answer:
    """Return the answer of a way that finds tables."""
    parts: list[Section] = []
    for name, table in ((name, table.astype(object)) for name, table in tables.items() if len(table)):
        rows = [[number(c) if isinstance(c, float) else str(c) for c in row] for row in table.to_numpy().tolist()]
        more = [f"and {plural(len(rows) - MOST_LINES, 'row')} more"] if len(rows) > MOST_LINES else []
        parts.append((name, [list(map(str, table)), *rows[:MOST_LINES]], more))
    parts += [("notes", [], notes)] if notes else []
    plain: dict[str, Any] = {name: table.astype(object).to_dict("records") for name, table in tables.items()}
    return Answer(title, parts, {"title": title, "notes": notes, "found": found, **plain}, found)


def one_line(text: object) -> str:
    """Return a text of a file for the terminal: on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def title_of(found: Diagnosis) -> str:
    """Return the first line: that no rule fired; else what fired first, and whether a series left its range before."""
    name = one_line(Path(found.source).name)
    if not found.found:
        spikes = " but spikes, which a hard batch gives too" if found.alarms else ""
        return f"{name}: no rule fired{spikes}"
    events = [(f.step, f.name) for f in found.facts] + [(k.step, f"sign of {k.kind}") for k in found.kinds]
    events += [(a.step, f"alarm {a.name}") for a in found.alarms if a.lasting]
    step, what = min(events)
    if found.departures and (left := found.departures[0]).step < step:
        return f"{name}: first at step {left.step:,}: {one_line(left.tag)} left its range; at step {step:,}: {what}"
    return f"{name}: first at step {step:,}: {what}"


def sections(found: Diagnosis) -> list[Section]:
    """Return the parts of the answer, in the order in which they are read."""
    steps = f"steps {found.first_step:,} to {found.last_step:,}"
    used = ", ".join(f"{column} = {tag}" if column != tag else tag for column, tag in [*found.columns.items()][:6])
    more = f", and {len(found.columns) - 6} more" if len(found.columns) > 6 else ""
    unused = [f"Not recognized: {', '.join(found.unused[:6])}; name a column with --map TAG=COLUMN."]
    parts: list[Section] = [
        ("The log", [], [f"{found.format}, {steps}. Read: {used}{more}.", *unused[: len(found.unused)], *found.notes])
    ]
    parts[0][2].extend(found.warnings)
    parts += _events(found)
    parts.append(("Nearest failure of the zoo", [], [_near(found)]))
    if e := found.experiment:
        apart = f"{e['what']}: gone would speak for {e['gone']}, remains for {e['remains']}. {e['command']}."
        said = apart if e["what"] else "No experiment in the table tells them apart."
        parts.append((f"What would tell {e['between'][0]} and {e['between'][1]} apart", [], [said]))
        rows = [[r["change"], r["measured"]] for r in found.remedies]
        parts.append(
            (f"Remedies against {found.kinds[0].kind}", [["change", "switched on in a run that fails"], *rows], [])
        )
    rows = [[m["statistic"], m["decides"], f"{m['more']:+d}", m["how"]] for m in found.missing]
    last = f"Log next: {found.missing[0]['statistic']}." if rows else "It has all statistics that the signs read."
    head = ["not logged", "would decide", "more runs named right", "how"]
    parts.append(("What this log cannot tell", [head, *rows], [last]))
    return parts


def _events(found: Diagnosis) -> list[Section]:
    """Return the tables of facts, departures, alarms and signs."""
    rates = ["faults found", "healthy accused"]
    rows = [
        [f"{f.step:,}", f.name, f.series, number(f.value), "–" if f.before is None else number(f.before),
         "{hits} of {faults}".format(**found.fact_rates[f.name]),
         "{accused} of {healthy}".format(**found.fact_rates[f.name])]
        for f in found.facts
    ]  # fmt: skip
    head = ["step", "fact", "series", "value", "before", *rates]
    notes = [f"{f.name}: {f.meaning}." for f in found.facts] or ["None."]
    parts: list[Section] = [("Plain facts", [head, *rows], notes)]
    head = ["step", "series", "value", "its past", "limit", "back at", *rates]
    rows = [
        [f"{d.step:,}", d.tag, number(d.value), number(d.before), number(d.limit), f"{d.back:,}" if d.back else "–",
         "{} of {}".format(*found.departure_rates[parse_tag(d.tag).statistic][:2]),
         "{} of {}".format(*found.departure_rates[parse_tag(d.tag).statistic][2:])]
        for d in found.departures[:MOST_ROWS]
    ]  # fmt: skip
    note = (
        "On the bench some series left its range in {} of {} runs with a fault and in {} of {} healthy ones; the series"
        " and the rule of three values were chosen with those runs in view, so expect worse."
    )
    said = note.format(*found.departure_rates["any"]) if rows else "No series left its range."
    parts.append(("What left its range first (each series against its own past)", [head, *rows], [said]))
    head = ["step", "alarm", "series", "value", "threshold", "begins", *rates, "10,000 steps"]
    rows = [
        [f"{a.step:,}", a.name, a.series, number(a.value), number(a.threshold), f"{a.count}×",
         "no such fault" if a.name == "non_finite" else f"{a.bench['hits']} of {a.bench['faults']}",
         f"{a.bench['accused']} of {a.bench['healthy']}",
         "not scored" if a.late is None else "{hits} of {faults}, {accused} of {healthy}".format(**a.late)]
        for a in found.alarms
    ]  # fmt: skip
    parts.append(("Alarms", [head, *rows], [] if rows else ["No alarm fired."]))
    head = ["step", "kind", "series", "reading", "limit", "right when named first", "healthy accused", "found"]
    rows = [
        [f"{k.step:,}", k.kind, k.series, number(k.value), number(k.limit),
         f"{k.bench['right']} of {k.bench['named']}", f"{k.bench['accused']} of {k.bench['healthy']}",
         f"{k.bench['right']} of {k.bench['runs']}"]
        for k in found.kinds
    ]  # fmt: skip
    notes = [f"{k.kind}: {k.meaning}." for k in found.kinds] or ["No sign of a kind of fault."]
    notes += [f"Not read: the sign of {row['kind']} ({row['statistic']}): {row['why']}." for row in found.not_read]
    parts.append(("Kinds of fault whose signs fired", [head, *rows], notes))
    return parts


def _near(found: Diagnosis) -> str:
    """Return what is said of the nearest failure of the zoo."""
    n, near = found.nearest, evidence()["near"]
    if n.why:
        return f"Not compared: {n.why}."
    verdict = f"{n.failure} is near" if n.near else "None is near"
    said = f"{verdict}: {n.failure} at distance {n.distance}, then {n.next} at {n.next_distance}; near is {n.limit}."
    right, wrong, other, healthy = ("{} of {}".format(*near[key]) for key in ("right", "wrong", "other", "healthy"))
    said += (
        f" Of judged runs of the bench with a fault of the zoo, the near failure was right in {right} and wrong in"
        f" {wrong}; a failure was near in {other} runs with another fault and in {healthy} healthy runs. What"
        " is compared was chosen with those runs in view, so expect worse."
    )
    return said


def figure(log: Log, found: Diagnosis) -> bytes | None:
    """Draw the losses and, below, the first series that left its range and is no loss; mark what fired. PNG."""
    losses = [t for t in map(str, log.metrics) if t.startswith("loss/")] or ["loss"]
    first = next((d for d in found.departures if not d.tag.startswith("loss")), None)
    panels: list[list[str]] = [losses[:6], *([[first.tag]] if first else [])]
    events = [
        *(f.step for f in found.facts),
        *(k.step for k in found.kinds),
        *(a.step for a in found.alarms if a.lasting),
    ]
    with matplotlib.rc_context(RC):
        canvas = Figure(figsize=(9.5, 2.9 * len(panels)), layout="constrained")
        for axes, tags in zip(canvas.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            for color, tag in zip(PALETTE, tags, strict=False):
                series = log.metrics[tag].replace(np.inf, np.nan).dropna()
                axes.plot(series.index, series.to_numpy(), color=color, lw=1.1, label=one_line(tag)[:60])
            for departure in [d for d in found.departures if d.tag in tags]:
                axes.axvline(departure.step, color="#59636e", lw=1, ls=":")
            for event in events:
                axes.axvline(event, color="#a3262a", lw=1, alpha=0.6)
            positive = all((log.metrics[tag].dropna() > 0).all() for tag in tags)
            axes.set(xlabel="optimizer step", yscale="log" if positive and first and tags == [first.tag] else "linear")
            axes.yaxis.set_major_formatter(short)
            axes.legend(frameon=False, loc="upper right", fontsize=9)
        png = io.BytesIO()
        FigureCanvasAgg(canvas).print_png(png, metadata={"Software": None})
    return png.getvalue()
