"""Each verdict can be reached, and only under its conditions."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmqk.lab.grid.claims import Claim
from mmqk.lab.runs import Run, read_runs
from mmqk.lab.study import Group, compare, load_study, share_history
from mmqk.lab.verdicts.checks import within_bound
from mmqk.lab.verdicts.judge import judge
from mmqk.lab.verdicts.measure import measure, spread_outcomes
from tests.lab.fake_runs import DEMO, Planted, write_demo
from tests.lab.verdicts.test_claims import passed


def verdicts(tmp_path, planted=None, edit=lambda folder: None, **kwargs):
    """Return the verdicts of a planted demo by claim; ``edit`` changes the folders of its runs."""
    folder = write_demo(tmp_path / "demo", planted, **kwargs)
    edit(folder)
    return {verdict.claim.id: verdict for verdict in judge(load_study(folder))}


def claim(number, **fields):
    """Return a change of the grid: set these fields of one of its claims; None removes a field."""

    def change(grid):
        for name, value in fields.items():
            if value is None:
                grid["claims"][number].pop(name)
            else:
                grid["claims"][number][name] = value

    return change


def test_planted_effect_is_reproduced_with_its_numbers(tmp_path):
    found = verdicts(tmp_path)["C2"]
    assert found.verdict == "reproduced"
    assert found.effect.value == pytest.approx(math.log(60 / 8.5))
    assert found.effect.df == 6 and "Standard deviation over seeds by arm: 0.12, 0.12, 0.12; pooled: 0.12" in " ".join(
        found.notes
    )
    half = 2.4469 * 0.12 * math.sqrt(2 / 3)
    assert found.effect.low == pytest.approx(found.effect.value - half, abs=1e-4)
    assert all(passed(found).values()) and len(found.runs) == 6


def test_planted_opposite_with_its_controls_is_contradicted(tmp_path):
    found = verdicts(tmp_path, {"mixed-qk": Planted(120.0)})
    assert found["C2"].verdict == "contradicted"
    assert passed(found["C2"])["positive control P1"]
    found = verdicts(tmp_path / "alone", {"mixed-qk": Planted(120.0)}, change=claim(0, positive_control=None))["C2"]
    assert found.verdict == "inconclusive" and "without a positive control" in found.notes[0]


def test_with_a_failed_positive_control_it_is_inconclusive(tmp_path):
    planted = {"mixed-qk": Planted(120.0), "high-pre": Planted(30.0)}
    found = verdicts(tmp_path, planted)
    assert found["C2"].verdict == "inconclusive"
    assert not passed(found["C2"])["positive control P1"]
    # C2 is the positive control of C10.
    assert found["C10"].verdict == "inconclusive"
    assert not passed(found["C10"])["positive control C2"]


def test_a_failed_positive_control_does_not_take_a_reproduction_away(tmp_path):
    assert verdicts(tmp_path, {"high-pre": Planted(30.0)})["C2"].verdict == "reproduced"


@pytest.mark.parametrize(("direction", "verdict"), [("greater", "contradicted"), ("less", "reproduced")])
def test_direction_is_that_of_the_claim(tmp_path, direction, verdict):
    planted = {"image-off": Planted(200.0)}
    found = verdicts(tmp_path, planted, change=claim(2, direction=direction))["C10"]
    assert found.verdict == verdict
    assert found.as_record()["threshold"] == (0.45 if direction == "greater" else -0.45)


def test_missing_arms_are_not_run(tmp_path):
    found = verdicts(tmp_path, leave_out=("image-off",))
    assert found["C10"].verdict == "not run" and found["C10"].effect is None
    assert found["C2"].verdict == "reproduced"


def test_shown_is_not_decided_and_a_control_is_no_claim(tmp_path):
    made = verdicts(tmp_path)
    found = made["C13"]
    assert "P1" not in made
    assert found.verdict == "inconclusive"
    assert found.notes[0] == "Shown, 1 seed: not decided."
    assert found.medians["high-post"] == pytest.approx(160000 * math.exp(-0.12))


def test_a_modality_that_is_not_trained_need_not_be_learned(tmp_path):
    found = verdicts(tmp_path)["C10"]
    assert passed(found)["both modalities learned"]
    detail = next(c.detail for c in found.checks if c.name == "both modalities learned")
    assert "image is not trained in “image loss off" in detail


def test_an_interrupted_seed_leaves_it_open(tmp_path):
    folder = write_demo(tmp_path / "demo")
    status = folder / "mixed-0000000000" / "seed2" / "status.json"
    status.write_text(json.dumps({"status": "interrupted", "step": 90}))
    found = {v.claim.id: v for v in judge(load_study(folder))}["C2"]
    assert found.verdict == "inconclusive"
    assert found.notes[0] == "2 of 3 planned runs of “mixed, no QK-Norm” finished."
    assert found.effect.n == 2 and len(found.runs) == 5


def test_logits_above_the_bound_decide_nothing(tmp_path):
    folder = write_demo(tmp_path / "demo")
    with open(folder / "mixed-qk-0000000001" / "seed0" / "metrics.jsonl", "a") as file:
        file.write('{"step": 205, "attn_logit_bound/layer00": 4, ')
        file.write('"attn_logit_absmax/text-text/layer00": 5}\n')
    found = {v.claim.id: v for v in judge(load_study(folder))}["C2"]
    assert found.verdict == "inconclusive"
    assert not passed(found)["logits within the QK-Norm bound"]


def test_the_bound_is_checked_of_runs_alone(tmp_path):
    study = load_study(write_demo(tmp_path / "demo"))
    assert within_bound(study.of_arm("mixed")) is None
    # The logit 8 is in the layer with the bound 4 or in the layer with the bound 9. Only finite logits count.
    for layer, within in ((0, False), (1, True)):
        name = tmp_path / f"layer{layer}"
        name.mkdir()
        lines = [
            {"step": 1, "attn_logit_bound/layer00": 4, "attn_logit_bound/layer01": 9}
            | {f"attn_logit_absmax/text-text/layer{layer:02d}": 8},
            {"step": 2, "attn_logit_bound/layer00": 4, "attn_logit_absmax/text-text/layer00": "inf"},
        ]
        (name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert within_bound(read_runs(name)).passed == within
    found = within_bound(study.of_arm("mixed-qk"))
    assert found is not None and found.passed and found.detail == "at most 87 % of the bound"


def test_nan_in_the_treatment_ranks_worst_and_cannot_contradict(tmp_path):
    """A run that ends in NaN counts with the largest logit that was observed, as a lower bound."""
    nan = replace(DEMO["mixed"], nan_from=160)
    found = verdicts(tmp_path / "a", {"mixed": nan})["C2"]
    assert found.verdict == "reproduced"
    assert any("ended without a finite value" in note for note in found.notes)
    found = verdicts(tmp_path / "b", {"mixed": nan, "mixed-qk": Planted(120.0)})["C2"]
    assert found.verdict != "contradicted"
    assert found.effect.value >= 0


def test_nan_in_the_control_cannot_reproduce(tmp_path):
    found = verdicts(tmp_path, {"image-off": replace(DEMO["image-off"], nan_from=60)})["C10"]
    assert found.verdict != "reproduced"
    assert found.effect.value <= 0


def diverge(*places):
    """Return a function that sets the status of these runs (arm, seed) to diverged; their logits stay finite."""

    def change(folder):
        for arm, seed in places:
            (path,) = (p for p in folder.glob(f"{arm}-0*/seed{seed}") if p.parent.name[:-11] == arm)
            record = json.loads((path / "status.json").read_text())
            (path / "status.json").write_text(json.dumps(record | {"status": "diverged"}))

    return change


EVERY_SEED = (0, 1, 2)


def test_a_treatment_that_diverges_early_with_low_logits_is_no_contradiction(tmp_path):
    low = {"mixed": Planted(9.0)}
    assert verdicts(tmp_path / "a", low)["C2"].verdict == "contradicted"
    found = verdicts(tmp_path / "b", low, diverge(("mixed", 0)))["C2"]
    assert found.verdict == "inconclusive"
    assert any("1 run of “mixed, no QK-Norm” diverged" in note for note in found.notes)


def test_both_arms_diverging_decides_nothing(tmp_path):
    both = diverge(*((arm, seed) for arm in ("mixed", "mixed-qk") for seed in EVERY_SEED))
    found = verdicts(tmp_path, None, both)["C2"]
    assert found.verdict == "inconclusive" and found.effect.value == 0


def turned(grid):
    grid["claims"][0] |= {"direction": "less", "treatment": "mixed-qk", "control": "mixed"}


def test_divergence_counts_by_the_direction_of_the_claim(tmp_path):
    """A diverged control supports a claim that QK-Norm lowers the logits, and a diverged treatment does not."""
    assert verdicts(tmp_path / "a", change=turned)["C2"].verdict == "reproduced"
    assert verdicts(tmp_path / "b", None, diverge(("mixed", 1)), change=turned)["C2"].verdict == "reproduced"
    assert verdicts(tmp_path / "c", None, diverge(("mixed-qk", 1)), change=turned)["C2"].verdict == "inconclusive"


def without_probes(arm, seed, status):
    def change(folder):
        (path,) = (p for p in folder.glob(f"{arm}-0*/seed{seed}") if p.parent.name[:-11] == arm)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        kept = [{k: v for k, v in line.items() if "loss" in k or k == "step"} for line in lines]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
        record = json.loads((path / "status.json").read_text())
        (path / "status.json").write_text(json.dumps(record | {"status": status}))

    return change


def test_a_run_that_diverged_before_its_first_probe_ranks_worst(tmp_path):
    found = verdicts(tmp_path, None, without_probes("mixed-qk", 2, "diverged"))["C2"]
    assert found.verdict == "inconclusive" and found.effect.n == 3
    assert found.effect.low < math.log(2)


def test_a_finished_run_without_a_value_leaves_it_open(tmp_path):
    found = verdicts(tmp_path, None, without_probes("mixed-qk", 2, "completed"))["C2"]
    assert found.verdict == "inconclusive" and found.effect.n == 2
    assert found.notes[0] == "Without a value: “mixed, QK-Norm” seed 2."


def test_what_diverged_says_nothing_about_the_spread(tmp_path):
    found = verdicts(tmp_path, None, diverge(("mixed", 0), ("mixed", 1)))["C2"]
    assert "mixed" not in found.notes[-1] and "Standard deviation over seeds by arm: 0.12, 0.12;" in " ".join(
        found.notes
    )


def test_a_positive_control_that_ends_in_nan_counts_as_what_was_seen(tmp_path):
    quiet = replace(DEMO["high-pre"], logit=30.0, nan_from=120)
    planted = {"mixed-qk": Planted(120.0), "high-pre": quiet}
    assert not passed(verdicts(tmp_path / "a", planted)["C2"])["positive control P1"]
    planted["high-pre"] = replace(DEMO["high-pre"], nan_from=120)
    assert passed(verdicts(tmp_path / "b", planted)["C2"])["positive control P1"]


def test_power_counts_from_the_smallest_effect_of_interest(tmp_path):
    """The interval must exclude min_effect, not 0. The power is simulated with the spread of these seeds."""
    found = verdicts(tmp_path, {"image-off": Planted(60 / math.exp(0.5))})["C10"]
    assert found.verdict == "inconclusive" and "includes the smallest effect" in found.notes[0]
    needed = found.claim.min_effect + found.effect.beyond(0.05)
    assert found.detectable == pytest.approx(needed)
    rng, draws, half = np.random.default_rng(1), 4000, found.effect.high - found.effect.value

    def power(effect):
        sd = np.sqrt(0.12**2 * rng.chisquare(6, draws) / 6)
        means = rng.normal(effect, 0.12 * math.sqrt(2 / 3), draws)
        return np.mean(means - half / 0.12 * sd > found.claim.min_effect)

    assert power(needed) == pytest.approx(0.8, abs=0.04)
    assert power(found.effect.beyond(0.05)) < 0.2


def test_no_difference_is_no_positive_control(tmp_path):
    """C2 is the positive control of C10: first C2 claims an effect, then an equivalence that is reproduced."""
    assert verdicts(tmp_path / "effect")["C10"].verdict == "contradicted"

    def change(grid):
        grid["claims"][0] |= {"test": "equivalence"}

    found = verdicts(tmp_path / "equal", {"mixed-qk": Planted(60.0)}, change=change)
    assert found["C2"].verdict == "reproduced"
    assert not passed(found["C10"])["positive control C2"] and found["C10"].verdict == "inconclusive"


def test_runs_that_were_not_measured_do_not_count_as_not_reached(tmp_path):
    def change(grid):
        grid["claims"][0] |= {"test": "count", "at_least": 40.0, "min_effect": 0.05}

    seeds = tuple(range(6))
    study = load_study(write_demo(tmp_path / "demo", seeds=seeds, change=change))
    found = judge(study)[0]
    assert found.counts == {"mixed": (6, 6), "mixed-qk": (0, 6)} and found.verdict == "reproduced"
    for path in (tmp_path / "demo").glob("mixed-qk*/seed*/metrics.jsonl"):
        path.write_text(path.read_text().replace("attn_logit_absmax", "attn_logit_other"))
    found = judge(load_study(tmp_path / "demo"))[0]
    assert found.verdict == "inconclusive"
    assert found.open == "Without a value: “mixed, QK-Norm” seed 0, “mixed, QK-Norm” seed 1 and 4 more."


@pytest.mark.parametrize(("forked", "arms"), [(False, 5), (True, 3)])
def test_forks_of_one_run_give_the_spread_once(tmp_path, forked, arms):
    """Forks of one run count once, because each fork would otherwise add degrees of freedom without a new seed."""
    study = load_study(write_demo(tmp_path / "demo", {"late": Planted(60.0), "later": Planted(60.0)}))
    parents = {run.seed: run.name for run in study.runs if run.arm == "mixed"}
    for run in study.runs:
        if forked and run.arm.startswith("late"):
            run.fork = {"parent": parents[run.seed], "step": 100}
    of_logits = Claim("T", "", metric="largest_attention_logit", treatment="mixed", control="mixed-qk")
    compared = compare(study, of_logits)
    spread = spread_outcomes(compared, measure(compared.groups, of_logits.metric))
    assert len(spread) == arms and math.isfinite(sum(map(sum, spread.values())))


# Forks of one run ----------------------------------------------------------------------------------------------------

CHECKPOINT = {"parent": "plain-0/seed{seed}", "step": 250}


def group(name, forks):
    """Return a group with one run per seed; ``forks`` has the parent and the step of each run, or None."""
    runs = {}
    for seed, fork in forks.items():
        fork = fork and {**fork, "parent": fork["parent"].format(seed=seed)}
        runs[seed] = (Run(Path(name), f"{name}-0/seed{seed}", name, seed, fork=fork),)
    return Group(name, (), runs, len(runs))


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
