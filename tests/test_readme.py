"""docs/claims.md has the numbers of the kept report of the demonstration, and every link has a target."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from mmqk.lab.page import write_report

README = Path("README.md").read_text()
EXAMPLE = Path("reports/examples/demo")
TABLE = Path("docs/claims.md").read_text().partition("## The demonstration")[2].partition("\n## ")[0]
PAGES = ["README.md", "CONTRIBUTING.md", "data/README.md", "reports/tokenizer/README.md", f"{EXAMPLE}/report.md"]
PAGES += [f"docs/{name}.md" for name in ("ablations", "alarms", "checkpoints", "cluster", "data", "train")]


def verdicts() -> dict[str, dict]:
    return {v["claim"]: v for v in json.loads((EXAMPLE / "verdicts.json").read_text())}


def says(text: str, verdict: dict, log: bool) -> bool:
    """Return whether the column "this run" of a row prints the effect of the verdict and its interval, rounded.

    Log ratios are printed as ratios.
    """
    cell = text.split("|")[3]
    printed = re.findall(r"\d+(?:\.\d+)?", cell)[:3]
    values = [math.exp(n) if log else n for n in (verdict["effect"], *verdict["interval"])]
    return len(printed) == 3 and all(
        f"{value:.{len(text.partition('.')[2])}f}" == text for value, text in zip(values, printed, strict=True)
    )


@pytest.mark.parametrize(("claim", "log"), [("C2", True), ("X1", False)])
def test_verdict_rows_are_those_of_the_kept_report(claim, log):
    row = next(line for line in TABLE.splitlines() if line.startswith(f"| {claim} "))
    verdict = verdicts()[claim]
    assert verdict["verdict"] in row and says(row, verdict, log)
    wrong = {**verdict, "effect": verdict["effect"] * 1.3 + 0.2}
    assert not says(row, wrong, log)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = Path(page).read_text()
    # `make pages` draws the figures of a report.
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", text) if not t.startswith(("http", "#", "figures/"))]
    for target in targets:
        path, _, anchor = target.partition("#")
        found = (Path(page).parent / path).resolve()
        assert found.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", found.read_text(), flags=re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in heads}


def test_kept_report_is_whole_and_its_page_needs_no_network(tmp_path, without_figures):
    page = tmp_path / "page"
    write_report(EXAMPLE.with_suffix(".zip"), page)
    files = {p.relative_to(page).as_posix() for p in page.rglob("*") if p.is_file()}
    assert {"index.html", "report.md", "verdicts.json", "figures/hero.png", "figures/hero.csv"} <= files
    assert (page / "index.html").stat().st_size < 5e6
    for name in ("report.md", "verdicts.json"):
        assert (page / name).read_bytes() == (EXAMPLE / name).read_bytes(), "render it again: make pages"
    assert not re.search(r"(?:src|href)=\"https?://(?!arxiv)", (page / "index.html").read_text())
