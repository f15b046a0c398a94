"""Compares models of random configurations to the forward pass in tests/model/written_out.py."""

import random

import pytest
import torch

from mmqk.model import ModelConfig, PerModalityConfig, QKNormConfig, RopeScalingConfig
from tests.model.small import SMALL, build
from tests.model.written_out import WrittenOut

CHOICES = {
    "n_kv_heads": [0, 1, 2], "d_head": [0, 6], "mlp": ["swiglu", "geglu", "gelu"], "pre_norm": [True, False],
    "post_norm": [True, False], "norm": ["rms", "layer"], "norm_gain": ["plain", "none", "zero_centered"],
    "norm_bias": [True, False], "post_gain_init": [1.0, 0.0], "attn_softcap": [None, 2.0],
    "final_softcap": [None, 1.5], "attn_scale": ["rsqrt", "inverse", "none", 0.2],
    "attention": ["softmax", "softmax", "sigmoid"], "weight_reparam": ["none", "sigma"],
    "reparam_gamma": ["sigma", "one"], "layer_scale": [None, 0.3], "embed_scale": [{}, {"image": 2.0}],
    "embed_sqrt_d": [False, True], "tie_embeddings": [False, True], "window": [0, 3], "global_every": [0, 2],
    "rope_theta": [100.0], "local_rope_theta": [None, 20.0],
}  # fmt: skip
QK = {
    "kind": ["none", "rms", "layer", "l2"], "scope": ["head", "full"], "bias": [True, False], "eps": [1e-5, 1e-2],
    "gain": ["none", "shared", "per_head", "zero_centered"], "place": ["before_rope", "after_rope"],
    "normalize_v": [True, False], "scale_init": [4.0], "scale_max": [None, 4.5],
}  # fmt: skip


def drawn(seed: int) -> dict:
    """Return a random configuration that `ModelConfig` accepts."""
    pick = random.Random(seed)
    while True:
        fields = {name: pick.choice(values) for name, values in CHOICES.items()}
        try:
            fields["qk_norm"] = QKNormConfig(**{name: pick.choice(values) for name, values in QK.items()})
            fields["per_modality"] = PerModalityConfig(*(pick.random() < 0.3 for _ in range(4)))
            kind = pick.choice(["none", "linear", "llama3"])
            fields["rope_scaling"] = RopeScalingConfig(kind, factor=3.0, original_length=32)
            ModelConfig(**(SMALL | fields))
        except ValueError:
            continue
        return fields


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_combined_equals_the_forward_written_out(seed):
    fields = drawn(seed)
    model = build(**fields).double()
    ids_T = torch.randint(0, 21, (9,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = WrittenOut(model.state_dict(), model.config)(ids_T)
        torch.testing.assert_close(model(ids_T[None])[0], expected, rtol=0, atol=1e-5)
        other = WrittenOut(model.state_dict(), model.config)(ids_T.roll(1))  # the control: other tokens
        assert (model(ids_T[None])[0] - other).abs().max() > 1e-3


def test_the_draws_reach_every_choice():
    configs = [drawn(seed) for seed in range(40)]
    for name, values in CHOICES.items():
        assert {str(c[name]) for c in configs} == {str(v) for v in values}, name
    assert {c["qk_norm"].kind for c in configs} == set(QK["kind"])
