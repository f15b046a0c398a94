"""Compares attention weights under finite additive masks with a softmax in float64 over all keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from mmqk.monitors import attach
from mmqk.monitors.foreign.calls import Call
from mmqk.monitors.modalities import padded_call
from tests.monitors import brute_force
from tests.monitors.attach.nets import D, H, V, alibi, batches
from tests.monitors.attach.test_exact import IMAGE, NAMES, causal, modality_of, same

T = 16
HIDDEN = ~torch.ones(T, T, dtype=torch.bool).tril()


class Masked(nn.Module):
    """One attention with integer queries and keys, whose products are exact in fp32, and an additive mask."""

    def __init__(self, fill: float, bias: torch.Tensor | None = None, flex: bool = False, size: float = 200):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.size, self.flex = nn.Embedding(V, D), nn.Linear(D, 3 * D), size, flex
        added = torch.zeros(1, T, T) if bias is None else bias
        self.mask = added + torch.zeros(T, T).masked_fill(HIDDEN, fill)
        self.kept: list = []

    def forward(self, ids):
        q, k, v = self.qkv(self.embed(ids)).view(*ids.shape, 3, H, D // H).permute(2, 0, 3, 1, 4)
        q, k = (self.size * q).round(), (self.size * k).round()
        self.kept.append((q, k))
        if self.flex:
            return flex_attention(q, k, v, lambda z, b, h, t, s: z + self.mask[0][t, s], scale=0.5)
        return F.scaled_dot_product_attention(q, k, v, self.mask, scale=0.5)


def expected_of(net: Masked, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return the statistics of the weights, by loops over rows, from all keys and the mask as it is given."""
    with torch.no_grad():  # flex_attention has no backward on a CPU
        net(ids)  # keeps q and k
    q, k = (x.detach().double().numpy() for x in net.kept[-1])
    z = 0.5 * q @ k.swapaxes(-1, -2) + mask.double().numpy()
    modality, rows = modality_of(ids), brute_force.Means()
    weights = np.exp(z - z.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    for (b, _, t), p in zip(np.ndindex(*z.shape[:3]), weights.reshape(-1, T), strict=True):
        seen, of_key, a = np.arange(T) <= t, modality[b], NAMES[modality[b, t]]
        rows.see(f"attn_mass_hidden/{a}/layer00", p[~seen].sum())
        if t < 7:
            continue
        mass = [p[seen & (of_key == m)].sum() for m in range(2)]
        entropy = [-sum(x * np.log(x) for x in xs if x > 0) for xs in (p, [*mass, p[~seen].sum()])]
        rows.see(f"attn_entropy/{a}/layer00", entropy[0])
        rows.see(f"attn_entropy_block/{a}/layer00", entropy[1])
        rows.see(f"attn_entropy_within/{a}/layer00", entropy[0] - entropy[1])
        for m, x in enumerate(mass):
            rows.see(f"attn_mass/{a}-{NAMES[m]}/layer00", x)
    s_sq = np.linalg.svd(weights, compute_uv=False) ** 2
    return rows.means() | {"attn_rank/layer00": (s_sq.sum(-1) ** 2 / (s_sq**2).sum(-1)).mean()}


@pytest.mark.parametrize("way", ["mask", "mask and bias", "score_mod"])
def test_weights_are_computed_with_the_finite_mask_that_is_given(way):
    bias = alibi(T) if way == "mask and bias" else None
    (ids,), net = batches(1, B=3, T=T), Masked(-1e4, bias, flex=way == "score_mod")
    measured = attach(net, modality=IMAGE).probe(ids=ids).flat()
    expected = expected_of(net, ids, net.mask)
    assert len(expected) == 13 and same(measured, expected)
    assert min(expected[f"attn_mass_hidden/{name}/layer00"] for name in NAMES) > 0.1
    if way == "mask":
        watch = attach(net, modality=IMAGE, every_n_steps=1)
        net(ids)
        share = 100 * max(expected[f"attn_mass_hidden/{name}/layer00"] for name in NAMES)
        with pytest.warns(UserWarning, match=f"at step 1 the attention logits outgrow .* {share:.3g} % of the att"):
            watch.step()
    # The raw logits are those of the visible keys.
    q, k = (x.detach().double().numpy() for x in net.kept[-1])
    raw = brute_force.attention(q, k, 0.5, modality_of(ids), causal, NAMES, 0, softmax=False)
    assert same(measured, raw) and raw["attn_logit_max/text-text/layer00"] > 1e4
    # Control: with -inf, no hidden key gets attention, and there is no mass to measure.
    infinite = Masked(-torch.inf, bias, flex=way == "score_mod")
    without = attach(infinite, modality=IMAGE).probe(ids=ids).flat()
    assert not any("attn_mass_hidden" in tag for tag in without) and not same(without, expected)
    entropies = {tag: x for tag, x in expected_of(net, ids, infinite.mask).items() if "attn_mass_hidden" not in tag}
    assert same(without, entropies) and not same(measured, entropies)


def test_a_mask_that_no_logit_reaches_has_mass_0_on_hidden_keys():
    (ids,) = batches(1, B=3, T=T)
    cases = ((-1e9, 200, 0), (-9984.0, 1, 0), (torch.finfo(torch.float32).min, 200, None))  # bf16 rounds -1e4
    for fill, size, mass in cases:
        net = Masked(fill, size=size)
        measured = attach(net, modality=IMAGE).probe(ids=ids).flat()
        assert measured.get("attn_mass_hidden/image/layer00") == mass
        expected = expected_of(net, ids, net.mask.masked_fill(HIDDEN, -torch.inf))
        assert same(measured, {tag: x for tag, x in expected.items() if "attn_mass_hidden" not in tag})


def test_a_bias_stays_a_bias():
    """The values of a bias may pass the limit of a mask: the weights are computed from them all the same."""
    (ids,), bias = batches(1, B=3, T=T), 2000 * alibi(T)[:1]  # down to -15,000
    net = Masked(-torch.inf, bias)
    measured = attach(net, modality=IMAGE).probe(ids=ids).flat()
    expected = expected_of(net, ids, net.mask)
    far = {tag: x for tag, x in expected.items() if tag.startswith(("attn_entropy/", "attn_rank"))}
    assert len(far) == 3 and same(measured, far)


def test_cross_attention_keeps_the_mask_that_is_given():
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, H, n, 8, generator=random) for n in (3, 5))
    seen = torch.rand(2, 1, 3, 5, generator=random) < 0.5
    call = Call(q, k, k, 1.0, seen, ~seen, score_mod=lambda z, head: z.masked_fill(~seen[:, 0], -2.0))
    small, large = call.weights(1)[0], padded_call(call).weights(1)[0]
    torch.testing.assert_close(large[:, :3, 3:], small)
    assert not large[:, :3, :3].any()
    assert (small[~seen[:, 0]] > 0).all()  # the control


