"""The tables of docs/claims.md and docs/which_remedy.md agree with their report and their pack."""

import claims_page
import pytest
import tournament_page


@pytest.mark.parametrize("page", [claims_page, tournament_page])
def test_the_table_is_that_of_its_source(page):
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- /") == 1 and page.filled(text) == text, page.__doc__


def test_another_verdict_gives_another_table(tmp_path, monkeypatch):
    """The control: a changed verdict changes the table."""
    report = claims_page.REPORT.read_text(encoding="utf-8")
    verdict = next(word for word in ("**reproduced**", "**contradicted**", "**inconclusive**") if word in report)
    (tmp_path / "report.md").write_text(report.replace(verdict, "**changed**", 1), encoding="utf-8")
    monkeypatch.setattr(claims_page, "REPORT", tmp_path / "report.md")
    text = claims_page.PAGE.read_text(encoding="utf-8")
    assert claims_page.filled(text) != text


def test_another_ranking_gives_another_table(monkeypatch):
    """The control: a changed ranking changes the table."""
    changed = tournament_page.ranked().replace("layer_scale,", "layer_scale2,")
    monkeypatch.setattr(tournament_page, "ranked", lambda: changed)
    text = tournament_page.PAGE.read_text(encoding="utf-8")
    assert tournament_page.filled(text) != text
