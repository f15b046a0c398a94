"""The page has the numbers of its runs, is one file, and is identical byte for byte if it is rendered again."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mmqk.lab.formatting import number, render
from mmqk.lab.grid.claims import claims_hash
from mmqk.lab.page import page_content, report_files, write_report
from mmqk.lab.page.drawing import arm_colors
from mmqk.lab.page.tables import arm_table, tokens
from mmqk.lab.study import load_study
from mmqk.lab.verdicts.judge import judge
from tests.lab.fake_runs import Planted, write_demo, write_run

FIGURES = ("hero", "claim-C2", "claim-C10", "claim-C13", "entropy", "norms", "final_norm", "layers", "shown")


def read(folder):
    """Return the study of a folder and its verdicts."""
    study = load_study(folder)
    return study, judge(study)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Write runs of the demonstration with known numbers, and their report; return both folders."""
    root = tmp_path_factory.mktemp("page")
    runs = write_demo(root / "runs" / "demo")
    write_report(runs, root / "report")
    return runs, root / "report"


def pages_of(folder: Path) -> dict[str, str]:
    """Return index.html and report.md of a folder of runs, without figures."""
    content = page_content(*read(folder))
    return {name: render(name, content) for name in ("index.html", "report.md")}


class Checker(HTMLParser):
    """Collect the references and ids of a page, and check that its tags match."""

    VOID = ("meta", "br", "col", "img", "line", "link", "input", "hr")

    def __init__(self, page: str):
        super().__init__()
        self.references, self.ids, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"


def test_page_needs_nothing_else_and_its_tags_match(demo):
    report = demo[1]
    text = (report / "index.html").read_text()
    page = Checker(text)
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    for reference in page.references:
        assert reference[1:] in page.ids if reference.startswith("#") else (report / reference).exists(), reference
    assert not re.search(r"<(?:script|link)[^>]*(?:src|href)=|url\((?!data:)", text)
    images = re.findall(r"\]\((figures/[\w-]+\.(?:png|csv))\)", (report / "report.md").read_text())
    assert {Path(image).stem for image in images} == set(FIGURES) and all((report / i).exists() for i in images)


def test_every_number_of_a_claim_is_that_of_verdicts_json(demo):
    records = {record["claim"]: record for record in json.loads((demo[1] / "verdicts.json").read_text())}
    page = (demo[1] / "index.html").read_text()
    markdown = (demo[1] / "report.md").read_text()
    for id in ("C2", "C10"):
        record = records[id]
        values = [number(2.718281828459045**v) for v in (record["effect"], *record["interval"])]
        shown = "×{} ({} to {})".format(*values)
        assert shown in page.split(f'id="verdict-{id}"')[1].split("</article>")[0]
        section = page.split(f'id="claim-{id}"')[1].split("</details>")[0]
        p = "&lt; 0.0001" if record["p"] < 1e-4 else f"{record['p']:.2g}"
        assert shown in section and f"<dt>p</dt><dd>{p}</dd>" in section
        [row] = [line for line in markdown.splitlines() if line.startswith(f"| **{id}**")]
        assert shown in row and f"**{record['verdict']}**" in row
        assert f"p: {html.unescape(p)}".replace("<", r"\<") in row


def test_text_from_the_grid_is_escaped(tmp_path, without_figures):
    def change(grid):
        grid["report"]["question"] = "Does <it> grow?"
        grid["arms"]["mixed"]["label"] = "</script><b onclick=x>"
        grid["claims"][0]["statement"] = "<img src=x> holds"

    pages = report_files(*read(write_demo(tmp_path / "demo", change=change)))
    page = pages["index.html"]
    assert "<h1>Does &lt;it&gt; grow?</h1>" in page and "&lt;img src=x&gt; holds" in page
    assert "<b onclick" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert page.count("</script>") == page.count("<script") and "What a &lt;7B&gt; run would do." in page
    assert Checker(page).open == []
    assert r"What a \<7B\> run would do." in pages["report.md"]


def test_no_absolute_path_is_on_the_page(tmp_path, monkeypatch):
    """The page has no absolute path in commands, reasons, versions and parents of forks, wherever the runs were
    trained."""
    runs = tmp_path / "mine" / "runs" / "r"
    for seed, here in enumerate((tmp_path, Path("/elsewhere/me"))):
        path = write_run(runs / f"seed{seed}", Planted(50.0), seed)
        record = json.loads((path / "run.json").read_text())
        record["details"] |= {
            "command": ["python", "-m", "mmqk.train", "--config", f"{here}/my configs/x.yaml",
                        f"--out={here}/runs/a b", "--seed=3", f'--data.sets=["{here}/data/one"]'],
            "versions": {"torch": f"2.6 of {here}/torch/lib"},
        }  # fmt: skip
        (path / "run.json").write_text(json.dumps(record))
        ended = {"status": "failed", "step": 3, "reason": f"OSError: no space in {here}/runs/x/y.ckpt"}
        (path / "status.json").write_text(json.dumps(ended))
        (path / "fork.json").write_text(json.dumps({"parent": {"folder": f"{here}/runs/parent", "step": 2}}))
    monkeypatch.chdir(tmp_path)
    for text in pages_of(runs).values():
        assert str(tmp_path) not in text and "/elsewhere" not in text and "/me/" not in text
        assert "--config 'my configs/x.yaml' '--out=runs/a b' --seed=3" in html.unescape(text)
        assert "no space in runs/x/y.ckpt" in text and "runs/parent" in text


