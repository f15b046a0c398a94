"""One page for any set of runs: several folders, hundreds of runs, forks and replays."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmqk.lab import judge, load_study
from mmqk.lab.page.figures.curves import ALL_POINTS, FEWEST, points_a_line, thinned
from mmqk.lab.page.figures.fork_tree import fork_figure, fork_tree
from mmqk.lab.page.figures.papers import paper_figures
from mmqk.lab.page.findings import headline
from mmqk.lab.page.page import write_report
from mmqk.lab.verdicts.combined import read
from mmqk.report import default_name
from tests.analysis.fake_runs import write_demo
from tests.report.report_runs import write, write_forks, write_replays, write_sweep


@pytest.fixture(scope="module")
def report(folders, tmp_path_factory, module_without_figures):
    """Write the page of the demonstration; return (study, page)."""
    out = tmp_path_factory.mktemp("report")
    study, _ = write_report(folders[0], out)
    return study, (out / "index.html").read_text()


def records(verdicts):
    return [{k: v for k, v in verdict.as_record().items() if k != "runs"} for verdict in verdicts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write a demonstration, a second demonstration with the same arm names, and a sweep."""
    root = tmp_path_factory.mktemp("together")
    return write_demo(root / "a"), write_demo(root / "b"), write_sweep(root / "s", seeds=(0, 1))


def test_each_folder_is_judged_for_itself(folders):
    alone = [judge(load_study(folder)) for folder in folders]
    found = read(folders)
    for verdict, was in zip(found.verdicts, [v for part in alone for v in part], strict=True):
        expected = was.as_record()
        got = verdict.as_record()
        assert got["claim"] in (expected["claim"], f"demo-2:{expected['claim']}")
        for key in ("verdict", "effect", "interval", "p", "note"):
            assert got[key] == expected[key]
        assert len(got["runs"]) == len(expected["runs"])
        assert {name.split("/", 1)[1] for name in got["runs"]} == set(expected["runs"])
    assert len({v.claim.id for v in found.verdicts}) == len(found.verdicts)


def test_arms_of_one_name_stay_apart(folders):
    study = read(folders[:2]).study
    assert {"mixed", "demo-2/mixed"} <= set(study.arms) and len(study.arms) == 14
    first, second = study.of_arm("mixed"), study.of_arm("demo-2/mixed")
    assert [r.seed for r in first] == [r.seed for r in second] == [0, 1, 2]
    assert {r.path.parents[1].name for r in first} == {"a"} and {r.path.parents[1].name for r in second} == {
        "b"
    }
    assert study.label("demo-2/mixed") == "mixed, no QK-Norm (Norm competition in minutes)"


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
    joined = read([tmp_path / "named", folders[2]]).study
    assert joined.hero == ("mixed",) and joined.shown == ("high-pre",)
    assert paper_figures(joined)[0].arms == ("mixed",)
    assert joined.report["commands"][0] == "make demo"


def test_a_run_given_twice_counts_once(folders):
    demo = folders[0]
    arm = next(demo.glob("mixed-0*"))
    found = read([demo, arm, arm / "seed1", demo])
    assert len(found.study.runs) == len(load_study(demo).runs)
    assert records(found.verdicts) == records(judge(load_study(demo)))


@pytest.mark.slow
def test_a_joint_page_holds_everything_and_is_the_same_twice(folders, tmp_path):
    forks, replays = write_forks(tmp_path / "runs" / "forks"), write_replays(tmp_path / "runs" / "replays")
    together = [folders[0], forks, replays]
    for out in ("one", "two"):
        write_report(together, tmp_path / out)
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / out).rglob("*") if p.is_file()} for out in ("one", "two")
    )
    assert one == two
    page = one["index.html"].decode()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for href in re.findall(r'href="#([^"]+)"', page):
        assert href in ids
    for run in read(together).study.runs:
        assert f"<code>{run.name}</code>" in page
    assert "Forks" in page and "Replays" in page


def test_names_of_reports():
    assert default_name([Path("runs/a")]) == "a" and default_name([Path("x/a"), Path("y/b")]) == "a-b"
    assert default_name([Path(str(n)) for n in range(9)]) == "0-and-8-others"


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


def test_forks_of_two_folders_stay_below_their_own_parents(tmp_path):
    """All names and ids of the second folder are those of the first."""
    alone = fork_tree(load_study(write_forks(tmp_path / "a" / "forks")))
    joined = fork_tree(read([tmp_path / "a" / "forks", write_forks(tmp_path / "b" / "forks")]).study)
    for folder, name in (("a", "forks"), ("b", "forks-2")):
        nodes = [node for node in joined if node.run and tmp_path / folder in node.run.path.parents]
        found = [(n.name, n.depth, joined[n.parent].name) for n in nodes if n.parent >= 0]
        expected = [(n.name, n.depth, alone[n.parent].name) for n in alone if n.parent >= 0]
        assert found == [
            (f"{name}/{fork}", depth, parent if parent.isdigit() else f"{name}/{parent}")
            for fork, depth, parent in expected
        ]


def test_a_fork_is_found_below_a_parent_in_another_folder(tmp_path):
    forks = write_forks(tmp_path / "forks")
    (tmp_path / "parents").mkdir()
    (forks / "plain").rename(tmp_path / "parents" / "plain")
    nodes = fork_tree(read([forks, tmp_path / "parents"]).study)
    below = [node.name for node in nodes if node.parent >= 0 and nodes[node.parent].name == "parents/plain"]
    assert below == ["forks/cold", "forks/late"]


def test_runs_without_forks_have_no_tree(folders):
    study = load_study(folders[0])
    assert fork_tree(study) == [] and fork_figure(study, []) is None


@pytest.mark.parametrize(("fp32", "label"), [("diverged", "dynamics"), ("completed", "numerics")])
def test_replays_have_their_label(tmp_path, without_figures, fp32, label):
    write_report(write_replays(tmp_path / "hot", fp32=fp32), tmp_path / "report")
    page = (tmp_path / "report" / "report.md").read_text()
    assert f"**too hot, seed 1: {label}.**" in page
    assert "| 20 % | 64 | bf16-fused | 81, 82, 83 | 0 of 3 | 112 |" in page
    assert page.count("Replay of hot-ffffffffff/seed1 in") == 18 and "Control replay of" in page
    assert fork_tree(load_study(tmp_path / "hot")) == []


@pytest.mark.parametrize(("fp32", "label"), [("diverged", "dynamics"), ("completed", "numerics")])
def test_replays_beside_another_folder_keep_their_label(folders, tmp_path, fp32, label):
    replays, forks = write_replays(tmp_path / "hot", fp32=fp32), write_forks(tmp_path / "forks")
    alone, joined = read([replays]), read([forks, replays])
    (one,), (two,) = alone.replays, joined.replays
    assert (one.label, one.sentence) == (two.label, two.sentence) and one.label == label
    assert (two.of, two.rows[0].runs[0]) == (f"hot/{one.of}", f"hot/{one.rows[0].runs[0]}")
    assert f"{label} according to its replays" in headline(joined.study, joined.verdicts)


def test_pages_without_replays_say_nothing_of_them(report):
    page = report[1]
    assert "Replays" not in page and "Forks" not in page


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
