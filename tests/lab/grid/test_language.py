"""Test the grid language: files, axes, learning rates, forks and merged grids."""

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml

from mmqk.lab.grid import load_grid, load_grids
from mmqk.lab.grid.claims import claims_hash
from mmqk.store import UserError

HEAD = "name: toy\nbase: base.yaml\n"


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
def load(tmp_path):
    """Return a function that writes a grid and loads it."""
    folder = tmp_path / "ablations"
    folder.mkdir()
    for path in ("base.yaml", "more.yaml", "ablations/base.yaml", "ablations/last.ckpt"):
        (tmp_path / path).write_text("{}")

    def load(text, name="toy"):
        path = folder / f"{name}.yaml"
        path.write_text(text)
        return load_grid(path)

    return load


def test_a_grid_becomes_command_lines_the_first_seed_of_every_arm_first(load, tmp_path):
    grid = load(GRID)
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
        "--optim.lr=0.1",
        "--model.attn_softcap=null",
        "--seed=0",
    )
    assert grid.jobs[2].args == (*base, "--model.post_norm=true", "--seed=5")
    assert [arm.label for arm in grid.arms] == ["no QK-Norm", "QK-Norm", "shown"]


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
def test_a_claim_that_compares_names_its_direction(load, more, refused):
    text = GRID.replace("direction: greater, ", more)
    if refused:
        with pytest.raises(UserError, match=refused):
            load(text)
    else:
        load(text)
    # The grid may name it once, which leaves the hash of the claims as it was registered; but only the direction
    # that the hash of a claim without one stands for.
    raw = load(text + "direction: greater\n").raw
    assert claims_hash(raw) == claims_hash(yaml.safe_load(text))
    with pytest.raises(UserError, match="direction is 'less': give 'greater' here, and 'less' in the claims"):
        load(text + "direction: less\n")


def test_the_hash_of_claims_is_theirs_alone(load):
    grid = load(GRID).raw
    assert claims_hash(load(GRID.replace("seeds: [0, 1]", "seeds: [7]")).raw) == claims_hash(grid)
    assert claims_hash(json.loads(json.dumps(grid))) == claims_hash(grid)
    assert claims_hash(load(GRID.replace("bounds", "binds")).raw) != claims_hash(grid)
    assert claims_hash({}) == claims_hash({"claims": None}) == claims_hash({"claims": []})


def test_axes_are_crossed_with_every_arm_and_seed(load):
    grid = load(
        HEAD + "seeds: [3, 5]\n"
        "axes: {optim.lr: [0.003, 1e-2], model.pre_norm: [true, false]}\n"
        "arms:\n"
        "  plain: {}\n"
        "  flat: {axes: {}}\n"
        "  own: {axes: {model.n_layers: [2, 4]}, set: {model.d_model: 8}}\n"
    )
    wanted = {
        (f"plain-lr{lr}-pre_norm{str(pre).lower()}", seed, "plain", (("optim.lr", lr), ("model.pre_norm", pre)))
        for lr, pre, seed in itertools.product((0.003, 0.01), (True, False), (3, 5))
    }
    wanted |= {("flat", seed, "flat", ()) for seed in (3, 5)}
    wanted |= {(f"own-n_layers{n}", s, "own", (("model.n_layers", n),)) for n in (2, 4) for s in (3, 5)}
    jobs = grid.jobs
    assert {(j.arm, j.seed, j.family.name, tuple(j.point.items())) for j in jobs} == wanted
    assert len(jobs) == len(wanted) and {j.role for j in jobs} == {"verdict"}
    assert [j.seed for j in jobs] == [3] * 7 + [5] * 7, "the first seed of every arm first"
    for job in jobs:
        given = {k: json.loads(v) for k, _, v in (a.partition("=") for a in job.args) if v}
        assert given.pop("--seed") == job.seed
        assert given == {
            **{f"--{k}": v for k, v in job.family.fields.items()},
            **{f"--{k}": v for k, v in job.point.items()},
        }


