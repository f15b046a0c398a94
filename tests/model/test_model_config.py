"""ModelConfig refuses an impossible model in one sentence that names the field."""

from dataclasses import asdict

import pytest

from mmqk.model import ModelConfig, PerModalityConfig, QKNormConfig, RopeScalingConfig


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n_heads": 5}, "model.d_model 64 .* model.n_heads 5"),
        ({"d_model": 12, "n_heads": 4}, "odd head_dim 3"),
        ({"d_head": 7}, "model.d_head is 7, which RoPE cannot rotate"),
        ({"n_kv_heads": 3}, "model.n_heads 4 cannot share model.n_kv_heads 3"),
        ({"pre_norm": False}, "model.pre_norm and model.post_norm"),
        ({"deep_norm": True}, "model.deep_norm .* model.pre_norm true: remove one"),
        ({"deep_norm": True, "pre_norm": False, "post_norm": True}, "model.deep_norm .* model.post_norm true"),
        ({"mlp": "relu"}, "model.mlp must be one of swiglu, geglu, gelu, but is 'relu'"),
        ({"vocab_sizes": {"text": 10, "image": 0}}, "model.vocab_sizes.image is 0: it must be a whole number from 1"),
        ({"window": -1}, "model.window is -1: it must be a whole number from 0"),
        ({"norm_bias": True}, "model.norm_bias belongs to model.norm layer, but model.norm is rms"),
        ({"post_norm": True, "post_gain_init": 0.0, "norm_gain": "none"}, "needs a gain, but"),
        ({"attn_scale": -1.0}, "model.attn_scale is -1.0: it must be a number from"),
        ({"embed_init": {"text": 0.0}}, "model.embed_init.text is 0.0: it must be a number from"),
        ({"embed_scale": {"txt": 2.0}, "vocab_sizes": {"text": 9}}, "model.embed_scale names 'txt', .* are text"),
        ({"per_modality": PerModalityConfig(qk_norm=True)}, "no QK-Norm to separate: set model.qk_norm.kind"),
        ({"per_modality": PerModalityConfig(qk_norm=True), "qk_norm": QKNormConfig("rms", gain="none")},
         "no gain or bias"),
        ({"per_modality": PerModalityConfig(norms=True), "norm_gain": "none"},
         "model.per_modality.norms has no gain or bias"),
        ({"qk_norm": QKNormConfig("l2"), "attn_scale": "inverse"}, "multiply the learned scale"),
        ({"separate_last": 1, "attn_sink": True}, "model.separate_last separates .* model.attn_sink"),
        ({"separate_first": 3, "separate_last": 2}, "separate_first 3 and model.separate_last 2 are more layers"),
    ],
)  # fmt: skip
def test_an_impossible_model_is_refused_by_name(fields, sentence):
    refused(ModelConfig, fields, sentence)


