"""The page: a study's verdicts and figures as index.html, report.md, figures/ and verdicts.json.

Two reports of the same runs are the same bytes: nothing in them depends on when or where they were made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

from mmqk.analysis.curves import Figure
from mmqk.analysis.draw import png, svg_panels
from mmqk.analysis.figures import figures
from mmqk.analysis.findings import cannot_tell, headline
from mmqk.analysis.metrics import LEARNT_NATS, LOSS_WINDOW, unigram_entropy
from mmqk.analysis.study import Study, load_study
from mmqk.analysis.style import INK, arm_colours, modality_dashes
from mmqk.analysis.tables import arm_rows, data_rows, environment, run_rows, used_marks, verdict_rows
from mmqk.analysis.verdicts import Verdict, judge
from mmqk.analysis.words import plural
from mmqk.store import UserError

TEMPLATES = Path(__file__).parent / "templates"
SECTIONS = (
    ("attention", "Attention entropy and norms", ("entropy", "norms")),
    ("output", "Output of the last layer", ("final_norm",)),
    ("by-layer", "Layer by layer", ("layers",)),
    ("not-decided", "Shown, not decided", ("shown",)),
)
CHANGED = "Claims were changed after they were first registered."


def write_report(folder: str | Path, out: str | Path) -> tuple[Study, list[Verdict]]:
    """Read the runs of ``folder`` and write their report into ``out``, which is made if it does not exist.

    Raises:
        UserError: ``folder`` has no runs or a record that cannot be read; ``out`` cannot be written.
    """
    study = load_study(folder)
    out = Path(out)
    try:
        # Before anything is drawn: a folder that cannot be written is known at once.
        (out / "figures").mkdir(parents=True, exist_ok=True)
        verdicts = judge(study)
        for name, data in _files(study, verdicts).items():
            (out / name).write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}): give another --out") from error
    return study, verdicts


def _files(study: Study, verdicts: list[Verdict]) -> dict[str, str | bytes]:
    """The report's files by name."""
    drawn = figures(study)
    files: dict[str, str | bytes] = {
        "verdicts.json": json.dumps([v.as_record() for v in verdicts], indent=1, ensure_ascii=False) + "\n"
    }
    for figure in drawn:
        files[f"figures/{figure.name}.csv"] = figure.csv()
        files[f"figures/{figure.name}.png"] = png(study, figure)
    content = page_content(study, verdicts, drawn)
    files["report.md"] = _template("report.md").render(content)
    files["index.html"] = _template("index.html").render(
        content, css=(TEMPLATES / "page.css").read_text(encoding="utf-8").strip()
    )
    return files


ABOUT_DATA = (
    "Nats a token, over the first training sequences of a run. Unigram: entropy of the token frequencies. Compressed:"
    " what LZMA needs. n-gram: held-out cross-entropy of a small n-gram model. Best loss: the lowest that a run here"
    " reached. The last three are upper bounds on the entropy rate. Floor: the loss of a model that knows the source,"
    " where it is synthetic. Repeated: tokens in passages of 8 seen before."
)


def page_content(study: Study, verdicts: list[Verdict], drawn: list[Figure]) -> dict[str, Any]:
    """Everything that the templates say, as plain data."""
    title, standfirst = headline(study, verdicts)
    views = {figure.name: _view(study, figure) for figure in drawn}
    colours = arm_colours(study)
    rows = run_rows(study, colours)
    shown = {study.label(arm) for arm in study.shown}
    sections = []
    for id, heading, names in SECTIONS:
        present = [views[name] for name in names if name in views]
        if present:
            ended = [row for row in rows if row["label"] in shown] if id == "not-decided" else []
            sections.append({"id": id, "title": heading, "text": "", "figures": present, "ended": ended})
    return {
        "page": {
            "title": title,
            "standfirst": standfirst,
            "kicker": _kicker(study),
            "learnt": _about_learning(study),
            "losses": "* marks means of the last training steps; the others are held-out.",
            "window": LOSS_WINDOW,
            "data": ABOUT_DATA,
        },
        "figures": views,
        "verdicts": verdict_rows(study, verdicts),
        "registration": CHANGED if study.claims_changed else "",
        "marks": used_marks(verdicts),
        "cannot_tell": cannot_tell(study, verdicts),
        "commands": _commands(study),
        "sections": sections,
        "arms": arm_rows(study, colours),
        "data": data_rows(study),
        "excess": any(tag.statistic == "excess" for run in study.runs for tag in run.tags.values()),
        "runs": rows,
        "modalities": study.modalities,
        "environment": environment(study),
    }


def _view(study: Study, figure: Figure) -> dict[str, Any]:
    """A figure as the template wants it."""
    colours, dashes = arm_colours(study), modality_dashes(study)
    legend: list[dict[str, Any]] = []
    if figure.name != "layers":
        legend = [
            {"label": study.label(arm), "colour": colours[arm], "dash": "", "width": 3} for arm in figure.arms
        ]
        if len(figure.modalities) > 1:
            legend += [{"label": m, "colour": INK, "dash": dashes[m], "width": 2} for m in figure.modalities]
    return {
        "name": figure.name,
        "reading": figure.reading,
        "caption": figure.caption,
        "columns": max(2, max(len(row) for row in figure.rows)),
        "svgs": svg_panels(study, figure),
        "legend": legend,
    }


def _kicker(study: Study) -> str:
    finished = sum(run.status.finished for run in study.runs)
    total = len(study.runs) + len(study.missing)
    runs = plural(total, "run") if finished == total else f"{finished} of {plural(total, 'run')} finished"
    return f"{study.title} · {runs} of {plural(len(study.arms), 'arm')}"


def _about_learning(study: Study) -> str:
    measured = any(unigram_entropy(run, m) > 0 for run in study.runs for m in study.modalities)
    floor = (
        "what token frequencies and the form of a sequence give on held-out data (the column “no context”)"
        if measured
        else "its value at initialisation"
    )
    return (
        f"A modality counts as learnt once its loss has been {LEARNT_NATS} nat below {floor}. "
        "Comparing an arm that has learnt with one that has not says something about learning only."
    )


def _commands(study: Study) -> list[str]:
    # An absolute path is true of one machine only.
    runs = f"runs/{study.name}" if study.registered or study.folder.is_absolute() else study.folder.as_posix()
    report = f"python -m mmqk.report {runs} --out reports/{study.name}"
    named = study.report.get("command")
    if named:
        return [str(named), f"{report}   # the page alone, from finished runs"]
    commands = [run.details.get("command") for run in study.runs]
    trained = [" ".join(map(str, c)) if isinstance(c, list) else str(c) for c in commands if c]
    return [*dict.fromkeys(trained), report]


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = _markdown
    return environment.get_template(name)


def _markdown(text: object) -> str:
    """Text that Markdown leaves as it is, also inside a table."""
    escaped = str(text)
    for character in "\\`*_<>|":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped
