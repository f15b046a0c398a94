"""Check the labels of replays with planted divergence steps."""

import itertools
import math
from pathlib import Path

import pytest

from mmqk.lab.runs.load import Run
from mmqk.lab.runs.replays import BF16, FP32, replay_verdicts
from mmqk.store import Status

STEP, T_DIV, HORIZON = 800, 1000, 1400


def run(name, status, step, replay=None):
    details = {"config": {"trainer": {"max_steps": HORIZON}}}
    return Run(Path(name), name, "a", 1, status=Status(status, step), details=details, replay=replay)


def replays_of(times, depth=0.2, step=STEP):
    """Return runs from {numerics: [divergence step, or None for a run that survived]}."""
    found = []
    for numerics, ended in times.items():
        for number, at in enumerate(ended):
            record = {"of": "a/seed1", "depth": depth, "step": step, "numerics": numerics, "number": number}
            status = ("completed", HORIZON) if at is None else ("diverged", at)
            found.append(run(f"replays/{depth}-{numerics}-{number}", *status, replay=record))
    return found


def study(*groups, control=("diverged", T_DIV)):
    record = {"of": "a/seed1", "depth": None, "step": 0, "numerics": "control", "number": 0}
    return [
        run("a/seed1", "diverged", T_DIV),
        run("replays/control", *control, replay=record),
        *itertools.chain(*groups),
    ]


def verdict(*groups, **kwargs):
    (found,) = replay_verdicts(study(*groups, **kwargs))
    assert found.of == "a/seed1"
    return found


SAME = {"bf16-fused": [990, 1010, 1100], "bf16-math": [970, 1005, 1040], "fp32": [980, 1020, 1200]}


def test_times_of_one_distribution_are_dynamics():
    found = verdict(replays_of(SAME))
    assert found.label == "dynamics"
    assert (found.rows[0].numerics, found.rows[0].diverged) == ("bf16-fused", (990, 1010, 1100))


def test_fp32_that_lives_where_bf16_fails_is_numerics():
    found = verdict(replays_of({**SAME, "fp32": [None] * 3}))
    assert found.label == "numerics"
    assert [row.survived for row in found.rows if row.numerics == FP32] == [3]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fp32": [None, None, 1300]}, "2 of 3 fp32 replays survived"),
        ({"fp32": [None] * 3, "bf16-math": [970, None, 990]}, "survived"),
        ({"fp32": [1290, 1310, 1395]}, "after every bf16"),
        ({"fp32": [840, 860, 900]}, "before every bf16"),
        ({"fp32": [980, 990]}, "3 of each kind are needed"),
    ],
)
def test_everything_else_is_undecided_and_says_why(changed, words):
    found = verdict(replays_of({**SAME, **changed}))
    assert found.label == "undecided"
    assert words in found.sentence
    judged_without_a_survivor = "needed" not in words and None not in changed.get("fp32", ())
    assert ("does not need bf16" in found.sentence) == judged_without_a_survivor


def test_every_depth_must_agree():
    other = replays_of({**SAME, "fp32": [None] * 3}, depth=0.05, step=950)
    found = verdict(replays_of(SAME), other)
    assert found.label == "undecided"
    assert "5 %" in found.sentence and "20 %" not in found.sentence


def test_a_step_of_difference_is_no_difference():
    """Replays that start just before the divergence all diverge at the same step if their precision is the same."""
    times = {"bf16-fused": [1000] * 3, "bf16-math": [1000] * 3, "fp32": [1001] * 3}
    assert verdict(replays_of(times, depth=0.05, step=950)).label == "dynamics"
    assert verdict(replays_of({**times, "fp32": [1004] * 3}, depth=0.05, step=950)).label == "undecided"


def test_a_run_that_does_not_repeat_itself_is_not_judged():
    found = verdict(replays_of(SAME), control=("diverged", T_DIV + 1))
    assert found.label == "undecided" and "is not reproducible" in found.sentence
    found = verdict(replays_of(SAME), control=("completed", HORIZON))
    assert found.label == "undecided"


def test_replays_that_have_not_finished_are_not_judged():
    groups = replays_of(SAME)
    groups[4] = run(groups[4].name, "running", 820, replay=groups[4].replay)
    found = verdict(groups)
    assert found.label == "undecided" and "1 of 10 replays" in found.sentence


def test_runs_without_replays_have_no_verdict():
    assert replay_verdicts([run("a/seed1", "diverged", T_DIV)]) == []


def test_how_often_times_of_one_distribution_look_different():
    """Check the count in the module docstring: in 2 of the 84 possible orders of 3 fp32 and 6 bf16 times, the label
    is not dynamics."""
    looks_different = 0
    for fp32 in itertools.combinations(range(9), 3):
        bf16 = [i for i in range(9) if i not in fp32]
        # The times are so far apart that the tolerance `SLACK` has no effect.
        at = [STEP + 40 + 60 * i for i in range(9)]
        times = {
            BF16[0]: [at[i] for i in bf16[:3]],
            BF16[1]: [at[i] for i in bf16[3:]],
            FP32: [at[i] for i in fp32],
        }
        looks_different += verdict(replays_of(times)).label != "dynamics"
    assert (looks_different, math.comb(9, 3)) == (2, 84)


@pytest.mark.parametrize(("fp32", "label"), [([980, 1020, 1200], "dynamics"), ([None] * 3, "numerics")])
def test_an_attention_without_a_fused_form_is_judged_by_the_dense_one(fp32, label):
    assert verdict(replays_of({"bf16-math": SAME["bf16-math"], "fp32": fp32})).label == label


def test_a_depth_that_lacks_what_others_have_is_not_judged():
    lacking = {"bf16-math": SAME["bf16-math"], "fp32": SAME["fp32"]}
    found = verdict(replays_of(SAME), replays_of(lacking, depth=0.05, step=950))
    assert found.label == "undecided" and "0 replays in bf16-fused from a depth of 5 %" in found.sentence
