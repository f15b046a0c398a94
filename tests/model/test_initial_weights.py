"""Initial weights depend only on the seed and the parameter's name."""

import math
import re

import pytest
import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig
from mmqk.model.linear import init_weights


def weights(seed=0, **fields):
    config = ModelConfig(**({"vocab_sizes": {"text": 60, "image": 40}} | fields))
    return EarlyFusionTransformer(config, seed=seed).state_dict()


@pytest.mark.parametrize(
    "other",
    [
        {"qk_norm": QKNormConfig("layer")}, {"pre_norm": False, "post_norm": True}, {"mlp": "gelu", "d_ff": 176},
        {"n_layers": 6}, {"weight_reparam": "sigma"}, {"layer_scale": 0.1},
        {"per_modality": PerModalityConfig(mlp=True)},
    ],
)  # fmt: skip
def test_arms_share_every_parameter_they_both_have(other):
    here, there = weights(), weights(**other)
    assert set(here) != set(there)
    for name in set(here) & set(there):
        assert torch.equal(here[name], there[name]), name


def test_the_seed_and_the_name_decide_and_the_global_generator_does_not():
    torch.manual_seed(1)
    here = weights()
    torch.manual_seed(2)
    assert all(torch.equal(value, here[name]) for name, value in weights().items())
    matrices = [name for name, value in here.items() if value.dim() == 2]
    elsewhere = weights(seed=1)
    assert not any(torch.equal(here[name], elsewhere[name]) for name in matrices)
    assert not torch.equal(here["blocks.0.attention.w_q.weight"], here["blocks.1.attention.w_q.weight"])
    model = EarlyFusionTransformer(ModelConfig(vocab_sizes={"text": 60, "image": 40}), seed=1)
    init_weights(model, 0)
    assert all(torch.equal(value, here[name]) for name, value in model.state_dict().items())


def test_the_scales_are_those_of_the_table():
    state = weights(d_model=96, d_ff=400, n_layers=1, qk_norm=QKNormConfig("layer"))
    for name, value in state.items():
        if name.endswith("norm.weight"):
            assert (value == 1).all()
        elif name.endswith("bias"):
            assert (value == 0).all()
        else:
            std = value.shape[1] ** -0.5
            assert value.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(value.mean().item()) < 0.05 * std
            cut = name != "embed.weight"
            assert bool(value.abs().max() < 2.3 * std) == cut, name


def test_gains_scales_and_power_vectors_have_the_first_values_that_they_say():
    state = weights(
        norm_gain="zero_centered", post_norm=True, post_gain_init=0.25, layer_scale=0.1, weight_reparam="sigma",
        qk_norm=QKNormConfig("l2", gain="per_head", scale_init=20.0, scale_max=100.0),
    )  # fmt: skip
    first = {
        "pre_norm.weight": 0.0,  # the parameter w; the gain is 1 + w
        "post_norm.weight": -0.75,
        "final_norm.weight": 0.0,
        "layer_scale.weight": 0.1,
        "q_norm.weight": math.log(20.0),
    }
    for ending, value in first.items():
        found = [v for name, v in state.items() if name.endswith(ending)]
        assert found and all(torch.allclose(v, torch.tensor(value)) for v in found), ending
    assert (weights(qk_norm=QKNormConfig("l2"))["blocks.0.attention.q_norm.weight"] == 10.0).all()


def test_copies_of_a_layer_start_as_the_layer_that_is_not_untied():
    everything = PerModalityConfig(norms=True, qk_norm=True, qk=True, mlp=True)
    fields = {"qk_norm": QKNormConfig("layer", bias=True), "norm": "layer", "weight_reparam": "sigma"}
    tied, untied = weights(**fields), weights(**fields, per_modality=everything)
    assert sum(".copies.1." in name for name in untied) > 40
    for name, value in untied.items():
        assert torch.equal(value, tied[re.sub(r"\.copies\.\d+", "", name)]), name
