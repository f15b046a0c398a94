"""The table of results in docs/claims.md agrees with reports/examples/claims/report.md."""

from tests import claims_page
from tests.claims_page import PAGE, filled


def test_the_table_is_that_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    assert "<!-- results -->" in text and filled(text) == text, "write it: python -m tests.claims_page"


def test_another_page_gives_another_table(tmp_path, monkeypatch):
    """The control: a changed verdict changes the table."""
    report = claims_page.REPORT.read_text(encoding="utf-8")
    verdict = next(word for word in ("**reproduced**", "**contradicted**", "**inconclusive**") if word in report)
    (tmp_path / "report.md").write_text(report.replace(verdict, "**changed**", 1), encoding="utf-8")
    monkeypatch.setattr(claims_page, "REPORT", tmp_path / "report.md")
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) != text
