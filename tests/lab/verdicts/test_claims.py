"""The fields of a claim, and every kind of verdict; a planted violation of each control changes the verdict."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from mmqk.lab.study import load_study
from mmqk.lab.verdicts.judge import judge
from mmqk.store import UserError
from tests.lab.fake_runs import Planted, write_grid

POSITIVE = {"id": "P", "arms": ["a"], "at_least": 5, "status": "control"}
BASIC = {"id": "C", "statement": "more", "treatment": "a", "control": "b", "min_effect": 0.2, "positive_control": "P"}


def study(tmp_path, arms, claims, seeds=range(6), lr=None, more=()):
    """Return a study. ``arms`` maps names to `Planted` or to a function of the seed; ``more`` has further runs."""
    runs = [
        ({"arm": arm, "seed": seed}, planted(seed) if callable(planted) else planted, {"optim.eps": arm})
        for arm, planted in arms.items()
        for seed in seeds
    ]
    grid = {"arms": {arm: {"set": {"optim.eps": arm}} for arm in arms}, "claims": [*claims, POSITIVE]}
    if lr:
        grid["lr"] = lr
    return load_study(write_grid(tmp_path / "made", grid, [*runs, *more]))


def one(*args, **kwargs):
    return judge(study(*args, **kwargs))[0]


def passed(verdict):
    return {control.name: control.passed for control in verdict.checks}


# Equivalence ---------------------------------------------------------------------------------------------------

SAME = BASIC | {"test": "equivalence"}


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.0, "reproduced"), (1.15, "inconclusive"), (1.6, "contradicted"), (1 / 1.6, "contradicted")],
)
def test_no_difference_takes_two_sides(tmp_path, ratio, verdict):
    found = one(tmp_path, {"a": Planted(10 * ratio), "b": Planted(10)}, [SAME])
    assert found.verdict == verdict


def test_its_p_value_is_that_of_two_one_sided_tests(tmp_path):
    found = one(tmp_path, {"a": Planted(11), "b": Planted(10)}, [SAME])
    spread = 0.12 * np.array([-1, 0, 1, -1, 0, 1])
    a, b = math.log(11) + spread, math.log(10) + spread
    sides = [
        stats.ttest_ind(a + 0.2, b, alternative="greater").pvalue,
        stats.ttest_ind(a - 0.2, b, alternative="less").pvalue,
    ]
    assert found.p == pytest.approx(2 * max(sides), rel=1e-3)
    # The difference is not significant, but the interval does not exclude a difference of min_effect.
    assert stats.ttest_ind(a, b).pvalue > 0.05 and found.verdict == "inconclusive"


def test_no_difference_without_a_positive_control_says_nothing(tmp_path):
    found = one(tmp_path, {"a": Planted(10), "b": Planted(10)}, [SAME | {"positive_control": None}])
    assert found.verdict == "inconclusive" and "without a positive control" in " ".join(found.notes)


def test_no_difference_says_which_delta_its_seeds_are_good_for(tmp_path):
    found = one(tmp_path, {"a": Planted(11.5), "b": Planted(10)}, [SAME])
    error = found.effect.error
    rng, draws = np.random.default_rng(0), 20_000
    means = rng.normal(0, error, draws)
    errors = error * np.sqrt(rng.chisquare(10, draws) / 10)
    inside = np.abs(means) + stats.t.ppf(0.975, 10) * errors < found.detectable
    assert inside.mean() == pytest.approx(0.8, abs=0.02)


def test_failures_make_no_difference_impossible(tmp_path):
    def planted(seed):
        return Planted(10, diverges=150) if seed == 0 else Planted(10)

    found = one(tmp_path, {"a": planted, "b": Planted(10)}, [SAME])
    assert found.verdict == "inconclusive"


# Counts --------------------------------------------------------------------------------------------------------

COUNT = BASIC | {"test": "count", "positive_control": None}


def failing(count):
    return lambda seed: Planted(10, diverges=100) if seed < count else Planted(10)


@pytest.mark.parametrize(
    ("a", "b", "size", "verdict"), [(6, 0, 0.2, "reproduced"), (6, 0, 0.6, "inconclusive"), (4, 1, 0.2, "inconclusive")]
)
def test_more_runs_diverge(tmp_path, a, b, size, verdict):
    found = one(tmp_path, {"a": failing(a), "b": failing(b)}, [COUNT | {"min_effect": size}])
    assert found.verdict == verdict
    assert found.counts == {"a": (a, 6), "b": (b, 6)} and found.medians["a"] == a / 6
    fisher = stats.fisher_exact([[a, 6 - a], [b, 6 - b]])[1]
    assert f"Fisher's exact test: p = {fisher:.2g}" in " ".join(found.notes)


def test_the_test_that_decides_a_count_is_named(tmp_path):
    """Counts of 4 and 0 of 6: the interval excludes 0.02, but Fisher's test does not reject equal shares."""
    found = one(tmp_path, {"a": failing(4), "b": failing(0)}, [COUNT | {"min_effect": 0.02}])
    assert found.verdict == "inconclusive" and found.effect.interval(0.05)[0] > 0.02 and found.effect.fisher > 0.05
    assert "does not reject equal shares" in found.why and "includes" not in found.why


