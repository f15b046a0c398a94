"""The page of a single run lists what grew first and its alarms; a page of several runs does not."""

import json
import re

import pytest

from tests.lab.metrics.test_probes import run_of
from tests.lab.page.test_page import pages_of


def write_lines(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_first_screen_says_what_began_where(tmp_path):
    run = run_of(
        tmp_path / "mine",
        loss__text=lambda step: 4.0,
        k_norm__image__layer03=lambda step: 1.0 if step < 80 else 9.0,
        attn_entropy__text__layer00=lambda step: 3.0 if step < 160 else 1.0,
    )
    alarm = {"name": "growth", "step": 80, "tag": "k_norm/image/layer03", "value": 9.0, "threshold": 2.0,
             "sentence": "k_norm/image/layer03 <doubled>"}  # fmt: skip
    (run.path / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    page, markdown = pages_of(run.path).values()
    for text in (page, markdown):
        assert "completed at step 200" in text and "What grew first" in text
    rows = [line for line in markdown.splitlines() if line.startswith(("| k", "| attn"))]
    assert rows == [
        r"| k\_norm | image | 3 | 80 | 1.00 | 9.00 | ×9.00 |",
        r"| attn\_entropy | text | 0 | 160 | 3.00 | 1.00 | ÷3.00 |",
    ]
    assert ">growth</td>" in page and ">image, layer 3</td>" in page and "Alarms: 1</summary>" in page
    assert "k_norm/image/layer03 &lt;doubled&gt;" in page


def test_a_calm_run_names_nothing_and_a_run_with_one_probe_after_its_warmup_neither(tmp_path):
    run = run_of(tmp_path / "calm", loss__text=lambda step: 4.0, k_norm__image__layer03=lambda step: 1.0)
    page = pages_of(run.path)["index.html"]
    assert "What grew first: nothing" in page and "Alarms: none" in page and ">k_norm</td>" not in page
    for warmup in (199, 0):  # the control: without a warm-up the series is listed
        run = run_of(tmp_path / str(warmup), warmup, k_norm__image__layer03=lambda step: 1.0 + step)
        page = pages_of(run.path)["report.md"]
        assert ("What grew first: nothing" in page) == bool(warmup)
        assert (r"| k\_norm | image | 3 |" in page) == (not warmup)


def test_the_page_lists_the_fields_that_differ_from_their_defaults(tmp_path):
    run = run_of(tmp_path / "mine", loss__text=lambda step: 4.0)
    record = json.loads((run.path / "run.json").read_text())
    config = {"optim": {"lr": 0.03, "beta2": 0.95}, "model": {"qk_norm": {"kind": "rms"}}, "out": "x"}
    record["details"]["config"] = config
    (run.path / "run.json").write_text(json.dumps(record))
    page, markdown = pages_of(run.path).values()
    rows = re.findall(r"<tr><td[^>]*><code>(.*?)</code></td><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", page)
    # The defaults are those that `mmqk.train --help` prints. beta2 has its default value, so it is not listed.
    assert rows == [("optim.lr", "0.03", "0.001"), ("model.qk_norm.kind", "rms", "none")]
    assert "| `optim.lr` | 0.03 | 0.001 |" in markdown


@pytest.mark.parametrize("low", [0.01, 0.9])
def test_the_page_of_attach_applies_the_rules(tmp_path, low):
    """`attach` writes no alarms. The entropy falls to 1 % of its first value, in the control to 90 %."""
    lines = [{"step": n, "attn_entropy/text/layer00": 2.0 * (1 if n < 50 else low)} for n in range(10, 100, 10)]
    folder = write_lines(tmp_path / "mine", lines)
    (folder / "status.json").write_text(json.dumps({"status": "completed", "step": 90, "reason": "", "seconds": 1}))
    page = pages_of(folder)["index.html"]
    assert ("Alarms: 1</summary>" in page) == (low < 0.1) and ("Alarms: none" in page) == (low > 0.1)
