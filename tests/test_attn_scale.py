"""Test docs/experiments/attn_scale: the measurement gives known answers, a tiny run meets the prediction, and the
page has the committed numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import attn_scale as experiment
import pytest
import torch

FOLDER = Path("docs/experiments")


def test_against_loops_over_a_small_case():
    logits = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs, own, rows, entropy, largest = [], [], [], [], []
    for row_TS in logits.flatten(0, 1):
        for t in range(12):
            pairs += row_TS[t, :t].tolist()
            own.append(row_TS[t, t].item())
            if t >= experiment.FEWEST_KEYS:
                rows.append(row_TS[t, :t].var().item())
            if t >= experiment.FEWEST_KEYS - 1:
                p = torch.softmax(row_TS[t, : t + 1], dim=0)
                entropy.append(-(p * p.log()).sum().item() / math.log(t + 1))
                largest.append(p.max().item())
    found = experiment.measure(logits)
    expected = {
        "variance": torch.tensor(pairs, dtype=torch.float64).var().item(),
        "own": torch.tensor(own, dtype=torch.float64).var().item(),
        "in_row": sum(rows) / len(rows),
        "entropy": sum(entropy) / len(entropy),
        "largest": sum(largest) / len(largest),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    future = logits.clone()
    future[..., 0, 1:] = 1e9
    assert experiment.measure(future) == found
    past = logits.clone()
    past[..., 9, 2] += 1.0
    assert experiment.measure(past) != found


# The logit variance of a model with 4 heads of 16 channels has a relative standard deviation of about 3 % over seeds.
# The tolerance is 4 standard deviations of the mean over three seeds, plus 0.5 % for the epsilon of the norm.
TOLERANCE = 0.075


@pytest.mark.parametrize(
    "variant", ["scale none", "scale rsqrt", "scale inverse", "rsqrt, RMS QK-Norm", "cosine times 10"]
)
def test_a_tiny_run_meets_the_prediction(variant):
    rows = experiment.run(variants=(variant,), head_dims=(16,), seeds=3)
    assert [row.layer for row in rows] == [1, 2, 3, 4]
    others = {"scale none": 16.0, "scale rsqrt": 1.0, "scale inverse": 1 / 16, "cosine times 10": 100 / 16}
    own = others.pop(variant, 1.0)
    assert rows[0].predicted == pytest.approx(own)
    assert rows[0].variance == pytest.approx(own, rel=TOLERANCE)
    for other in others.values():  # negative control: the run meets no other prediction
        assert other == own or rows[0].variance != pytest.approx(other, rel=TOLERANCE)


def test_the_committed_numbers_meet_the_predictions():
    """In the first layer, the variance differs from its prediction by at most 3 %. For heads of at least 32 channels,
    the entropy differs from its prediction by at most 0.03."""
    rows = experiment.from_csv((FOLDER / "attn_scale.csv").read_text())
    for row in rows:
        config = replace(experiment.VARIANTS[row.variant], d_head=row.head_dim)
        assert row.predicted == pytest.approx(experiment.predicted_variance(config, row.layer), rel=1e-4)
        if row.layer == 1:
            assert row.variance == pytest.approx(row.predicted, rel=0.03)
            if row.head_dim >= 32:
                assert row.entropy == pytest.approx(row.entropy_predicted, abs=0.03)
