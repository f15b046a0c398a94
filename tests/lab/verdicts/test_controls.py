"""A verdict requires runs that learned, arms that differ as declared, and enough seeds, unless its claim turns a
check off with a reason."""

import copy
import json
from dataclasses import replace

import pytest

from mmqk.lab.study import load_study
from mmqk.lab.verdicts.judge import judge
from tests.lab.fake_runs import BASE, DEMO, Planted, write_demo, write_grid
from tests.lab.verdicts.test_claims import BASIC, POSITIVE

UNLEARNED = {"text": 5.58, "image": 5.48}
NOTHING = {arm: replace(DEMO[arm], loss=UNLEARNED) for arm in ("mixed", "mixed-qk")}
LEARNED, DECLARED, SEEDS = "modalities learned", "arms differ only as declared", "enough seeds"


def plain(**fields):
    """Return a change of the grid that sets these fields of C2 and removes its `regime`, which would rename the check
    "modalities learned" and forbid `unchecked.learned`."""

    def change(grid):
        grid["claims"][0].pop("regime")
        grid["claims"][0] |= fields

    return change


def verdict(folder, planted=None, edit=None, **kwargs):
    runs = write_demo(folder / "demo", planted, **kwargs)
    if edit is not None:
        edit(runs)
    return judge(load_study(runs))[0]


def check(found, name):
    return next(control for control in found.checks if control.name == name)


def test_runs_of_which_learning_is_not_known_decide_nothing(tmp_path):
    def without_losses(runs):
        for path in runs.glob("mixed*/seed*/metrics.jsonl"):
            path.write_text(path.read_text().replace('"loss/', '"lost/'))

    found = verdict(tmp_path, edit=without_losses, change=plain())
    assert found.verdict == "inconclusive"
    assert "no trained modality has a loss in 3 of 3 runs of “mixed, QK-Norm”" in check(found, LEARNED).detail


def test_arms_that_do_not_differ_decide_nothing(tmp_path):
    def alike(runs):
        for path in runs.glob("mixed*/seed*/run.json"):
            record = json.loads(path.read_text())
            record["identity"] = copy.deepcopy(BASE) | {"seed": record["identity"]["seed"]}
            path.write_text(json.dumps(record))

    found = verdict(tmp_path, edit=alike, change=plain())
    assert found.verdict == "inconclusive" and check(found, DECLARED).detail == "they differ in nothing"


def test_a_run_of_which_nothing_is_recorded_decides_nothing(tmp_path):
    def lost(runs):
        next(runs.glob("mixed-qk*/seed1/run.json")).unlink()

    found = verdict(tmp_path, edit=lost, change=plain())
    assert found.verdict == "inconclusive" and not check(found, DECLARED).passed
    assert not verdict(tmp_path / "whole", change=plain()).open


def another_rate(runs):
    for path in runs.glob("mixed-0*/seed*/run.json"):
        record = json.loads(path.read_text())
        record["identity"]["optim"]["lr"] = 0.03
        path.write_text(json.dumps(record))


ALARMS = {"checkpoint": [], "probe": [], "stop": [], "probe_steps": 20}
LARGE, SMALL = ({"vocab_sizes": {"text": size}} for size in (9, 7))
DIAL = {"data": {"dial": {"modalities": ["text", "image"]}}}
PAIRS = {"data": {"tokenizers": "t1", "pairs": "a1", "mix": {"pair": 1.0}, "image_first_prob": 0.5}, "model": LARGE}
TEXT = {"data": {"tokenizers": "t1", "pairs": "", "mix": {"text": 1.0}, "image_first_prob": 0.0}, "model": SMALL}


@pytest.mark.parametrize(
    ("treatment", "control", "named"),
    [
        # Only the mixture is named, not the fields that follow from it.
        (PAIRS, TEXT, "they also differ in data.mix.pair, data.mix.text"),
        (PAIRS, {**PAIRS, "data": {**PAIRS["data"], "pairs": "b2"}}, "they also differ in data.pairs"),
        (PAIRS, {**PAIRS, "model": SMALL}, "they also differ in model.vocab_sizes.text"),
        (PAIRS, {"data": {**PAIRS["data"], "tokenizers": ""}, "model": SMALL}, None),
        (DIAL, {"data": {"dial": {"modalities": ["image", "text"]}}}, "they also differ in data.dial.modalities"),
        # Of the alarms only the action is named that one arm has.
        ({"alarm": ALARMS | {"stop_diverged": False}}, {}, "they also differ in alarm.stop_diverged"),
        ({"alarm": ALARMS}, {}, None),
    ],
)
def test_a_source_that_only_one_arm_reads_follows_from_the_mixture(tmp_path, treatment, control, named):
    def edit(runs):
        for arm, identity in (("mixed-0*", treatment), ("mixed-qk*", control)):
            for path in runs.glob(f"{arm}/seed*/run.json"):
                record = json.loads(path.read_text())
                for section, fields in identity.items():
                    record["identity"].setdefault(section, {}).update(fields)
                path.write_text(json.dumps(record))

    found = check(verdict(tmp_path, edit=edit, change=plain()), DECLARED)
    assert found.passed == (named is None) and found.detail.endswith(named or "model.qk_norm.kind")


