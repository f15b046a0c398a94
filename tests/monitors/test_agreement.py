"""Tests that gradient agreement equals its formula on small vectors and is an unbiased estimate under noise."""

import math

import pytest
import torch

from mmqk.monitors.formulas.weights import half_products

D = 400


def halves_of(truths, noise, seed):
    """Return two noisy estimates of each true gradient, as halves A and B."""
    random = torch.Generator().manual_seed(seed)

    def look(g):
        return [
            g[:150] + noise * torch.randn(150, generator=random),
            g[150:] + noise * torch.randn(250, generator=random),
        ]

    return [(look(g), look(g)) for g in truths]


@pytest.mark.parametrize("true", [0.8, 0.0, -0.5])
def test_noise_does_not_shrink_it_as_it_shrinks_the_plain_cosine(true):
    a = torch.zeros(D)
    b = torch.zeros(D)
    a[0], b[0], b[200] = 10.0, 10 * true, 10 * math.sqrt(1 - true**2)
    measured, plain = [], []
    for seed in range(60):
        pairs = halves_of([a, b], 0.5, seed)  # the noise vector is as long as the signal
        measured.append(half_products(pairs).cosine[0, 1])
        whole = [torch.cat(x) + torch.cat(y) for x, y in pairs]
        plain.append(torch.nn.functional.cosine_similarity(*whole, dim=0))
    assert float(torch.stack(measured).mean()) == pytest.approx(true, abs=0.06)
    if true:
        assert abs(float(torch.stack(plain).mean())) < 0.8 * abs(true)


def test_noise_alone_is_not_told():
    measured = half_products(halves_of([torch.zeros(D), torch.ones(D)], 1.0, 3))
    assert float(measured.noise[0]) == pytest.approx(D, rel=0.3)
    if measured.signal[0] <= 0:
        assert math.isnan(measured.cosine[0, 1])
    negative = half_products([([torch.ones(2)], [-torch.ones(2)]), ([torch.ones(2)], [torch.ones(2)])])
    assert math.isnan(negative.cosine[0, 1]) and float(negative.cosine[1, 1]) == pytest.approx(1)
