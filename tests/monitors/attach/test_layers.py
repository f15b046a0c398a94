"""Tests which layers are measured, their numbers, and the report of attention that cannot be measured, wherever it
is and however it is written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmqk.monitors import attach
from mmqk.monitors.adapters import layer_numbers, layer_of
from mmqk.monitors.foreign.output import summary_parts
from tests.monitors.attach.nets import D, H, Net, V, batches

IMAGE = {"image": range(10, 40)}


def probed(model, **inputs):
    watch = attach(model, modality=IMAGE)
    values = watch.probe(**(inputs or {"ids": batches(1)[0]})).flat()
    assert watch.layers is not None
    return values, watch.layers, " · ".join(summary_parts(watch.prober, {}, 0.1, [1.0], 100))


def test_layers_whose_attention_is_not_seen_are_named():
    hidden = {2: "by log", 5: "by log"}
    values, layers, line = probed(Net([hidden.get(n, "sdpa") for n in range(8)]))
    assert layers.numbers == [0, 1, 3, 4, 6, 7] and layers.hidden == ["layers.2", "layers.5"] and layers.total == 8
    assert "attention measured in 6 of 8 layers, not in layers.2, layers.5 (maxima over layers" in line
    assert "attn_entropy/image/layer03" in values and not any("layer02" in name for name in values)
    all_values, layers, line = probed(Net())
    assert layers.hidden == [] and "not in" not in line and "attn_entropy/image/layer02" in all_values


def test_numbers_are_those_of_the_path_or_of_the_calls():
    assert layer_of("model.layers.12.self_attn") == ("model.layers", 12) and layer_of("attn") is None
    assert layer_numbers(["a.layers.1.x", "a.layers.3.x"]) == [1, 3]
    assert layer_numbers(["a.0.blocks.0", "a.0.blocks.1", "a.1.blocks.0"]) == [0, 1, 2]

    class Shared(Net):  # calls one layer eight times
        def forward(self, ids):
            x = self.embed(ids)
            for _ in range(8):
                x = self.layers[0](x)
            return self.head(x)

    values, layers, _ = probed(Shared(["sdpa"]))
    assert layers.numbers == list(range(8)) and values["q_norm/text/layer00"] != values["q_norm/text/layer07"]


def exp_over_sum(z: Tensor) -> Tensor:
    e = (z - z.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


WEIGHTS = {
    "exp": exp_over_sum,
    "log": lambda z: F.log_softmax(z, -1).exp(),
    "special": lambda z: torch.special.softmax(z, -1),
    "sigmoid": torch.sigmoid,
    "module": nn.Softmax(-1),
}


class Mixer(nn.Module):
    """A block whose class name does not contain attention. If ``weights`` is None, it calls torch's attention."""

    def __init__(self, weights=None, einsum: bool = False):
        super().__init__()
        self.qkv, self.weights, self.einsum = nn.Linear(D, 3 * D), weights, einsum

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.weights is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            z = torch.einsum("bhtk,bhsk->bhts", q, k) if self.einsum else q @ k.mT
            T = x.shape[1]
            out = self.weights(z.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -1e4)) @ v
        return x + out.transpose(1, 2).flatten(2)


class Other(Mixer):
    """A block whose class differs from that of the measured blocks."""


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.embed, self.layers = nn.Embedding(V, D), nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.mT


def layers_of(*layers: nn.Module):
    watch = attach(Stack(*layers), modality=IMAGE)
    watch.probe(ids=batches(1)[0])
    assert watch.layers is not None
    return watch.layers


@pytest.mark.parametrize("einsum", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_however_it_is_written(weights, einsum):
    layers = layers_of(Mixer(), Mixer(), Other(WEIGHTS[weights], einsum))
    is_measured = weights in ("special", "module")
    assert layers.hidden == ["layers.2"] * (not is_measured) and layers.total == 3
    assert layers.numbers == [0, 1, 2][: 2 + is_measured]
    assert layers_of(Mixer(), Mixer(), Other()).hidden == []


def test_other_products_are_no_attention():
    """Matrix products for rotations, experts, relative positions and token mixing are not reported as attention."""

    class Busy(Mixer):
        def __init__(self):
            super().__init__()
            self.mix, self.experts = nn.Linear(16, 16), nn.Parameter(torch.randn(4, D, D))
            self.relative = nn.Parameter(torch.randn(16, 16, D))

        def forward(self, x):
            angle = torch.rand(4, 8, 1) @ torch.arange(16.0).expand(4, 1, 16)
            far = torch.einsum("btd,tsd->bts", x, self.relative)
            x = super().forward(x) + self.mix(x.mT).mT + 0 * (angle.sum() + far.sum())
            return x + torch.bmm(x, self.experts).relu()

    assert layers_of(Busy(), Busy()).hidden == []
