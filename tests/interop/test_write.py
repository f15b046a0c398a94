"""`to_transformers`: exact round trips, and fields that no class of transformers supports."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from mmqk.interop import from_transformers, to_transformers
from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig, RopeScalingConfig
from mmqk.model.patch import allow_patch
from mmqk.store import UserError
from tests.interop.models import CHAMELEON, LLAMA, QWEN3, logits_of, tiny
from tests.interop.test_parity import LINEAR, LLAMA3, some_ids

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
# Values that no layout has; the message names field and value.
OF_ANY = {
    "norm": "layer", "norm_gain": "zero_centered", "post_norm": True, "mlp": "gelu", "attention": "sigmoid",
    "attn_softcap": 50.0, "final_softcap": 30.0, "weight_reparam": "sigma", "layer_scale": 0.1, "embed_sqrt_d": True,
    "embed_norm": True, "attn_gate": "head", "attn_sink": True, "head_scale": True, "mlp_clamp": 7.0,
    "mlp_norm": True, "residual_gate": 0.3, "depth_scale": "branch", "patch": "mmqk.bench.faults:loud_head",
    "separate_first": 1, "separate_last": 1, "embed_scale": {"image": 2.0}, "window": 5,
}  # fmt: skip
OF_RMS = {"scope": "full", "place": "after_rope", "normalize_v": True, "eps": 1e-6, "gain": "per_head"}
OF_LAYER = {"bias": False, "gain": "none", "eps": 1e-6}
REFUSED = [
    *(({name: value}, LLAMA, f"model.{name} is {value}") for name, value in OF_ANY.items()),
    *(({"qk_norm": replace(qk, **{name: value})}, architecture, f"model.qk_norm.{name} is {value}")
      for qk, architecture, fields in ((RMS, QWEN3, OF_RMS), (LAYER, CHAMELEON, OF_LAYER))
      for name, value in fields.items()),
    ({"qk_norm": replace(RMS, gain="zero_centered")}, QWEN3, "model.qk_norm.gain is zero_centered"),
    ({"qk_norm": QKNormConfig("l2")}, "none", "model.qk_norm.kind is l2, which no layout of"),
    ({"pre_norm": False, "post_norm": True}, LLAMA, "model.post_norm is True"),
    ({"post_norm": True, "qk_norm": LAYER}, CHAMELEON, "model.post_norm is True"),
    ({"deep_norm": True, "pre_norm": False}, LLAMA, "model.deep_norm is True"),
    ({"attn_scale": "inverse"}, LLAMA, "model.attn_scale is 0.0625"),
    ({"per_modality": PerModalityConfig(norms=True)}, LLAMA, "model.per_modality.norms is True"),
    ({"per_modality": PerModalityConfig(mlp=True)}, LLAMA, "model.per_modality.mlp is True"),
    ({"window": 5, "qk_norm": LAYER}, CHAMELEON, "model.window is 5"),
    ({"window": 5, "local_rope_theta": 99.0, "qk_norm": RMS}, QWEN3, "model.local_rope_theta is 99.0"),
    ({"d_model": 66, "d_head": 16}, LLAMA, f"model.n_heads is 4, but {LLAMA}, the nearest layout, needs a divisor"),
    ({"d_head": 8, "qk_norm": LAYER}, CHAMELEON, "model.d_head is 8"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "architecture", "says"), REFUSED)
def test_what_no_layout_has_is_refused_by_name(fields, architecture, says):
    if "patch" in fields:
        allow_patch(fields["patch"])
    model = EarlyFusionTransformer(replace(SHAPE, **fields))
    with pytest.raises(UserError, match=re.escape(says)) as refused:
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
