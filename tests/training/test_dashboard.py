"""Run the TensorBoard command that mmqk prints, and check its pages in a real browser."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmqk.store import dashboards
from mmqk.train import main
from mmqk.training.tensorboard import PAGES, RUN_PAGE, StoryLogger
from tests.training.browser import browser, installed

ROOT = Path(__file__).parents[2]
SPIKE = 1777
CARD = "tf-custom-scalar-multi-line-chart-card"
# JavaScript: `all` returns every element of the page, also in shadow roots; `cards` returns the title and the
# number of drawn lines of each chart.
PAGE = f"""
const all = root => [...root.querySelectorAll('*')].flatMap(e => e.shadowRoot ? [e, ...all(e.shadowRoot)] : [e]);
const cards = () => all(document).filter(e => e.tagName.toLowerCase() === '{CARD}').map(e => {{
  const inside = all(e.shadowRoot || e);
  return {{
    title: inside.find(i => i.matches('.heading-label')).textContent.trim(),
    lines: inside.filter(i => i.matches('path.line') && (i.getAttribute('d') || '').length > 9).length,
  }};
}});
"""


@contextlib.contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """Run the printed command on a free port and yield the address of its page."""
    command = re.search(r"python (-m .*), then open \S+(#\w+)$", dashboards(logdir))
    assert command is not None
    words = [sys.executable, *shlex.split(command[1]), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = next(match[0] for line in process.stderr if (match := re.search(r"http://[\w.]+:\d+/", line)))
        yield found + command[2]
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def logdir(tiny_args, tmp_path_factory) -> Path:
    """Return a folder with 13 runs of an ablation (with the long run as many as the demonstration) and a long run
    whose loss has a spike of one step."""
    folder = tmp_path_factory.mktemp("dash") / "runs of mine"
    for seed in (1, 2):
        assert main([*tiny_args, f"--seed={seed}", f"--out={folder}/mixed-0123456789/seed{seed}"]) == 0
    for seed in range(3, 14):
        shutil.copytree(folder / "mixed-0123456789/seed1", folder / f"mixed-0123456789/seed{seed}")
    logger = StoryLogger(folder / "long", ("text", "image"))
    for step in range(1, 3001):
        high = 9.0 if step == SPIKE else 3.0
        logger.log_metrics({"loss/text": high, "loss/image": 4.0}, step)
    logger.finalize("success")
    return folder


@pytest.mark.skipif(installed() is None, reason="no Chromium is installed")
def test_the_page_opens_on_the_story_and_draws_every_chart_without_an_error(logdir):
    titles = {chart.title for charts in PAGES.values() for chart in charts} | set(RUN_PAGE)
    with tensorboard(logdir) as address, browser(installed() or "") as page:
        page.open(address)
        page.wait("document.readyState === 'complete'")
        page.value(PAGE + "globalThis.cards = cards; globalThis.all = all; 0")
        drawn = page.wait(f"cards().length >= {len(titles)} && cards().every(c => c.lines > 0) && cards()")
        assert drawn, page.value("cards()")
        assert {card["title"] for card in drawn} == titles
        lines = {card["title"]: card["lines"] for card in drawn}
        # 13 runs, each with two query and two key modalities.
        assert lines["Largest attention logit (max over layers)"] >= 52
        assert lines["Query norm (max over layers)"] >= 26
        assert page.value("all(document).some(e => e.textContent.trim() === 'mixed-0123456789/seed2')")
        # The chart's data contains the spike of one step among 3,000.
        series = page.value(
            "fetch('data/plugin/custom_scalars/scalars?run=long&tag='"
            " + encodeURIComponent('^loss/text$')).then(r => r.json())"
        )
        values = {int(step): value for _, step, value in series["tag_to_events"]["loss/text"]}
        assert len(values) == 3000 and values[SPIKE] == 9.0
        outcome = page.value(
            "fetch('data/plugin/hparams/session_groups', {method: 'POST', body: JSON.stringify("
            "{experimentName: '', allowedStatuses: ['STATUS_SUCCESS'], colParams: [], startIndex: 0, sliceSize: 9})})"
            ".then(r => r.json())"
        )
        rows = [group["hparams"] for group in outcome["sessionGroups"]]
        assert len(rows) == 9 and {row["seed"] for row in rows} <= {1, 2}
        assert all(row["as ended"] == "completed" and row["arm"] == "mixed" for row in rows)
        metrics = outcome["sessionGroups"][0]["metricValues"]
        values = {m["name"]["tag"]: m["value"] for m in metrics if "val_loss" in m["name"]["tag"]}
        assert values.keys() == {"val_loss/text", "val_loss/image"} and min(values.values()) > 0
        assert not page.errors


@pytest.mark.skipif(installed() is None, reason="no Chromium is installed")
def test_the_browser_sees_a_broken_page(tmp_path):
    """The control: an error on the page and an empty page are detected."""
    (tmp_path / "page.html").write_text("<script>console.error('oh'); missing()</script>")
    with browser(installed() or "") as page:
        page.open((tmp_path / "page.html").as_uri())
        page.wait("document.readyState === 'complete'")
        assert len(page.errors) == 2 and "missing" in " ".join(page.errors)
        assert page.value(PAGE + "cards().length") == 0
