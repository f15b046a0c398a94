"""Run folders are found at several depths, and damaged ones are loaded."""

import json
import math

import numpy as np
import pytest

from mmqk.lab.runs import read_runs
from mmqk.store import write_json
from tests.lab.fake_runs import DEMO, Planted, write_demo, write_run


def test_ablation_lists_its_runs_in_order(tmp_path):
    runs = read_runs(write_demo(tmp_path / "demo"))
    assert [(run.arm, run.seed) for run in runs] == [
        *((arm, seed) for arm in ("mixed", "mixed-qk", "image-off") for seed in (0, 1, 2)),
        *((arm, 0) for arm in DEMO if arm.startswith("high")),
    ]
    assert runs[0].setting("optim.lr") == 0.01
    assert runs[-1].setting("optim.lr") == 0.1
    assert runs[0].setting("optim.nothing", "absent") == "absent"


@pytest.mark.parametrize("asked", [".", "mixed-0123456789", "mixed-0123456789/seed1"])
def test_runs_are_found_without_an_ablation(tmp_path, asked):
    write_run(tmp_path / "mixed-0123456789" / "seed1", Planted(50.0), 1)
    (run,) = read_runs(tmp_path / asked)
    assert (run.arm, run.seed) == ("mixed", 1)


def test_combined_reduces_over_layers_and_keys_and_ranks_nan_worst(tmp_path):
    path = write_run(tmp_path / "x", Planted(50.0, spread=0))
    (run,) = read_runs(tmp_path)
    assert run.combined("attn_logit_absmax", np.max)[1][-1] == pytest.approx(50.0)
    assert run.combined("attn_logit_absmax", np.max, "image")[1][-1] == pytest.approx(0.8 * 50.0)
    assert len(run.combined("attn_logit_absmax", np.max, "audio")[0]) == 0
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 220, "attn_logit_absmax/text-text/layer00": "nan", ')
        file.write('"attn_logit_absmax/text-text/layer01": 3.0}\n')
    (run,) = read_runs(tmp_path)
    assert run.combined("attn_logit_absmax", np.max)[1][-1] == math.inf


def test_columns_are_those_of_reading_line_by_line(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "x"
    path.mkdir()
    tags = [f"t{i}" for i in range(9)]
    expected: dict[str, dict[int, float]] = {}
    text = []
    # The lines have changing keys, repeated and unordered steps, and values that are not numbers.
    for step in rng.integers(0, 60, 200).tolist():
        line = {}
        for tag in rng.permutation(tags)[: rng.integers(1, 9)].tolist():
            what = rng.integers(0, 12)
            line[tag] = {0: "nan", 1: "inf", 2: "-inf", 3: None, 4: "words", 5: [1.0]}.get(what, float(rng.normal()))
            if what not in (3, 4, 5):
                expected.setdefault(tag, {})[step] = float(line[tag])
        text.append(json.dumps({"step": step} | line))
    (path / "metrics.jsonl").write_text("\n".join(text) + "\n")
    for notes in ((), ("a line of metrics.jsonl cannot be read",)):
        (run,) = read_runs(tmp_path)
        assert set(run.tags) == set(expected) and run.last_step == max(max(by) for by in expected.values())
        for tag, by_step in expected.items():
            steps, values = run.series(tag)
            assert steps.tolist() == sorted(by_step)
            np.testing.assert_array_equal(values, [by_step[step] for step in sorted(by_step)])
        assert run.notes == notes
        with open(path / "metrics.jsonl", "a") as file:
            file.write('{"step": 61, "t0": 3.')


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\n", b"[1]\n", b'{"loss": 3}\n', b'{"step": "1"}\n'])
def test_files_without_a_line_of_numbers_are_noted(tmp_path, content):
    path = tmp_path / "x"
    path.mkdir()
    (path / "metrics.jsonl").write_bytes(content)
    (run,) = read_runs(tmp_path)
    assert run.tags == {} and run.last_step == 0
    assert any("metrics.jsonl" in note for note in run.notes) == bool(content)


def test_metrics_and_a_grid_that_are_gone_are_noted(tmp_path):
    folder = write_demo(tmp_path / "demo")
    first = read_runs(folder)[0]
    write_json(first.path / "status.json", {"status": "interrupted", "step": 8, "reason": "", "seconds": 1.0})
    noted = ("metrics.jsonl is missing", "no ablation.json")
    for missing, expected in ((None, [False, False]), ("metrics.jsonl", [True, False])):
        if missing:
            (first.path / missing).unlink()
        (run,) = read_runs(first.path)
        assert [any(text in note for note in run.notes) for text in noted] == expected
    (folder / "ablation.json").unlink()
    notes = [" ".join(run.notes) for run in read_runs(folder)]
    assert all("no ablation.json" in note for note in notes) and sum("metrics.jsonl" in n for n in notes) == 1


def test_a_fork_without_an_ablation_says_its_parent_itself(tmp_path):
    path = write_run(tmp_path / "x", Planted(50.0))
    (path / "fork.json").write_text('{"parent": {"id": "0123456789", "folder": "../y", "step": 40}}')
    assert read_runs(tmp_path)[0].fork == {"parent": "../y", "step": 40}
    (path / "fork.json").write_text('{"parent": {"id": "01234')
    assert read_runs(tmp_path)[0].fork is None


def test_half_written_run_is_kept_with_a_note(tmp_path):
    path = write_run(tmp_path / "x", Planted(50.0, status="running"))
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 201, "loss": 3.')
    (run,) = read_runs(tmp_path)
    assert run.last_step == 200
    assert len(run.notes) == 2 and "cut off" in run.notes[0] and "metrics.jsonl" in run.notes[1]
    (path / "run.json").unlink()
    (path / "status.json").write_text("{")
    (run,) = read_runs(tmp_path)
    assert not run.status.finished and len(run.notes) == 3 and len(run.series("loss/text")[0]) == 200
    # The control: a complete run has no notes.
    assert read_runs(write_run(tmp_path / "whole" / "y", Planted(50.0)))[0].notes == ()
