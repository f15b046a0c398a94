"""Write the table of results in docs/claims.md from the report reports/examples/claims/report.md.

``python docs/experiments/claims_page.py`` writes the table; a test checks that the committed page is up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/claims.md"
REPORT = ROOT / "reports/examples/claims/report.md"


def table() -> str:
    """Return the table: the smallest effect, the effect and the verdict of every claim with runs, in the order of the
    report, which also names the compared arms."""
    lines = ["| id | statement | tested | effect (95 % interval) | verdict |", "| --- | --- | --- | --- | --- |"]
    for line in REPORT.read_text(encoding="utf-8").splitlines():
        claim = re.match(r"\| \*\*([\w-]+)\*\* (.*?)\.? \| ", line)
        if claim is None or "**not run**" in line:
            continue
        cells = line.split(" | ")
        verdict = re.match(r"\*\*(.+?)\*\*", cells[1])
        assert verdict is not None, line
        statement, exploratory, _ = claim[2].partition(" (exploratory)")
        noted = ", exploratory" if exploratory else ""
        tested = cells[2].partition(" in “")[0]
        effect = cells[3].partition("<br>")[0].partition(", n = ")[0].replace("**", "").strip() or "–"
        lines.append(f"| {claim[1]} | {statement} | {tested} | {effect} | {verdict[1]}{noted} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return the text of the page with a new table between the markers."""
    place = re.compile(r"(<!-- results -->\n).*?(\n<!-- /results -->)", re.DOTALL)
    return place.sub(lambda match: match[1] + table() + match[2], text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