def refused(kind, fields, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        kind(**fields)
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


def test_impossible_parts_are_refused_by_name():
    for fields, sentence in (
        ({"kind": "batch"}, r"model\.qk_norm\.kind must be one of none, rms, layer"),
        ({"kind": "rms", "eps": -1e-5}, r"model\.qk_norm\.eps"),
        ({"kind": "rms", "bias": True}, r"qk_norm\.bias belongs to kind 'layer', but .* is 'rms'"),
        ({"kind": "l2", "scope": "full"}, r"qk_norm\.scope 'full' does not work with"),
        ({"kind": "l2", "gain": "zero_centered"}, r"qk_norm\.gain 'zero_centered' does not work with .*kind 'l2'"),
        ({"kind": "l2", "scale_max": 9.0}, r"qk_norm\.scale_max 9\.0 is below model\.qk_norm\.scale_init 10\.0"),
    ):
        refused(QKNormConfig, fields, sentence)
    for fields, sentence in (
        ({"kind": "linear", "factor": 0.0}, r"model\.rope_scaling\.factor is 0.0: it must be a number from"),
        ({"kind": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 1.0}, r"high_freq_factor 1\.0 must be above"),
        ({"kind": "yarn"}, r"model\.rope_scaling\.kind must be one of none, linear, llama3"),
    ):
        refused(RopeScalingConfig, fields, sentence)


def test_derived_sizes():
    config = ModelConfig(vocab_sizes={"text": 1029, "image": 512})
    assert (config.modalities, config.vocab_size, config.head_dim) == (("text", "image"), 1541, 16)
    assert config.mlp_width == 176 and ModelConfig(mlp="gelu").mlp_width == 256
    assert ModelConfig(d_ff=100).mlp_width == 100
    scales = {name: ModelConfig(attn_scale=name).attn_scale_value for name in ("rsqrt", "inverse", "none")}
    assert scales == {"rsqrt": 1 / 4, "inverse": 1 / 16, "none": 1.0}
    assert ModelConfig(attn_scale=0.3).attn_scale_value == 0.3
    assert ModelConfig(qk_norm=QKNormConfig("l2")).attn_scale_value == 1.0
    assert ModelConfig(d_head=6, n_kv_heads=2).head_dim == 6 and ModelConfig(n_kv_heads=2).kv_heads == 2
    assert ModelConfig().kv_heads == 4


def test_windows_by_layer():
    gemma2, gemma3 = ModelConfig(window=8, global_every=2), ModelConfig(window=8, global_every=6)
    assert [gemma2.window_of(layer) for layer in range(4)] == [8, 0, 8, 0]
    assert [gemma3.window_of(layer) for layer in range(12)] == 2 * ([8] * 5 + [0])
    assert {ModelConfig(window=8).window_of(layer) for layer in range(12)} == {8}
    assert {ModelConfig(global_every=2).window_of(layer) for layer in range(12)} == {0}


def test_a_configuration_comes_back_from_its_dictionary():
    config = ModelConfig(
        vocab_sizes={"text": 9},
        qk_norm=QKNormConfig("l2", scale_max=100.0),
        per_modality=PerModalityConfig(mlp=True),
        rope_scaling=RopeScalingConfig("llama3", 8.0),
    )
    assert ModelConfig.from_dict(asdict(config)) == config
    with pytest.raises(TypeError, match="n_head"):
        ModelConfig.from_dict(asdict(config) | {"n_head": 2})


@pytest.mark.parametrize(
    "fields",
    [
        {"qk_norm": QKNormConfig(gain="per_head", place="after_rope", scope="full", normalize_v=True)},
        {"post_gain_init": 0.0},
        {"reparam_gamma": "one"},
        {"global_every": 2, "local_rope_theta": 500.0},
        {"rope_scaling": RopeScalingConfig(factor=8.0)},
        {"per_modality": PerModalityConfig(mlp=True), "vocab_sizes": {"text": 9}},
        {"separate_first": 1, "separate_last": 1, "vocab_sizes": {"text": 9}},
    ],
)
def test_a_detail_of_what_is_off_is_set_back_so_that_equal_models_have_equal_configurations(fields):
    sizes = {"vocab_sizes": fields["vocab_sizes"]} if "vocab_sizes" in fields else {}
    assert ModelConfig(**fields) == ModelConfig(**sizes)


def test_a_detail_of_what_is_on_stays():
    assert QKNormConfig("rms", gain="per_head") != QKNormConfig("rms")
    assert QKNormConfig("rms", scale_max=50.0) == QKNormConfig("rms") != QKNormConfig("l2", scale_max=50.0)
    assert ModelConfig(window=8, global_every=2) != ModelConfig(window=8)
    assert ModelConfig(vocab_sizes={"text": 9, "image": 3}, per_modality=PerModalityConfig(mlp=True)).per_modality.mlp


@pytest.mark.parametrize("name", ["a b", "te/xt", "layer03", "", "text-image", 3])
def test_a_modality_has_a_name_that_a_series_can_carry(name):
    with pytest.raises(ValueError, match=r"model\.vocab_sizes has a modality"):
        ModelConfig(vocab_sizes={name: 4})
    with pytest.raises(ValueError, match="it must be a whole number from 1"):
        ModelConfig(vocab_sizes={"text": 4.5})
