"""Compares norms and ranks of matrices with numpy and known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.monitors.formulas.weights import matrix_sizes
from mmqk.monitors.own.probe import probe
from tests.one_step import token_batch

BLOCKS = {"text": 20, "image": 12}


def test_sizes_are_those_of_numpy():
    generator = torch.Generator().manual_seed(0)
    for shape in ((7, 5), (5, 7), (6, 6)):
        weight = torch.randn(shape, generator=generator) * 3
        values = np.linalg.svd(weight.double().numpy(), compute_uv=False)
        expected = [math.sqrt((values**2).sum()), values[0], (values**2).sum() / values[0] ** 2]
        assert [float(x) for x in matrix_sizes(weight)] == pytest.approx(expected, rel=1e-5)
    assert math.isnan(float(matrix_sizes(torch.zeros(3, 3))[2]))
    assert math.isnan(float(matrix_sizes(torch.full((2, 2), torch.nan))[1]))


def model(**fields):
    torch.manual_seed(3)
    config = ModelConfig(vocab_sizes=BLOCKS, d_model=16, n_layers=2, n_heads=2, **fields)
    return EarlyFusionTransformer(config, backend="sdpa")


BATCH = token_batch(torch.arange(24).view(2, 12) % 32, BLOCKS)


def test_a_probe_has_them_when_asked_and_nothing_else_changes():
    net = model()
    plain, every = probe(net, BATCH).flat(), probe(net, BATCH, matrices=True).flat()
    added = {tag: value for tag, value in every.items() if tag not in plain}
    assert {tag: every[tag] for tag in plain} == plain and added
    weight = net.blocks[1].attention.w_q.weight
    assert added["w_q_norm/layer01"] == pytest.approx(float(weight.norm()), rel=1e-5)
    assert added["w_q_spectral/layer01"] == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-5)
    assert added["w_q_stable_rank/layer01"] == pytest.approx(
        float(weight.norm() ** 2 / torch.linalg.matrix_norm(weight, 2) ** 2), rel=1e-4
    )
    names = {tag.partition("_norm/")[0] for tag in added if tag.endswith("_norm/layer00")}
    assert names == {"w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down"}