def test_an_axis_may_be_groups_of_fields_and_names_stay_distinct(load):
    text = (
        HEAD + "axes:\n  size: {small: {model.d_model: 32, model.n_heads: 2}, big: {model.d_model: 64, "
        "model.n_heads: 4}}\n  a.eps: [1.0e-8]\n  b.eps: [1.0e-6, null]\narms: {plain: {}}\n"
    )
    names = [f"plain-{size}-a.eps1e-08-b.eps{eps}" for size in ("small", "big") for eps in ("1e-06", "null")]
    grid = load(text)
    assert [job.arm for job in grid.jobs] == names
    assert grid.jobs[0].point == {"model.d_model": 32, "model.n_heads": 2, "a.eps": 1e-8, "b.eps": 1e-6}


def test_a_learning_rate_of_its_own_is_chosen_first_on_other_seeds(load):
    grid = load(
        HEAD + "seeds: [1, 2]\nlr: {rule: own_best, grid: [0.1, 0.01], seeds: [8, 9], metric: final_loss/text}\n"
        "axes: {model.n_layers: [2, 4]}\narms: {plain: {}, qk: {}}\n"
    )
    choosing = [job for job in grid.jobs if job.role == "selection"]
    assert grid.jobs[: len(choosing)] == choosing
    assert {(j.arm, j.seed) for j in choosing} == {
        (f"{arm}-n_layers{n}-lr{lr}", seed)
        for arm, n, lr, seed in itertools.product(("plain", "qk"), (2, 4), (0.01, 0.1), (8, 9))
    }
    assert choosing[0].point == {"model.n_layers": 2, "optim.lr": 0.01}
    deciding = grid.jobs[len(choosing) :]
    assert {j.seed for j in deciding} == {1, 2} and {j.role for j in deciding} == {"verdict"}
    assert not any("optim.lr" in arg for j in deciding for arg in j.args)


def test_a_fork_has_the_seeds_and_the_points_of_its_parent(load):
    grid = load(
        HEAD + "seeds: [1, 2]\naxes: {optim.lr: [0.01, 0.1]}\narms:\n"
        "  late: {fork: {arm: plain, step: 3}, set: {model.qk_norm.kind: rms}}\n"
        "  plain: {}\n"
        "  cool: {fork: {arm: plain-lr0.1, step: 3}, axes: {optim.lr: [0.001, 0.003]}, seeds: [2]}\n"
        "  wide: {fork: {arm: plain, step: 2}, axes: {optim.lr: [0.01], data.weights: [1, 2]}}\n"
        "  again: {fork: {arm: late, step: 3}, set: {fork_noise: 1.0e-6}}\n"
        "  file: {fork: {checkpoint: last.ckpt}, set: {fork_skip_batches: 1}}\n"
    )
    found = {(j.arm, j.seed): j for j in grid.jobs}
    assert found["late-lr0.1", 2].parent == "plain-lr0.1"
    assert found["late-lr0.1", 2].args == ("--model.qk_norm.kind=rms",), "the parent sets the other fields"
    assert found["again-lr0.01", 1].parent == "late-lr0.01"
    assert found["cool-lr0.003", 2].parent == "plain-lr0.1" and ("cool-lr0.003", 1) not in found
    assert found["cool-lr0.003", 2].args == ("--optim.lr=0.003",)
    assert found["wide-lr0.01-weights2", 1].args == ("--data.weights=2",)
    assert found["file", None].args == ("--fork_skip_batches=1",)
    assert sorted(a for a, s in found if s == 1 and a.startswith("late")) == ["late-lr0.01", "late-lr0.1"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GRID.replace("control: qk", "control: qx"), r"claim C2: there is no arm 'qx' \(arms: plain, qk, shown\)"),
        ("axes: {optim.lr: [0.1, 1e-1]}\narms: {a: }", "two values with the name lr0.1"),
        (
            "lr: {rule: own_best, grid: [0.1]}\narms: {a: }",
            "seed 0 selects the learning rate and is also in the verdicts",
        ),
        (
            "arms: {a: {fork: {arm: b, step: 1}}, b: {fork: {arm: a, step: 1}}}",
            "'b' is no arm of this grid, or a fork of a",
        ),
        ("arms: {a: , b: {seeds: [4], fork: {arm: a, step: 1}}}", "4 is not a seed of its parent a"),
        ("arms: {a: {set: {fork_skip_batches: 1}}}", "'fork_skip_batches' is for forks only"),
        (
            "axes: {x: [1, 2]}\narms: {a: , b: {axes: {}, fork: {arm: a, step: 1}}}",
            "a has several runs per seed: name one of a-x1, a-x2",
        ),
    ],
)
def test_a_mistake_is_one_sentence(load, text, sentence):
    with pytest.raises(UserError, match=sentence) as refusal:
        load(text if "name: " in text else HEAD + text)
    assert "\n" not in str(refusal.value)


