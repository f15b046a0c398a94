"""Tests that `attach` reports attention that it cannot measure, wherever it is and however it is written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmqk.monitors import attach
from tests.monitors.attach.nets import D, H, SelfAttention, V, batches

IMAGE = {"image": range(10, 40)}


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


def layers_of(*layers: nn.Module, T: int = 16):
    watch = attach(Stack(*layers), modality=IMAGE)
    watch.probe(ids=batches(1, T=T)[0])
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


def test_beside_one_that_is_seen():
    """Attention that cannot be measured is reported even if its stage, layer or module has measured attention too."""

    class Stage(nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.blocks = nn.Sequential(Mixer(), Mixer(weights))

        def forward(self, x):
            return self.blocks(x)

    class Two(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.of_text, self.of_image = SelfAttention(), SelfAttention(call)

        def forward(self, x):
            return self.of_image(self.of_text(x))

    class Both(Mixer):
        def __init__(self, then):
            super().__init__()
            self.then = then

        def forward(self, x):
            self.weights = None
            x = super().forward(x)
            self.weights = self.then
            return super().forward(x)

    soft = WEIGHTS["log"]
    assert layers_of(Stage(soft), Stage(soft)).hidden == ["layers.0.blocks.1", "layers.1.blocks.1"]
    assert layers_of(Stage(None), Stage(None)).hidden == []
    layers = layers_of(Two("by log"), Two("sdpa"))
    assert layers.hidden == ["layers.0.of_image"] and layers.total == 4
    assert layers_of(Two("sdpa"), Two("sdpa")).hidden == []
    assert layers_of(Both(WEIGHTS["log"])).hidden == ["layers.0"]
    assert layers_of(Both(None)).hidden == []


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