class Packed(Masked):
    """Two packed documents, and padding at the start of the second sequence."""

    def __init__(self, apart: bool):
        super().__init__(-torch.inf, size=1)
        self.valid, self.document = torch.ones(2, T, dtype=torch.long), torch.arange(T)[None] // 9
        self.valid[1, :3] = 0
        if apart:
            seen = (self.document[:, :, None] == self.document[:, None]) & self.valid[:, None].bool()
            self.mask = torch.zeros(2, 1, T, T).masked_fill(~(seen[:, None] & ~HIDDEN), -torch.inf)

    def forward(self, ids, attention_mask=None, position_ids=None):
        return super().forward(ids)


def test_attention_on_padding_and_on_other_documents_is_measured_where_the_mask_leaks():
    (ids,), leaking, apart = batches(1, B=2, T=T), Packed(False), Packed(True)
    packed = {"attention_mask": leaking.valid, "position_ids": torch.arange(T)[None] % 9}
    measured = attach(leaking, modality=IMAGE).probe(ids=ids, **packed).flat()
    leaking(ids)  # keeps q and k
    q, k = (x.detach().double().numpy() for x in leaking.kept[-1])
    z = 0.5 * q @ k.swapaxes(-1, -2) + leaking.mask.double().numpy()
    modality, rows, valid, document = modality_of(ids), brute_force.Means(), leaking.valid, leaking.document[0]
    for b, h, t in np.ndindex(*z.shape[:3]):
        if not valid[b, t]:
            continue
        p = np.exp(z[b, h, t] - z[b, h, t].max())
        p, a = p / p.sum(), NAMES[modality[b, t]]
        rows.see(f"attn_mass_padding/{a}/layer00", p[valid[b] == 0].sum())
        rows.see(f"attn_mass_documents/{a}/layer00", p[(valid[b] == 1) & (document != document[t])].sum())
    expected = rows.means()
    assert len(expected) == 4 and same(measured, expected) and min(expected.values()) > 0.01
    # Controls: without the leak there is no such mass; the masses without it are other numbers.
    kept = attach(apart, modality=IMAGE).probe(ids=ids, **packed).flat()
    assert not any(tag.startswith(("attn_mass_padding", "attn_mass_documents")) for tag in kept)
    plain = attach(leaking, modality=IMAGE).probe(ids=ids).flat()
    assert not any(tag.startswith(("attn_mass_padding", "attn_mass_documents")) for tag in plain)
    with pytest.warns(UserWarning, match="attention is on padding .attn_mass_padding.*pass the padding mask"):
        watch = attach(leaking, modality=IMAGE, every_n_steps=1)
        leaking(ids, **packed)
        watch.step()
