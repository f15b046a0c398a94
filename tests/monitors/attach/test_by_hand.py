"""Compares attention that a model computes by hand with brute force in float64 and with the same model with SDPA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmqk.monitors import attach
from tests.monitors import brute_force
from tests.monitors.attach.nets import D, H, Layer, Net, alibi, batches
from tests.monitors.attach.test_exact import IMAGE, NAMES, causal, modality_of, norms, same
from tests.monitors.attach.test_sides import summary

K, T = D // H, 16
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def added(z: Tensor, low: float = -torch.inf) -> Tensor:
    return z + torch.zeros(T, T).masked_fill(~CAUSAL, low)


def by_module(q, k, v):
    return nn.Softmax(-1)((torch.matmul(input=q, other=k.mT) / K**0.5).masked_fill(~CAUSAL, -1e9)) @ v


def in_place(q, k, v):
    z = torch.matmul(q, k.transpose(-1, -2))
    z *= K**-0.5
    z += torch.full((T, T), -torch.inf).triu(1)
    return F.dropout(F.softmax(z, dim=-1, dtype=torch.float32).to(q.dtype), 0.5, training=False) @ v


def einsum(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = added(K**-0.5 * torch.einsum("b t h c, b s h c -> b h t s", q, k)).softmax(-1)
    return torch.einsum("bhts,bshc->bthc", weights, v).transpose(1, 2)


def values_first(q, k, v):
    z = torch.einsum("bhtc,bhsc->bhts", q, k) / torch.tensor(K).sqrt()
    return torch.einsum("bhsc,bhts->bhtc", v, torch.where(CAUSAL, z, -1e9).softmax(-1))


def flat(q, k, v):
    q, k, v = (x.reshape(-1, T, K) for x in (q, k, v))
    z = torch.bmm(q, k.transpose(1, 2)) * K**-0.5
    return torch.bmm(added(z).softmax(-1), v).view(-1, H, T, K)


def heads_first(q, k, v):
    q, k, v = (torch.cat(x.unbind(1), 0) for x in (q, k, v))
    weights = added(q @ k.mT * K**-0.5).softmax(-1)
    return torch.stack((weights @ v).chunk(H), 1)


def bloom(q, k, v):
    """Scores from baddbmm, with sequences and heads on one axis; the softmax has four axes."""
    q, k, v = (x.reshape(-1, T, K) for x in (q, k, v))
    z = torch.zeros(1, 1, T).baddbmm(batch1=q, batch2=k.mT, beta=1.0, alpha=K**-0.5)
    weights = added(z.view(-1, H, T, T), torch.finfo(torch.float32).min).softmax(-1)
    return (weights.view(-1, T, T) @ v).view(-1, H, T, K)


PLAIN = [by_module, in_place, einsum, values_first, flat, heads_first, bloom]


def with_cap(q, k, v):
    z = torch.tanh(q @ k.mT * K**-0.5 / 3.0) * 3.0
    return added(z).softmax(-1) @ v


def with_alibi(q, k, v):
    return added(q @ k.mT * K**-0.5 + alibi(T)).softmax(-1) @ v


def minus_maximum(q, k, v):
    z = added(q @ k.mT * K**-0.5)
    return (z - z.amax(-1, keepdim=True)).softmax(-1) @ v


KEPT: dict[int, tuple[Tensor, ...]] = {}  # by module; a probe restores a module's own attributes


class HandMade(nn.Module):
    """Attention with a given function of q, k and v, each (B, H, T, K)."""

    def __init__(self, function):
        super().__init__()
        self.function, self.qkv = function, nn.Linear(D, 3 * D)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, K)).permute(2, 0, 3, 1, 4)
        KEPT[id(self)] = q, k, v
        return self.function(q, k, v).transpose(1, 2).flatten(2)


def net_of(function) -> Net:
    net = Net([])
    torch.manual_seed(1)
    net.layers = nn.ModuleList(Layer(HandMade(function)) for _ in range(2))
    with torch.no_grad():
        for layer in net.layers:
            layer.attention.qkv.weight.mul_(4)
    return net


def measured(function, B: int = 3):
    net, (ids,) = net_of(function), batches(1, B=B, T=T)
    watch = attach(net, modality=IMAGE)
    return watch.probe(ids=ids).flat(), net, ids, watch


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("function", PLAIN)
def test_it_equals_brute_force_and_the_same_model_with_sdpa(function):
    values, net, ids, watch = measured(function)
    assert watch.layers.numbers == [0, 1] and watch.layers.hidden == []
    modality = modality_of(ids)
    for n, layer in enumerate(net.layers):
        q, k, _ = (x.detach().double().numpy() for x in KEPT[id(layer.attention)])
        expected = brute_force.attention(q, k, K**-0.5, modality, causal, NAMES, n)
        assert same(values, norms(q, k, modality, n) | expected)
        # Control: another scale.
        other = brute_force.attention(q, k, 0.9 * K**-0.5, modality, causal, NAMES, n)
        assert not same(values, {t: x for t, x in other.items() if t.startswith(("attn_logit_m", "attn_entropy"))})
    expected = measured(sdpa)[0]
    assert same(values, expected)
    hidden = {tag for tag in values if tag.startswith("attn_mass_hidden")}  # with finite masks only
    assert values.keys() - hidden == expected.keys()


def test_a_cap_and_a_bias_are_no_part_of_the_raw_logits():
    def biased(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, added(alibi(T)))

    assert same(measured(with_alibi)[0], measured(biased)[0])
    assert same(measured(minus_maximum)[0], measured(sdpa)[0])
    values, net, ids, _ = measured(with_cap)
    q, k, _ = (x.detach().double().numpy() for x in KEPT[id(net.layers[0].attention)])
    expected = brute_force.attention(q, k, K**-0.5, modality_of(ids), causal, NAMES, 0, cap=3.0)
    assert same(values, expected)
    uncapped = brute_force.attention(q, k, K**-0.5, modality_of(ids), causal, NAMES, 0)
    assert not same(values, {t: x for t, x in uncapped.items() if t.startswith("attn_entropy")})  # the control


def test_sdpa_with_heads_outermost_is_not_read_as_sequences_outermost():
    def merged(heads_outermost):
        def function(q, k, v):
            if heads_outermost:
                q, k, v = (torch.cat(x.unbind(1), 0) for x in (q, k, v))
                return torch.stack(F.scaled_dot_product_attention(q, k, v, is_causal=True).chunk(H), 1)
            q, k, v = (x.reshape(-1, T, K) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).view(-1, H, T, K)

        return function

    expected = measured(sdpa)[0]
    assert same(measured(merged(True))[0], expected) and same(measured(merged(False))[0], expected)

    def shuffled(q, k, v):  # an order that cannot be followed
        q, k, v = (x.flatten(0, 1)[torch.arange(len(q) * H - 1, -1, -1)] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).flip(0).view(-1, H, T, K)

    watch = measured(shuffled)[3]
    assert watch.layers.numbers == [] and "has sequences and heads in an unknown order" in summary(watch)


def summed(q, k, v):
    """Scores that are a sum of two products, as with decoupled RoPE."""
    z = q[..., :4] @ k[..., :4].mT
    z += q[..., 4:] @ k[..., 4:].mT
    return added(z * K**-0.5).softmax(-1) @ v


def summed_by_baddbmm(q, k, v):
    q, k, v = (x.reshape(-1, T, K) for x in (q, k, v))
    z = torch.baddbmm(q[..., :4] @ k[..., :4].mT, q[..., 4:], k[..., 4:].mT)
    return (added(z * K**-0.5).softmax(-1) @ v).view(-1, H, T, K)


def test_sums_of_products_and_weights_that_are_changed_before_the_values_are_not_measured():
    def gated(q, k, v):
        return (added(q @ k.mT * K**-0.5).softmax(-1) * 0.5) @ v

    def mixed(q, k, v):  # talking heads: a linear map over heads before the softmax
        z = torch.einsum("bhts,hg->bgts", q @ k.mT, torch.eye(H).roll(1, 0))
        return added(z).softmax(-1) @ v

    for function in (gated, mixed, summed, summed_by_baddbmm):
        values, _, _, watch = measured(function)
        assert watch.layers.hidden == ["layers.0", "layers.1"] and "attn_logit_max/text-text/layer00" not in values
        assert "; F.scaled_dot_product_attention outside torch.jit is measured" in summary(watch)
