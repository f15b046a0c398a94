"""The table of docs/which_remedy.md agrees with the pack reports/examples/tournament.zip."""

from tests import tournament_page
from tests.tournament_page import PAGE, filled


def test_the_table_is_that_of_the_ranking():
    text = PAGE.read_text(encoding="utf-8")
    assert "<!-- tournament" in text and filled(text) == text, "write it: python -m tests.tournament_page"


def test_another_ranking_gives_another_table(monkeypatch):
    """The control: a changed ranking changes the tables."""
    changed = tournament_page.ranked().replace("layer_scale,", "layer_scale2,")
    monkeypatch.setattr(tournament_page, "ranked", lambda: changed)
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) != text
