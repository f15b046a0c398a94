"""Compares statistics of the output softmax with known answers; `test_probe` compares them with brute force."""

from types import SimpleNamespace

import pytest
import torch

from mmqk.monitors.formulas.reduce import output_statistics, selection

BLOCKS = {"text": 7, "image": 4, "sound": 3}
B, T, V, M = 2, 12, 14, 3


def case(shift=0.0):
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(B, T, V, generator=random) + shift
    target = torch.randint(0, 2, (B, T), generator=random)  # no target is sound
    keep = torch.rand(B, T, generator=random) < 0.8
    return logits, target, keep


def ours(logits, target, keep):
    by_name, _ = output_statistics(logits, target, selection(target, keep, M), BLOCKS)
    return SimpleNamespace(**{name.removeprefix("out_"): sums for name, sums in by_name.items()})


def test_a_number_added_to_all_logits_is_drift_and_a_factor_is_sharpening():
    logits, target, keep = case()
    before, drift, sharp = (ours(x, target, keep) for x in (logits, logits + 5, 2 * (logits - logits.mean(-1, True))))
    for m in range(2):
        assert float(drift.log_z.mean[m] - before.log_z.mean[m]) == pytest.approx(5, abs=1e-4)
        assert float(drift.logit_mean.mean[m] - before.logit_mean.mean[m]) == pytest.approx(5, abs=1e-4)
        assert float(drift.logit_spread.mean[m]) == pytest.approx(float(before.logit_spread.mean[m]), abs=1e-4)
        assert float(drift.wrong_mass.mean[m]) == pytest.approx(float(before.wrong_mass.mean[m]), abs=1e-5)
        assert float(sharp.logit_mean.mean[m]) == pytest.approx(0, abs=1e-5)
        assert float(sharp.logit_spread.mean[m]) > float(before.logit_spread.mean[m]) + 0.5


def test_equal_logits_have_no_spread_and_their_share_of_wrong_mass():
    _, target, keep = case()
    statistics = ours(torch.full((B, T, V), 100.0), target, keep)
    for m, size in enumerate((7, 4)):
        assert float(statistics.logit_spread.mean[m]) == pytest.approx(0, abs=1e-4)
        assert float(statistics.wrong_mass.mean[m]) == pytest.approx(1 - size / V, abs=1e-5)
