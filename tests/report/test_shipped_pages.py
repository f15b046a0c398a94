"""Every kept report equals the report that is rendered from its pack, byte for byte."""

from pathlib import Path

import pytest

from mmqk.lab.page.page import write_report

EXAMPLES = Path(__file__).parents[2] / "reports/examples"
PACKS = sorted(EXAMPLES.glob("*.zip"))


def test_every_report_has_its_pack():
    assert {pack.stem for pack in PACKS} == {kept.parent.name for kept in EXAMPLES.glob("*/report.md")}


@pytest.mark.parametrize(
    "pack",
    [pytest.param(pack, id=pack.stem, marks=pytest.mark.slow if pack.stem != "demo" else ()) for pack in PACKS],
)
def test_a_report_is_rendered_from_its_pack(pack, tmp_path, without_figures):
    write_report(pack, tmp_path / "page")
    for name in ("report.md", "verdicts.json"):
        kept = (EXAMPLES / pack.stem / name).read_bytes()
        assert (tmp_path / "page" / name).read_bytes() == kept, "render it again: make pages"