def test_a_written_key_overrides_a_merged_one(load):
    arms = "arms: {a: &a {label: one, set: &s {x: 1, z: 3}}, b: {<<: *a, label: two, set: {x: 2, <<: *s}}}\n"
    a, b = load(HEAD + "seeds: [1]\n" + arms).arms
    assert (a.label, a.fields) == ("one", {"x": 1, "z": 3})
    assert (b.label, b.fields) == ("two", {"x": 2, "z": 3})
    # The control: a key that is written twice is refused beside a merge key too.
    with pytest.raises(UserError, match=r"line 4: the key 'label' is written twice: remove one"):
        load(HEAD + "seeds: [1]\n" + arms.replace("label: two", "label: two, label: three"))
    with pytest.raises(UserError, match="the key on is not text in YAML: put it in quotes"):
        load(HEAD + "seeds: [1]\n" + arms.replace("label: two", "on: two"))


def test_grids_are_merged_arm_by_arm_and_claim_by_claim(load, tmp_path):
    load(HEAD + "seeds: [1]\narms: {a: , b: {set: {x: 1}}}\nclaims: [{id: A, arms: [a]}]\nreport: {hero: [a]}")
    other = HEAD.replace("toy", "two") + "seeds: [1, 2]\narms: {a: , c: {set: {x: 2}}}\n"
    load(other + "claims: [{id: B, arms: [c]}]\nreport: {hero: [c, a], command: make it}", "two")
    toy, two = (tmp_path / f"ablations/{name}.yaml" for name in ("toy", "two"))
    grid = load_grids([toy, two])
    assert grid.name == "toy+two" and [(arm.name, arm.seeds) for arm in grid.arms] == [
        ("a", (1, 2)),
        ("b", (1,)),
        ("c", (1, 2)),
    ]
    assert len(grid.jobs) == 5
    assert grid.raw["claims"] == [{"id": "A", "arms": ["a"], "grid": "toy"}, {"id": "B", "arms": ["c"], "grid": "two"}]
    assert grid.raw["report"] == {"hero": ["a", "c"], "command": "make it"}
    assert json.loads(json.dumps(grid.raw)) == grid.raw
    # An arm without a block gets the name of its grid, so that seed spreads are not pooled over grids.
    blocks = {"a": "toy", "b": "toy", "c": "two"}
    assert {arm.name: arm.block for arm in grid.arms} == blocks
    assert {name: record["block"] for name, record in grid.raw["arms"].items()} == blocks
    alone = load_grids([toy])
    assert {arm.block for arm in alone.arms} == {""}
    assert alone.name == "toy" and alone.raw["claims"][0]["grid"] == "toy"
    assert claims_hash(alone.raw) == claims_hash(load_grid(toy).raw)
    for text, sentence in (
        (other.replace("{a: ,", "{a: {set: {x: 3}},"), "arm a differs from the one in .*toy.yaml"),
        (other.replace("two", "toy"), "another grid has the name toy"),
        (other + "claims: [{id: A, arms: [c]}]", "claim A differs from the one in toy"),
    ):
        load(text, "two")
        with pytest.raises(UserError, match=sentence):
            load_grids([toy, two])


def test_every_example_of_the_page_can_be_read(load):
    page = (Path(__file__).parents[3] / "docs/ablations.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", page, re.S)
    grids = {grid.name: grid for grid in map(load, examples)}
    assert len(grids) == len(examples) == 5
    assert len(grids["sizes"].jobs) == 2 * (2 * 3 * 2 + 1 + 2)
    assert len(grids["best"].jobs) == 2 * 4 * 2 + 2 * 3
    assert {job.parent for job in grids["late"].jobs} == {"", "plain"}
    assert grids["judged"].raw["claims"][0]["id"] == "C1"
