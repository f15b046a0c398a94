"""The page of a report in headless Chromium: opened from a file, wide, narrow and printed."""

import base64
import csv
import re
from pathlib import Path

import pytest

from mmqk.lab.page.page import write_report
from tests.analysis.fake_runs import write_demo
from tests.training.browser import browser, installed

CHROMIUM = installed()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def report(tmp_path_factory, module_without_figure_files):
    """Write a page with forks."""
    root = tmp_path_factory.mktemp("browser")
    write_report(write_demo(root / "demo"), root / "report")
    return root / "report" / "index.html"


@pytest.fixture(scope="module")
def demo(tmp_path_factory, module_without_figure_files):
    """Render the page of the demonstration from its pack."""
    page = tmp_path_factory.mktemp("demo")
    write_report(Path(__file__).parents[2] / "reports/examples/demo.zip", page)
    return page / "index.html"


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
    assert len(drawn) > 20
    # The negative control: a block that is too wide is detected.
    page.value("document.querySelector('h1').style.width = '2000px'")
    assert page.value(OVERFLOW) > 0


def test_the_demonstration_fits_in_five_screens(page, demo):
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    page.open(demo.as_uri())
    assert page.wait("document.querySelectorAll('.uplot').length > 1")
    assert page.value("document.documentElement.scrollHeight") <= 5 * 800
    assert page.errors == []
    # The negative control: with all sections unfolded the page is longer.
    page.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.value("document.documentElement.scrollHeight") > 5 * 800


def test_a_link_into_a_fold_opens_it_and_paper_opens_all(page, report):
    show(page, report, 1280)
    assert page.value("document.querySelectorAll('details[open]').length") == 0
    page.value("document.querySelector('.card .more a').click()")
    assert page.wait("document.querySelectorAll('details[open]').length == 1")
    assert page.value("document.querySelector('details[open]').id === location.hash.slice(1)")
    page.value("location.hash = document.querySelector('table.sortable tbody tr').id")
    assert page.wait("document.getElementById('runs').open")
    page.value("dispatchEvent(new Event('beforeprint'))")
    assert page.value("document.querySelectorAll('details:not([open])').length") == 0
    page.value("dispatchEvent(new Event('afterprint'))")
    assert page.value("document.querySelectorAll('details:not([open])').length") > 5


def test_the_table_sorts_and_two_runs_are_compared(page, report):
    show(page, report, 1280)
    page.value("document.getElementById('runs').open = true")
    heads = "[...document.querySelectorAll('table.sortable thead th')]"
    column = f"{heads}.findIndex(h => h.textContent.startsWith('Largest logit'))"
    rows = "[...document.querySelectorAll('table.sortable tbody tr')]"
    cells = f"(n => {rows}.map(r => r.cells[n].textContent))({column})"
    before = page.value(cells)
    press = f"document.querySelectorAll('table.sortable thead th button')[{column}]"
    page.value(f"{press}.focus(), {press}.click()")
    shown = [float(text.replace(",", "")) for text in page.value(cells) if text != "–"]
    assert shown == sorted(shown) and len(shown) > 10 and page.value(cells) != before
    page.value(f"{press}.click()")
    assert [float(t.replace(",", "")) for t in page.value(cells) if t != "–"] == shown[::-1]
    assert page.value("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    page.value("[...document.querySelectorAll('table.sortable input')].slice(0, 2).forEach(box => box.click())")
    lines = "[...document.querySelectorAll('.compared tbody tr')]"
    compared = page.value(f"{lines}.map(r => [...r.cells].map(c => c.textContent))")
    fields = [row for row in compared if "." in row[0]]
    assert fields and all(a != b for _, a, b in fields)
    assert page.errors == []


def test_a_figure_answers(page, demo):
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=1600, deviceScaleFactor=1, mobile=False)
    page.open(demo.as_uri())
    assert page.wait("document.querySelectorAll('#fig-hero .uplot').length == 4")
    box = "document.querySelector('#fig-hero .u-over').getBoundingClientRect()"
    x, y = page.value(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({box})")
    page.value("document.querySelector('#fig-hero .tip').textContent = ''")
    for dy in range(-60, 60, 6):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y + dy)
        if page.value("!document.querySelector('#fig-hero .tip').hidden"):
            break
    tip = page.value("document.querySelector('#fig-hero .tip').textContent")
    name, step, value = tip.split(" · ")
    seed = name.rpartition(", ")[2]
    seed = seed.removeprefix("seed ") if seed.startswith("seed") else "median"
    rows = csv.DictReader((demo.parent / "figures/hero.csv").read_text().splitlines())
    at = [
        float(row["value"])
        for row in rows
        if (row["modality"], row["seed"], f"{float(row['step']):g}") == ("text", seed, step.split()[1])
    ]
    assert any(abs(float(value) - v) < 0.01 for v in at), tip
    # The first button hides an arm, and the last button changes the scale of the axis.
    lines = "document.querySelector('#fig-hero .uplot')"
    buttons = "[...document.querySelectorAll('#fig-hero .controls button')]"
    picture = f"{lines}.querySelector('canvas').toDataURL()"
    before = page.value(picture)
    page.value(f"{buttons}[0].click()")
    assert page.value(f"{buttons}[0].getAttribute('aria-pressed')") == "false" and page.value(picture) != before
    page.value(f"{buttons}[0].click()")
    page.value(f"{buttons}.at(-1).click()")
    assert page.value(picture) != before and page.errors == []


def contrast(one, two):
    """Return the contrast ratio of two colors, as WCAG 2 defines it."""

    def light(color):
        channels = [int(c) / 255 for c in re.findall(r"\d+", color)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    a, b = sorted((light(one), light(two)), reverse=True)
    return (a + 0.05) / (b + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(page, report, scheme):
    show(page, report, 1280)
    preferred = {"name": "prefers-color-scheme", "value": scheme}
    page.call("Emulation.setEmulatedMedia", media="", features=[preferred])
    paper = page.value("getComputedStyle(document.body).backgroundColor")
    colors = page.value(
        "[...new Set([...document.querySelectorAll('main *')].filter(e => !e.closest('svg, button, .u-wrap')"
        " && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))"
        ".map(e => getComputedStyle(e).color))]"
    )
    assert len(colors) > 4 and all(contrast(color, paper) >= 4.5 for color in colors)
    assert (contrast(paper, "rgb(0, 0, 0)") > 10) == (scheme == "light")
    assert contrast("rgb(150, 150, 150)", "rgb(255, 255, 255)") < 4.5  # the negative control
    page.call("Emulation.setEmulatedMedia", media="", features=[])


def test_it_prints(page, report):
    show(page, report, 720, "print")
    assert page.value("getComputedStyle(document.querySelector('.skip')).display") == "none"
    assert page.value(OVERFLOW) <= 0
    paper = base64.b64decode(page.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert paper.startswith(b"%PDF") and paper.count(b"/Type /Page\n") + paper.count(b"/Type/Page") > 5
    show(page, report, 720)
    assert page.value("getComputedStyle(document.querySelector('.skip')).display") != "none"
