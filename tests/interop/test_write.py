"""`to_transformers`: exact round trips, and fields that no class of transformers supports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmqk.interop import from_transformers, to_transformers
from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig, RopeScalingConfig
from mmqk.model.patch import allow_patch
from mmqk.store import UserError
from tests.interop.models import logits_of, tiny
from tests.interop.test_parity import LINEAR, LLAMA3, some_ids

LLAMA, QWEN3, CHAMELEON = "LlamaForCausalLM", "Qwen3ForCausalLM", "ChameleonForConditionalGeneration"
BLOCKS = {"text": 64, "image": 32}
SHAPE = ModelConfig(vocab_sizes=BLOCKS, d_model=64, n_layers=3, n_heads=4, n_kv_heads=2)
MODELS = [
    (LLAMA, {}),
    (LLAMA, {"tie_word_embeddings": True, "head_dim": 8, "attention_dropout": 0.1}),
    (LLAMA, {"rope_parameters": LLAMA3, "hidden_act": "gelu_pytorch_tanh"}),
    (QWEN3, {"rope_parameters": LINEAR, "head_dim": 32}),
    (QWEN3, {"use_sliding_window": True, "sliding_window": 7,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    (CHAMELEON, {"swin_norm": False}),
    (CHAMELEON, {"swin_norm": True, "rms_norm_eps": 1e-6}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "fields"), MODELS)
@torch.no_grad()
def test_there_and_back_is_exact(architecture, fields):
    dtype = torch.bfloat16
    hf_model = tiny(architecture, dtype, **fields)
    model = from_transformers(hf_model)
    back = to_transformers(model)
    back.config._attn_implementation = "eager"
    assert type(back) is type(hf_model) and not back.training and back.dtype == dtype
    before, after = hf_model.state_dict(), back.state_dict()
    ours = {name for name in before if ".vqmodel." not in name}
    assert ours == {name for name in after if ".vqmodel." not in name}
    assert all(torch.equal(before[name], after[name]) for name in ours)
    assert all(t.isfinite().all() and not t.is_meta for t in [*back.parameters(), *back.buffers()])
    assert torch.equal(logits_of(back, some_ids()), logits_of(hf_model, some_ids()))
    assert from_transformers(back).config == model.config
    mine = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() not in mine for p in back.parameters())
    tied = back.lm_head.weight is back.model.embed_tokens.weight
    assert tied == bool(fields.get("tie_word_embeddings"))


LAYER = QKNormConfig("layer", bias=True)
EXPORTED = [
    (LLAMA, SHAPE),
    (LLAMA, replace(SHAPE, rope_scaling=RopeScalingConfig("llama3", 4.0, original_length=16))),
    (LLAMA, replace(SHAPE, window=5, global_every=1)),
    (QWEN3, replace(SHAPE, qk_norm=QKNormConfig("rms"), d_head=10, window=5, global_every=2, mlp="geglu")),
    (CHAMELEON, replace(SHAPE, qk_norm=LAYER, attn_scale=16**-0.5)),
    (CHAMELEON, replace(SHAPE, qk_norm=LAYER, pre_norm=False, post_norm=True, vocab_sizes={"a": 90, "b": 6})),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "config"), EXPORTED)
@torch.no_grad()
def test_a_model_of_ours_gives_the_same_logits(architecture, config):
    model = EarlyFusionTransformer(config, seed=1).double().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter += torch.empty_like(parameter).uniform_(-0.3, 0.3)
    hf_model = to_transformers(model)
    assert type(hf_model).__name__ == architecture
    assert (logits_of(hf_model, some_ids()) - model(some_ids())).abs().max() <= 1e-5
    assert list(from_transformers(hf_model).config.vocab_sizes.items()) == list(config.vocab_sizes.items())
    if architecture == CHAMELEON:
        q_norm = hf_model.model.layers[0].self_attn.q_norm
        assert q_norm.weight.shape == (4, 16) and torch.equal(q_norm.weight[0], q_norm.weight[3])
        # The control: another norm placement gives other logits.
        hf_model.config.swin_norm = not hf_model.config.swin_norm
        flipped = type(hf_model)(hf_model.config).double().eval()
        flipped.load_state_dict(hf_model.state_dict())
        assert (logits_of(flipped, some_ids()) - model(some_ids())).abs().max() > 1e-2


def test_image_ids_have_chameleons_names():
    config = replace(SHAPE, qk_norm=LAYER, vocab_sizes={"text": 50, "image": 32, "more": 14})
    hf_model = to_transformers(EarlyFusionTransformer(config))
    mapping = hf_model.model.vocabulary_mapping
    assert mapping.image_tokens == list(range(50, 82))
    assert mapping.bpe2img == {50 + code: code for code in range(32)}  # derived by transformers
    assert hf_model.config.vq_config.num_embeddings == 32
    with torch.no_grad():
        assert (hf_model(some_ids()).logits[..., 50:82] == torch.finfo(torch.float32).min).all()
        pixels = torch.zeros(1, 3, 32, 32)
        tokens = hf_model.model.get_image_tokens(pixels)
    assert tokens.min() >= 50 and tokens.max() < 82


RMS = QKNormConfig("rms")
REFUSED = [
    ({"norm": "layer"}, LLAMA, "model.norm is layer, but LlamaForCausalLM, the nearest layout, needs rms"),
    ({"norm_gain": "zero_centered"}, LLAMA, "model.norm_gain is zero_centered"),
    ({"pre_norm": False, "post_norm": True}, LLAMA, "model.post_norm is True"),
    ({"post_norm": True}, LLAMA, "model.post_norm is True"),
    ({"post_norm": True, "qk_norm": LAYER}, CHAMELEON, "model.post_norm is True"),
    ({"mlp": "gelu"}, LLAMA, "model.mlp is gelu"),
    ({"attention": "sigmoid"}, LLAMA, "model.attention is sigmoid"),
    ({"attn_softcap": 50.0}, LLAMA, "model.attn_softcap is 50.0"),
    ({"final_softcap": 30.0}, LLAMA, "model.final_softcap is 30.0"),
    ({"attn_scale": "inverse"}, LLAMA, "model.attn_scale is 0.0625"),
    ({"weight_reparam": "sigma"}, LLAMA, "model.weight_reparam is sigma"),
    ({"layer_scale": 0.1}, LLAMA, "model.layer_scale is 0.1"),
    ({"embed_sqrt_d": True}, LLAMA, "model.embed_sqrt_d is True"),
    ({"embed_norm": True}, LLAMA, "model.embed_norm is True"),
    ({"attn_gate": "head"}, LLAMA, "model.attn_gate is head"),
    ({"attn_sink": True}, LLAMA, "model.attn_sink is True"),
    ({"head_scale": True}, LLAMA, "model.head_scale is True"),
    ({"mlp_clamp": 7.0}, LLAMA, "model.mlp_clamp is 7.0"),
    ({"mlp_norm": True}, LLAMA, "model.mlp_norm is True"),
    ({"residual_gate": 0.3}, LLAMA, "model.residual_gate is 0.3"),
    ({"depth_scale": "branch"}, LLAMA, "model.depth_scale is branch"),
    ({"deep_norm": True, "pre_norm": False}, LLAMA, "model.deep_norm is True"),
    ({"patch": "mmqk.bench.faults:loud_head"}, LLAMA, "model.patch is mmqk.bench.faults:loud_head"),
    ({"separate_first": 1}, LLAMA, "model.separate_first is 1"),
    ({"separate_last": 1}, LLAMA, "model.separate_last is 1"),
    ({"embed_scale": {"image": 2.0}}, LLAMA, r"model.embed_scale is \{'image': 2.0\}"),
    ({"per_modality": PerModalityConfig(norms=True)}, LLAMA, "model.per_modality.norms is True"),
    ({"per_modality": PerModalityConfig(mlp=True)}, LLAMA, "model.per_modality.mlp is True"),
    ({"window": 5}, LLAMA, "model.window is 5"),
    ({"window": 5, "qk_norm": LAYER}, CHAMELEON, "model.window is 5"),
    ({"window": 5, "local_rope_theta": 99.0, "qk_norm": RMS}, QWEN3, "model.local_rope_theta is 99.0"),
    ({"d_model": 66, "d_head": 16}, LLAMA, "model.n_heads is 4, but .* needs a divisor of 66"),
    ({"d_head": 8, "qk_norm": LAYER}, CHAMELEON, "model.d_head is 8"),
    ({"qk_norm": QKNormConfig("l2")}, "none", "model.qk_norm.kind is l2, which no layout of"),
    ({"qk_norm": replace(RMS, scope="full")}, QWEN3, "model.qk_norm.scope is full"),
    ({"qk_norm": replace(RMS, place="after_rope")}, QWEN3, "model.qk_norm.place is after_rope"),
    ({"qk_norm": replace(RMS, normalize_v=True)}, QWEN3, "model.qk_norm.normalize_v is True"),
    ({"qk_norm": replace(RMS, eps=1e-6)}, QWEN3, "model.qk_norm.eps is 1e-06, but .* needs 1e-05"),
    ({"qk_norm": replace(RMS, gain="per_head")}, QWEN3, "model.qk_norm.gain is per_head"),
    ({"qk_norm": replace(RMS, gain="zero_centered")}, QWEN3, "model.qk_norm.gain is zero_centered"),
    ({"qk_norm": replace(LAYER, bias=False)}, CHAMELEON, "model.qk_norm.bias is False"),
    ({"qk_norm": replace(LAYER, gain="none")}, CHAMELEON, "model.qk_norm.gain is none"),
    ({"qk_norm": replace(LAYER, eps=1e-6)}, CHAMELEON, "model.qk_norm.eps is 1e-06, but .* needs 1e-05"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "architecture", "says"), REFUSED)
def test_what_no_layout_has_is_refused_by_name(fields, architecture, says):
    if "patch" in fields:
        allow_patch(fields["patch"])
    model = EarlyFusionTransformer(replace(SHAPE, **fields))
    with pytest.raises(UserError, match=says) as refused:
        to_transformers(model)
    assert architecture == "none" or architecture in str(refused.value)
    assert str(refused.value).endswith(".") and ". " not in str(refused.value)


def test_every_field_is_carried_left_behind_or_refused():
    """Every field of ModelConfig is in one of the sets below; add a new field to one of them."""
    from dataclasses import fields

    carried = {
        "vocab_sizes", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "mlp", "pre_norm",
        "norm_eps",
        "qk_norm", "attn_dropout", "tie_embeddings", "window", "global_every", "rope_theta", "rope_scaling",
    }  # fmt: skip
    only_training = {"post_gain_init", "residual_dropout", "output_init", "embed_init"}
    refused = {name for changed, _, _ in REFUSED for name in changed}
    of_norm_layer, of_sigma = {"norm_bias"}, {"reparam_gamma"}
    assert {f.name for f in fields(ModelConfig)} == carried | only_training | refused | of_norm_layer | of_sigma