def test_as_many_runs_diverge(tmp_path):
    claim = COUNT | {"min_effect": 0.5, "positive_control": "P"}
    found = one(tmp_path, {"a": failing(0), "b": failing(0)}, [claim], seeds=range(12))
    assert found.verdict == "contradicted"
    assert one(tmp_path / "few", {"a": failing(0), "b": failing(0)}, [claim]).verdict == "inconclusive"


def test_runs_that_reach_a_value_count(tmp_path):
    arms = {"a": Planted(1000), "b": Planted(10)}
    found = one(tmp_path, arms, [COUNT | {"at_least": 500}])
    assert found.verdict == "reproduced" and found.counts["a"] == (6, 6)
    assert one(tmp_path / "without", arms, [COUNT]).counts["a"] == (0, 6)


# Runs without spread or without values ---------------------------------------------------------------------------


@pytest.mark.parametrize(("failed", "why"), [(6, "no spread for an interval"), (5, "The second test disagrees")])
def test_equal_values_in_each_arm_have_no_interval(tmp_path, failed, why):
    """If 6 of 6 runs diverged and 0 of 6, the spread is 0, and the chance of another result is not. With 5 of 6 there
    is an interval above min_effect, but zeros and ones are skewed: such runs need `test: count`."""
    found = one(tmp_path, {"a": failing(failed), "b": failing(0)}, [BASIC | {"metric": "diverged"}])
    assert found.effect.value == pytest.approx(failed / 6) and found.verdict == "inconclusive"
    assert why in " ".join(found.notes) and (found.p < 0.05) == (failed == 5)


# Families of claims ----------------------------------------------------------------------------------------------


def nearby(id, **more):
    return BASIC | {"id": id, **more}


CLOSE = {"a": Planted(10 * math.exp(0.2 + 0.17)), "b": Planted(10)}


@pytest.mark.parametrize(("status", "most"), [("confirmatory", 4), ("exploratory", 5)])
def test_a_claim_among_many_must_be_clearer(tmp_path, status, most):
    alone = one(tmp_path / "alone", CLOSE, [nearby("C", status=status)])
    assert alone.verdict == "reproduced" and 0.01 < alone.p < 0.05
    # The other claims measure something that does not differ between the arms.
    others = [nearby(f"C{i}", status=status, metric="final_loss/text", min_effect=0.01) for i in range(most)]
    found = one(tmp_path / "many", CLOSE, [nearby("C", status=status), *others])
    assert found.verdict == "inconclusive" and found.p == pytest.approx(alone.p)
    record = found.as_record()
    assert record["interval"][0] > 0.2 > record["adjusted"]["interval"][0]
    assert record["adjusted"]["claims"] == most + 1 and record["adjusted"]["p"] > record["p"]


def test_families_are_counted_apart_and_what_was_not_run_counts(tmp_path):
    other = nearby("D", alpha_family="other", metric="final_loss/text", min_effect=0.01)
    assert one(tmp_path / "apart", CLOSE, [nearby("C"), other]).adjusted.claims == 1
    merged = nearby("E", grid="another", metric="final_loss/text", min_effect=0.01)
    assert one(tmp_path / "merged", CLOSE, [nearby("C"), merged]).adjusted.claims == 1
    (tmp_path / "shared").mkdir()
    shared = one(tmp_path / "shared", CLOSE, [nearby("C"), nearby("D", metric="final_excess/text")])
    assert shared.adjusted.claims == 2 and shared.adjusted.alpha == 0.025