@pytest.mark.parametrize("what", ["same", "changed", "absent", "lost"])
def test_the_page_says_when_a_registration_was_changed_or_lost(tmp_path, what):
    runs = write_demo(tmp_path / "demo")
    path = runs / "ablation.json"
    record = json.loads(path.read_text())
    if what != "absent":
        record["registered"] = claims_hash(record["grid"])
    if what == "changed":
        record["grid"]["claims"][0]["min_effect"] = 0.5
    path.write_text(json.dumps(record | {"lost": what == "lost"}))
    for text in pages_of(runs).values():
        assert ("Claims were changed or added after the first registration." in text) == (what == "changed")
        assert ("Claims were registered after runs had begun" in text) == (what == "lost")
    statuses = {v.claim.id: v.as_record()["status"] for v in read(runs)[1]}
    assert (statuses["C2"], statuses["C13"]) == ("exploratory" if what == "lost" else "confirmatory", "shown")


@pytest.mark.parametrize("what", ["several", "bare"])
def test_runs_without_a_grid_get_a_plain_page(tmp_path, what):
    runs = tmp_path / "runs"
    if what == "bare":
        (runs / "x").mkdir(parents=True)
        (runs / "x" / "metrics.jsonl").write_text('{"step": 1, "loss/text": 3.0}\n{"step": 2, "lo')
    else:
        for number in range(4):
            nan = 100 if number == 1 else None
            write_run(runs / f"arm{number}" / "seed0", Planted(10.0 + number, nan_from=nan))
    files = report_files(*read(runs))
    page = Checker(files["index.html"])
    assert "verdicts" not in page.ids and "claims" not in page.ids and {"runs", "fig-hero"} <= set(page.ids)
    assert json.loads(files["verdicts.json"]) == [] and "figures/hero.png" in files


def test_a_grid_whose_runs_have_not_started_gets_a_page(tmp_path):
    folder = write_demo(tmp_path / "demo")
    for run in folder.glob("*/seed*"):
        shutil.rmtree(run)
    page = pages_of(folder)["report.md"]
    assert "3 claims: 3 not run." in page and page.count("| not started |") == 13


def test_two_other_modalities_and_arms_get_the_same_page(tmp_path, without_figures):
    """The page does not depend on the names of the demonstration: renamed arms and a renamed modality have the same
    verdicts."""
    folder = write_demo(tmp_path / "demo")
    for path in [*folder.rglob("metrics.jsonl"), *folder.rglob("run.json")]:
        path.write_text(path.read_text().replace("image", "audio"))
    record = (folder / "ablation.json").read_text()
    (folder / "ablation.json").write_text(
        record.replace("image-off-0000000002", "KEEP")
        .replace("image-off", "quiet")
        .replace("loss.weights.image", "loss.weights.audio")
        .replace("KEEP", "image-off-0000000002")
    )
    found = read(folder)
    verdicts = {v.claim.id: v.verdict for v in found[1]}
    assert verdicts == {"C2": "reproduced", "C10": "contradicted", "C13": "inconclusive"}
    assert 'aria-label="Audio: largest |attention logit|"' in report_files(*found)["index.html"]


def test_a_fork_costs_what_it_reads_itself(tmp_path):
    for name, start, end in (("plain", 0, None), ("late", 40, None), ("hot", 70, 90)):
        fork = {"parent": {"id": "0123456789", "folder": "elsewhere", "step": start}} if start else None
        write_run(tmp_path / name, Planted(9.0, diverges=end), fork=fork)
    read_by = {run.name: tokens(run) for run in load_study(tmp_path).runs}
    # A step has 8 sequences of 128 tokens. `plain` trains 200 steps, `late` 160 from step 40, `hot` 20 from step 70.
    assert read_by == {"plain": 204_800, "late": 163_840, "hot": 20_480}


def test_a_watched_model_without_a_loss_gets_a_page(tmp_path):
    """`mmqk.monitors.attach(out=...)` writes such a folder: probes and a status, but no losses and no
    configuration."""
    run = tmp_path / "mine"
    run.mkdir()
    lines = [
        {"step": step, "attn_logit_absmax/text-text/layer00": 2.0 + step, "q_norm/text/layer00": 1.0 + step,
         "q_norm/image/layer00": 3.0}
        for step in (10, 20, 40)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "status.json").write_text('{"status": "completed", "step": 40, "reason": ""}')
    files = report_files(*read(run))
    assert "figures/hero.png" in files and "figures/norms.csv" in files
    study = load_study(run)
    assert arm_table(study, arm_colors(study)) is None
    for page in (files["report.md"], files["index.html"]):
        assert "run.json" not in page and "Results by arm" not in page and "Text loss" not in page


# `mmqk.report` in a process that cannot import torch.
FRONT_DOOR = """
import sys

class Blocked:
    # None in sys.modules would break scipy.stats, which looks for torch in it.
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
from mmqk.report import main
from mmqk.store import cli_main
sys.exit(cli_main(main)(sys.argv[1:]))
"""


def test_figures_of_an_earlier_report_are_removed_and_files_of_others_are_kept(demo, tmp_path, without_figures):
    out, alone, before = tmp_path / "out", tmp_path / "alone", demo[1]
    shutil.copytree(before, out)
    (out / "figures/mine.png").write_bytes(b"mine")
    folder = write_demo(tmp_path / "one", change=lambda grid: grid["claims"].pop(2))
    write_report(folder, out)
    write_report(folder, alone)
    assert set(files_of(out)) == {*files_of(alone), "figures/mine.png"} < {*files_of(before), "figures/mine.png"}


def test_front_door_reports_the_same_bytes_again_without_torch(demo, tmp_path):
    source = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FRONT_DOOR, str(demo[0])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "reports/demo/index.html"
    assert "C2: reproduced" in done.stdout
    assert files_of(tmp_path / "reports" / "demo") == files_of(demo[1])
