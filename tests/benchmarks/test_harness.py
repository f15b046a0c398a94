"""Turns, failures, memory and ratios of the benchmark harness, for candidates whose times and memory are known."""

from __future__ import annotations

import statistics

import pytest
import torch

from benchmarks.harness import ABSENT, FAILED, MEASURED, Absent, Candidate, Context, compare
from benchmarks.memory import Peak
from benchmarks.tables import against, faster, mfu, one, times

CONTEXT = Context()


def candidate(name, seconds, calls=None, **fields):
    """Return a candidate that reports these seconds, one per turn, after two warm-up turns."""

    def build():
        left = iter([0.0, 0.0, *seconds])

        def take(n):
            if calls is not None:
                calls.append((name, n))
            found = next(left)
            if isinstance(found, Exception):
                raise found
            return found

        return take

    return Candidate(name, build, {"steps": 1, "tokens": 10.0}, memory=False, **fields)


def unit(rows, base="a", table="peers", device="somewhere"):
    about = {"device": device, "cpu": device, "threads": 1, "cpus": 2, "load": 0.0}
    return {
        "table": table, "unit": "u", "title": "t", "machine": about, "versions": {"torch": "0"}, "facts": {},
        "base": base, "rows": rows, "command": "c", "started": "1",
    }  # fmt: skip


def test_turns_rotate_and_the_first_round_is_left_out():
    calls: list[tuple[str, int]] = []
    candidates = [candidate(name, [9.0, 1.0, 2.0], calls) for name in "abc"]
    rows = compare(candidates, CONTEXT, repeat=5, rounds=2)
    assert [row["seconds"] for row in rows] == [[1.0, 2.0]] * 3
    turns = [name for name, n in calls[6:]]
    assert turns == list("abcbcacab")
    assert {n for _, n in calls[6:]} == {5} and {n for _, n in calls[:6]} == {1}


def test_what_fails_says_why_and_the_rest_goes_on():
    def broken():
        raise RuntimeError("no  such\nkernel")

    def missing():
        raise Absent("litgpt is not installed: pip install litgpt")

    candidates = [
        candidate("good", [9.0, 1.0]),
        Candidate("broken", broken, memory=False),
        Candidate("missing", missing, memory=False),
        candidate("late", [9.0, torch.OutOfMemoryError("tried to allocate")]),
    ]
    good, bad, absent, late = compare(candidates, CONTEXT, repeat=1, rounds=1)
    assert (good["status"], good["seconds"]) == (MEASURED, [1.0])
    assert (bad["status"], bad["reason"]) == (FAILED, "RuntimeError: no such kernel")
    assert (absent["status"], absent["seconds"]) == (ABSENT, [])
    assert (late["status"], late["reason"], late["seconds"]) == (FAILED, "out of memory", [])
    page = one(unit([good, bad, absent, late], base="good"))
    for said in ("| good | 1,000.00", "no such kernel", "| litgpt is not installed: pip", "out of memory"):
        assert said in page


def test_ratios_are_made_within_a_round():
    """The median of ratios within rounds can differ from the ratio of medians, if the machine was slow in one
    round."""
    a, b = compare(
        [candidate("a", [0.0, 1.0, 10.0, 4.0]), candidate("b", [0.0, 3.0, 20.0, 4.0])], CONTEXT, repeat=1, rounds=3
    )
    assert times(b, a) == [3.0, 2.0, 1.0]
    assert faster(b, a, "tokens") == pytest.approx([1 / 3, 0.5, 1.0])
    assert statistics.median(b["seconds"]) / statistics.median(a["seconds"]) == 1.0
    assert "| 2.00 |" in one(unit([a, b]))


def test_a_row_has_no_ratio_to_itself_or_to_what_failed():
    a, b, c = compare(
        [candidate("a", [0.0, RuntimeError()]), candidate("b", [0.0, 1.0]), candidate("c", [0.0, 2.0], against="b")],
        CONTEXT, repeat=1, rounds=1,
    )  # fmt: skip
    found = unit([a, b, c])
    assert against(b, found) is None and against(a, found) is None
    assert against(c, found) is b


def test_mfu_is_the_work_over_the_peak():
    (row,) = compare([candidate("a", [0.0, 0.5])], CONTEXT, repeat=1, rounds=1)
    row["work"]["flops"] = 989e12 / 4
    assert mfu(row, "NVIDIA H200") == pytest.approx(0.5)
    assert mfu(row, "some CPU") is None


def test_peak_counts_what_lives_at_once():
    with Peak() as peak:
        a = torch.ones(1000)
        b = a + 1  # 8,000 bytes alive
        del a
        c = b * 2
        c.view(10, 100).add_(1)  # neither a view nor an in-place change allocates memory
        del b, c
        torch.zeros(500)
    assert peak.bytes == 8000
    with Peak() as larger:
        kept = [torch.ones(1000) for _ in range(3)]
    assert larger.bytes == 12000 and len(kept) == 3


def test_memory_of_a_way_is_watched_where_nothing_is_compiled():
    def build():
        weight = torch.ones(1000)

        def take(n):
            torch.ones(250).sum()
            return float(weight[0])

        return take

    watched, compiled = compare(
        [Candidate("watched", build), Candidate("compiled", build, compiled=True)], CONTEXT, repeat=1, rounds=1
    )
    assert watched["peak_bytes"] == 5000 + 4  # the 4 bytes are the result of `sum`
    assert compiled["peak_bytes"] is None
