"""Write a report: index.html, report.md, figures/ and verdicts.json.

Two reports of the same runs are identical byte for byte, because they contain no time and no path of the machine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from mmqk.lab.formatting import plural
from mmqk.lab.metrics import LEARNED_NATS, LOSS_WINDOW
from mmqk.lab.page.claims import MARKS, cannot_tell, claim_rows, counts
from mmqk.lab.page.draw import arm_colors, png
from mmqk.lab.page.figure import Figure, chart_data
from mmqk.lab.page.figures import figures
from mmqk.lab.page.first import order_table, single
from mmqk.lab.page.ranking import ranking_csv, ranking_figure, ranking_table
from mmqk.lab.page.render import css, render, scripts
from mmqk.lab.page.sweeps import sweep_figures
from mmqk.lab.page.tables import arm_table, compared, data_table, environment, fork_table, run_table, totals
from mmqk.lab.verdicts.ranking import Ranking, ranking
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import Findings, Verdict, read
from mmqk.store import relative_word, without_roots, write_folder
from mmqk.store.files import read_regular, writing

SECTIONS = (
    ("attention", "Attention entropy and norms", ("entropy", "norms")),
    ("output", "Output of the last layer", ("final_norm",)),
    ("by-layer", "Attention logits by layer", ("layers",)),
    ("outcomes", "Outcomes over time and by layer", ("outcomes", "outcomes_by_layer")),
    ("not-decided", "Shown without a verdict", ("shown",)),
)
CHANGED = "Claims were changed or added after the first registration."
LOST = "Claims were registered after runs had begun, without an earlier registration: they are exploratory."
LEARNED = (
    f"A modality counts as learned once its loss has been {LEARNED_NATS} nat below its unigram loss, the held-out "
    "loss of a model that knows only token frequencies and the places of special tokens (without one, below its loss "
    "at initialization). Losses in nats per token, medians over runs, on held-out data; * marks means of the last "
    f"{LOSS_WINDOW} training steps."
)
DATA = (
    "Nats per token, over the first training sequences of a run (their number of tokens: sample). Unigram: entropy "
    "of the token frequencies. Compressed: size under LZMA. n-gram: held-out cross-entropy of a small n-gram model. "
    "Best loss: the lowest of these runs, an upper bound on the entropy rate. Floor: the loss of a model that knows "
    "the source, if the source is synthetic. Repeated: share of tokens in 8-token passages that occurred before."
)
NUMBERS = (
    "Effects are means over shared seeds; ratios are averaged on a log scale; medians are over the runs of an arm. "
    "Intervals are Student's t; differences of shares have Santner and Snell's exact interval; the interval of an "
    "AUROC is a jackknife over runs."
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
    findings = read(folder)
    out = Path(out)
    with writing(out):
        write_folder(out, {})  # fail before the figures are drawn
        files, earlier = report_files(findings), _linked_files(out)
        write_folder(out, files)
        for name in earlier - files.keys():
            (out / name).unlink(missing_ok=True)
    return findings.study, list(findings.verdicts)


def _linked_files(out: Path) -> set[str]:
    """Return the figures and tables to which the page in ``out`` links; none if there is no such page."""
    try:
        page = read_regular(out / "index.html").decode()
    except (OSError, UnicodeDecodeError):
        return set()
    return set(re.findall(r'href="(figures/[\w-]+\.(?:csv|png)|ranking\.csv)"', page))


def report_files(findings: Findings) -> dict[str, str | bytes]:
    """Return the files of the report by name."""
    study, verdicts = findings.study, findings.verdicts
    records = without_roots([verdict.as_record() for verdict in verdicts])
    files: dict[str, str | bytes] = {"verdicts.json": json.dumps(records, indent=1, ensure_ascii=False) + "\n"}
    ranked, colors = ranking(study), arm_colors(study)
    papers = sweep_figures(study)
    drawn = [*figures(study, verdicts), *papers, *([ranking_figure(study, ranked)] if ranked else ())]
    for figure in drawn:
        files[f"figures/{figure.name}.csv"] = figure.csv()
        files[f"figures/{figure.name}.png"] = png(study, colors, figure)
    if ranked:
        files["ranking.csv"] = ranking_csv(study, ranked)
    content = page_content(findings, drawn, [figure.name for figure in papers], ranked)
    files["report.md"] = render("report.md", content)
    files["index.html"] = render("index.html", content | {"css": css(), "scripts": scripts()})
    return files


def page_content(
    findings: Findings, drawn: Sequence[Figure] = (), papers: Sequence[str] = (), ranked: Ranking | None = None
) -> dict[str, Any]:
    """Return the values that the templates use, as plain data; ``papers`` names the figures in the form of the
    papers' figures."""
    study, verdicts = findings.study, findings.verdicts
    colors = arm_colors(study)
    claims, runs = claim_rows(study, verdicts), run_table(study, colors)
    views = {figure.name: _view(study, colors, figure) for figure in drawn}
    sections = [("papers", "Figures as in the papers", tuple(papers)), *SECTIONS]
    finished = sum(run.status.finished or not run.status.status for run in study.runs)
    total = len(study.runs) + len(study.missing)
    ended = plural(total, "run") if finished == total else f"{finished} of {plural(total, 'run')} finished"
    notes = [CHANGED] * study.claims_changed + [LOST] * study.registration_lost
    used = {verdict.claim.source_access for verdict in verdicts}
    content = {
        "title": " ".join(study.named("question")) or study.title,
        "kicker": f"{study.title} · {plural(len(study.arms), 'arm')} · {ended}",
        "counts": counts(verdicts),
        "claims": claims,
        "in_rows": sum(claim["verdict"] != "not run" for claim in claims) > MOST_CARDS,
        "first": "survival" if "survival" in views else "hero",
        "figures": views,
        "sections": [(id, title, kept) for id, title, of in sections if (kept := [n for n in of if n in views])],
        "registration": " ".join(notes),
        "marks": [(mark, meaning) for mark, meaning in MARKS.items() if mark in used],
        "numbers": NUMBERS,
        "cannot_tell": cannot_tell(study, verdicts),
        "single": single(study),
        "order": order_table(study),
        "ranking": ranking_table(study, ranked) if ranked else None,
        "arms": arm_table(study, colors),
        "learned": LEARNED,
        "forks": fork_table(study, colors),
        "data": data_table(study),
        "about_data": DATA,
        "runs": runs,
        "totals": totals(study),
        "commands": _commands(study),
        "environment": environment(study),
    }
    return _plain(content) | {"compared": compared(study, runs)}


