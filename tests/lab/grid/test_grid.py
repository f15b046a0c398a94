import json
from pathlib import Path

import pytest
import yaml

from mmqk.lab.grid import load_grid
from mmqk.lab.grid.claims import claims_hash
from mmqk.store import UserError

GRID = """
name: demo
title: A demonstration
base: [../base.yaml, ../more.yaml]
seeds: [0, 1]
arms:
  plain: {label: "no QK-Norm", block: decided, set: {model.qk_norm.kind: none}}
  qk:
    label: QK-Norm
    block: decided
    set: {model.qk_norm.kind: rms, loss.weights.image: 0.0, optim.lr: 1e-1, model.attn_softcap: null}
  shown: {block: shown, seeds: [5], set: {model.post_norm: true}}
claims:
  - {id: C2, statement: QK-Norm bounds logits, metric: q_norm, direction: greater, treatment: plain, control: qk}
  - {id: C13, status: shown, arms: [shown, plain], positive_control: C2}
report: {hero: [plain, qk], command: make demo}
"""


@pytest.fixture
def write(tmp_path):
    (tmp_path / "ablations").mkdir()
    for name in ("base", "more"):
        (tmp_path / f"{name}.yaml").write_text("{}")

    def write(text):
        path = tmp_path / "ablations" / "grid.yaml"
        path.write_text(text)
        return path

    return write


def test_a_grid_becomes_command_lines_the_first_seed_of_every_arm_first(write, tmp_path):
    grid = load_grid(write(GRID))
    assert (grid.name, grid.title) == ("demo", "A demonstration")
    assert [(job.arm, job.seed) for job in grid.jobs] == [
        *[("plain", 0), ("qk", 0), ("shown", 5)],
        *[("plain", 1), ("qk", 1)],
    ]
    base = ("--config", str(tmp_path / "base.yaml"), "--config", str(tmp_path / "more.yaml"))
    assert grid.jobs[0].args == (*base, "--model.qk_norm.kind=none", "--seed=0")
    assert grid.jobs[1].args == (
        *base,
        "--model.qk_norm.kind=rms",
        "--loss.weights.image=0.0",
        "--optim.lr=1e-1",
        "--model.attn_softcap=null",
        "--seed=0",
    )
    assert grid.jobs[2].args == (*base, "--model.post_norm=true", "--seed=5")
    assert [arm.label for arm in grid.arms] == ["no QK-Norm", "QK-Norm", "shown"]


def test_base_configs_are_relative_to_the_grid_and_free_of_detours(write, monkeypatch, tmp_path):
    write(GRID)
    monkeypatch.chdir(tmp_path)
    assert load_grid("ablations/grid.yaml").jobs[0].args[:2] == ("--config", "base.yaml")


