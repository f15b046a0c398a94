"""What a page says of a claim: digits, signs, what was tested and why a verdict is missing."""

import dataclasses
import shutil

import pytest

from mmqk.lab import judge, load_study
from mmqk.lab.formatting import decimals, fixed
from mmqk.lab.page.sweeps import learning_rates
from mmqk.lab.page.verdicts import cannot_tell, claim_rows
from mmqk.lab.verdicts.words import effect_in_cell, effect_in_words
from tests.lab.fake_runs import Planted, write_demo
from tests.lab.page.report_runs import RATES, write_forks, write_sweep

WORDS = {
    v: "Text: {size} more ({low} to {high}, n = {n})." for v in ("reproduced", "inconclusive", "contradicted")
}


def text_loss(**fields):
    """Return a function that makes C2 a claim about the text loss and sets further fields."""
    change = {"metric": "final_loss/text", "min_effect": 0.05, "positive_control": None} | fields
    return lambda grid: grid["claims"][0].update(change)


def of_claim(tmp_path, planted=None, **kwargs):
    study = load_study(write_demo(tmp_path / "demo", planted, **kwargs))
    return study, {verdict.claim.id: verdict for verdict in judge(study)}


def row_of(study, found, id="C2"):
    return next(row for row in claim_rows(study, list(found.values())) if row["id"] == id)


@pytest.mark.parametrize(
    ("error", "value", "shown"),
    # Examples of the Review of Particle Physics: 0.827 ± 0.119 is printed as 0.83 ± 0.12, and 0.827 ± 0.367 as 0.8 ±
    # 0.4.
    [(0.119, 0.827, "0.83"), (0.367, 0.827, "0.8"), (0.0096, 0.0384, "0.038"), (12.0, 463.2, "463"),
     (52.0, 463.2, "460"), (0.1, -0.001, "0.00")],
)  # fmt: skip
def test_digits_are_those_of_the_error(error, value, shown):
    assert fixed(value, decimals(error)) == shown


def with_effect(verdict, value, half):
    """Return the verdict with this effect, whose 95 % interval extends by ``half`` to each side."""
    effect = verdict.effect
    scale = half / (effect.high - effect.value)
    return dataclasses.replace(verdict, effect=dataclasses.replace(effect, value=value, error=effect.error * scale))


def cell_of(verdict):
    return effect_in_cell(verdict.claim, verdict.effect, verdict.bounds)


def test_an_effect_is_rounded_like_its_interval(tmp_path):
    _, found = of_claim(tmp_path, change=text_loss())
    cell = cell_of(with_effect(found["C2"], 0.0650875, 0.1014508))
    assert cell == "+0.07 (-0.04 to +0.17) nats, n = 3"
    cell = cell_of(with_effect(found["C2"], -0.0384154, 0.0095518))
    assert cell == "-0.038 (-0.048 to -0.029) nats, n = 3"


@pytest.mark.parametrize(
    ("direction", "value", "size"),
    [("greater", -0.3, "-0.30"), ("greater", 0.3, "0.30"), ("less", -0.3, "0.30")],
)
def test_a_size_in_the_grids_words_has_the_sign_of_the_claim(tmp_path, direction, value, size):
    """In a sentence such as "{size} higher", the size is negative if the effect has the opposite direction."""
    _, found = of_claim(tmp_path, change=text_loss(finding=WORDS, direction=direction))
    assert effect_in_words(found["C2"].claim, with_effect(found["C2"], value, 0.2).effect)["size"] == f"{size} nats"


def test_what_cannot_be_told_is_that_of_the_runs(tmp_path):
    study, found = of_claim(tmp_path, leave_out=("image-off",))
    items = cannot_tell(study, list(found.values()))
    assert items[0] == ("", "Anything about size: these are toy models on icon art.")
    kinds = dict(items[1:])
    assert kinds["Runs that have not started"] == "3"
    assert kinds["Shown without a verdict, from a few runs and without an interval"] == "C13"
    assert kinds["One learning rate, not tuned for each arm"] == "0.01"
    assert "C2: weaker than a factor of" in kinds["Effects with less than 80 % power"]
    bare = "No claim was registered, so no difference has a verdict"
    assert bare not in kinds and bare in dict(cannot_tell(load_study(write_forks(tmp_path / "forks")), []))


def test_a_family_without_all_its_points_has_no_number_anywhere(tmp_path):
    """Neither the table nor the figure of a claim shows values that the verdict does not use."""
    folder = write_sweep(tmp_path / "sweep", widths=(64,))

    def shown():
        study = load_study(folder)
        [row] = claim_rows(study, judge(study)[:1])
        cells = {name.text: [cell.text for cell in rest] for name, *rest in row["values"].rows}
        panel = next(p for p in learning_rates(study).rows[-1] if p.statistic.startswith("lr_sensitivity"))
        points = [line for line in panel.lines if line.marker and line.group == "no QK-Norm"]
        return cells["no QK-Norm"], sum(len(line.x) for line in points)

    assert "not measured" not in shown()[0] and shown()[1] == 2
    shutil.rmtree(next(folder.glob(f"plain-lr{RATES[1]}-*/seed1")))
    cells, points = shown()
    assert cells[1] == "not measured" and float(cells[0]) > 0 and points == 1


@pytest.mark.parametrize(
    ("direction", "verdict", "tested"),
    [("less", "contradicted", "at least 0.1 nats lower"), ("greater", "reproduced", "at least 0.1 nats higher")],
)
def test_the_opposite_of_a_claim_is_not_its_reproduction(tmp_path, direction, verdict, tested):
    """The image loss of the treatment ends 0.17 nats higher. If the claim says "lowers", the runs contradict it; the
    control, which asks for a rise, shows what was tested wherever the verdict is printed."""
    claim = {"statement": "a tenth of the learning rate lowers the final image loss", "metric": "final_loss/image",
             "treatment": "mixed", "control": "mixed-qk", "min_effect": 0.1, "direction": direction}  # fmt: skip
    planted = {"mixed": Planted(60.0, {"text": 3.4, "image": 4.77}), "mixed-qk": Planted(8.5)}
    study, found = of_claim(tmp_path, planted, change=lambda grid: grid["claims"][0].update(claim))
    row = row_of(study, found)
    assert row["verdict"] == verdict and row["tested"].startswith(tested) and row["effect"].startswith("+0.17")
    assert found["C2"].as_record()["tested"] == tested


def test_a_verdict_that_a_check_took_away_names_the_check(tmp_path):
    """Both effects are far from the smallest effect of interest; one interval includes it."""
    changes = {
        "check": ({"mixed-qk": Planted(8.5, {"text": 3.4, "image": 6.29})}, "Failed checks: both modalities learned"),
        "interval": ({"mixed-qk": Planted(30.0)}, "The interval includes the smallest effect of interest"),
        "nothing": ({}, ""),
    }
    for name, (planted, why) in changes.items():
        row = row_of(*of_claim(tmp_path / name, planted))
        assert row["why"] == why and (row["verdict"] == "inconclusive") == bool(why)
        # A failed check makes the adjusted p-value 1; it stands beside the raw one.
        assert row["p"].get("adjusted p") == ("1" if name == "check" else None)
