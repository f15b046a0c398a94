"""ModelConfig refuses what cannot be built, in one sentence that names the field."""

import pytest

from mmqk.model import ModelConfig, QKNormConfig


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n_heads": 5}, "model.d_model 64 .* model.n_heads 5"),
        ({"d_model": 12, "n_heads": 4}, "odd head width 3"),
        ({"n_layers": 0}, "model.n_layers must be at least 1"),
        ({"d_ff": -1}, "model.d_ff"),
        ({"pre_norm": False}, "model.pre_norm and model.post_norm"),
        ({"attn_softcap": 0.0}, "model.attn_softcap must be a finite number above 0"),
        ({"final_softcap": -2.0}, "model.final_softcap"),
        ({"residual_dropout": 1.0}, r"model.residual_dropout must lie in \[0, 1\)"),
        ({"norm_eps": 0.0}, "model.norm_eps"),
        ({"rope_theta": float("inf")}, "model.rope_theta"),
        ({"mlp": "relu"}, "model.mlp must be one of swiglu, geglu, gelu, but is 'relu'"),
        ({"attn_scale": "sqrt"}, "model.attn_scale must be one of"),
        ({"blocks": {"text": 10, "image": 0}}, "image 0 ids"),
    ],
)
def test_an_impossible_value_is_refused_by_name(fields, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        ModelConfig(**fields)
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


def test_impossible_qk_norm_is_refused_by_name():
    with pytest.raises(ValueError, match=r"model\.qk_norm\.kind must be one of none, rms, layer"):
        QKNormConfig("batch")
    with pytest.raises(ValueError, match=r"model\.qk_norm\.eps"):
        QKNormConfig("rms", eps=-1e-5)


def test_derived_sizes():
    config = ModelConfig(blocks={"text": 1029, "image": 512})
    assert (config.modalities, config.vocab_size, config.head_dim) == (("text", "image"), 1541, 16)
    assert config.mlp_width == 176 and ModelConfig(mlp="gelu").mlp_width == 256
    assert ModelConfig(d_ff=100).mlp_width == 100
    scales = {name: ModelConfig(attn_scale=name).attn_scale_value for name in ("rsqrt", "inverse", "none")}
    assert scales == {"rsqrt": 1 / 4, "inverse": 1 / 16, "none": 1.0}
