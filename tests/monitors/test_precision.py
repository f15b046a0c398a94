"""Checks the measured effects of bf16 rounding and of Adam's epsilon against Python floats and known answers."""

import math

import numpy as np
import pytest
import torch

from mmqk.monitors.formulas.reduce import selection
from mmqk.monitors.formulas.weights import absorption, below_epsilon, update_size

B, T, D, M = 2, 5, 8, 2


def bf16(value: float) -> float:
    """Return the value rounded to 8 significant bits, ties to even."""
    if value == 0:
        return 0.0
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 256), exponent - 8)


def test_absorption_equals_rounding_element_by_element():
    random = torch.Generator().manual_seed(0)
    x, y = 50 * torch.randn(B, T, D, generator=random), 0.2 * torch.randn(B, T, D, generator=random)
    y[0, 0] = 0.0
    modality = torch.randint(0, M, (B, T), generator=random)
    by_name = absorption(x, y, selection(modality, torch.ones(B, T, dtype=torch.bool), M))
    measured = {name: sums.sum / sums.count for name, sums in by_name.items()}
    for m in range(M):
        rows = []
        for b in range(B):
            for t in range(T):
                if modality[b, t] == m and y[b, t].any():
                    xs, ys = [bf16(v) for v in x[b, t].tolist()], y[b, t].tolist()
                    sums = [bf16(a + c) for a, c in zip(xs, ys, strict=True)]
                    lost = [s - a - c for s, a, c in zip(sums, xs, ys, strict=True)]
                    energy = sum(c * c for c in ys)
                    gone = sum(c * c for s, a, c in zip(sums, xs, ys, strict=True) if s == a)
                    dot = sum(e * c for e, c in zip(lost, ys, strict=True))
                    rows.append((math.sqrt(sum(e * e for e in lost) / energy), -dot / energy, gone / energy))
        for name, expected in zip(("absorb_error", "absorb_bias", "absorbed"), np.mean(rows, axis=0), strict=True):
            assert float(measured[name][m]) == pytest.approx(expected, rel=1e-5, abs=1e-6), name
        assert 0.05 < float(measured["absorbed"][m]) < 1  # some additions are absorbed


def test_share_below_epsilon():
    v = torch.tensor([1e-18, 1e-14, 1e-10, 4e-16])
    assert float(below_epsilon(v, 10**6, 0.95, 1e-8)) == pytest.approx(0.25)
    # After one step v is (1 - beta2) g^2, and the bias correction makes it g^2.
    assert float(below_epsilon(0.05 * torch.tensor([4e-16, 0.25e-16]), 1, 0.95, 1e-8)) == pytest.approx(0.5)


def test_update_size_of_a_sign_step_is_one():
    before = torch.tensor([3.0, -4.0])
    over_lr, relative = update_size(before, before - 0.01 * torch.tensor([1.0, -1.0]), 0.01)
    assert float(over_lr) == pytest.approx(1, rel=1e-4)
    assert float(relative) == pytest.approx(0.01 / math.sqrt(12.5), rel=1e-4)