def _plain(value: Any) -> Any:
    """Return the content as plain data without paths of this machine."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else without_roots(value)


def _view(study: Study, colors: dict[str, str], figure: Figure) -> dict[str, Any]:
    """Return what the templates show of a figure."""
    return {
        "name": figure.name,
        "title": figure.title,
        "caption": figure.caption,
        "like": figure.like,
        "rows": [[f"{panel.title}: {panel.ylabel}".strip(": ") for panel in row] for row in figure.rows],
        "columns": max(len(row) for row in figure.rows),
        "data": chart_data(study, colors, figure),
    }


def _commands(study: Study) -> list[str]:
    """Return the commands that train the runs and write the page."""
    # An absolute path is valid on one machine only.
    folder = study.folder
    source = f"runs/{folder.resolve().name}" if folder.is_absolute() else folder.as_posix()
    source = f"runs/{study.name}" if study.registered else source
    report = f"python -m mmqk.report {source} --out reports/{study.name}"
    if named := study.named("commands") or study.named("command"):
        return [*dict.fromkeys(named), f"{report}   # the page only, from finished runs"]
    commands = [run.details.get("command") for run in study.runs]
    trained = [
        shlex.join(map(relative_word, c)) if isinstance(c, list) else without_roots(str(c))
        for c in commands
        if c
    ]
    trained = list(dict.fromkeys(trained))
    if len(trained) > MOST_COMMANDS:
        rest = len(trained) - MOST_COMMANDS + 1
        trained = [*trained[: MOST_COMMANDS - 1], f"# and {rest} more: each run.json has its command"]
    return [*trained, report]
