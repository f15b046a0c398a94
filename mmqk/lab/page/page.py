"""Write a report: index.html, report.md, figures/ and verdicts.json.

Two reports of the same runs are identical byte for byte, because they contain no time and no path of the machine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqk.lab.formatting import DASH, listed, plural, slug
from mmqk.lab.metrics import LEARNED_NATS, LOSS_WINDOW, unigram_entropy
from mmqk.lab.page.compared import compared
from mmqk.lab.page.effect_bar import effect_bar
from mmqk.lab.page.failure_order import order_figure, order_table
from mmqk.lab.page.figures.claims import claim_figure
from mmqk.lab.page.figures.draw import Brush
from mmqk.lab.page.figures.files import figure_files, svg_panels
from mmqk.lab.page.figures.fork_tree import Node, fork_figure, fork_tree
from mmqk.lab.page.figures.interactive import chart_data
from mmqk.lab.page.figures.outcomes import outcome_figures
from mmqk.lab.page.figures.papers import paper_figures
from mmqk.lab.page.figures.shapes import Figure, Panel
from mmqk.lab.page.figures.standard import figures
from mmqk.lab.page.figures.style import arm_colors
from mmqk.lab.page.figures.survival import survival_figure
from mmqk.lab.page.findings import about_numbers, cannot_tell, finding, headline, lead
from mmqk.lab.page.ranking import ABOUT, ranking_csv, ranking_figure, ranking_rows
from mmqk.lab.page.render import css, render, scripts, themed
from mmqk.lab.page.run_table import anchor, run_rows, totals
from mmqk.lab.page.single import single
from mmqk.lab.page.tables import arm_rows, data_rows, environment, used_marks, verdict_rows
from mmqk.lab.verdicts.failure_order import FailureOrder, failure_order
from mmqk.lab.verdicts.findings import Findings, read
from mmqk.lab.verdicts.ranking import Ranking, ranking
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import Verdict
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
# The page lists at most this many commands of single runs; the others are in the run.json of their runs.
MOST_COMMANDS = 4


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
        files, earlier = _files(findings), _linked_files(out)
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
    return set(re.findall(r'href="(figures/[\w-]+\.(?:csv|png|svg)|ranking\.csv)"', page))


def _files(findings: Findings) -> dict[str, str | bytes]:
    """Return the files of the report by name."""
    study = findings.study
    nodes = fork_tree(study)
    ranked = ranking(study)
    order = failure_order(study)
    papers = paper_figures(study)
    others = (
        survival_figure(study),
        order_figure(study, order),
        *outcome_figures(study),
        *(claim_figure(study, verdict) for verdict in findings.verdicts),
        *papers,
        fork_figure(study, nodes),
        ranking_figure(study, ranked) if ranked else None,
    )
    drawn = [*figures(study), *filter(None, others)]
    brush = Brush.of(study)
    files: dict[str, str | bytes] = {
        "verdicts.json": json.dumps(
            without_roots([v.as_record() for v in findings.verdicts]), indent=1, ensure_ascii=False
        )
        + "\n"
    }
    for figure in drawn:
        files[f"figures/{figure.name}.csv"] = figure.csv()
        for kind, data in figure_files(brush, figure).items():
            files[f"figures/{figure.name}.{kind}"] = data
    if ranked:
        files["ranking.csv"] = ranking_csv(study, ranked)
    content = page_content(findings, drawn, papers, nodes, ranked, order)
    files["report.md"] = render("report.md", content)
    files["index.html"] = render("index.html", content | {"css": css()})
    return files


BADGES = ("reproduced", "contradicted", "inconclusive", "not run", "shown")
# If more claims than this are not run, one sentence names all of them.
FEW_UNRUN = 3
# If there are more claims than this, the page lists them in rows instead of cards, and its title is `_question`.
MOST_CARDS = 6
def page_content(
    findings: Findings,
    drawn: Sequence[Figure] = (),
    papers: Sequence[Figure] = (),
    nodes: Sequence[Node] = (),
    ranked: Ranking | None = None,
    order: FailureOrder | None = None,
) -> dict[str, Any]:
    """Return the values that the templates use, as plain data; ``drawn`` has all figures, including ``papers``."""
    study, verdicts = findings.study, findings.verdicts
    brush = Brush.of(study)
    views = {figure.name: _view(study, brush, figure) for figure in drawn}
    colors = arm_colors(study)
    rows, arm_results = run_rows(study, colors), arm_rows(study, colors)
    single_run = single(study)
    estimates = data_rows(study, sample=single_run is not None)
    shown = {study.label(arm) for arm in study.shown}
    leading, _ = lead(study, verdicts)
    claims = [
        row
        | {
            "figure": views.get(f"claim-{row['slug']}"),
            "bar": effect_bar(verdict),
            "exploratory": verdict.claim.status == "exploratory",
            "leading": verdict in leading,
        }
        for row, verdict in zip(verdict_rows(study, verdicts), verdicts, strict=True)
    ]
    sections = []
    if papers:
        of_papers = [views[figure.name] for figure in papers]
        sections.append(
            {"id": "papers", "title": "Figures as in the papers", "figures": of_papers, "ended": []}
        )
    for id, heading, names in SECTIONS:
        present = [views[name] for name in names if name in views]
        if present:
            ended = [row for row in rows if row["label"] in shown] if id == "not-decided" else []
            sections.append({"id": id, "title": heading, "figures": present, "ended": ended})
    in_rows = len(verdicts) - len(_unrun(verdicts)) > MOST_CARDS
    question = _question(study, verdicts)
    page = {
        "title": question if in_rows else headline(study, verdicts),
        "question": question,
        "standfirst": _standfirst(study, verdicts, in_rows),
        "kicker": _kicker(study),
        "learned": _about_learning(study),
        "losses": _about_losses([row["final"] for row in arm_results], "medians that use means"),
        "run_losses": _about_losses([loss for row in rows for loss in row["losses"]]),
        "numbers": about_numbers(verdicts),
        "data": _about_data(estimates, single_run is not None),
        "totals": totals(study),
        "in_rows": in_rows,
        "counts": _counts(verdicts),
        # A list of many claims begins with one figure.
        "first": "" if not in_rows else "survival" if "survival" in views else "hero",
    }
    content = {
        "figures": views,
        "verdicts": claims,
        "unrun": _unrun(verdicts),
        "registration": " ".join(
            sentence
            for sentence, holds in ((CHANGED, study.claims_changed), (LOST, study.registration_lost))
            if holds
        ),
        "marks": used_marks(verdicts),
        "slugs": {v.claim.id: slug(v.claim.id) for v in verdicts},
        "cannot_tell": cannot_tell(study, verdicts),
        "commands": _commands(findings),
        "sections": sections,
        "arms": arm_results,
        "data": estimates,
        "excess": any(tag.statistic == "excess" for run in study.runs for tag in run.tags.values()),
        "runs": rows,
        "modalities": study.modalities,
        "losses": study.losses,
        "environment": environment(study),
        "forks": _fork_rows(study, nodes, colors),
        "compared": compared(study, rows),
        "ranking": ranking_rows(study, ranked) if ranked else [],
        "unfinished": [study.label(arm) for arm in ranked.unfinished] if ranked else [],
        "about_ranking": ABOUT,
        "failure_order": order_table(study, order),
    }
    if ranked:
        page["title"] = views["ranking"]["reading"]
    if single_run is not None:
        page |= {"question": single_run["headline"], "title": single_run["headline"]}
    return without_roots(content | {"page": page, "single": single_run}) | {"scripts": scripts()}


def _counts(verdicts: Sequence[Verdict]) -> list[tuple[str, str, int]]:
    """Return (verdict, CSS class, number of claims) for each verdict that a claim has."""
    badges = [verdict.badge for verdict in verdicts]
    return [(badge, badge.replace(" ", "-"), badges.count(badge)) for badge in BADGES if badge in badges]


def _question(study: Study, verdicts: Sequence[Verdict]) -> str:
    """Return the question of the page: the one in the grid, or whether the claims in the title hold; without claims,
    the title of the study."""
    if named := study.named("question"):
        return " ".join(named)
    leading, _ = lead(study, verdicts)
    claims = [_uncapitalized(v.claim.statement.strip().rstrip(".")) for v in leading]
    return f"Is it true that {listed(claims)}?" if claims else study.title


def _uncapitalized(text: str) -> str:
    """Return the text with a lowercase first letter, to follow other words; a name such as QK-Norm is unchanged."""
    first = text.split(" ", 1)[0]
    return text if any(map(str.isupper, first[1:])) else text[:1].lower() + text[1:]


def _standfirst(study: Study, verdicts: Sequence[Verdict], in_rows: bool) -> list[str]:
    """Return the sentences below the title: one per claim, unless the claims are rows of a list."""
    rest = [] if in_rows else lead(study, verdicts)[1]
    unrun = _unrun(verdicts)
    sentences = [finding(study, v) for v in rest if v.claim.id not in unrun]
    if unrun:
        sentences.append(f"{len(unrun)} of {plural(len(verdicts), 'claim')} were not run: {listed(unrun)}.")
    return sentences


def _unrun(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the ids of the claims that are not run, if there are too many to show each on a card."""
    ids = [v.claim.id for v in verdicts if v.verdict == "not run"]
    return ids if len(ids) > FEW_UNRUN else []