TURNED_OFF = {
    "learned": (LEARNED, {"planted": NOTHING}, "text was not learned in 3 of 3 runs of “mixed, no QK-Norm”"),
    "declared": (DECLARED, {"edit": another_rate}, "they also differ in optim.lr"),
    "seeds": (SEEDS, {"seeds": (0, 1)}, "2 seeds per arm; a verdict needs 3"),
}


@pytest.mark.parametrize("name", TURNED_OFF)
def test_a_check_is_turned_off_by_name_with_a_reason(tmp_path, name):
    called, how, why = TURNED_OFF[name]
    on = verdict(tmp_path / "on", change=plain(), **how)
    assert on.verdict == "inconclusive" and not check(on, called).passed and why in check(on, called).detail
    other = next(key for key in TURNED_OFF if key != name)
    assert verdict(tmp_path / "other", change=plain(unchecked={other: "so"}), **how).verdict == "inconclusive"
    reason = "the only question is what <one> step does"
    found = verdict(tmp_path / "off", change=plain(unchecked={name: reason}), **how)
    assert found.verdict == "reproduced" and called not in [control.name for control in found.checks]
    note = f"Not checked: “{called}” ({reason})."
    assert note in found.notes and note in found.as_record()["note"]


@pytest.mark.parametrize(("metric", "passed"), [("lr_sensitivity/text", True), ("final_loss/text", False)])
def test_what_is_about_learning_rates_may_have_some_at_which_nothing_is_learned(tmp_path, metric, passed):
    """For a metric of learning rates, each seed must have learned at one or more learning rates; for any other
    metric, every run must have learned."""

    def sweep(folder, losses):
        runs = []
        for arm, qk in (("a", "none"), ("b", "rms")):
            for rate, loss in zip((0.01, 0.1), losses, strict=True):
                point = {"optim.lr": rate}
                entry = {"arm": f"{arm}-lr{rate}", "family": arm, "point": point}
                settings = {"model.qk_norm.kind": qk, **point}
                runs += [({**entry, "seed": s}, Planted(10.0, loss), settings) for s in range(3)]
        claim = {"id": "C", "treatment": "a", "control": "b", "min_effect": 0.2, "metric": metric}
        claim |= {} if passed else {"at": {"optim.lr": 0.1}}
        arms = {arm: {"set": {"model.qk_norm.kind": qk}} for arm, qk in (("a", "none"), ("b", "rms"))}
        return judge(load_study(write_grid(folder, {"arms": arms, "claims": [claim]}, runs)))[0]

    learned = {"text": 3.4, "image": 4.6}
    found = check(sweep(tmp_path / "some", (learned, UNLEARNED)), LEARNED)
    assert found.passed == passed
    assert "at some learning rate of every seed" in found.detail or not passed
    found = check(sweep(tmp_path / "nowhere", (UNLEARNED, UNLEARNED)), LEARNED)
    assert not found.passed and "was not learned in 3 of 3" in found.detail
    assert check(sweep(tmp_path / "everywhere", (learned, learned)), LEARNED).passed


@pytest.mark.parametrize("trained", [True, False])
def test_the_spread_of_a_modality_leaves_out_arms_that_do_not_train_it(tmp_path, trained):
    """If an arm measures the image loss but does not train it, the spread of that loss is meaningless."""
    weights = {"loss.weights": {"text": 1.0, "image": 1.0 if trained else 0.0}}
    runs = [
        (
            {"arm": arm, "seed": seed},
            Planted(10, {"text": 3.4, "image": image + (3.0 * (seed % 2) if arm == "off" else 0.0)}),
            weights if arm == "off" else {"optim.eps": arm},
        )
        for arm, image in (("a", 4.9), ("b", 4.5), ("off", 7.0))
        for seed in range(6)
    ]
    arms = {arm: {"set": {"optim.eps": arm}} for arm in ("a", "b")} | {"off": {"set": weights}}
    claim = BASIC | {"metric": "final_loss/image", "min_effect": 0.1, "unchecked": {"learned": "planted losses"}}
    grid = {"arms": arms, "claims": [claim, POSITIVE]}
    found = judge(load_study(write_grid(tmp_path / "made", grid, runs)))[0]
    assert set(found.spread.by_arm) == ({"a", "b", "off"} if trained else {"a", "b"})
    assert found.verdict == ("inconclusive" if trained else "reproduced")
