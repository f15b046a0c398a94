"""The sentence about trained targets is computed from counts, and printed only if the counts of the arms differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmqk.lab import judge, load_study
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import trained_targets
from tests.lab.fake_runs import C2, C10, C13, Planted, write_grid

PLAIN, QK = {"model.qk_norm.kind": "none"}, {"model.qk_norm.kind": "rms"}
OFF = {"loss.weights.image": 0.0}
ARMS = {"mixed": PLAIN, "mixed-qk": QK, "image-off": {**PLAIN, **OFF}, "image-off-matched": {**PLAIN, **OFF}}
LABELS = {
    "mixed": "mixed",
    "mixed-qk": "with QK-Norm",
    "image-off": "image off",
    "image-off-matched": "matched",
}
BATCH = {"image-off-matched": 15}
TARGETS = {"text": 55.0, "image": 48.0}


def study_of(folder: Path, batch: dict[str, int], targets: dict[str, float]) -> Study:
    """Return a study in which each arm has three seeds, with slightly different numbers of text targets."""
    off = {**C10, "positive_control": ""}
    claims = [{**C2, "positive_control": ""}, {**off, "control": "image-off-matched"}, {**off, "id": "C10b"}]
    claims.append({**C13, "arms": ["mixed", "mixed-qk", "image-off"]})
    arms = {arm: {"label": LABELS[arm], "set": settings} for arm, settings in ARMS.items()}
    runs = [
        ({"arm": arm, "seed": seed}, Planted(60.0), settings) for arm, settings in ARMS.items() for seed in (0, 1, 2)
    ]
    write_grid(folder, {"arms": arms, "seeds": [0, 1, 2], "claims": claims}, runs)
    for entry in json.loads((folder / "ablation.json").read_text())["runs"]:
        run = folder / entry["folder"]
        record = json.loads((run / "run.json").read_text())
        record["details"]["config"]["data"] = {"batch_size": batch.get(entry["arm"], 8)}
        (run / "run.json").write_text(json.dumps(record))
        data = json.loads((run / "data.json").read_text())
        for name, count in targets.items():
            data[name]["targets"] = count + 0.1 * (entry["seed"] - 1) * (name == "text")
        (run / "data.json").write_text(json.dumps(data))
    return load_study(folder)


def said(study: Study) -> dict[str, str]:
    """Return the sentence about trained targets by claim."""
    notes = {verdict.claim.id: verdict.notes for verdict in judge(study)}
    return {
        claim: next((note for note in found if note.startswith("Trained targets")), "")
        for claim, found in notes.items()
    }


START = "Trained targets per step, counted in the data of the runs: "


def test_arms_that_train_other_modalities_have_their_counts(tmp_path):
    study = study_of(tmp_path / "runs", BATCH, TARGETS)
    assert {run.arm: trained_targets(run) for run in study.runs if run.seed == 1} == pytest.approx(
        {"mixed": 8 * 103, "mixed-qk": 8 * 103, "image-off": 8 * 55, "image-off-matched": 15 * 55}
    )
    found = said(study)
    assert found["C10"] == START + "mixed: 824; matched: 825."
    assert found["C10b"] == START + "mixed: 824; image off: 440."
    assert found["C13"] == START + "mixed: 824; with QK-Norm: 824; image off: 440."
    assert found["C2"] == ""  # arms that train the same targets


def test_the_numbers_are_counted_and_not_written(tmp_path):
    """With other data in the same grid, the matched batch size no longer matches."""
    found = said(study_of(tmp_path / "runs", BATCH, {"text": 100.0, "image": 28.0}))
    assert found["C10"] == START + "mixed: 1,024; matched: 1,500."
