"""Sentences of a page have the right number of digits and the right direction, and are true for the runs."""

import dataclasses
import math
import re
import shutil

import pytest

from mmqk.lab import judge, load_study
from mmqk.lab.formatting import decimals, fixed
from mmqk.lab.page.figures.captions import LOGIT, at_end, hero_reading
from mmqk.lab.page.figures.claims import claim_figure
from mmqk.lab.page.figures.sweep_figures import lr_sensitivity
from mmqk.lab.page.findings import cannot_tell, effect_in_cell, finding, headline
from mmqk.lab.page.page import page_content
from mmqk.lab.page.render import css, render
from mmqk.lab.page.run_table import tokens, totals
from mmqk.lab.page.tables import outcome_rows
from mmqk.lab.verdicts.findings import read
from mmqk.lab.verdicts.verdicts import effect_tested
from mmqk.store import UserError
from tests.analysis.fake_runs import Planted, write_demo
from tests.report.report_runs import RATES, write_forks, write_sweep

WORDS = {
    v: "Text: {size} more ({low} to {high}, n = {n})." for v in ("reproduced", "inconclusive", "contradicted")
}


def text_loss(**fields):
    """Return a function that makes C2 a claim about the text loss and sets further fields."""

    def change(grid):
        grid["claims"][0] |= {
            "metric": "final_loss/text",
            "min_effect": 0.05,
            "positive_control": None,
        } | fields

    return change


def of_claim(tmp_path, planted=None, **kwargs):
    study = load_study(write_demo(tmp_path / "demo", planted, **kwargs))
    return study, {verdict.claim.id: verdict for verdict in judge(study)}


@pytest.mark.parametrize(
    ("error", "value", "shown"),
    # Examples of the Review of Particle Physics: 0.827 ± 0.119 is printed as 0.83 ± 0.12, and 0.827 ± 0.367 as 0.8 ±
    # 0.4.
    [(0.119, 0.827, "0.83"), (0.367, 0.827, "0.8"), (0.0096, 0.0384, "0.038"), (12.0, 463.2, "463"),
     (52.0, 463.2, "460"), (0.1, -0.001, "0.00")],
)  # fmt: skip
def test_digits_are_those_of_the_error(error, value, shown):
    assert fixed(value, decimals(error)) == shown


def with_effect(verdict, value, half, df=2.0):
    """Return the verdict with this effect, whose 95 % interval extends by ``half`` to each side."""
    effect = verdict.effect
    scale = half / (effect.high - effect.value)
    made = dataclasses.replace(effect, value=value, error=effect.error * scale)
    return dataclasses.replace(verdict, effect=made)


def test_an_effect_is_rounded_like_its_interval_and_named_by_modality(tmp_path):
    study, found = of_claim(tmp_path, change=text_loss())
    sentence = finding(study, with_effect(found["C2"], 0.0650875, 0.1014508))
    assert "The final loss (text) ended 0.07 nats higher in" in sentence
    assert "95 % interval -0.04 to 0.17 nats" in sentence
    cell = effect_in_cell(with_effect(found["C2"], 0.0650875, 0.1014508))
    assert cell == "+0.07 (-0.04 to +0.17) nats, n = 3"


def test_size_and_interval_look_the_same_way(tmp_path):
    study, found = of_claim(tmp_path, change=text_loss())
    sentence = finding(study, with_effect(found["C2"], -0.0384154, 0.0095518))
    assert "ended 0.038 nats lower in" in sentence and "0.029 to 0.048 nats" in sentence
    assert "-0." not in sentence


@pytest.mark.parametrize(
    ("direction", "value", "size"),
    [("greater", -0.3, "-0.30"), ("greater", 0.3, "0.30"), ("less", -0.3, "0.30")],
)
def test_a_size_in_the_grids_words_has_the_sign_of_the_claim(tmp_path, direction, value, size):
    """In a sentence such as "{size} higher", the size is negative if the effect has the opposite direction."""
    study, found = of_claim(tmp_path, change=text_loss(finding=WORDS, direction=direction))
    sentence = finding(study, with_effect(found["C2"], value, 0.2))
    assert f"Text: {size} nats more" in sentence


def test_without_an_interval_the_grids_words_are_not_used(tmp_path):
    study, found = of_claim(tmp_path, change=text_loss(finding=WORDS), seeds=(0,))
    sentence = finding(study, found["C2"])
    assert not found["C2"].effect.has_interval
    assert "nan" not in sentence and "not measured" not in sentence
    assert "1 seed, no interval" in sentence and sentence.endswith("does not decide claim C2.")
    assert found["C2"].why == "Too few seeds for an interval."
    study, found = of_claim(tmp_path / "three", change=text_loss(finding=WORDS))
    assert finding(study, found["C2"]).startswith("Text:")


