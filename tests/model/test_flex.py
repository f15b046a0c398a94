"""Compares FlexAttention on a CPU with `math` and written-out sums: masks, cap, grouped heads, row statistics."""

import pytest
import torch

from mmqk.model import backends as kernels
from tests.model.attend import attention, dense_flex

B, H, G, T, K = 2, 4, 2, 256, 8
SCALE = 0.4
DOCUMENT_BT = torch.zeros(B, T, dtype=torch.long)
DOCUMENT_BT[0, 100:], DOCUMENT_BT[1, 30:], DOCUMENT_BT[1, 131:] = 1, 7, 9
DOCUMENT_BT[:, 240:] = -1  # padding
DOCUMENTS = {"document_BT": DOCUMENT_BT}
CPU = torch.device("cpu")
CASES = {
    "causal": {}, "a window within a block": {"window": 50}, "a window over a block": {"window": 130},
    "documents": DOCUMENTS, "capped": {"softcap": 1.5}, "all": {"window": 40, "softcap": 1.5, **DOCUMENTS},
}  # fmt: skip


def qkv(dtype=torch.float32, size=1.5, heads=G):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, n, T, K) for n in (H, heads, heads)]
    return [size * torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def shared(x_BGTK):
    return x_BGTK.repeat_interleave(H // x_BGTK.shape[1], dim=1)


def dense(q, k, v, **options):
    return attention(q, shared(k), shared(v), scale=SCALE, **options)


@pytest.fixture
def flex_on_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "_compiled", lambda: dense_flex)


def rows_written_out(q, k, window=0, document_BT=None, softcap=None):
    """Return the largest raw logit and the log-sum-exp of the capped logits, query by query, in fp64."""
    logits = SCALE * q.double() @ shared(k).double().transpose(-1, -2)
    largest, lse = torch.empty(B, H, T).double(), torch.empty(B, H, T).double()
    for b in range(B):
        for t in range(T):
            near = range(max(0, t + 1 - window) if window else 0, t + 1)
            seen = [s for s in near if document_BT is None or document_BT[b, s] == document_BT[b, t]]
            of_row = logits[b, :, t, seen]
            largest[b, :, t] = of_row.amax(-1)
            capped = of_row if softcap is None else softcap * (of_row / softcap).tanh()
            lse[b, :, t] = capped.logsumexp(-1)
    return largest, lse


@pytest.mark.parametrize("name", CASES)
def test_rows_of_flex_are_the_written_out_maxima_and_sums(name, flex_on_cpu):
    options = dict(CASES[name])
    if "softcap" in options:
        options["softcap"] = 4.0  # inverting the cap is accurate only for raw logits below 6 times the cap
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = kernels.mask_of("flex", T, CPU, options.get("window", 0), options.get("document_BT"))
    out, rows = kernels.attention(q, k, v, mask, scale=SCALE, backend="flex", softcap=options.get("softcap"))
    assert not rows.max_BHT.requires_grad and not rows.lse_BHT.requires_grad
    largest, lse = rows_written_out(q, k, **options)
    tolerance = 4e-3 if "softcap" in options else 1e-5
    torch.testing.assert_close(rows.max_BHT.double(), largest, rtol=0, atol=tolerance)
    torch.testing.assert_close(rows.lse_BHT.double(), lse, rtol=0, atol=1e-5)
    assert (rows.max_BHT - rows.lse_BHT).abs().max() > 0.1
    for other in ({"window": 30}, {"softcap": 2.0}, {"document_BT": torch.arange(T).expand(B, T) // 90}):
        assert (rows_written_out(q, k, **(options | other))[1] - lse).abs().max() > 1e-2

    theirs = dense(q, k, v, **options)
    weight = torch.linspace(-1, 1, K)
    gradients = [torch.autograd.grad((x * weight).square().sum(), (q, k, v)) for x in (out, theirs)]
    torch.testing.assert_close(out, theirs, rtol=0, atol=5e-6)
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_a_saturated_cap_gives_a_finite_lower_bound(flex_on_cpu):
    q, k, v = qkv(size=6.0)
    mask = kernels.mask_of("flex", T, CPU)
    raw, _ = rows_written_out(q, k)
    found = kernels.attention(q, k, v, mask, scale=SCALE, backend="flex", softcap=7.2)[1].max_BHT.double()
    saturated, known = raw > 9.1 * 7.2, raw.abs() < 5 * 7.2
    assert min(saturated.sum(), known.sum()) > 30
    assert (found[saturated] <= raw[saturated]).all() and (found[saturated] >= 7 * 7.2).all()
    assert (found - raw)[known].abs().max() < 1e-3 * 7.2


def test_a_mask_made_while_validating_serves_training():
    """Lightning validates in inference mode, and autograd cannot save tensors that were created in this mode."""
    kernels._same_for_all.cache_clear()
    with torch.inference_mode():
        kernels.flex_mask(T, CPU, window=50)
        own = kernels.flex_mask(T, CPU, 50, DOCUMENT_BT)  # depends on the batch, so it is not reused
    made = [[x for x in mask.as_tuple() if torch.is_tensor(x)] for mask in (kernels.flex_mask(T, CPU, 50), own)]
    assert [any(x.is_inference() for x in tensors) for tensors in made] == [False, True] and made[0]
