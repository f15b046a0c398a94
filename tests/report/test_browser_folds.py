"""The page of a report in headless Chromium: without JavaScript, by keyboard, on a phone, unfolded, printed."""

import pytest

from mmqk.lab.page.page import write_report
from tests.analysis.fake_runs import write_demo
from tests.training.browser import browser, installed

CHROMIUM = installed()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")
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
    if (["STYLE", "SCRIPT"].includes(of.tagName)) continue;
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
def report(tmp_path_factory, module_without_figure_files):
    """Write a page with forks."""
    root = tmp_path_factory.mktemp("browser")
    write_report(write_demo(root / "demo"), root / "report")
    return root / "report" / "index.html"


@pytest.fixture(scope="module")
def demo(tmp_path_factory, module_without_figure_files):
    """Write the page of the demonstration's grid."""
    root = tmp_path_factory.mktemp("demo")
    write_report(write_demo(root / "demo"), root / "report")
    return root / "report" / "index.html"


@pytest.fixture(scope="module")
def page():
    with browser(CHROMIUM, 1280, SCREEN) as page:
        yield page


def show(page, report, width, media="", scheme="light", anchor=""):
    scheme = [{"name": "prefers-color-scheme", "value": scheme}]
    page.call("Emulation.setEmulatedMedia", media=media, features=scheme)
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=SCREEN, deviceScaleFactor=1, mobile=False
    )
    page.open("about:blank")  # a new anchor alone would not load the page again
    page.open(report.as_uri() + anchor)
    assert page.wait("document.readyState == 'complete' && !!document.querySelector('figure')")


def unfold(page):
    page.value("document.querySelectorAll('details').forEach(d => { d.open = true })")


def press(page, key, code):
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
        page.call("Input.dispatchKeyEvent", **event, **(text if kind == "keyDown" else {}))


def test_the_cards_are_on_the_first_screen(page, demo):
    show(page, demo, 1280)
    assert page.value("document.querySelector('.cards').getBoundingClientRect().bottom") <= SCREEN


@pytest.mark.parametrize("script", [True, False])
def test_links_into_folds_open_them(page, demo, script):
    page.call("Emulation.setScriptExecutionDisabled", value=not script)
    try:
        show(page, demo, 1280)
        run = page.value("document.querySelector('#runs tbody tr').id")
        visible = f"document.getElementById('{run}').checkVisibility()"
        assert not page.value(visible)
        show(page, demo, 1280, anchor=f"#{run}")
        assert page.wait(visible)
        if script:
            page.value("document.querySelector('.card .more a').click()")
            assert page.wait("document.querySelector('#claim-C2').open")
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("width", [1280, 400])
def test_unfolded_it_is_no_wider_than_the_page(page, report, width):
    show(page, report, width)
    unfold(page)
    assert page.value(OVERFLOW) <= 0
    assert page.errors == []


def test_without_its_script_the_page_has_its_drawings(page, demo):
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        for width in (1280, 400):
            show(page, demo, width)
            assert page.value("document.querySelectorAll('#fig-hero .panels svg').length") >= 4
            assert page.value(OVERFLOW) <= 0
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)


def contrast(one, other):
    """Return the WCAG 2.2 contrast ratio of two colors, each [red, green, blue] from 0 to 255."""

    def luminance(color):
        channels = [
            c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color
        ]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_known_colors():
    assert contrast([0, 0, 0], [255, 255, 255]) == pytest.approx(21)
    assert contrast([118, 118, 118], [255, 255, 255]) == pytest.approx(4.54, abs=0.01)  # WebAIM's #767676


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(page, report, scheme):
    show(page, report, 1280, scheme=scheme)
    unfold(page)
    found = page.value(TEXTS)
    assert len(found) > 500
    paper = [255, 255, 255] if scheme == "light" else [20, 24, 29]
    assert all(paper == background for text, _, background in found if text == "Results by arm")
    assert [(text, c, b) for text, c, b in found if contrast(c, b) < 4.5] == []
    # The negative control: faint text is detected.
    page.value("document.querySelector('h1').style.color = 'var(--line)'")
    assert any(contrast(c, b) < 4.5 for _, c, b in page.value(TEXTS))


def test_runs_sort_by_keyboard(page, demo):
    show(page, demo, 1280, anchor="#runs")
    head = "document.querySelectorAll('#runs thead th')[1]"
    seeds = "[...document.querySelectorAll('#runs tbody tr')].map(r => Number(r.cells[1].textContent))"
    before = page.value(seeds)
    assert before != sorted(before)
    page.value(f"{head}.querySelector('button').focus()")
    press(page, "Enter", 13)
    assert page.value(f"{head}.getAttribute('aria-sort')") == "ascending"
    assert page.value(seeds) == sorted(before)
    press(page, "Enter", 13)
    assert page.value(f"{head}.getAttribute('aria-sort')") == "descending"
    assert page.value(seeds) == sorted(before, reverse=True)
    assert page.errors == []


def test_the_keyboard_reaches_results_and_folds(page, demo):
    show(page, demo, 1280)
    press(page, "Tab", 9)
    assert page.value("document.activeElement.className") == "skip"
    assert page.value("document.activeElement.getBoundingClientRect().left") >= 0
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.value("document.querySelector('#environment summary').focus()")
    press(page, "Enter", 13)
    assert page.value("document.querySelector('#environment').open")


def test_rows_are_labeled_blocks_on_a_phone(page, demo):
    show(page, demo, 400)
    cell = "document.querySelector('#arms ~ .scroll tbody tr').cells[4]"
    assert page.value(f"{cell}.dataset.label") == "Final loss"
    assert page.value(f"getComputedStyle({cell}, '::before').display") == "block"
    visible = "[...document.querySelectorAll('.scroll')].filter(s => s.checkVisibility())"
    assert page.value(f"{visible}.length") > 0
    assert page.value(f"{visible}.filter(s => s.scrollWidth > s.clientWidth).map(s => s.textContent)") == []
    assert page.value(
        "document.querySelectorAll('table').length == document.querySelectorAll('caption').length"
    )
    show(page, demo, 1280)
    assert page.value(f"getComputedStyle({cell}, '::before').content") == "none"


def test_it_prints_what_is_folded(page, report):
    show(page, report, 720)
    entry = "document.querySelector('#environment dd')"
    assert not page.value(f"{entry}.checkVisibility()")
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.value(OVERFLOW) <= 0
    assert page.value(f"{entry}.getBoundingClientRect().height") > 0
    show(page, report, 720)
    assert not page.value(f"{entry}.checkVisibility()")


def test_paper_in_dark_mode_has_drawings_and_their_legend(page, demo):
    show(page, demo, 1280, scheme="dark")
    charts = "document.querySelectorAll('#fig-hero .uplot').length"
    legend = "getComputedStyle(document.querySelector('#fig-hero .legend')).display"
    assert page.wait(f"{charts} == 4") and page.value(legend) == "none"
    page.value("dispatchEvent(new Event('beforeprint'))")
    assert page.value(charts) == 0
    assert page.value("document.querySelectorAll('#fig-hero .panels > div > svg').length") == 4
    page.value("dispatchEvent(new Event('afterprint'))")
    assert page.value(charts) == 4
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.value(legend) == "flex"
    assert page.errors == []