def test_runs_that_failed_and_runs_that_lack_are_said_in_the_sentence(tmp_path):
    study, found = of_claim(tmp_path, {"mixed": Planted(60.0, diverges=150)})
    assert found["C2"].bounds == 3
    assert "a bound, because 3 failed runs count with the worst value seen" in finding(study, found["C2"])
    assert "bound" not in finding(study, of_claim(tmp_path / "fine")[1]["C2"])
    folder = write_demo(tmp_path / "cut")
    shutil.rmtree(next(folder.glob("mixed-0000000000/seed2")))
    study = load_study(folder)
    assert judge(study)[0].why == "2 of 3 planned runs of “mixed, no QK-Norm” finished."


def test_the_caption_of_a_claim_that_was_not_run_has_no_word_on_its_verdict(tmp_path):
    study, found = of_claim(tmp_path, leave_out=("mixed-qk",))
    assert found["C2"].verdict == "not run"
    caption = claim_figure(study, found["C2"]).caption
    assert caption.startswith("The 3 finished runs of the arms of this claim. ")
    assert "verdict" not in caption and "Numbers above" not in caption
    study, found = of_claim(tmp_path / "whole")
    caption = claim_figure(study, found["C2"]).caption
    assert caption.startswith("The 6 runs that the verdict counts. ")
    assert "Numbers above are medians over runs." in caption


def test_exploratory_findings_are_called_so(tmp_path):
    study, found = of_claim(tmp_path, change=lambda grid: grid["claims"][0].update(status="exploratory"))
    assert headline(study, list(found.values())).startswith("Exploratory: ")
    study, found = of_claim(tmp_path / "confirmatory")
    assert "Exploratory" not in headline(study, list(found.values()))


def test_what_was_not_measured_is_not_called_shown(tmp_path):
    nan = {arm: Planted(60.0, nan_from=None) for arm in ("mixed", "mixed-qk")}
    folder = write_demo(tmp_path / "demo", nan)
    for path in folder.glob("*/seed*/metrics.jsonl"):
        path.write_text(path.read_text().replace("attn_logit_absmax", "attn_logit_other"))
    study = load_study(folder)
    found = judge(study)
    assert finding(study, found[0]).startswith(
        "Claim C2 is inconclusive: without a value: “mixed, no QK-Norm” seed 0,"
    )
    assert finding(study, found[0]).endswith("and 4 more.")
    assert hero_reading(study, ("mixed", "mixed-qk")).startswith("Attention logits were not measured")


def test_words_of_a_grid_that_name_what_is_not_there_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"claim C2: finding\.reproduced may contain \{ratio\}"):
        of_claim(tmp_path, change=text_loss(finding={"reproduced": "{effect} more"}))


def test_a_run_that_is_going_on_has_not_ended(tmp_path):
    folder = write_demo(tmp_path / "demo")
    study = load_study(folder)
    finished = at_end(study, "mixed", LOGIT)
    path = folder / "mixed-0000000000/seed2/status.json"
    path.write_text(path.read_text().replace("completed", "running"))
    values = [LOGIT(run, None) for run in load_study(folder).of_arm("mixed")]
    assert finished == pytest.approx(sorted(values)[1])
    assert at_end(load_study(folder), "mixed", LOGIT) == pytest.approx((values[0] + values[1]) / 2)
    assert hero_reading(load_study(folder), ("mixed",)).startswith("The largest attention logit ended at")
    for path in folder.glob("mixed-0000000000/seed*/status.json"):
        path.write_text(path.read_text().replace("completed", "running"))
    reading = hero_reading(load_study(folder), ("mixed",))
    assert reading.startswith("The largest attention logit was last at 60.0 (mixed, no QK-Norm)")


def test_forks_cost_what_they_read_themselves(tmp_path):
    study = load_study(write_forks(tmp_path / "forks"))
    read = {run.name: tokens(run) for run in study.runs}
    # A step has 8 sequences of 128 tokens. `plain` trains 100 steps, `late` 60 from step 40, `hot` 20 from step 70.
    assert (read["plain"], read["late"], read["hot"]) == (102_400, 61_440, 20_480)
    assert f"{round(sum(read.values()) / 1000)}k tokens" in totals(study)


def test_without_claims_a_page_says_that_nothing_is_decided(tmp_path):
    study = load_study(write_forks(tmp_path / "forks"))
    assert any("no claim was registered for these runs" in item for item in cannot_tell(study, []))
    study, found = of_claim(tmp_path)
    assert not any("no claim was registered" in item for item in cannot_tell(study, list(found.values())))


def test_a_family_without_all_its_points_has_no_number_anywhere(tmp_path):
    """Neither the table nor the figure of a claim shows values that the verdict does not use."""
    folder = write_sweep(tmp_path / "sweep", widths=(64,))

    def shown():
        study = load_study(folder)
        rows = outcome_rows(study, judge(study)[0])[1]
        cells = {
            row["label"]: [cell[0]["text"] for cell in row["cells"]] for row in rows if cell_is_family(row)
        }
        points = lr_sensitivity(study, ["plain"], "")
        [panel] = [p for p in points.rows[0] if p.statistic.startswith("lr_sensitivity")]
        return cells["no QK-Norm: first unstable learning rate"], len(panel.lines)

    def cell_is_family(row):
        return row["cells"][0][0]["anchor"] == ""

    assert "not measured" not in shown()[0] and shown()[1] == 2  # the median and the two seeds
    gone = next(folder.glob(f"plain-lr{RATES[1]}-*/seed1"))
    shutil.rmtree(gone)
    cells, lines = shown()
    assert cells[1] == "not measured" and cells[0] != "not measured" and lines == 1
    assert math.isfinite(float(cells[0]))


