"""Every shipped page equals the page that is rendered from its pack, byte for byte."""

from pathlib import Path

import pytest

from mmqk.report.page import write_report
from tests.versions import older

EXAMPLES = Path(__file__).parents[2] / "reports/examples"
PACKS = sorted(EXAMPLES.glob("*.zip"))


def test_every_page_has_its_pack():
    assert {pack.stem for pack in PACKS} == {page.parent.name for page in EXAMPLES.glob("*/index.html")}


@pytest.mark.parametrize(
    "pack",
    [pytest.param(pack, id=pack.stem, marks=pytest.mark.slow if pack.stem != "demo" else ()) for pack in PACKS],
)
def test_a_page_is_rendered_from_its_pack(pack, tmp_path, request):
    """All files of the demonstration's page are compared. Figures of the other pages take half a minute or more to
    draw, so their PNG and SVG files are not compared. The two largest pages are rendered without any figure, and only
    their report.md and verdicts.json are compared.

    Pixels depend on the version of matplotlib's fonts, so PNG files are compared only by name. With an older
    matplotlib than that of the shipped pages, no figure is compared.
    """
    if pack.stem in ("norm_competition", "claims") or older("matplotlib", "3.11"):
        request.getfixturevalue("without_figures")
        write_report(pack, tmp_path / "page")
        names = ("report.md", "verdicts.json")
        assert all((tmp_path / "page" / n).read_bytes() == (EXAMPLES / pack.stem / n).read_bytes() for n in names)
        return
    if pack.stem != "demo":
        request.getfixturevalue("without_figure_files")
    write_report(pack, tmp_path / "page")
    made, shipped = (
        {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
        for root in (tmp_path / "page", EXAMPLES / pack.stem)
    )
    drawn = {n for n in shipped if pack.stem == "demo" or not n.endswith((".png", ".svg"))}
    assert made.keys() == drawn
    different = [n for n in made if not n.endswith(".png") and made[n].read_bytes() != shipped[n].read_bytes()]
    assert different == [], "render them again: make pages"