def test_the_sign_flip_test_stands_beside_it_from_six_seeds_on(tmp_path):
    def planted(seed):
        return Planted(12 + seed % 4, spread=0)

    found = one(tmp_path, {"a": planted, "b": Planted(10, spread=0)}, [BASIC])
    values = [math.log((12 + s % 4) / 10) - 0.2 for s in range(6)]
    sums = [abs(np.dot(signs, values)) for signs in itertools.product((1, -1), repeat=6)]
    assert found.sign_flip == pytest.approx(np.mean([s >= abs(sum(values)) - 1e-12 for s in sums]))
    few = one(tmp_path / "few", {"a": planted, "b": Planted(10)}, [BASIC], seeds=range(5))
    assert math.isnan(few.sign_flip)


# Controls --------------------------------------------------------------------------------------------------------


def leaning(kind, other):
    return [BASIC | {kind: "N"}, nearby("N", status="exploratory", **other)]


@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_a_failed_manipulation_decides_neither_way(tmp_path, ratio):
    arms = {"a": Planted(10 * ratio), "b": Planted(10), "c": Planted(10), "d": Planted(30)}
    done = leaning("manipulation_check", {"treatment": "d", "control": "b"})
    assert one(tmp_path / "done", arms, done).verdict == ("reproduced" if ratio > 1 else "contradicted")
    failed = leaning("manipulation_check", {"treatment": "c", "control": "b"})
    assert one(tmp_path / "failed", arms, failed).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("registered", "verdict"),
    [({"seeds": 6}, "reproduced"), ({"seeds": 8}, "inconclusive"), ({"seeds": 4}, "inconclusive")],
)
def test_seeds_are_those_that_were_registered(tmp_path, registered, verdict):
    found = one(tmp_path, {"a": Planted(20), "b": Planted(10)}, [BASIC | registered])
    assert found.verdict == verdict
    assert (verdict == "reproduced") != any(note.startswith("Registered for") for note in found.notes)


# Invalid claims --------------------------------------------------------------------------------------------------


def test_seven_confirmatory_claims_are_too_many(tmp_path):
    claims = [nearby(f"C{i}") for i in range(7)]
    with pytest.raises(UserError, match="7 confirmatory claims"):
        study(tmp_path, {"a": Planted(20), "b": Planted(10)}, claims, seeds=(0,))
    claims[-1]["status"] = "exploratory"
    assert len(judge(study(tmp_path / "six", {"a": Planted(20), "b": Planted(10)}, claims, seeds=(0,)))) == 7


REASON = "It would need a larger model, about 8 hours of one GPU"
ABSENT = {"id": "C5", "statement": "a trend over sizes", "not_run": REASON}
PAIR = {"a": Planted(20), "b": Planted(10)}


def test_it_is_not_run_with_its_reason(tmp_path):
    decided, absent = judge(study(tmp_path, PAIR, [BASIC, ABSENT]))
    assert (decided.verdict, absent.verdict) == ("reproduced", "not run")
    assert absent.notes == (f"{REASON}.",) and absent.runs == () and absent.adjusted is None


ARMS = {arm: Planted(logit, spread=0.05) for arm, logit in {"a": 20, "b": 10, "c": 10, "d": 30}.items()}
SHOWS = {"id": "N", "treatment": "d", "control": "b", "min_effect": 0.2, "status": "exploratory"}


@pytest.mark.parametrize(
    "violation",
    [{"treatment": "b", "control": "c"}, {"min_effect": 5.0}, {"treatment": "b", "control": "d"}],
    ids=["no effect", "too small", "the other way"],
)
@pytest.mark.parametrize("use", ["positive_control", "manipulation_check"])
def test_a_claim_that_does_not_show_its_effect_is_no_control(tmp_path, violation, use):
    """C is an equivalence. Its verdict needs its positive control and its manipulation check."""
    same = BASIC | {"treatment": "b", "control": "c", "test": "equivalence", use: "N"}
    shown = one(tmp_path / "shown", ARMS, [same, SHOWS])
    assert shown.verdict == "reproduced" and passed(shown)[f"{use.replace('_', ' ')} N"]
    found = one(tmp_path / "violated", ARMS, [same, SHOWS | violation])
    assert found.verdict == "inconclusive" and not passed(found)[f"{use.replace('_', ' ')} N"]
