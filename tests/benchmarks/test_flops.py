"""The formula of `benchmarks.flops` against torch's count of a dense forward and backward pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flops import peak_flops, seen_keys, step_flops
from mmqk.model import EarlyFusionTransformer, ModelConfig

SHAPE = {"vocab_sizes": {"text": 40, "image": 24}, "d_model": 32, "n_layers": 3, "n_heads": 4}
B, T = 2, 16


def counted(config: ModelConfig) -> int:
    """Return torch's count of operations with dense attention, which also computes the masked half of the logits."""
    model = EarlyFusionTransformer(config, "math")
    ids_BT = torch.randint(config.vocab_size, (B, T), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(ids_BT).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "fields",
    [{}, {"mlp": "gelu"}, {"n_kv_heads": 2, "d_head": 16}, {"tie_embeddings": True}, {"d_ff": 80, "n_layers": 1}],
    ids=str,
)
def test_step_is_what_torch_counts(fields):
    config = ModelConfig(**(SHAPE | fields))
    unseen = config.n_layers * (T * T - T * (T + 1) // 2)
    dense = step_flops(config, B, T) + 3 * B * 4 * config.n_heads * config.head_dim * unseen
    assert dense == counted(config)


def test_causal_attention_and_head_count():
    """Controls: dense attention has more operations than the formula counts, and one more vocabulary entry adds the
    operations of one row of the head."""
    config = ModelConfig(**SHAPE)
    assert step_flops(config, B, T) < counted(config)
    larger = ModelConfig(**(SHAPE | {"vocab_sizes": {"text": 41, "image": 24}}))
    assert step_flops(larger, B, T) - step_flops(config, B, T) == 6 * B * T * 32


@pytest.mark.parametrize("window", [0, 1, 3, 7, 20])
def test_seen_keys_one_by_one(window):
    reach = window or 7
    assert seen_keys(7, window) == sum(query - reach < key <= query for query in range(7) for key in range(7))


def test_windowed_layers_count_what_they_see():
    config = ModelConfig(**SHAPE, window=4, global_every=3)
    plain = ModelConfig(**SHAPE)
    less = 2 * (seen_keys(T) - seen_keys(T, 4))  # two of three layers
    assert step_flops(plain, B, T) - step_flops(config, B, T) == 3 * B * 4 * 32 * less


def test_peak_is_known_by_name():
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("AMD EPYC") is None