def test_the_whole_file_travels_as_plain_data(write):
    grid = load_grid(write(GRID + "\n"))
    assert json.loads(json.dumps(grid.raw)) == grid.raw
    assert grid.raw["claims"][0]["treatment"] == "plain"
    dated = load_grid(write(GRID.replace("id: C2,", "id: C2, source: 2023-09-25,")))
    assert dated.raw["claims"][0]["source"] == "2023-09-25"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("title:", "titel:", "unknown key 'titel'"),
        ("label: QK-Norm", "lable: QK-Norm", r"arms\.qk: unknown key 'lable'"),
        ("metric:", "metrik:", "claim C2: there is no field 'metrik': did you mean 'metric'"),
        ("command: make", "comand: make", "report: unknown key 'comand'"),
        ("seeds: [0, 1]", "seeds: [0, 0]", r"seeds must be a list of different whole numbers"),
        ("seeds: [0, 1]", "seeds: 3", r"seeds must be a list .*, not 3"),
        ("seeds: [0, 1]", "seeds: [true]", r"seeds must be a list"),
        ("seeds: [5]", "seeds: []", r"arms\.shown\.seeds must be"),
        ("name: demo", "name: ../up", "is not a folder name"),
        ("  shown:", "  sh/own:", "is not a folder name"),
        ("../more.yaml", "../none.yaml", r"base config \.\./none\.yaml does not exist"),
        ("control: qk", "control: qx", r"claim C2: there is no arm 'qx' \(arms: plain, qk, shown\)"),
        ("arms: [shown, plain]", "arms: [show]", "claim C13: there is no arm 'show'"),
        ("positive_control: C2", "positive_control: C9", "claim C13 refers to 'C9', which is not"),
        ("id: C13", "id: C2", r"claims\[1\] has no unique id"),
        ("hero: [plain, qk]", "hero: [plane]", "report.hero: there is no arm 'plane'"),
        ("set: {model.post_norm: true}", "set: {seed: 4}", "'seed' cannot be set by an arm"),
        ("set: {model.post_norm: true}", "set: [a]", r"arms\.shown\.set must be a mapping"),
        ("  shown:", "  plain:", "line 12: the key 'plain' is written twice"),
        ("name: demo", "name: [", "is not valid YAML: line"),
        ("name: demo\n", "", "the key 'name' is missing"),
        ("control: qk}", "control: qk, min_effect: .inf}", "has a number that is not finite"),
        ("control: qk}", "control: qk, effect: x}", "there is no field 'effect': did you mean 'min_effect'"),
        (
            "control: qk}",
            "control: qk, zz: x}",
            "claim C2: there is no field 'zz': use one of id, statement,",
        ),
    ],
)
def test_a_mistake_in_a_grid_is_one_sentence_that_names_it(write, old, new, sentence):
    assert GRID.count(old) >= 1
    with pytest.raises(UserError, match=sentence) as refusal:
        load_grid(write(GRID.replace(old, new, 1)))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "wrong", "right", "sentence"),
    [
        ("label: QK-Norm", "label: null", "label: 3", r"arms\.qk\.label must be text"),
        ("block: shown", "block: null", "block: 1", r"arms\.shown\.block must be text"),
        ("title: A demonstration", "title: null", "title: 2026", "title must be text"),
        ("set: {model.post_norm: true}", "set: []", "set: {}", r"arms\.shown\.set must be a mapping"),
        ("command: make demo", "headline: [3]", "headline: [C2]", r"report\.headline must be a name"),
        (
            "command: make demo",
            "cannot_tell: [Late drift: these runs are short.]",
            "cannot_tell: ['Late drift: these runs are short.']",
            r"report\.cannot_tell must be a name",
        ),
    ],
)
def test_a_value_that_ablation_json_cannot_hold_is_refused_before_the_runs(write, old, wrong, right, sentence):
    assert GRID.count(old) == 1
    with pytest.raises(UserError, match=sentence) as refusal:
        load_grid(write(GRID.replace(old, wrong)))
    assert "\n" not in str(refusal.value)
    load_grid(write(GRID.replace(old, right)))


def test_a_missing_grid_or_one_that_is_no_mapping_is_named(write, tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml cannot be read \(No such file"):
        load_grid(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="must be a mapping"):
        load_grid(write("- a\n- b\n"))
    with pytest.raises(UserError, match="arms is empty"):
        load_grid(write("name: x\nbase: ../base.yaml\narms: {}\n"))


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ("", "claim C2 has no direction: add 'greater' if q_norm should be higher in 'plain' than"),
        ("test: count, ", "claim C2 has no direction"),
        ("test: equivalence, ", ""),
        ("status: shown, ", ""),
        ("direction: less, ", ""),
    ],
)
def test_a_claim_that_compares_names_its_direction(write, more, refused):
    text = GRID.replace("direction: greater, ", more)
    if refused:
        with pytest.raises(UserError, match=refused):
            load_grid(write(text))
    else:
        load_grid(write(text))
    # The grid may name it once, which leaves the hash of the claims as it was registered; but only the direction
    # that the hash of a claim without one stands for.
    raw = load_grid(write(text + "direction: greater\n")).raw
    assert claims_hash(raw) == claims_hash(yaml.safe_load(text))
    with pytest.raises(UserError, match="direction is 'less': give 'greater' here, and 'less' in the claims"):
        load_grid(write(text + "direction: less\n"))


def test_the_hash_of_claims_is_theirs_alone(write):
    grid = load_grid(write(GRID)).raw
    assert claims_hash(load_grid(write(GRID.replace("seeds: [0, 1]", "seeds: [7]"))).raw) == claims_hash(grid)
    assert claims_hash(json.loads(json.dumps(grid))) == claims_hash(grid)
    assert claims_hash(load_grid(write(GRID.replace("bounds", "binds"))).raw) != claims_hash(grid)
    assert claims_hash({}) == claims_hash({"claims": None}) == claims_hash({"claims": []})


def test_grids_that_ship_can_be_read():
    shipped = sorted((Path(__file__).parents[3] / "configs" / "ablations").glob("*.yaml"))
    for path in shipped:
        assert load_grid(path).jobs
