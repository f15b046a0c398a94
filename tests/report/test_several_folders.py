"""One page for any set of runs: hundreds of runs, forks."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from mmqk.lab import load_study
from mmqk.lab.page.figures.curves import ALL_POINTS, FEWEST, points_a_line, thinned
from mmqk.lab.page.figures.fork_tree import fork_figure, fork_tree
from mmqk.lab.page.figures.papers import paper_figures
from mmqk.lab.page.page import write_report
from tests.analysis.fake_runs import write_demo
from tests.report.report_runs import write, write_forks


@pytest.fixture(scope="module")
def report(folders, tmp_path_factory, module_without_figures):
    """Write the page of the demonstration; return (study, page)."""
    out = tmp_path_factory.mktemp("report")
    study, _ = write_report(folders[0], out)
    return study, (out / "index.html").read_text()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write a demonstration."""
    return (write_demo(tmp_path_factory.mktemp("together") / "a"),)


def test_a_string_in_the_report_is_one_name(folders, tmp_path):
    report = {
        "hero": "mixed", "shown": "high-pre", "headline": "C1", "cannot_tell": "Anything.", "command": "make demo",
        "figures": [{"kind": "training_loss", "arms": "mixed"}],
    }  # fmt: skip

    def as_lists(of_names):
        lists = {key: [value] for key, value in of_names.items() if isinstance(value, str)}
        return lists | {"figures": [of_names["figures"][0] | {"arms": [of_names["figures"][0]["arms"]]}]}

    def change(grid):
        grid["report"] = report

    study = load_study(write_demo(tmp_path / "named", change=change))
    listed = replace(study, report=as_lists(report))
    assert study.hero == listed.hero == ("mixed",) and study.shown == listed.shown == ("high-pre",)
    figure = paper_figures(study)[0]
    assert figure.arms == paper_figures(listed)[0].arms == ("mixed",)


def test_thinning_keeps_spikes_and_ends():
    rng = np.random.default_rng(0)
    steps, values = np.arange(5000), rng.normal(size=5000)
    values[1234], values[4321] = 50.0, -50.0
    at, kept = thinned((steps, values), 60)
    assert len(at) <= 60 and at[0] == 0 and at[-1] == 4999 and (np.diff(at) > 0).all()
    assert {1234, 4321} <= set(at.tolist()) and (kept == values[at]).all()
    same = thinned((steps[:50], values[:50]), 60)
    assert (same[1] == values[:50]).all()
    # The negative control: taking every 100th value loses the spike.
    assert 50.0 not in values[::100]
    assert points_a_line(1) == points_a_line(100) == 120 and points_a_line(10_000) == FEWEST
    assert points_a_line(300) * 300 <= ALL_POINTS


@pytest.mark.slow
def test_hundreds_of_runs_fit_in_five_megabytes(tmp_path):
    for number in range(200):
        write(
            tmp_path / "runs" / f"arm{number:03d}",
            seed=number,
            logit=5.0 + number,
            settings={"optim.lr": 0.001 * (1 + number)},
            every=4,
            end=40,
        )
    (tmp_path / "runs" / "arm000" / "status.json").unlink()
    (tmp_path / "runs" / "arm001" / "metrics.jsonl").write_text('{"step": 1, "loss/te')
    write_report(tmp_path / "runs", tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert len(page.encode()) < 5_000_000
    assert sum(p.stat().st_size for p in (tmp_path / "report").rglob("*") if p.is_file()) < 8_000_000
    assert all(f"<code>arm{number:03d}</code>" in page for number in range(200))
    # Every run with numbers is in the CSV of the figure.
    csv = (tmp_path / "report" / "figures" / "hero.csv").read_text().splitlines()
    assert {line.rsplit(",", 1)[1] for line in csv[1:]} == {f"arm{n:03d}" for n in range(200)} - {"arm001"}
    assert "status.json is missing" in page.lower()
    assert "200 runs: 199 completed, 1 failed" in page


def test_forks_are_a_tree(tmp_path):
    study = load_study(write_forks(tmp_path / "forks"))
    nodes = fork_tree(study)
    found = [(n.name, n.depth, nodes[n.parent].name if n.parent >= 0 else "", n.step) for n in nodes]
    assert found == [
        ("plain", 0, "", 0),
        ("cold", 1, "plain", 40),
        ("hot", 2, "cold", 70),
        ("late", 1, "plain", 40),
        ("0123456789", 0, "", 0),
        ("lost", 1, "0123456789", 10),
    ]
    by_name = {n.name: n for n in nodes}
    assert by_name["hot"].changed == "optim.lr 0.003 → 0.1" and by_name["hot"].end == 90
    assert "2 parameters added; the outputs changed by 0.0130" in by_name["late"].remarks
    assert by_name["lost"].changed == "nothing changed" and by_name["0123456789"].run is None
    figure = fork_figure(study, nodes)
    assert figure.reading == "4 forks; 1 of them diverged."
    ends = [line for line in figure.panels[0].lines if line.role == "median" and line.run == "hot"]
    assert ends[0].steps.tolist() == [70, 90] and ends[0].diverged


def test_runs_without_forks_have_no_tree(folders):
    study = load_study(folders[0])
    assert fork_tree(study) == [] and fork_figure(study, []) is None


def test_every_value_of_a_claim_links_to_its_run(report):
    study, page = report
    table = page[page.index('id="values-C2"') :]
    table = table[: table.index("</table>")]
    links = dict(re.findall(r'href="#(run-[^"]+)">([^<]+)</a>', table))
    assert len(links) == 6
    for run in study.of_arm("mixed"):
        last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
        largest = max(v for k, v in last.items() if k.startswith("attn_logit_absmax"))
        assert float(links["run-" + run.name.replace("/", "-")]) == pytest.approx(largest, rel=5e-3)
