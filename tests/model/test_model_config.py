"""ModelConfig refuses an impossible model, and equal models have equal configurations."""

from dataclasses import asdict

import pytest

from mmqk.model import ModelConfig, PerModalityConfig, QKNormConfig, RopeScalingConfig

IMPOSSIBLE = [
    {"n_heads": 5}, {"d_model": 12, "n_heads": 4}, {"d_head": 7}, {"n_kv_heads": 3}, {"pre_norm": False},
    {"deep_norm": True}, {"deep_norm": True, "pre_norm": False, "post_norm": True}, {"norm_bias": True},
    {"post_norm": True, "post_gain_init": 0.0, "norm_gain": "none"}, {"vocab_sizes": {"text-image": 4}},
    {"qk_norm": QKNormConfig("l2"), "attn_scale": 1.0}, {"per_modality": PerModalityConfig(qk_norm=True)},
    {"separate_last": 1, "attn_sink": True}, {"separate_first": 3, "separate_last": 2},
]  # fmt: skip


@pytest.mark.parametrize("fields", IMPOSSIBLE, ids=str)
def test_an_impossible_model_is_refused(fields):
    with pytest.raises(ValueError, match=r"model\."):
        ModelConfig(**fields)


def test_a_configuration_comes_back_from_its_dictionary():
    config = ModelConfig(
        vocab_sizes={"text": 9}, qk_norm=QKNormConfig("l2", scale_max=100.0), per_modality=PerModalityConfig(mlp=True),
        rope_scaling=RopeScalingConfig("llama3", 8.0),
    )  # fmt: skip
    assert ModelConfig.from_dict(asdict(config)) == config
    with pytest.raises(TypeError, match="n_head"):
        ModelConfig.from_dict(asdict(config) | {"n_head": 2})


@pytest.mark.parametrize(
    "fields",
    [
        {"qk_norm": QKNormConfig(gain="per_head", place="after_rope", scope="full", normalize_v=True)},
        {"post_gain_init": 0.0}, {"reparam_gamma": "one"}, {"global_every": 2, "local_rope_theta": 500.0},
        {"rope_scaling": RopeScalingConfig(factor=8.0)},
        {"per_modality": PerModalityConfig(mlp=True), "vocab_sizes": {"text": 9}},
        {"separate_first": 1, "separate_last": 1, "vocab_sizes": {"text": 9}},
    ],
)  # fmt: skip
def test_a_detail_of_what_is_off_is_set_back_so_that_equal_models_have_equal_configurations(fields):
    sizes = {"vocab_sizes": fields["vocab_sizes"]} if "vocab_sizes" in fields else {}
    assert ModelConfig(**fields) == ModelConfig(**sizes)


def test_a_detail_of_what_is_on_stays():
    assert QKNormConfig("rms", gain="per_head") != QKNormConfig("rms")
    assert QKNormConfig("rms", scale_max=50.0) == QKNormConfig("rms") != QKNormConfig("l2", scale_max=50.0)
    assert ModelConfig(window=8, global_every=2) != ModelConfig(window=8)
    assert ModelConfig(vocab_sizes={"text": 9, "image": 3}, per_modality=PerModalityConfig(mlp=True)).per_modality.mlp
