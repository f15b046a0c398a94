"""The page of a report in headless Chromium: opened from a file, wide, narrow, light and dark."""

from pathlib import Path

import pytest

from mmqk.lab.page.page import write_report
from tests.lab.fake_runs import write_demo
from tests.lab.page.browser import browser, installed
from tests.lab.page.report_runs import write_forks

CHROMIUM = installed()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SCREEN = 800
# Return each text with its color and the first opaque background behind it, as [red, green, blue].
TEXTS = """
(() => {
  const rgba = color => { const c = color.match(/[\\d.]+/g).map(Number); return c.length < 4 ? [...c, 1] : c; };
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), found = [];
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const of = node.parentElement;
    if (!node.data.trim() || !of.checkVisibility({ visibilityProperty: true })) continue;
    if (["STYLE", "SCRIPT", "NOSCRIPT"].includes(of.tagName)) continue;
    let behind = of;
    while (behind && rgba(getComputedStyle(behind).backgroundColor)[3] < 1) behind = behind.parentElement;
    const style = getComputedStyle(of);
    found.push([node.data.trim().slice(0, 40), rgba(of.closest("svg") ? style.fill : style.color).slice(0, 3),
      rgba(getComputedStyle(behind ?? document.body).backgroundColor).slice(0, 3)]);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write the page of a grid, of the demonstration's pack and of forks."""
    root = tmp_path_factory.mktemp("browser")
    write_report(write_demo(root / "demo"), root / "grid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmqk.lab.page.figure.Drawing.png", lambda drawing: b"")
        write_report(Path(__file__).parents[3] / "reports/examples/demo.zip", root / "pack")
        write_report(write_forks(root / "runs"), root / "forks")
    return {name: root / name / "index.html" for name in ("grid", "pack", "forks")}


@pytest.fixture(scope="module")
def page():
    with browser(CHROMIUM, 1280, SCREEN) as page:
        yield page


def show(page, report, width=1280, scheme="light"):
    scheme = [{"name": "prefers-color-scheme", "value": scheme}]
    page.call("Emulation.setEmulatedMedia", media="", features=scheme)
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=SCREEN, deviceScaleFactor=1, mobile=False)
    page.open("about:blank")  # so that the wait below does not see the page before
    page.open(report.as_uri())
    assert page.wait("document.readyState == 'complete' && !!document.querySelector('.uplot')")


def unfold(page):
    page.value("document.querySelectorAll('details').forEach(d => { d.open = true })")


@pytest.mark.parametrize("name", ["grid", "pack", "forks"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_page_and_every_link_leads_somewhere(page, pages, name, width):
    show(page, pages[name], width)
    assert page.value(OVERFLOW) <= 0
    unfold(page)
    assert page.wait("[...document.querySelectorAll('figure')].every(f => f.dataset.live)")
    assert page.value(OVERFLOW) <= 0 and page.errors == []
    lost = page.value(
        "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.getElementById("
        "decodeURIComponent(a.hash.slice(1)))).map(a => a.hash)"
    )
    assert lost == []
    widths = page.value("[...document.querySelectorAll('.panels canvas')].map(s => s.getBoundingClientRect().width)")
    assert len(widths) > 10 and min(widths) > 100
    # The negative control: a block that is too wide is detected.
    page.value("document.querySelector('h1').style.width = '2000px'")
    assert page.value(OVERFLOW) > 0


def contrast(one, other):
    """Return the WCAG 2.2 contrast ratio of two colors, each [red, green, blue] from 0 to 255."""

    def luminance(color):
        channels = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(page, pages, scheme):
    assert contrast([118, 118, 118], [255, 255, 255]) == pytest.approx(4.54, abs=0.01)  # WebAIM's #767676
    show(page, pages["pack"], scheme=scheme)
    unfold(page)
    found = page.value(TEXTS)
    assert len(found) > 500
    paper = [255, 255, 255] if scheme == "light" else [20, 24, 29]
    assert all(paper == background for text, _, background in found if text == "Results by arm")
    assert [(text, c, b) for text, c, b in found if contrast(c, b) < 4.5] == []
    # The negative control: faint text is detected.
    page.value("document.querySelector('h1').style.color = 'var(--line)'")
    assert any(contrast(c, b) < 4.5 for _, c, b in page.value(TEXTS))