def _view(study: Study, brush: Brush, figure: Figure) -> dict[str, Any]:
    """Return the values of a figure for the template."""
    wide = any(isinstance(panel, Panel) and panel.height for panel in figure.panels)
    return {
        "name": figure.name,
        "reading": figure.reading,
        "caption": figure.caption,
        "like": figure.like,
        "wide": wide,
        "columns": 1 if wide else max(2, max(len(row) for row in figure.rows)),
        "rows": [[themed(svg) for svg in row] for row in svg_panels(brush, figure)],
        "data": chart_data(study, brush, figure),
        "legend": [
            {"label": key.label, "color": key.color, "dash": key.dash, "marker": key.marker}
            for key in figure.legend
        ],
        "arms": [
            {"label": study.label(arm), "href": f"#arm-{slug(arm)}"}
            for arm in figure.arms
            if arm in study.arms
        ],
    }


def _fork_rows(study: Study, nodes: Sequence[Node], colors: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "depth": node.depth,
            "label": f"{study.label(node.run.arm)}, seed {node.run.seed}" if node.run else node.name,
            "href": f"#{anchor(node.run)}" if node.run else "",
            "color": colors.get(node.run.arm, "#000000") if node.run else "#b3bac2",
            "from": f"from step {node.step:,}" if node.parent >= 0 else "",
            "changed": node.changed,
            "remarks": node.remarks,
            "status": f"{node.run.status.status} at step {node.end:,}"
            if node.run
            else "not among these runs",
        }
        for node in nodes
    ]


