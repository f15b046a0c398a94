"""The page of a single run lists what grew first and its alarms; a page of several runs does not."""

import json
import re

import pytest

from mmqk.lab.page.page import write_report
from tests.analysis.fake_runs import write_demo
from tests.analysis.test_growth_order import run_of

pytestmark = pytest.mark.usefixtures("without_figures")


def page_of(folder, tmp_path):
    write_report(folder, tmp_path / "report")
    return (tmp_path / "report/index.html").read_text(), (tmp_path / "report/report.md").read_text()


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
    page, markdown = page_of(run.path, tmp_path)
    headline = "First to change: key norm, image, layer 3, from step 80. The run completed at step 200."
    assert f"<h1>{headline}</h1>" in page and markdown.startswith(f"# {headline}")
    rows = re.findall(r"<tr><td>([a-z].*?)</td>.*?>(\d+)</td>", page)
    assert rows[:2] == [("key norm, image, layer 3", "80"), ("attention entropy, text, layer 0", "160")]
    assert "Step 80: growth (image, layer 3): k_norm/image/layer03 &lt;doubled&gt;" in page
    assert "×9" in page and "÷3" in page and "1 alarm</summary>" in page


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        (2, "key norm, image, layer 1; key norm, image, layer 0"),
        (3, "key norm, image, layer 2; key norm, image, layer 1; and 1 other"),
        (5, "key norm, image, layer 4; key norm, image, layer 3; and 3 others"),
    ],
)
def test_series_that_changed_at_the_same_probe_are_named_together(tmp_path, layers, named):
    series = {
        f"k_norm__image__layer{layer:02d}": lambda step, end=5.0 + layer: 1.0 if step < 80 else end
        for layer in range(layers)
    }
    later = {"q_norm__text__layer00": lambda step: 1.0 if step < 100 else 90.0}
    page, markdown = page_of(run_of(tmp_path / "tied", **series, **later).path, tmp_path)
    headline = f"First to change, at the same probe (step 80): {named}. The run completed at step 200."
    assert f"<h1>{headline}</h1>" in page and markdown.startswith(f"# {headline}")


def test_the_data_of_a_single_run_state_the_size_of_their_sample(tmp_path):
    run = run_of(tmp_path / "mine", loss__text=lambda step: 4.0)
    (run.path / "data.json").write_text(json.dumps({"text": {"unigram": 3.21, "tokens": 12345}}))
    pages = page_of(run.path, tmp_path)
    for text in pages:
        words = re.sub(r"<[^>]+>", " ", text)
        assert re.search(r"12,345 tokens\W+3\.21\W", words)
        assert "Sample: the tokens from which" in text


def test_a_calm_run_names_nothing(tmp_path):
    run = run_of(tmp_path / "calm", loss__text=lambda step: 4.0, k_norm__image__layer03=lambda step: 1.0)
    page, _ = page_of(run.path, tmp_path)
    assert "<h1>No measured series grew. The run completed at step 200.</h1>" in page
    assert "0 alarms</summary>" in page and "<td>key norm" not in page


def test_a_run_with_one_probe_after_its_warmup_cannot_tell_what_grew(tmp_path):
    headlines = {}
    for warmup in (199, 0):  # the control: without a warm-up the series is listed
        run = run_of(tmp_path / str(warmup), warmup, k_norm__image__layer03=lambda step: 1.0 + step)
        headlines[warmup] = page_of(run.path, tmp_path)[1].splitlines()[0]
    unknown = "# What grew first is unknown: no norm, logit or attention entropy has two values from the end of the "
    assert headlines[199] == f"{unknown}learning rate's warm-up on. The run completed at step 200."
    assert headlines[0].startswith("# First to change: key norm, image, layer 3")


def test_the_page_lists_the_fields_that_differ_from_their_defaults(tmp_path):
    run = run_of(tmp_path / "mine", loss__text=lambda step: 4.0)
    record = json.loads((run.path / "run.json").read_text())
    config = {"optim": {"lr": 0.03, "beta2": 0.95}, "model": {"qk_norm": {"kind": "rms"}}, "out": "x"}
    record["details"]["config"] = config
    (run.path / "run.json").write_text(json.dumps(record))
    page, markdown = page_of(run.path, tmp_path)
    rows = re.findall(r"<tr><td><code>(.*?)</code></td><td>(.*?)</td><td>(.*?)</td>", page)
    # The defaults are those that `mmqk.train --help` prints. beta2 has its default value, so it is not listed.
    assert rows == [("optim.lr", "0.03", "0.001"), ("model.qk_norm.kind", "rms", "none")]
    assert "2 fields that differ from their defaults" in page and "| `optim.lr` | 0.03 | 0.001 |" in markdown


def test_a_page_of_several_runs_has_no_such_part(tmp_path):
    page, markdown = page_of(write_demo(tmp_path / "demo"), tmp_path)
    assert "grew-first" not in page and "What grew first" not in markdown
    assert "Sample" not in page and "ample:" not in markdown and "| sample |" not in markdown


@pytest.mark.parametrize("low", [0.01, 0.9])
def test_the_page_of_attach_applies_the_rules(tmp_path, low):
    """`attach` writes no alarms. The entropy falls to 1 % of its first value, in the control to 90 %."""
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = [{"step": n, "attn_entropy/text/layer00": 2.0 * (1 if n < 50 else low)} for n in range(10, 100, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "status.json").write_text(json.dumps({"status": "completed", "step": 90, "reason": "", "seconds": 1}))
    page, _ = page_of(folder, tmp_path)
    assert ("1 alarm</summary>" in page) == (low < 0.1) and ("0 alarms</summary>" in page) == (low > 0.1)


@pytest.mark.parametrize("of", ["attach", "mmqk"])
def test_a_page_of_attach_says_nothing_about_what_it_does_not_have(tmp_path, of):
    """The folder has metrics alone. The control: the same metrics in a folder of mmqk.train that lost two files."""
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = [{"step": n, "lr": 0.1, "q_norm/text/layer00": 2.0} for n in range(0, 1000, 2)]
    if of == "mmqk":
        lines = [{**line, "loss/text": 4.0, "loss": 4.0} for line in lines]
        (folder / "data.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = ("run.json is missing", "status.json is missing", "failed at step 0", "mean of", "Results by arm")
    pages = page_of(folder, tmp_path)
    for text in pages:
        text = re.sub(r"<style>.*?</style>|<script.*?</script>", "", text, flags=re.S)
        assert [words for words in said if words in text] == (list(said) if of == "mmqk" else [])
    assert "No measured series grew." in pages[0] and "0 alarms" in pages[0]


def test_nothing_is_said_to_have_raised_no_alarm_where_nothing_was_measured(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "lr": 0.1}\n{"step": 2, "lr": 0.1}\n')
    page, markdown = page_of(folder, tmp_path)
    assert "0 alarms" not in page and "Alarms" not in markdown
    assert "What grew first" not in page and "What grew first" not in markdown
