"""Arms whose runs are identical until a fork are compared by their differences per seed; other arms are not."""

from pathlib import Path

import pytest

from mmqk.lab.runs import Run
from mmqk.lab.verdicts.study import Group, share_history

CHECKPOINT = {"parent": "plain-0/seed{seed}", "step": 250}


def group(name, forks):
    """Return a group with one run per seed; ``forks`` has the parent and the step of each run, or None."""
    runs = {}
    for seed, fork in forks.items():
        fork = fork and {**fork, "parent": fork["parent"].format(seed=seed)}
        runs[seed] = (Run(Path(name), f"{name}-0/seed{seed}", name, seed, fork=fork),)
    return Group(name, name, (), runs, len(runs))


LATE = group("late", {1: CHECKPOINT, 2: CHECKPOINT})


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (group("same", {1: CHECKPOINT, 2: CHECKPOINT}), True),
        (group("plain", {1: None, 2: None}), True),  # the parent itself
        (group("same", {1: CHECKPOINT, 2: {**CHECKPOINT, "step": 300}}), False),
        (group("same", {1: CHECKPOINT, 2: {**CHECKPOINT, "parent": "other-0/seed2"}}), False),
        (group("qk", {1: None, 2: None}), False),
        (group("same", {3: CHECKPOINT}), False),  # no seed in common
    ],
)
def test_what_runs_have_in_common(other, expected):
    assert share_history(LATE, other) is share_history(other, LATE) is expected


def test_runs_without_a_fork_have_nothing_in_common():
    assert not share_history(group("a", {1: None}), group("b", {1: None}))
