"""The page in a headless Chromium: from a file, wide and narrow, on paper."""

import base64

import pytest

from mmqk.report.page import write_report
from tests.analysis.fake_runs import write_demo
from tests.report.report_runs import write_forks, write_replays
from tests.training.browser import browser, installed

CHROMIUM = installed()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with claims, forks and replays."""
    root = tmp_path_factory.mktemp("browser")
    runs = [write_demo(root / "demo"), write_forks(root / "forks"), write_replays(root / "hot")]
    write_report(runs, root / "report")
    return root / "report" / "index.html"


@pytest.fixture(scope="module")
def page(report):
    with browser(CHROMIUM, 1280, 900) as page:
        yield page


def show(page, report, width, media=""):
    page.call("Emulation.setEmulatedMedia", media=media)
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    page.open(report.as_uri())
    assert page.wait("document.readyState == 'complete' && !!document.querySelector('figure')")


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_page_and_every_link_leads_somewhere(page, report, width):
    show(page, report, width)
    assert page.value(OVERFLOW) <= 0
    assert page.errors == []
    lost = page.value(
        "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.getElementById("
        "decodeURIComponent(a.hash.slice(1)))).map(a => a.hash)"
    )
    assert lost == []
    drawn = page.value(
        "[...document.querySelectorAll('.panels svg')].map(s => s.getBoundingClientRect().width)"
    )
    assert len(drawn) > 20 and min(drawn) > 150
    # The negative control: a block that is too wide is seen.
    page.value("document.querySelector('h1').style.width = '2000px'")
    assert page.value(OVERFLOW) > 0


def test_side_index_stands_beside_the_text_or_after_it(page, report):
    box = "(s => { const r = document.querySelector(s).getBoundingClientRect(); return [r.left, r.top, r.right] })"
    show(page, report, 1280)
    (_, nav_top, nav_right), (main_left, main_top, _) = (page.value(f"{box}('{s}')") for s in ("nav", "main"))
    assert nav_right <= main_left and nav_top <= main_top + 1
    page.value("document.querySelector('#runs').scrollIntoView()")
    assert page.value(f"{box}('nav')")[1] == pytest.approx(0, abs=1)  # it stays in sight
    show(page, report, 400)
    assert page.value(f"{box}('nav')")[1] > page.value(f"{box}('main')")[1]
    assert page.value("getComputedStyle(document.querySelector('.contents')).display") == "inline"


def test_it_prints(page, report):
    show(page, report, 720, "print")
    assert page.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.value(OVERFLOW) <= 0
    paper = base64.b64decode(page.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert paper.startswith(b"%PDF") and paper.count(b"/Type /Page\n") + paper.count(b"/Type/Page") > 5
    show(page, report, 720)
    assert page.value("getComputedStyle(document.querySelector('nav')).display") != "none"
