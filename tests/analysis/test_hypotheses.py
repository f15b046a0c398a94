"""Test hypotheses: which states an interval leaves possible, and whether the claims together support a hypothesis."""

from dataclasses import replace
from itertools import product

import pytest

from mmqk.lab import judge, load_study
from mmqk.lab.grid.claims import claims_hash
from mmqk.lab.grid.hypotheses import PREDICTIONS, read_hypotheses
from mmqk.lab.page.page import write_report
from mmqk.lab.stats.effects import Effect
from mmqk.lab.verdicts.controls import Control
from mmqk.lab.verdicts.hypotheses import patterns, possible_states, prediction_verdict
from mmqk.store import UserError
from tests.analysis.fake_runs import Planted, write_grid

ALIKE = {"declared": "planted numbers"}
SIZE = 0.2231


def study_of(folder, logits, hypotheses, seeds=6, spread=0.05):
    """Return a study with planted runs. ``logits`` has the largest attention logit of each arm. Each arm after the
    first has a claim that compares it with the first arm."""
    names = list(logits)
    runs = [
        ({"arm": arm, "seed": seed}, Planted(logit, spread=spread), {})
        for arm, logit in logits.items()
        for seed in range(seeds)
    ]
    every = {"control": names[0], "min_effect": SIZE, "status": "exploratory", "unchecked": ALIKE}
    claims = [{"id": arm, "treatment": arm, **every} for arm in names[1:]]
    grid = {"arms": {arm: {} for arm in names}, "claims": claims, "hypotheses": hypotheses}
    return load_study(write_grid(folder, grid, runs))


def test_the_pattern_of_planted_effects(tmp_path):
    study = study_of(
        tmp_path,
        {"base": 20.0, "up": 60.0, "same": 20.0, "down": 8.0},
        [
            {"id": "right", "predicts": {"up": "above", "same": "none", "down": "not above"}},
            {"id": "wrong", "predicts": {"up": "above", "same": "above"}},
        ],
    )
    right, wrong = patterns(study, judge(study))
    assert right.possible == {"up": ("above",), "same": ("none",), "down": ("below",)}
    assert (right.verdict, wrong.verdict) == ("supported", "contradicted")
    assert wrong.predictions == {"up": "supported", "same": "contradicted"}


def test_a_wide_interval_tells_nothing_apart(tmp_path):
    """The control: if the spread over 3 seeds is large, equal means do not decide a hypothesis."""
    hypotheses = [{"id": "H", "predicts": {"same": "none"}}, {"id": "G", "predicts": {"same": "above"}}]
    study = study_of(tmp_path, {"base": 20.0, "same": 20.0}, hypotheses, seeds=3, spread=0.9)
    assert [p.verdict for p in patterns(study, judge(study))] == ["not told apart"] * 2


def test_a_failed_check_tells_nothing(tmp_path):
    study = study_of(tmp_path, {"base": 20.0, "up": 60.0}, [{"id": "H", "predicts": {"up": "above"}}])
    (verdict,) = judge(study)
    assert possible_states(verdict) == ("above",)
    failed = replace(verdict, controls=(*verdict.controls, Control("modalities learned", False, "")))
    assert possible_states(failed) == () and possible_states(replace(verdict, bounds=1)) == ()
    assert patterns(study, [failed])[0].verdict == "not told apart"


def test_possible_states_and_predictions_against_points_of_the_interval(tmp_path):
    """The reference: a state is possible if it contains a point of the interval. A prediction is supported if it
    holds at every point, and contradicted if it holds at none."""
    study = study_of(tmp_path, {"base": 20.0, "up": 60.0}, [])
    (verdict,) = judge(study)
    for low, high in product((-0.5, -0.3, -0.1, 0.1, 0.3), repeat=2):
        if low >= high:
            continue
        effect = Effect((low + high) / 2, 1.0, 3, 4.0, "pooled")
        half = effect.high - effect.value
        effect = replace(effect, error=(high - low) / 2 / half)
        points = [low + (high - low) * k / 1000 for k in range(1001)]
        seen = {"above" if x > SIZE else "below" if x < -SIZE else "none" for x in points}
        possible = possible_states(replace(verdict, effect=effect))
        assert set(possible) == seen
        for name, allowed in PREDICTIONS.items():
            fits = {state in allowed for state in seen}
            reference = "supported" if fits == {True} else "contradicted" if fits == {False} else "not told apart"
            assert prediction_verdict(name, possible) == reference


def test_the_page_shows_every_prediction_beside_what_was_seen(tmp_path, without_figures):
    hypotheses = [{"id": "H1", "statement": "plain <growth>", "predicts": {"up": "above"}, "source": "ours"}]
    study_of(tmp_path / "runs", {"base": 20.0, "up": 60.0}, hypotheses)
    write_report(tmp_path / "runs", tmp_path / "page")
    html = (tmp_path / "page/index.html").read_text().split('id="hypotheses"')[1].split("</table>")[0]
    assert "above ✓" in html and '<span class="verdict supported">supported</span>' in html
    assert "plain &lt;growth&gt;" in html
    assert "| **H1** plain \\<growth\\> Source: ours" in (tmp_path / "page/report.md").read_text()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([{"id": "H", "predicts": {"C9": "above"}}], "hypothesis H predicts 'C9', which is not a claim of this grid"),
        ([{"id": "H", "predicts": {"C1": "up"}}], "hypothesis H predicts 'up' for C1: use one of above, none, below"),
        ([{"id": "H"}], "hypothesis H predicts nothing"),
        ([{"predicts": {"C1": "above"}}], r"hypotheses\[0\] has no unique id"),
        ([{"id": "H", "predict": {}}], "hypothesis H: "),
        ({}, "^$"),
    ],
)
def test_a_mistake_is_one_sentence(value, sentence):
    if sentence == "^$":
        assert read_hypotheses(None, ["C1"], "g.yaml") == ()
        return
    with pytest.raises(UserError, match=sentence):
        read_hypotheses(value, ["C1"], "g.yaml")


def test_hypotheses_are_registered_with_the_claims():
    claims = {"claims": [{"id": "C1"}]}
    one, other = ({**claims, "hypotheses": [{"id": "H", "predicts": {"C1": p}}]} for p in ("above", "none"))
    assert len({claims_hash(grid) for grid in (claims, one, other)}) == 3
