"""Norms keep the dtype of the input and round only once. `test_peers` compares the values of norms with those of
torch."""

import pytest
import torch
import torch.nn.functional as F

from mmqk.model.norms import L2Norm, LayerNorm, LayerScale, RMSNorm

DIM, EPS = 24, 1e-5
NORMS = {
    "rms": (RMSNorm((DIM,), EPS), lambda x, w: F.rms_norm(x, (DIM,), w, EPS)),
    "zero-centered": (RMSNorm((DIM,), EPS, gain="zero_centered"), lambda x, w: F.rms_norm(x, (DIM,), 1 + w, EPS)),
    "layer": (LayerNorm((DIM,), EPS, bias=True), lambda x, w, b: F.layer_norm(x, (DIM,), w, b, EPS)),
    "no gain": (LayerNorm((DIM,), EPS, gain="none"), lambda x: F.layer_norm(x, (DIM,), eps=EPS)),
    "l2": (L2Norm(DIM, EPS, scale=4.0, scale_shape=(1,)), lambda x, w: w * F.normalize(x, dim=-1)),
    "clamped": (
        L2Norm(DIM, EPS, scale=4.0, scale_shape=(1,), maximum=5.0),
        lambda x, w: w.exp().clamp(max=5.0) * F.normalize(x, dim=-1),
    ),
    "layer scale": (LayerScale(DIM, 0.3), lambda x, w: w * x),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_rounds_once_and_keeps_the_dtype(name):
    ours, formula = NORMS[name]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1 * torch.rand(parameter.shape, generator=generator)
    x = 0.5 + 2 * torch.randn(64, DIM, generator=generator)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            wide, narrow = ours(x), ours(x.bfloat16())
        assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
        torch.testing.assert_close(wide, formula(x, *ours.parameters()), rtol=0, atol=1e-5)
        once = formula(x.bfloat16().float(), *ours.parameters()).bfloat16()
        # fp32 sums in another order move only a few values across a bf16 rounding boundary.
        assert (narrow != once).float().mean() < 0.01
    if name == "rms":  # the control: the normalized input is rounded before the gain
        normalized = F.rms_norm(x.bfloat16().float(), (DIM,), eps=EPS)
        twice = (ours.weight * normalized.bfloat16()).bfloat16()
        assert (narrow != twice).float().mean() > 0.1