# What a claim tests, and why a verdict is missing ------------------------------------------------------------------


def content_of(folder):
    return page_content(read(folder))


def lower_rate(direction):
    """Return a change of the grid that claims: the treatment lowers the final image loss by 0.1 nat."""
    claim = {"statement": "a tenth of the learning rate lowers the final image loss", "metric": "final_loss/image",
             "treatment": "mixed", "control": "mixed-qk", "min_effect": 0.1}  # fmt: skip
    return lambda grid: grid["claims"][0].update(claim, direction=direction)


@pytest.mark.parametrize(
    ("direction", "verdict", "tested"),
    [("less", "contradicted", "at least 0.1 nats lower"), ("greater", "reproduced", "at least 0.1 nats higher")],
)
def test_the_opposite_of_a_claim_is_not_its_reproduction(tmp_path, direction, verdict, tested):
    """The image loss of the treatment ends 0.17 nats higher. If the claim says "lowers", the runs contradict it; the
    control, which asks for a rise, shows what was tested wherever the verdict is printed."""
    planted = {"mixed": Planted(60.0, {"text": 3.4, "image": 4.77}), "mixed-qk": Planted(8.5)}
    folder = write_demo(tmp_path / "demo", planted, change=lower_rate(direction))
    content = content_of(folder)
    row = content["verdicts"][0]
    assert row["verdict"] == verdict and row["tested"] == tested and row["effect"].startswith("+0.17")
    for name in ("index.html", "report.md"):
        assert f"{tested} in “mixed, no QK-Norm”" in render(name, content | {"css": css()})
    assert judge(load_study(folder))[0].as_record()["tested"] == tested


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "at least ×1.99"),
        ({"direction": "less"}, "at most ×0.502"),
        ({"test": "equivalence"}, "from ×0.502 to ×1.99"),
        ({"metric": "final_loss/text", "test": "equivalence"}, "less than 0.69 nats apart"),
        ({"test": "count"}, "at least 0.69 of the runs more"),
        ({"metric": "time_of_divergence", "direction": "less"}, "at least 0.69 of the run lower"),
        ({"status": "shown"}, ""),
    ],
)
def test_what_is_tested_is_in_the_unit_of_the_metric(tmp_path, change, words):
    study = load_study(write_demo(tmp_path / "demo", change=lambda grid: grid["claims"][0].update(change)))
    assert effect_tested(study.claims[0]) == words


def test_a_shown_claim_has_no_verdict_on_the_page(tmp_path):
    content = content_of(write_demo(tmp_path / "demo"))
    rows = {row["id"]: row for row in content["verdicts"]}
    assert rows["C13"]["verdict"] == "shown" and rows["C2"]["verdict"] == "reproduced"
    assert dict((badge, n) for badge, _, n in content["page"]["counts"]) == {
        "reproduced": 1, "contradicted": 1, "shown": 1,
    }  # fmt: skip
    for name in ("index.html", "report.md"):
        text = render(name, content | {"css": "", "scripts": ""})
        assert "inconclusive" not in text and ("shown" in text)


def test_a_verdict_that_a_check_took_away_names_the_check(tmp_path):
    """Both effects are far from the smallest effect of interest; one interval includes it."""
    changes = {
        "check": ({"mixed-qk": Planted(8.5, {"text": 3.4, "image": 6.29})}, "Failed checks: both modalities learned"),
        "interval": ({"mixed-qk": Planted(30.0)}, "The interval includes the smallest effect of interest"),
        "nothing": ({}, ""),
    }
    for name, (planted, why) in changes.items():
        content = content_of(write_demo(tmp_path / name, planted))
        row = content["verdicts"][0]
        assert row["why"] == why and (row["verdict"] == "inconclusive") == bool(why)
        for template in ("index.html", "report.md"):
            assert not why or render(template, content | {"css": css()}).count(why) >= 1
        # A failed check makes the adjusted p-value 1; it stands beside the raw one.
        assert row["p"].get("adjusted p") == ("1" if name == "check" else None)


def test_only_measured_numbers_are_links_and_never_those_of_an_arm(tmp_path):
    def rename(grid):
        for arm, value in grid["arms"].items():
            value["label"] = f"learning rate 0.0375, {arm}"

    content = content_of(write_demo(tmp_path / "demo", change=rename))
    page = render("index.html", content | {"css": css()})
    links = re.findall(r'<a class="n" href="[^"]*">([^<]*)</a>', page)
    assert "60.0" in links and "0.0375" not in links
    assert page.count("0.0375") > 10
