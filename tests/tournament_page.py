"""Write the tables of docs/which_remedy.md and README.md from the ranking of the tournament.

``python -m tests.tournament_page`` writes the tables; a test checks that the committed pages are up to date.
"""

from __future__ import annotations

import csv
import functools
import io
import re
from pathlib import Path

from mmqk.lab.page.ranking import ranking_csv
from mmqk.lab.verdicts.ranking import ranking
from mmqk.lab.verdicts.study import load_study
from mmqk.remedies import REMEDIES
from mmqk.store.pack import unpacked

ROOT = Path(__file__).parents[1]
PACK = ROOT / "reports/examples/tournament.zip"
PAGES = (ROOT / "docs/which_remedy.md", ROOT / "README.md")
FLAGS = {remedy.key: " ".join(f"`{flag}`" for flag in remedy.flags) for remedy in REMEDIES}
# Arms of the README's table: common choices, one of each kind.
SHORT = ("qk_norm_rms", "post_norm", "sandwich", "qk_clip", "attn_gate_element", "muon", "z_loss")


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
    """Return the table of all remedies."""
    lines = [
        "| remedy | loss relative to no remedy (nats) | trains | sensitivity | largest logit | time |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for row in rows().values():
        if row["difference"]:
            cells = [f"`{row['arm']}`", signed(row), row["trains"], f"{float(row['sensitivity']):.2f}"]
            cells += [times(row["logit_ratio"]), times(row["time_ratio"])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def short() -> str:
    """Return the table of the remedies in `SHORT` in the order of the ranking, and of the arm without a remedy."""
    table = rows()
    lines = [
        "| remedy | loss relative to no remedy (nats) | learning rates that train | largest logit | time |",
        "| --- | --: | --: | --: | --: |",
    ]
    for row in table.values():
        if row["arm"] in SHORT:
            title = f"{row['label']}: {FLAGS[row['arm']]}"
            cells = [title, signed(row), trains(row), times(row["logit_ratio"]), times(row["time_ratio"])]
            lines.append(f"| {' | '.join(cells)} |")
    none = table["plain"]
    lines.append(f"| none | loss {float(none['loss']):.2f} | {trains(none)} | {float(none['logit']):.0f} | ×1 |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return the text of a page with new tables between the markers."""
    for name, table in (("whole", whole()), ("short", short())):
        place = re.compile(rf"(<!-- tournament {name} -->\n).*?(\n<!-- /tournament -->)", re.DOTALL)
        text = place.sub(lambda match, table=table: match[1] + table + match[2], text)
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
