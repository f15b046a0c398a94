"""The page has the numbers of its runs, is one file, and is identical byte for byte if it is rendered again."""

import csv
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mmqk.lab import load_study
from mmqk.lab.formatting import duration, listed, number
from mmqk.lab.grid.claims import claims_hash
from mmqk.lab.page.figures.curves import binned, layer_map
from mmqk.lab.page.figures.draw import Brush
from mmqk.lab.page.figures.files import figure_files
from mmqk.lab.page.figures.fork_tree import fork_figure, fork_tree
from mmqk.lab.page.figures.interactive import chart_data
from mmqk.lab.page.figures.standard import figures, heat_map, hero
from mmqk.lab.page.figures.style import GRAY, arm_colors
from mmqk.lab.page.findings import cannot_tell, finding, headline, lead
from mmqk.lab.page.page import page_content, write_report
from mmqk.lab.page.render import css, render
from mmqk.lab.page.tables import arm_rows, data_rows
from mmqk.lab.verdicts.findings import read
from mmqk.lab.verdicts.study import StudyArm
from mmqk.lab.verdicts.verdicts import judge
from tests.analysis.fake_runs import DEMO, Planted, write_demo, write_grid, write_run
from tests.analysis.small_runs import small_run

CLAIMS = ("claim-C2", "claim-C10", "claim-C13")
PAPERS = ("chameleon-fig-5b", "chameleon-fig-6b")
OTHERS = ("entropy", "norms", "final_norm", "layers", "shown")
FIGURES = ("hero", *CLAIMS, *PAPERS, *OTHERS)
FILES = {
    "index.html",
    "report.md",
    "verdicts.json",
    *(f"figures/{name}.{kind}" for name in FIGURES for kind in ("csv", "png", "svg")),
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Write runs of the demonstration with known numbers, and their report; return both folders."""
    root = tmp_path_factory.mktemp("page")
    runs = write_demo(root / "runs" / "demo")
    write_report(runs, root / "report")
    return runs, root / "report"


@pytest.fixture
def hero_file_alone(monkeypatch):
    """Make reports draw all figures on the page, but write the files of the first figure only."""
    monkeypatch.setattr(
        "mmqk.lab.page.page.figure_files",
        lambda brush, figure: figure_files(brush, figure) if figure.name == "hero" else {},
    )


class Checker(HTMLParser):
    """Collect the references, ids and headings of a page, and check that its tags match."""

    VOID = ("meta", "br", "col", "img", "line", "link", "input", "hr")

    def __init__(self):
        super().__init__()
        self.references, self.ids, self.open, self.headings = [], [], [], []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)
        if tag in ("h1", "h2"):
            self.headings.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if data.strip() and {"h1", "h2"} & set(self.open):
            self.headings[-1] += data


def test_files_are_those_promised(demo):
    found = files_of(demo[1])
    assert set(found) == FILES
    assert len(found["index.html"]) < 2_000_000
    assert sum(map(len, found.values())) < 5_000_000


def test_other_runs_give_another_page(demo, tmp_path, hero_file_alone):
    other = write_demo(tmp_path / "demo", {"mixed": Planted(61.0)})
    write_report(other, tmp_path / "report")
    for name in ("index.html", "report.md", "verdicts.json", "figures/hero.csv", "figures/hero.png"):
        assert files_of(tmp_path / "report")[name] != files_of(demo[1])[name]


def test_page_needs_nothing_else_and_its_tags_match(demo):
    report = demo[1]
    page = Checker()
    page.feed((report / "index.html").read_text())
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    for reference in page.references:
        if reference.startswith("#"):
            assert reference[1:] in page.ids
        elif not reference.startswith("data:image/png;base64,"):
            assert (report / reference).exists(), reference
    assert not re.search(r"<(?:script|link)[^>]*(?:src|href)=", (report / "index.html").read_text())


def test_page_is_in_order(demo):
    page = Checker()
    text = (demo[1] / "index.html").read_text()
    page.feed(text)
    claims = [
        "Without QK-Norm attention logits explode with the learning rate",
        "Image generation is what destabilizes",
        "QK-Norm is essential and not sufficient",
    ]
    assert page.headings[1:] == [
        *claims,
        "Results by arm",
        "What these runs cannot show",
        "Each claim in detail",
        "More figures, data and runs",
    ]
    folds = re.findall(r"<summary>(.*?)</summary>", text)
    assert [re.sub("<[^>]*>", "", fold) for fold in folds] == [
        *(
            f"{id} {verdict} {claim}"
            for id, verdict, claim in zip(
                ("C2", "C10", "C13"), ("reproduced", "contradicted", "shown"), claims, strict=True
            )
        ),
        "Figures as in the papers",
        "Attention entropy and norms",
        "Output of the last layer",
        "Attention logits by layer",
        "Shown without a verdict",
        "Data",
        "All runs",
        "Reproduce",
        "Environment",
    ]
    assert text.index('id="verdicts"') < text.index('id="fig-hero"') < text.index('id="arms"')


def test_the_title_is_the_question_of_the_grid(tmp_path, without_figures):
    def ask(grid):
        grid["report"]["question"] = "Does <it> grow?"

    write_report(write_demo(tmp_path / "demo", change=ask), tmp_path / "report")
    assert "<h1>Does &lt;it&gt; grow?</h1>" in (tmp_path / "report/index.html").read_text()


def test_the_question_without_one_in_the_grid_is_about_the_leading_claims(tmp_path):
    def question(folder):
        return page_content(read(folder))["page"]["question"]

    def rename(grid):
        grid["claims"][0]["statement"] = "QK-Norm keeps logits low."

    asked = "Is it true that without QK-Norm attention logits explode with the learning rate?"
    assert question(write_demo(tmp_path / "demo")) == asked
    assert question(write_demo(tmp_path / "named", change=rename)) == "Is it true that QK-Norm keeps logits low?"
    for arm in ("one", "two"):
        write_run(tmp_path / "plain" / arm / "seed0", Planted(10.0))
    assert question(tmp_path / "plain") == "plain"


def test_title_has_its_numbers_n_and_interval(demo):
    page = (demo[1] / "index.html").read_text()
    title = html.unescape(re.search("<title>(.*)</title>", page)[1])
    (record,) = [v for v in json.loads((demo[1] / "verdicts.json").read_text()) if v["claim"] == "C2"]
    for value in (record["effect"], *record["interval"]):
        assert number(float(np.exp(value))) in title
    assert "3 seeds" in title
    assert title in (demo[1] / "report.md").read_text()


def test_a_card_draws_the_effect_and_its_interval_to_scale(demo):
    """The dot, the interval, zero effect and the smallest effect of interest are on one logarithmic axis."""
    page = (demo[1] / "index.html").read_text()
    card = page[page.index('id="verdict-C2"') :]
    bar = card[card.index("<svg") : card.index("</svg>")]
    (record,) = [v for v in json.loads((demo[1] / "verdicts.json").read_text()) if v["claim"] == "C2"]
    dot = float(re.search(r'<circle cx="([\d.]+)"', bar)[1])
    low, high = map(float, re.search(r'x1="([\d.]+)" x2="([\d.]+)"[^>]*stroke-width="4"', bar).groups())
    none, least = (float(x) for x in re.findall(r'<text x="([\d.]+)"', bar))
    scale = (dot - none) / record["effect"]
    places = zip((low, high, least), (*record["interval"], record["threshold"]), strict=True)
    assert all(place - none == pytest.approx(scale * value, abs=0.2) for place, value in places)
    assert high - low > 5 and f"no effect is ×1; the smallest effect of interest is ×{1.99}" in bar


def test_charts_have_the_numbers_of_the_csv(demo):
    page = (demo[1] / "index.html").read_text()
    figure = page[page.index('id="fig-hero"') :]
    data = json.loads(figure[figure.index("chart-data") + len('chart-data">') : figure.index("</script>")])
    panel = data["rows"][0][0]
    line = next(line for line in panel["lines"] if line["seed"] == 1)
    rows = csv.DictReader((demo[1] / "figures/hero.csv").read_text().splitlines())
    points = {
        (float(row["step"]), float(row["value"]))
        for row in rows
        if (row["modality"], row["seed"]) == (line["modality"], "1") and "loss" in row["statistic"]
    }
    drawn = {(float(x), float(y)) for x, y in zip(line["at"], line["is"], strict=True)}
    near = [any(x == a and y == pytest.approx(b, rel=1e-4) for a, b in points) for x, y in drawn]
    assert near and all(near)


def test_text_from_the_grid_is_escaped(demo):
    assert "What a &lt;7B&gt; run would do." in (demo[1] / "index.html").read_text()
    assert r"What a \<7B\> run would do." in (demo[1] / "report.md").read_text()


def test_a_threshold_is_our_smallest_effect_of_interest(demo):
    wanted = {
        "index.html": "<dt>Tested</dt><dd>at least ×1.99 in “mixed, no QK-Norm”",
        "report.md": "Tested: at least ×1.99 in “mixed, no QK-Norm”.",
    }
    for name, sentence in wanted.items():
        text = (demo[1] / name).read_text()
        assert sentence in text
        assert "asked for" not in text.lower() and "asks for" not in text


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
    found = read(runs)
    nodes = fork_tree(found.study)
    content = page_content(found, [fork_figure(found.study, nodes)], nodes=nodes) | {"css": css()}
    for name in ("index.html", "report.md"):
        text = render(name, content)
        assert str(tmp_path) not in text and "/elsewhere" not in text and "/me/" not in text
        words = html.unescape(text)
        assert "--config 'my configs/x.yaml' '--out=runs/a b' --seed=3" in words
        assert "no space in runs/x/y.ckpt" in text and "runs/parent" in text


@pytest.mark.parametrize("lost", [True, False])
def test_the_page_says_when_a_registration_was_lost(tmp_path, lost):
    runs = write_demo(tmp_path / "demo")
    path = runs / "ablation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lost": lost}))
    found = read(runs)
    content = page_content(found) | {"css": css()}
    for name in ("index.html", "report.md"):
        assert ("Claims were registered after runs had begun" in render(name, content)) == lost
    statuses = {v.claim.id: v.as_record()["status"] for v in found.verdicts}
    assert (statuses["C2"], statuses["C13"]) == ("exploratory" if lost else "confirmatory", "shown")


@pytest.mark.parametrize("registered", ["same", "other", "absent"])
def test_the_page_says_when_claims_were_changed(tmp_path, registered):
    runs = write_demo(tmp_path / "demo")
    path = runs / "ablation.json"
    record = json.loads(path.read_text())
    if registered != "absent":
        record["registered"] = claims_hash(record["grid"])
    if registered == "other":
        record["grid"]["claims"][0]["min_effect"] = 0.5
    path.write_text(json.dumps(record))
    content = page_content(read(runs)) | {"css": css()}
    for name, note in (("index.html", r'<p class="note[^"]*">(.*)</p>'), ("report.md", r"(.*Marks: .*)")):
        text = render(name, content)
        said = "Claims were changed or added after the first registration." in text
        assert said == (registered == "other")
        assert not said or "Claims were changed" in re.search(note, text)[1]
    for verdict in (found.as_record() for found in judge(load_study(runs))):
        assert "claim" in verdict and "registered" not in verdict


def test_data_are_those_of_the_runs_by_arm_where_they_differ(demo, tmp_path):
    for name in ("index.html", "report.md"):
        text = re.sub(r"<[^>]+>", " ", (demo[1] / name).read_text())
        assert re.search(r"image\W+all\W+50 %\W+512 of 512\W+6\.19\W+–\W+5\.13", text)
    other = write_demo(tmp_path / "demo")
    path = next(other.glob("image-off-*/seed0")) / "data.json"
    path.write_text(json.dumps({"image": {"unigram": 3.21, "floor": 2.5}}))
    rows = {row["arms"]: row for row in data_rows(load_study(other)) if row["modality"] == "image"}
    assert rows["“image loss off, no QK-Norm”"]["unigram"] == "3.21" and len(rows) == 2
    assert rows["“image loss off, no QK-Norm”"]["floor"] == "2.50"
    # No run of this arm trains the image modality, so the arm has no best image loss. In the other row, the best loss
    # is the lowest of all its runs.
    assert rows["“image loss off, no QK-Norm”"]["best"] == "–"
    others = next(row for arms, row in rows.items() if arms != "“image loss off, no QK-Norm”")
    assert 4.4 < float(others["best"]) < 4.6


def test_markdown_shows_every_figure(demo):
    images = re.findall(r"\]\((figures/[\w-]+\.png)\)", (demo[1] / "report.md").read_text())
    assert [Path(i).stem for i in images] == list(FIGURES)
    assert all((demo[1] / image).exists() for image in images)


def test_plotted_numbers_are_those_of_the_runs(demo):
    runs, report = demo
    rows = list(csv.DictReader(io.StringIO((report / "figures" / "hero.csv").read_text())))
    logits = {
        (row["arm"], row["seed"]): float(row["value"])
        for row in rows
        if row["statistic"] == "attn_logit_absmax/text" and row["step"] == "200"
    }
    for seed in (0, 1, 2):
        lines = (runs / "mixed-0000000000" / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        expected = max(v for k, v in last.items() if k.startswith("attn_logit_absmax/text-"))
        assert logits["mixed", str(seed)] == pytest.approx(expected, rel=1e-5)
    assert logits["mixed", "median"] == pytest.approx(60.0, rel=1e-5)
    assert {row["arm"] for row in rows} == {"mixed", "mixed-qk", "image-off"}
    assert {row["arm"] for row in rows if row["statistic"] == "attn_logit_bound"} == {"mixed-qk"}


def test_binned_is_the_mean_of_its_steps():
    steps, values = np.arange(1, 8), np.array([1.0, 2, 3, 4, 5, np.nan, 8])
    at, means = binned((steps, values), 3)
    assert at.tolist() == [2, 4.5, 7]
    assert means.tolist() == [2, 4.5, 8]


def test_color_is_arm_on_every_figure(demo):
    study = load_study(demo[0])
    colors = arm_colors(study)
    assert len(set(colors.values())) == len(DEMO)
    figure = hero(study)
    assert {line.arm for panel in figure.panels for line in panel.lines} == set(study.hero)


def test_of_many_arms_those_of_the_figures_have_a_color_of_their_own(demo):
    one = load_study(demo[0])
    arms = {f"arm{i:02d}": StudyArm(f"arm{i:02d}", f"arm {i}", family=f"arm{i:02d}") for i in range(25)}
    study = replace(one, arms=arms, claims=(), report={"hero": ["arm03"], "outcomes": ["arm23", "arm24"]})
    colors = arm_colors(study)
    assert len(set(colors.values()) - {GRAY}) == 21 and list(colors.values()).count(GRAY) == 4
    assert colors["arm23"] != GRAY != colors["arm24"]
    # The control: without these figures the last arms are gray.
    assert arm_colors(replace(study, report={}))["arm24"] == GRAY


def test_diverged_lines_are_marked(demo):
    text = (demo[1] / "index.html").read_text()
    assert "× marks where a run was stopped as diverged." in text
    assert "Image loss 7.41 was more than 0.1 nat above its initial 6.30 for 50 steps." in text


def test_sentences_follow_the_verdicts(tmp_path):
    for name, logit, ratio, tail in (
        ("weaker", 45.0, "1.33", ", weaker than the smallest effect of interest, a factor of 1.99"),
        ("opposite", 120.0, "0.500", ", in the opposite direction"),
    ):
        study = load_study(write_demo(tmp_path / name, {"mixed-qk": Planted(logit)}))
        title = headline(study, judge(study))
        assert f"{ratio} times as high" in title and title.endswith(tail)
    study = load_study(write_demo(tmp_path / "b", leave_out=("mixed-qk",)))
    assert "Claim C2 was not tested" in headline(study, judge(study))


@pytest.mark.parametrize("unrun", [3, 4])
def test_many_claims_that_are_not_run_share_a_sentence(unrun, tmp_path, without_figures):
    arms = {"a": 20.0, "b": 10.0}
    runs = [({"arm": arm, "seed": s}, Planted(logit), {}) for arm, logit in arms.items() for s in range(3)]
    alike = {"min_effect": 0.2, "status": "exploratory", "unchecked": {"declared": "planted numbers"}}
    claims = [{"id": "done", "treatment": "a", "control": "b", **alike}]
    claims += [{"id": f"U{i}", "treatment": "a", "control": f"c{i}", **alike} for i in range(unrun)]
    grid = {"arms": {name: {} for name in [*arms, *(f"c{i}" for i in range(unrun))]}, "claims": claims}
    write_report(write_grid(tmp_path / "runs", grid, runs), tmp_path / "page")
    html, plain = ((tmp_path / "page" / name).read_text(encoding="utf-8") for name in ("index.html", "report.md"))
    sentence = f"{unrun} of {unrun + 1} claims were not run: U0, U1, U2"
    assert (sentence in html, sentence in plain) == (unrun == 4,) * 2
    assert html.count('<article class="card"') == (1 if unrun == 4 else 4)
    assert all(f'id="claim-U{i}"' in html.replace("claim-u", "claim-U") for i in range(unrun))


@pytest.mark.parametrize("count", [6, 7])
def test_more_than_six_claims_are_rows_of_a_list(count, tmp_path, without_figures):
    runs = [({"arm": arm, "seed": 0}, Planted(logit), {}) for arm, logit in (("a", 20.0), ("b", 10.0))]
    alike = {"treatment": "a", "control": "b", "min_effect": 0.2, "unchecked": {"declared": "planted numbers"}}
    claims = [{"id": f"N{i}", "status": "exploratory", **alike} for i in range(count)]
    grid = {"arms": {"a": {}, "b": {}}, "claims": claims, "report": {"question": "Which hold?"}}
    write_report(write_grid(tmp_path / "runs", grid, runs), tmp_path / "page")
    html, plain = ((tmp_path / "page" / name).read_text(encoding="utf-8") for name in ("index.html", "report.md"))
    cards, rows = (html.count(f'<article class="{name}"') for name in ("card", "row"))
    assert (cards, rows) == ((6, 0) if count == 6 else (0, 7))
    assert plain.startswith("# Which hold?\n") == (count == 7)
    assert html.count('<svg class="bar"') == count
    row = "N6, exploratory: [^<;]+; not checked: “arms differ only as declared” [(]planted numbers[)]</span>"
    assert len(re.findall(row, html)) == (count == 7)
    assert "7 claims: 7 inconclusive." in plain or count == 6
    if count == 7:  # the claim of the title, the count, then the other claims
        order = ('id="verdict-N0"', "7 claims:", 'id="all-claims"', 'id="verdict-N1"')
        places = [html.index(mark) for mark in order]
        assert places == sorted(places)


def test_the_grid_may_word_a_finding(tmp_path):
    def change(grid):
        grid["claims"][2]["finding"] = {"contradicted": "Image loss: ×{ratio} ({low} to {high}), {seeds}."}
        grid["report"]["headline"] = ["C10", "C2"]

    study = load_study(write_demo(tmp_path / "demo", change=change))
    title = headline(study, judge(study))
    assert title.startswith(
        "Image loss: ×1.09 (0.858 to 1.39), 3 seeds. The largest attention logit ended 7.06"
    )
    assert lead(study, judge(study))[1] == []


def test_a_loss_is_worded_as_a_difference(tmp_path):
    def change(grid):
        grid["claims"][2].update(metric="final_loss/text", min_effect=0.05)

    study = load_study(write_demo(tmp_path / "demo", change=change))
    (verdict,) = [v for v in judge(study) if v.claim.id == "C10"]
    assert "0.10 nats higher in “mixed, no QK-Norm” than in" in finding(study, verdict)


def test_what_cannot_be_told_is_generated(tmp_path):
    study = load_study(write_demo(tmp_path / "demo", leave_out=("image-off",)))
    items = cannot_tell(study, judge(study))
    assert items[0] == "Anything about size: these are toy models on icon art."
    assert any("Effects weaker than a factor of" in item for item in items)
    assert any("3 runs of the grid have not started" in item for item in items)
    assert any("C13: shown without a verdict" in item for item in items)
    assert any("ran at 0.01" in item for item in items)


@pytest.mark.parametrize("what", ["one", "several", "bare", "nan"])
def test_runs_without_a_grid_get_a_plain_page(tmp_path, hero_file_alone, what):
    runs = tmp_path / "runs"
    if what == "bare":
        (runs / "x").mkdir(parents=True)
        (runs / "x" / "metrics.jsonl").write_text('{"step": 1, "loss/text": 3.0}\n{"step": 2, "lo')
    else:
        for number in range(10 if what == "several" else 1):
            nan = 100 if what == "nan" else None
            write_run(runs / f"arm{number}" / "seed0", Planted(10.0 + number, nan_from=nan))
    write_report(runs, tmp_path / "report")
    page = Checker()
    page.feed((tmp_path / "report" / "index.html").read_text())
    assert "verdicts" not in page.ids and "Each claim in detail" not in page.headings and "runs" in page.ids
    assert json.loads((tmp_path / "report" / "verdicts.json").read_text()) == []
    assert "fig-hero" in page.ids and (tmp_path / "report" / "figures" / "hero.png").exists()


def test_two_other_modalities_and_arms_get_the_same_page(tmp_path, hero_file_alone):
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
    _, found = write_report(folder, tmp_path / "report")
    assert {v.claim.id: v.verdict for v in found} == {
        "C2": "reproduced",
        "C10": "contradicted",
        "C13": "inconclusive",
    }
    assert "Audio queries" in (tmp_path / "report" / "index.html").read_text()


def test_words():
    assert [number(v) for v in (42123.4, 999.6, 9.996, 0.04567, 250, 1.5e-7, 0)] == [
        "42,100", "1,000", "10.0", "0.0457", "250", "1.50e-07", "0",
    ]  # fmt: skip
    assert number(2.5e14) == "250,000,000,000,000" and number(2.5e15) == "2.50e+15"
    assert number(float("inf")) == "∞" and number(float("nan")) == "not measured"
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert duration(42.4) == "42 s" and duration(185) == "3 min 05 s" and duration(7199.4) == "119 min 59 s"
    assert duration(7200) == "2 h 00 min" and duration(10_790) == "3 h 00 min" and duration(61_450) == "17 h 04 min"


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


def front_door(*args, cwd=None):
    """Run `mmqk.report` in a process that cannot import torch."""
    source = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FRONT_DOOR, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def test_figures_of_an_earlier_report_are_removed_and_files_of_others_are_kept(tmp_path):
    out, alone, before = tmp_path / "out", tmp_path / "alone", tmp_path / "before"
    write_report(write_demo(tmp_path / "demo"), before)
    shutil.copytree(before, out)
    (out / "figures/mine.png").write_bytes(b"mine")
    folder = write_demo(tmp_path / "one", change=lambda grid: grid["claims"].pop(2))
    write_report(folder, out)
    write_report(folder, alone)
    assert set(files_of(out)) == {*files_of(alone), "figures/mine.png"} < {*files_of(before), "figures/mine.png"}


def test_front_door_reports_the_same_bytes_again_without_torch(demo, tmp_path):
    done = front_door(demo[0], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "reports/demo/index.html"
    assert "C2: reproduced" in done.stdout
    assert files_of(tmp_path / "reports" / "demo") == files_of(demo[1])


def test_front_door_names_mistakes_in_one_sentence(demo, tmp_path):
    done = front_door(tmp_path / "nowhere", "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nowhere is not a folder" in done.stderr
    (tmp_path / "file").write_text("kept")
    done = front_door(demo[0], "--out", tmp_path / "file")
    assert done.returncode == 2 and "cannot be written" in done.stderr
    assert (tmp_path / "file").read_text() == "kept"


def test_help_says_what_is_written():
    done = front_door("--help")
    assert done.returncode == 0
    for word in ("--out", "verdicts.json", "examples:"):
        assert word in done.stdout


def rewrite(runs: Path, arm: str, seed: int, change) -> None:
    """Apply ``change(line)`` to every line of a run's metrics."""
    (path,) = runs.glob(f"{arm}-??????????/seed{seed}/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def logits(runs: Path, seed: int, step: int, layer: int) -> list[float]:
    """Return the largest logits of text queries of the arm `mixed`, read from the metrics file."""
    (path,) = runs.glob(f"mixed-??????????/seed{seed}/metrics.jsonl")
    line = json.loads(path.read_text().splitlines()[step])
    names = [f"attn_logit_absmax/text-{key}/layer{layer:02d}" for key in ("text", "image")]
    return [float(line[name]) for name in names if name in line]


def test_layers_join_pairs_by_step_when_probes_lack_one(tmp_path):
    runs = write_demo(tmp_path / "demo")

    def change(line):
        # text-text lacks steps 0 to 60, text-image lacks 80 and 100, and no series has step 80. So the series differ
        # in length and steps.
        for name in [name for name in line if name.startswith("attn_logit_absmax/text-")]:
            key, step = name.split("/")[1], line["step"]
            if (key == "text-text" and step <= 60) or (key == "text-image" and step in (80, 100)):
                del line[name]
            elif name.endswith("text-image/layer02") and step == 120:
                line[name] = "nan"
        if line["step"] == 80:
            for name in [name for name in line if name.startswith("attn_logit_absmax/text-")]:
                del line[name]

    for seed in (0, 1):
        rewrite(runs, "mixed", seed, change)
    found = layer_map(load_study(runs), "mixed", "attn_logit_absmax", "text")
    assert found is not None
    layers, steps, values = found
    assert layers == (0, 1, 2, 3) and values.shape == (4, 10)
    assert steps.tolist() == [s for s in range(0, 201, 20) if s != 80]
    for layer in range(4):
        for step, value in zip(steps.astype(int), values[layer], strict=True):
            worst = [
                np.inf if np.isnan(found).any() else max(found)
                for found in (logits(runs, seed, step, layer) for seed in range(3))
            ]
            assert value == pytest.approx(float(np.median(worst)), rel=1e-12)
    assert np.isinf(values).sum() == 1 and np.isinf(values[2, 5])  # NaN in two of three seeds, at step 120
    (figure,) = (figure for figure in figures(load_study(runs)) if figure.name == "layers")
    rows = csv.DictReader(io.StringIO(figure.csv()))
    assert {r["step"] for r in rows if (r["arm"], r["modality"]) == ("mixed", "text")} <= set(
        map(str, steps.astype(int))
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_layers_keep_their_numbers_if_not_all_have_attention(tmp_path, seeds):
    for seed in range(seeds):
        logits = {layer: {step: v + step for step in (0, 50, 100)} for layer, v in ((3, 10.0), (7, 300.0))}
        series = {f"attn_logit_absmax/text-text/layer{layer:02d}": values for layer, values in logits.items()}
        small_run(tmp_path / f"hybrid/seed{seed}", {"loss/text": {100: 3.0}, **series}, seed=seed)
    study = load_study(tmp_path)
    assert layer_map(study, "hybrid", "attn_logit_absmax", "text")[0] == (3, 7)
    figure = heat_map(study)
    of = "the largest attention logit" if seeds == 1 else "the median over seeds of the largest attention logit"
    assert figure.reading == f"At the last probe {of} was highest in layer 7 of “hybrid” (400)."
    assert ("median over seeds" in figure.caption) == (seeds == 2)
    assert [row["layer"] for row in csv.DictReader(io.StringIO(figure.csv()))] == ["3"] * 3 + ["7"] * 3
    ((panel,),) = json.loads(chart_data(study, Brush.of(study), figure))["rows"]
    assert [(line["name"], line["layer"]) for line in panel["lines"]] == [("layer 3", 3), ("layer 7", 7)]


def test_layers_take_the_median_of_the_seeds_that_have_one(tmp_path):
    runs = write_demo(tmp_path / "demo")

    def change(line):
        for name in [name for name in line if re.fullmatch(r"attn_logit_absmax/text-.*/layer03", name)]:
            del line[name]

    rewrite(runs, "mixed", 0, change)
    values = layer_map(load_study(runs), "mixed", "attn_logit_absmax", "text")[2]
    assert values.shape == (4, 11)
    expected = np.median([max(logits(runs, seed, 200, 3)) for seed in (1, 2)])
    assert values[3, -1] == pytest.approx(expected)
    for seed in (1, 2):
        rewrite(runs, "mixed", seed, lambda line: line["step"] == 200 and change(line))
    values = layer_map(load_study(runs), "mixed", "attn_logit_absmax", "text")[2]
    assert np.isnan(values[3, -1]) and np.isfinite(values).sum() == 43
    # Seeds that share no step have no map.
    for seed, half in ((0, 0), (1, 20)):
        rewrite(runs, "mixed", seed, lambda line, half=half: line["step"] % 40 == half and _forget(line))
    assert layer_map(load_study(runs), "mixed", "attn_logit_absmax", "text") is None
    assert layer_map(load_study(runs), "mixed", "attn_logit_absmax", "audio") is None
    # The figure of layers still shows the other arms.
    assert "layers" in {figure.name for figure in figures(load_study(runs))}


def _forget(line: dict) -> None:
    for name in [name for name in line if name.startswith("attn_logit_absmax/text-")]:
        del line[name]


def test_alarms_of_a_run_stand_beside_it(tmp_path, without_figures):
    loud, quiet = (write_run(tmp_path / "runs" / name / "seed0", DEMO["mixed"]) for name in ("loud", "quiet"))
    alarms = [("growth", 120), ("spike_median", 90), ("growth", 140)]
    lines = [
        json.dumps(
            {"name": name, "step": step, "tag": "loss", "value": 1.0, "threshold": 0.5, "sentence": "so"}
        )
        for name, step in alarms
    ]
    (loud / "alarms.jsonl").write_text("\n".join(lines) + "\n")
    write_report(tmp_path / "runs", tmp_path / "report")
    page = (tmp_path / "report/report.md").read_text()
    assert page.count("Alarms: growth 2, spike median 1; the first at step 90.") == 1
    assert quiet.exists() and page.count("Alarms:") == 1


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
    write_report(run, tmp_path / "report")
    page = (tmp_path / "report/report.md").read_text()
    assert "largest attention logit ended at" in page and "figures/hero.png" in page
    assert "nats (1 run)" not in page and "not trained" not in page
    study = load_study(run)
    assert arm_rows(study, arm_colors(study)) == []
    assert "run.json" not in page and "mean of" not in page and "Results by arm" not in page
    assert "Text loss" not in (tmp_path / "report/index.html").read_text() and "text loss" not in page