def _about_data(rows: list[dict[str, Any]], sample: bool) -> str:
    """Return the note below the table of the data. Runs of older versions have two more estimates."""
    older = bool(rows) and "model" in rows[0]
    compressed = "Compressed: size under LZMA. n-gram: held-out cross-entropy of a small n-gram model. "
    text = (
        "Nats per token, over the first training sequences of a run. Unigram: entropy of the token frequencies. "
        f"{compressed if older else ''}Best loss: the lowest of these runs. "
        f"{'Compressed, n-gram and best loss are upper bounds' if older else 'It is an upper bound'} on the entropy"
        " rate. Floor: the loss of a model that knows the source, if the source is synthetic. Repeated: share of"
        " tokens in 8-token passages that occurred before."
    )
    if sample:
        names = "unigram, compressed, n-gram and repeated" if older else "unigram and repeated"
        text += (
            f" Sample: the tokens from which {names} were estimated. Another sample, such as that of mmqk inspect,"
            " gives other values."
        )
    return text


def _kicker(study: Study) -> str:
    # A monitored model may have no status.
    finished = sum(run.status.finished or not run.status.status for run in study.runs)
    total = len(study.runs) + len(study.missing)
    runs = f"{plural(total, 'run')} of {plural(len(study.arms), 'arm')}"
    return f"{study.title} · {runs if finished == total else f'{finished} of {runs} have finished'}"


def _about_losses(cells: Sequence[str], what: str = "means") -> str:
    """Return the note on a table's losses: held out or, with a star, means of the last training steps."""
    measured = [cell for cell in cells if cell != DASH]
    means = [cell for cell in measured if cell.endswith("*")]
    if not means:
        return "Losses are on held-out data." if measured else ""
    marks = f"* marks {what} of the last {LOSS_WINDOW} training steps"
    return f"{marks}; the others are on held-out data." if len(means) < len(measured) else f"{marks}."


def _about_learning(study: Study) -> str:
    modalities = study.modalities
    measured = any(unigram_entropy(run, m) > 0 for run in study.runs for m in modalities)
    floor = (
        "its unigram loss, the held-out loss of a model that knows only token frequencies and the places of special "
        "tokens"
        if measured
        else "its value at initialization"
    )
    return (
        f"A modality counts as learned once its loss has been {LEARNED_NATS} nat below {floor}. "
        "A comparison of an arm that learned with one that did not shows only that one of them learned."
    )


def _commands(findings: Findings) -> list[str]:
    """Return the commands that train the runs and write the page."""
    study = findings.study
    # An absolute path is valid on one machine only.
    folder = study.folder
    source = f"runs/{folder.resolve().name}" if folder.is_absolute() else folder.as_posix()
    if study.registered:
        source = f"runs/{study.name}"
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
