"""Tests the attention statistics of layers in which the modalities do not see each other, and of a shared layer."""

import pytest
import torch

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.monitors.probe import probe

BLOCKS = {"text": 9, "image": 7}


def test_no_attention_mass_lies_between_modalities_in_a_separated_layer():
    config = ModelConfig(vocab_sizes=BLOCKS, d_model=16, n_layers=3, n_heads=2, separate_first=1, separate_last=1)
    ids_BT = torch.randint(0, 16, (3, 24), generator=torch.Generator().manual_seed(0))
    every = torch.ones_like(ids_BT, dtype=torch.bool)
    trained = every.clone()
    trained[:, -1] = False
    batch = TokenBatch(ids_BT, (ids_BT >= 9).long(), trained, every, trained.sum(), None)
    values = probe(EarlyFusionTransformer(config), batch).flat()
    mass = {name: value for name, value in values.items() if name.startswith("attn_mass/")}
    for layer in ("layer00", "layer02"):
        for m in BLOCKS:
            for other in BLOCKS:
                found = mass.get(f"attn_mass/{m}-{other}/{layer}", 0.0)
                assert found == pytest.approx(float(m == other), abs=1e-6), (m, other, layer)
    # Control: the shared layer mixes modalities.
    assert 0.1 < mass["attn_mass/text-image/layer01"] < 0.9
    assert mass["attn_mass/image-image/layer01"] < 0.95
