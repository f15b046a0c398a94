"""Write the table of docs/which_remedy.md from the ranking of the tournament.

``python docs/experiments/tournament_page.py`` writes the table; a test checks that the committed page is up to date.
"""

from __future__ import annotations

import csv
import functools
import io
import re
from pathlib import Path

from mmqk.lab.page.ranking import ranking, ranking_csv
from mmqk.lab.study import load_study
from mmqk.store.pack import unpacked

ROOT = Path(__file__).parents[2]
PACK = ROOT / "reports/examples/tournament.zip"
PAGE = ROOT / "docs/which_remedy.md"


@functools.cache
def ranked() -> str:
    """Return the ranking of the pack as CSV."""
    study = load_study(unpacked(PACK))
    found = ranking(study)
    assert found is not None
    return ranking_csv(study, found)


def rows() -> dict[str, dict[str, str]]:
    """Return the rows of the ranking by arm, best first."""
    return {row["arm"]: row for row in csv.DictReader(io.StringIO(ranked()))}


def signed(row: dict[str, str]) -> str:
    """Return the difference in loss with its interval, and a star if the best learning rate is the lowest or highest
    one tried."""
    value, low, high = (float(row[f"difference{end}"]) for end in ("", "_low", "_high"))
    return f"{value:+.2f} ({low:+.2f} to {high:+.2f}){'*' if row['at_edge'] == '1' else ''}"


def trains(row: dict[str, str]) -> str:
    return f"{row['trains']} of {row['rates']}"


def times(value: str) -> str:
    return f"×{float(value):.2f}" if value else "–"


def whole() -> str:
    """Return the table of the remedies whose interval does not include 0."""
    lines = [
        "| remedy | loss relative to no remedy (nats) | trains | sensitivity | largest logit | time |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for row in rows().values():
        if row["difference"] and float(row["difference_low"]) * float(row["difference_high"]) > 0:
            cells = [f"`{row['arm']}`", signed(row), row["trains"], f"{float(row['sensitivity']):.2f}"]
            cells += [times(row["logit_ratio"]), times(row["time_ratio"])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return the text of the page with a new table between the markers."""
    place = re.compile(r"(<!-- tournament -->\n).*?(\n<!-- /tournament -->)", re.DOTALL)
    return place.sub(lambda match: match[1] + whole() + match[2], text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
