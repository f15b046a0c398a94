"""The page of a report in headless Chromium: opened from a file, wide, narrow and by keyboard."""

import csv
from pathlib import Path

import pytest

from mmqk.lab.page import write_report
from tests.lab.fake_runs import write_demo
from tests.lab.page.browser import browser, installed
from tests.lab.page.report_runs import write_forks

CHROMIUM = installed()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SCREEN = 800
@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write the page of a grid, of the demonstration's pack and of forks."""
    root = tmp_path_factory.mktemp("browser")
    write_report(write_demo(root / "demo"), root / "grid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmqk.lab.page.drawing.Drawing.png", lambda drawing: b"")
        write_report(Path(__file__).parents[3] / "reports/examples/demo.zip", root / "pack")
        write_report(write_forks(root / "runs"), root / "forks")
    return {name: root / name / "index.html" for name in ("grid", "pack", "forks")}


@pytest.fixture(scope="module")
def page():
    with browser(CHROMIUM, 1280, SCREEN) as page:
        yield page


def show(page, report, width=1280, anchor="", script=True):
    page.call("Emulation.setScriptExecutionDisabled", value=not script)
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=SCREEN, deviceScaleFactor=1, mobile=False)
    page.open("about:blank")  # a new anchor alone would not load the page again
    page.open(report.as_uri() + anchor)
    assert page.wait("document.readyState == 'complete' && !!document.querySelector('figure')")
    if script:
        assert page.wait("!!document.querySelector('.uplot')")


def unfold(page):
    page.value("document.querySelectorAll('details').forEach(d => { d.open = true })")


def press(page, key, code):
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
        page.call("Input.dispatchKeyEvent", **event, **(text if kind == "keyDown" else {}))


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


@pytest.mark.parametrize("script", [True, False])
def test_links_into_folds_open_them_and_without_its_script_the_page_has_its_pngs(page, pages, script):
    try:
        show(page, pages["grid"], script=script)
        run = page.value("document.querySelector('#runs tbody tr').id")
        visible = f"document.getElementById('{run}').checkVisibility()"
        assert not page.value(visible)
        images = "[...document.querySelectorAll('#fig-hero img')].map(i => i.naturalWidth)"
        assert (page.value(images) == []) if script else (page.value(images)[0] > 1000)
        assert page.value(OVERFLOW) <= 0
        show(page, pages["grid"], anchor=f"#{run}", script=script)
        assert page.wait(visible)
        if script:
            page.value("document.querySelector('.card .more a').click()")
            assert page.wait("document.querySelector('#claim-C2').open")
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)


def test_the_table_sorts_by_keyboard_and_two_runs_are_compared(page, pages):
    show(page, pages["grid"], anchor="#runs")
    heads = "[...document.querySelectorAll('#runs thead th')]"
    column = f"{heads}.findIndex(h => h.textContent.startsWith('Largest logit'))"
    cells = f"(n => [...document.querySelectorAll('#runs tbody tr')].map(r => r.cells[n].textContent))({column})"
    before = page.value(cells)
    page.value(f"document.querySelectorAll('#runs thead th button')[{column}].focus()")
    for order in ("ascending", "descending"):
        press(page, "Enter", 13)
        assert page.value("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == order
        shown = [float(text.replace(",", "")) for text in page.value(cells) if text != "–"]
        assert shown == sorted(shown, reverse=order == "descending") and len(shown) > 10
    assert page.value(cells) != before
    page.value("[...document.querySelectorAll('#runs input')].slice(0, 2).forEach(box => box.click())")
    lines = "[...document.querySelectorAll('.compared tbody tr')]"
    compared = page.value(f"{lines}.map(r => [...r.cells].map(c => c.textContent))")
    fields = [row for row in compared if "." in row[0]]
    assert fields and all(a != b for _, a, b in fields) and "Largest logit" in [row[0] for row in compared]
    assert page.errors == []


def test_the_keyboard_reaches_results_and_folds(page, pages):
    show(page, pages["grid"])
    press(page, "Tab", 9)
    assert page.value("document.activeElement.className") == "skip"
    assert page.value("document.activeElement.getBoundingClientRect().left") >= 0
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.value("document.querySelector('#environment summary').focus()")
    press(page, "Enter", 13)
    assert page.value("document.querySelector('#environment').open")


def test_a_figure_answers(page, pages):
    demo = pages["pack"]
    show(page, demo)
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=1600, deviceScaleFactor=1, mobile=False)
    box = "document.querySelector('#fig-hero .u-over').getBoundingClientRect()"
    x, y = page.value(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({box})")
    for dy in range(-60, 60, 6):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y + dy)
        if page.value("!document.querySelector('#fig-hero .tip').hidden"):
            break
    tip = page.value("document.querySelector('#fig-hero .tip').textContent")
    name, step, value = tip.split(" · ")
    seed = name.rpartition(", ")[2].removeprefix("seed ")
    rows = csv.DictReader((demo.parent / "figures/hero.csv").read_text().splitlines())
    at = [
        float(row["value"])
        for row in rows
        if (row["modality"], row["seed"], f"{float(row['step']):g}") == ("text", seed, step.split()[1])
    ]
    assert any(abs(float(value) - v) < 0.01 for v in at), tip
    # The first button hides an arm, and the last button changes the scale of the axis.
    buttons = "[...document.querySelectorAll('#fig-hero .controls button')]"
    picture = "document.querySelector('#fig-hero .uplot').querySelector('canvas').toDataURL()"
    before = page.value(picture)
    page.value(f"{buttons}[0].click()")
    assert page.value(f"{buttons}[0].getAttribute('aria-pressed')") == "false" and page.value(picture) != before
    page.value(f"{buttons}[0].click()")
    page.value(f"{buttons}.at(-1).click()")
    assert page.value(picture) != before and page.errors == []
