"""Write a report: index.html, report.md, figures/ and verdicts.json.

Two reports of the same runs are identical byte for byte, because they contain no time and no path of the machine.

claims   what a page shows of each claim
tables   its tables
figures  its figures over steps; sweeps: over learning rates; ranking: of remedies, with table and CSV
drawing  a figure as PNG, as chart and as CSV; which arms it shows, and their colors
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqk.lab.formatting import plural, render
from mmqk.lab.page import sweeps, tables
from mmqk.lab.page.claims import cannot_tell, claim_rows, counts
from mmqk.lab.page.drawing import Drawing, arm_colors
from mmqk.lab.page.figures import figures
from mmqk.lab.page.ranking import Ranking, ranking, ranking_csv, ranking_figure, ranking_table
from mmqk.lab.study import Study, load_study
from mmqk.lab.verdicts.assess import Verdict
from mmqk.lab.verdicts.judge import judge
from mmqk.store import relative_word, without_roots, write_folder
from mmqk.store.files import writing

SECTIONS = (
    ("papers", "By learning rate and size", ("learning_rates",)),
    ("attention", "Attention entropy and norms", ("entropy", "norms")),
    ("output", "Output of the last layer", ("final_norm",)),
    ("by-layer", "Attention logits by layer", ("layers",)),
    ("outcomes", "Outcomes over time", ("outcomes",)),
    ("not-decided", "Shown without a verdict", ("shown",)),
)
# The page lists at most this many commands of single runs; the others are in the run.json of their runs.
MOST_COMMANDS = 4
# If there are more claims than this, the page lists them in rows instead of cards.
MOST_CARDS = 6


def write_report(folder: str | Path, out: str | Path) -> tuple[Study, list[Verdict]]:
    """Read the runs of a folder or pack and write their report into ``out``, which is created if missing.

    Figures and tables of an earlier report in ``out`` that this report does not have are removed.

    Raises:
        UserError: the folder has no runs or an unreadable record; ``out`` cannot be written.
    """
    study, out = load_study(folder), Path(out)
    verdicts = judge(study)
    with writing(out):
        write_folder(out, {})  # fail before the figures are drawn
        files, earlier = report_files(study, verdicts), _linked_files(out)
        write_folder(out, files)
        for name in earlier - files.keys():
            (out / name).unlink(missing_ok=True)
    return study, verdicts


def _linked_files(out: Path) -> set[str]:
    """Return the figures and tables to which the page in ``out`` links; none if there is no such page."""
    try:
        page = (out / "index.html").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return set()
    return set(re.findall(r'href="(figures/[\w-]+\.(?:csv|png)|ranking\.csv)"', page))


def report_files(study: Study, verdicts: Sequence[Verdict]) -> dict[str, str | bytes]:
    """Return the files of the report by name."""
    records = without_roots([verdict.as_record() for verdict in verdicts])
    files: dict[str, str | bytes] = {"verdicts.json": json.dumps(records, indent=1, ensure_ascii=False) + "\n"}
    ranked, colors = ranking(study), arm_colors(study)
    drawn = [*figures(study, verdicts), sweeps.learning_rates(study)]
    if ranked:
        drawn.append(ranking_figure(ranked))
        files["ranking.csv"] = ranking_csv(study, ranked)
    drawings = [Drawing(study, colors, figure) for figure in drawn if figure]
    for drawing in drawings:
        files[f"figures/{drawing.figure.name}.csv"] = drawing.figure.csv()
        files[f"figures/{drawing.figure.name}.png"] = drawing.png()
    content = page_content(study, verdicts, drawings, ranked)
    return files | {name: render(name, content) for name in ("report.md", "index.html")}


def page_content(
    study: Study, verdicts: Sequence[Verdict], drawings: Sequence[Drawing] = (), ranked: Ranking | None = None
) -> dict[str, Any]:
    """Return the values that the templates use, as plain data."""
    colors, claims = arm_colors(study), claim_rows(study, verdicts)
    views = {drawing.figure.name: _view(drawing) for drawing in drawings}
    finished = sum(run.status.finished or not run.status.status for run in study.runs)
    total = len(study.runs) + len(study.missing)
    ended = plural(total, "run") if finished == total else f"{finished} of {plural(total, 'run')} finished"
    registration = {"changed": study.claims_changed, "lost": study.registration_lost}
    content = {
        "title": " ".join(study.named("question")) or study.title,
        "kicker": f"{study.title} · {plural(len(study.arms), 'arm')} · {ended}",
        "counts": counts(verdicts),
        "claims": claims,
        "in_rows": sum(claim["verdict"] != "not run" for claim in claims) > MOST_CARDS,
        "first": "survival" if "survival" in views else "hero",
        "figures": views,
        "sections": [(id, title, kept) for id, title, of in SECTIONS if (kept := [n for n in of if n in views])],
        "registration": [name for name, applies in registration.items() if applies],
        "marks": [verdict.claim.source_access for verdict in verdicts],
        "cannot_tell": cannot_tell(study, verdicts),
        "single": tables.single(study),
        "ranking": ranking_table(study, ranked) if ranked else None,
        "arms": tables.arm_table(study, colors),
        "forks": tables.fork_table(study),
        "data": tables.data_table(study),
        "runs": tables.run_table(study, colors),
        "commands": _commands(study),
        "environment": tables.environment(study),
    }
    return without_roots(content) | {"compared": tables.compared(study)}


def _view(drawing: Drawing) -> dict[str, Any]:
    """Return what the templates show of a figure."""
    rows = drawing.figure.rows
    return {
        "title": drawing.figure.title,
        "like": drawing.figure.like,
        "rows": [[f"{panel.title}: {panel.ylabel}".strip(": ") for panel in row] for row in rows],
        "columns": max(len(row) for row in rows),
        "data": drawing.chart(),
    }


def _commands(study: Study) -> list[str]:
    """Return the commands that train the runs and write the page."""
    # An absolute path is valid on one machine only.
    folder = study.folder
    source = f"runs/{folder.resolve().name}" if folder.is_absolute() else folder.as_posix()
    source = f"runs/{study.name}" if study.registered else source
    report = f"python -m mmqk.report {source} --out reports/{study.name}"
    if named := study.named("command"):
        return [*dict.fromkeys(named), f"{report}   # the page only, from finished runs"]
    commands = filter(None, (run.details.get("command") for run in study.runs))
    texts = (shlex.join(map(relative_word, c)) if isinstance(c, list) else without_roots(str(c)) for c in commands)
    trained = list(dict.fromkeys(texts))
    if len(trained) > MOST_COMMANDS:
        rest = len(trained) - MOST_COMMANDS + 1
        trained = [*trained[: MOST_COMMANDS - 1], f"# and {rest} more: each run.json has its command"]
    return [*trained, report]
