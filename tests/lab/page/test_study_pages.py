"""Tables of the study pages agree with the scripts in docs/experiments that compute them from the shipped packs."""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import late_prediction as late
import norm_competition_check as check
import pytest

import mmqk

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "reports/examples"
RATIO = re.compile(r"×([\d.]+) \(([\d.]+) to ([\d.]+)\)")

pytestmark = pytest.mark.slow


def cells(page, first):
    """Return the cells of the row of a page whose first cell begins with these words, without bold."""
    for line in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").replace("**", "").splitlines():
        if line.startswith(f"| {first}"):
            return [cell.strip() for cell in line.strip("|").split("|")]
    raise AssertionError(f"docs/{page}.md has no row {first!r}")


def near(cell, numbers):
    """Return whether a cell prints these numbers, rounded to its own digits."""
    printed = RATIO.search(cell).groups()
    digits = [len(text.partition(".")[2]) for text in printed]
    return all(abs(float(text) - x) <= 0.51 * 10**-n for text, x, n in zip(printed, numbers, digits, strict=True))


def test_the_effects_of_an_entropy_gap_are_those_of_the_packs():
    columns = [("norm_competition", "-low", 1), ("norm_competition", "-high", 2), ("norm_competition_large", "", 3)]
    new = [("final_norm", "-low", 1), ("final_norm", "-high", 2)]
    arms, names = {}, {f"final_norm/{modality}" for modality in ("text", "image")}
    for pack in {pack for pack, _, _ in columns + new}:
        arms[pack], _ = check.load(check.reader(EXAMPLES / f"{pack}.zip"), names, defaultdict(str))
    for pack, rate, column in columns + new:
        pair = [arms[pack][arm + rate].values() for arm in ("hi", "mid")]
        kind = "confirmatory" if pack == "final_norm" else "exploratory"
        for modality in ("text", "image"):
            treated, control = ([run[f"final_norm/{modality}"] for run in of] for of in pair)
            test = check.stats.ttest_ind(treated, control, equal_var=False)
            effect = sum(treated) / len(treated) - sum(control) / len(control)
            expected = [math.exp(x) for x in (effect, *test.confidence_interval())]
            cell = cells("norm_competition", f"output norm, {modality}, {kind} |")[column]
            assert near(cell, expected), (pack, rate, modality, expected)
            assert not near(cell, [1.1 * x for x in expected])
    for pack, rate, column in columns:
        verdicts = {v["claim"]: v for v in json.loads((EXAMPLES / pack / "verdicts.json").read_text())}
        gap = verdicts[f"gap{rate}"]
        expected = [math.exp(x) for x in (gap["effect"], *gap["interval"])]
        assert near(cells("norm_competition", "largest logit (confirmatory)")[column], expected)


def test_the_noise_of_the_batches_and_the_text_loss_alone_are_those_of_the_pack():
    runs = [run for run in mmqk.load_runs(EXAMPLES / "late.zip") if run.status.finished and run.role == "verdict"]
    for arm, seed, *numbers in late.batch_rows(runs):
        first = f"mixed {seed} |" if arm == "mixed" else f"a third of the learning rate, {seed} |"
        assert cells("late_divergence", first)[1:] == numbers
    kinds = ("text loss alone", "lasting rise or divergence")
    for kind, (_, effect, least, equal) in zip(kinds, late.text_rows(runs), strict=True):
        row = cells("late_divergence", f"the same, {kind}")
        assert row[1:4] == [effect, least, f"{equal} (log-rank)"]
