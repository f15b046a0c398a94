"""The tables of docs/which_remedy.md and README.md agree with the pack reports/examples/tournament.zip."""

import re

import pytest

from mmqk.remedies import REMEDIES
from tests import tournament_page
from tests.tournament_page import PAGES, ROOT, filled, rows

DOC = ROOT / "docs/which_remedy.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_ranking(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- tournament " in text and filled(text) == text, "write them: python -m tests.tournament_page"


def test_another_ranking_gives_another_table(monkeypatch):
    """The control: a changed ranking changes the tables."""
    changed = tournament_page.ranked().replace("qk_norm_rms,", "qk_norm_rms2,")
    monkeypatch.setattr(tournament_page, "ranked", lambda: changed)
    text = DOC.read_text(encoding="utf-8")
    assert filled(text) != text


def test_every_remedy_of_the_text_has_its_row():
    named = set(re.findall(r"`([a-z]\w+)`", DOC.read_text(encoding="utf-8").partition("<!-- tournament")[0]))
    keys = {remedy.key for remedy in REMEDIES}
    assert named & keys <= rows().keys() and len(named & keys) > 5
