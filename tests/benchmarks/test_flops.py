"""The formula of `benchmarks.flops` against torch's count of a dense forward and backward pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flops import seen_keys, step_flops
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
    [{}, {"mlp": "gelu"}, {"n_kv_heads": 2, "d_head": 16}, {"tie_embeddings": True}, {"d_ff": 80, "n_layers": 1},
     {"window": 4, "global_every": 3}],
    ids=str,
)  # fmt: skip
def test_step_is_what_torch_counts(fields):
    config = ModelConfig(**(SHAPE | fields))
    unseen = sum(T * T - seen_keys(T, config.window_of(layer)) for layer in range(config.n_layers))
    dense = step_flops(config, B, T) + 3 * B * 4 * config.n_heads * config.head_dim * unseen
    assert dense == counted(config)


@pytest.mark.parametrize("window", [0, 1, 3, 7, 20])
def test_seen_keys_one_by_one(window):
    reach = window or 7
    assert seen_keys(7, window) == sum(query - reach < key <= query for query in range(7) for key in range(7))
