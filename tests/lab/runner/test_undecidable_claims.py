"""A claim that no result could support is refused before training; other claims are accepted."""

import json

import pytest

ARMS = {"a": {"set": {"size": 1}}, "b": {"set": {"size": 2}}, "c": {"set": {"size": 3}}}
CLAIM = {"id": "C", "treatment": "a", "control": "b", "min_effect": 0.2, "direction": "greater"}
CHECK = {"id": "P", "arms": ["a"], "at_least": 5, "status": "control"}
OTHER = CLAIM | {"id": "O", "treatment": "b", "control": "c", "status": "exploratory"}
SHOWN = {"id": "O", "arms": ["a", "b"], "status": "shown"}
SAME = {"test": "equivalence", "positive_control": "P"}


def grid(*claims, seeds=(1, 2, 3), arms=ARMS, **more):
    raw = {"name": "toy", "base": "base.yaml", "seeds": list(seeds), "arms": arms, "claims": list(claims)}
    return json.dumps(raw | more)


REFUSED = {
    "itself": ([CLAIM | {"control": "a"}], {}, "'a' as its treatment and as its control"),
    "itself by another name": (
        [{**CLAIM, "treatment": "a", "control": "a-size1", "at": {"size": 1}}],
        {"arms": {"a": {"axes": {"size": [1, 2]}}}},
        "compares the arm a-size1 with itself",
    ),
    "a modality that no run has": ([CLAIM | {"metric": "q_norm/imgae"}], {}, "no run has imgae: use one of"),
    "no seed in common": (
        [CLAIM],
        {"arms": ARMS | {"b": {"set": {"size": 2}, "seeds": [7, 8, 9]}}},
        "a and b share no seed",
    ),
    "one seed": ([CLAIM], {"seeds": (1,)}, "have one seed, which gives no interval"),
    "no difference, no control": ([CLAIM | {"test": "equivalence"}], {}, "needs a positive_control"),
    "no difference, leaning on no difference": (
        [CLAIM | SAME | {"positive_control": "O"}, OTHER | SAME, CHECK],
        {},
        "its positive control O can show no effect",
    ),
    "no difference, leaning on what is shown": (
        [CLAIM | SAME | {"positive_control": "O"}, SHOWN],
        {},
        "its positive control O can show no effect",
    ),
    "a check that is shown": (
        [CLAIM | {"manipulation_check": "O"}, SHOWN],
        {},
        "its manipulation check O can show no effect",
    ),
    "a ring": (
        [CLAIM | {"manipulation_check": "O"}, OTHER | {"positive_control": "C"}],
        {},
        "are controls of each other",
    ),
    "counts of few": ([CLAIM | {"test": "count"}], {}, "not enough for min_effect 0.2 with 3 runs per arm"),
    "more seeds than are planned": ([CLAIM | {"seeds": 6}], {}, "registered for 6 seeds per arm, but a has 3"),
    "fewer seeds than are planned": (
        [CLAIM | {"seeds": 2}],
        {"arms": ARMS | {"a": {"set": {"size": 1}, "seeds": [1, 2]}}},
        "registered for 2 seeds per arm, but b has 3",
    ),
}
ACCEPTED = {
    "plain": ([CLAIM], {"report": {"headline": "C"}}),
    "without a control it can be supported": ([CLAIM | {"status": "exploratory"}], {}),
    "one seed beside an arm of three": ([CLAIM], {"arms": ARMS | {"a": {"set": {"size": 1}, "seeds": [1]}}}),
    "no difference": ([CLAIM | SAME, CHECK], {}),
    "no difference, leaning on an effect": ([CLAIM | SAME | {"positive_control": "O"}, OTHER], {}),
    "checks": ([CLAIM | {"manipulation_check": "O", "positive_control": "P"}, OTHER, CHECK], {}),
    "counts": ([CLAIM | {"test": "count"}], {"seeds": range(1, 7)}),
    "two points of a family": (
        [{**CLAIM, "treatment": "a-size1", "control": "a-size2"}],
        {"arms": {"a": {"axes": {"size": [1, 2]}}}},
    ),
    "families": (
        [CLAIM | {"metric": "lr_sensitivity"}],
        {"axes": {"optim.lr": [0.1, 0.3]}, "arms": {"a": ARMS["a"], "b": ARMS["b"]}},
    ),
    "chosen rates": (
        [CLAIM],
        {"lr": {"rule": "own_best", "grid": [0.1, 0.3], "seeds": [8], "metric": "final_loss/text"}},
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_finding_could_support_is_refused_before_anything_is_written(world, tmp_path, capsys, what):
    claims, more, words = REFUSED[what]
    assert world(grid=grid(*claims, **more)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words in said and "toy.yaml" in said and "Traceback" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"base.yaml", "toy.yaml"}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_runs_could_support_is_accepted(world, capsys, what):
    claims, more = ACCEPTED[what]
    assert world("--dry-run", grid=grid(*claims, **more)) == 0, capsys.readouterr().err
