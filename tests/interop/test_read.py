"""`from_transformers`: the configuration that it returns, and the fields that it refuses by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmqk.data.tokens.ids import parse_vocab_sizes
from mmqk.interop import from_transformers
from mmqk.interop.read import config_of
from mmqk.model import EarlyFusionTransformer
from mmqk.store import UserError
from tests.interop.models import CHAMELEON, GEMMA2, GEMMA3, LLAMA, OLMO2, QWEN3, logits_of, some_ids, tiny

FULL, SLIDING = "full_attention", "sliding_attention"


def test_the_configuration_of_chameleon():
    config = from_transformers(tiny(CHAMELEON)).config
    assert config.vocab_sizes == {"special": 5, "image": 32, "text": 59}
    assert (config.pre_norm, config.post_norm) == (True, False)
    qk = config.qk_norm
    assert (qk.kind, qk.scope, qk.gain, qk.bias, qk.eps) == ("layer", "head", "per_head", True, 1e-5)
    assert (config.n_kv_heads, config.d_head, config.d_ff, config.mlp) == (2, 0, 80, "swiglu")
    # The eps of QK-Norm is a constant of the class; the eps of the other norms is a field.
    other = from_transformers(tiny(CHAMELEON, rms_norm_eps=1e-6)).config
    assert (other.norm_eps, other.qk_norm.eps) == (1e-6, 1e-5)


@pytest.mark.parametrize(
    ("vocabulary", "vocab_sizes"),
    [
        ({f"IMGIMG{i}": 64 + i for i in range(32)}, {"text": 64, "image": 32}),
        ({f"IMGIMG{i}": i for i in range(32)}, {"image": 32, "text": 64}),
        ({f"IMGIMG{i}": i for i in range(96)}, {"image": 96}),
        ({"<image>": 4}, {"text": 96}),
    ],
)
def test_vocab_sizes_from_the_vocabulary(vocabulary, vocab_sizes):
    hf_model = tiny(CHAMELEON)
    hf_model.config.vocabulary_map = vocabulary
    config = config_of(hf_model)
    assert config.vocab_sizes == vocab_sizes and list(config.vocab_sizes) == list(vocab_sizes)


def test_image_ids_with_gaps_need_blocks():
    hf_model = tiny(CHAMELEON)
    hf_model.config.vocabulary_map = {k: v for k, v in hf_model.config.vocabulary_map.items() if v != 9}
    with pytest.raises(UserError, match=r"31 image ids .* not one range .* give vocab_sizes, such as"):
        from_transformers(hf_model)
    given = from_transformers(hf_model, vocab_sizes={"image": 40, "text": 56})
    assert given.config.vocab_sizes == {"image": 40, "text": 56}


def test_blocks_that_are_given():
    hf_model = tiny(LLAMA)
    assert from_transformers(hf_model).config.vocab_sizes == {"text": 96}
    assert list(from_transformers(hf_model, {"text": 90, "image": 6}).config.vocab_sizes) == ["text", "image"]
    with pytest.raises(UserError, match=r"text=90, image=5 add up to 95, but the vocabulary has 96 ids"):
        from_transformers(hf_model, {"text": 90, "image": 5})
    with pytest.raises(UserError, match="add up to 0"):
        from_transformers(hf_model, {})
    with pytest.raises(UserError, match=r"vocab_sizes\.image is 0: it must be a whole number from 1"):
        from_transformers(hf_model, {"text": 96, "image": 0})


@pytest.mark.parametrize("text", ["", "text", "text=0", "text=1,text=2", "a/b=3"])
def test_blocks_that_cannot_be_parsed(text):
    with pytest.raises(UserError, match="give each modality once with its number of ids"):
        parse_vocab_sizes(text)
    assert parse_vocab_sizes("text=65536,image=8192") == {"text": 65536, "image": 8192}


@pytest.mark.parametrize(
    ("kinds", "every"),
    [([SLIDING, FULL] * 2, 2), ([SLIDING, SLIDING, FULL, SLIDING], 3), ([SLIDING] * 4, 0), ([SLIDING] * 3 + [FULL], 4)],
)
def test_periodic_windows(kinds, every):
    hf_model = tiny(GEMMA2, sliding_window=7, layer_types=kinds, num_hidden_layers=4)
    config = from_transformers(hf_model).config
    assert (config.window, config.global_every) == (7, every)
    assert [config.window_of(i) for i in range(4)] == [7 if kind == SLIDING else 0 for kind in kinds]


def test_layers_without_windows_ignore_the_width():
    config = from_transformers(tiny(GEMMA3, sliding_window=7, layer_types=[FULL] * 3)).config
    assert (config.window, config.local_rope_theta, config.rope_theta) == (0, None, 1e6)
    every = from_transformers(tiny(GEMMA3, sliding_window=7, layer_types=[SLIDING] * 3)).config
    assert (every.window, every.local_rope_theta, every.rope_theta) == (7, None, 1e4)


def test_the_scale_has_a_name_where_there_is_one():
    scales = {16: "rsqrt", 256: "inverse", 1: "none", 24: 24**-0.5}
    for scalar, named in scales.items():
        assert config_of(tiny(GEMMA2, query_pre_attn_scalar=scalar)).attn_scale == named


def test_tied_by_identity_not_by_the_configuration():
    tied = from_transformers(tiny(LLAMA, tie_word_embeddings=True))
    assert tied.config.tie_embeddings and tied.head.weight is tied.embed.weight
    assert tied.embed.weight.requires_grad
    # transformers does not tie the head to the embedding if they differ, even if tie_word_embeddings is true.
    hf_model = tiny(LLAMA)
    hf_model.config.tie_word_embeddings = True
    assert not from_transformers(hf_model).config.tie_embeddings


@pytest.mark.parametrize(("dtype", "tie"), [(torch.bfloat16, False), (torch.float64, True)])
def test_a_copy_in_the_same_dtype_and_mode(dtype, tie):
    hf_model = tiny(LLAMA, dtype, tie_word_embeddings=tie)
    before = {n: p.clone() for n, p in hf_model.state_dict().items()}
    model = from_transformers(hf_model)
    assert {p.dtype for p in model.parameters()} == {dtype} and not model.training
    assert from_transformers(hf_model.train()).training
    theirs = {p.data_ptr() for p in hf_model.parameters()}
    assert all(p.data_ptr() not in theirs and p.is_leaf for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(torch.equal(p, before[n]) for n, p in hf_model.state_dict().items())


def _hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, out: out + 1)


def _activation(model):
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def _eps(model):
    model.model.norm.variance_epsilon = 1.0


def _field(model):
    model.config.rms_norm_eps = 1.0


@pytest.mark.parametrize("change", [_hook, _activation, _eps, _field])
def test_a_model_that_was_changed_after_it_was_built_is_refused(change):
    hf_model = tiny(LLAMA, torch.float32)
    from_transformers(hf_model)  # the control
    change(hf_model)
    with pytest.raises(UserError, match=r"The logits of the LlamaForCausalLM differ .* Load it again"):
        from_transformers(hf_model)


REFUSED = [
    (LLAMA, {"attention_bias": True}, r"config.attention_bias is True"),
    (CHAMELEON, {"mlp_bias": True}, r"config.mlp_bias is True"),
    (LLAMA, {"hidden_act": "relu"}, r"config.hidden_act is 'relu'"),
    (GEMMA2, {"hidden_activation": "gelu"}, r"config.hidden_activation is 'gelu'"),
    (QWEN3, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, r"config.layer_types is \["),
    (GEMMA2, {"layer_types": [FULL, SLIDING, SLIDING]}, r"config.layer_types is \["),
    (GEMMA2, {"layer_types": [SLIDING, FULL, FULL]}, r"config.layer_types is \["),
    (GEMMA2, {"sliding_window": None}, r"config.sliding_window is None"),
    (GEMMA2, {"use_bidirectional_attention": True}, r"config.use_bidirectional_attention is True"),
    (GEMMA3, {"attn_logit_softcapping": 30.0}, r"config.attn_logit_softcapping is 30.0"),
    (OLMO2, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     r"config.rope_parameters.rope_type is 'dynamic'"),
    (LLAMA, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, r"rope_type is 'yarn'"),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     r"config.rope_parameters.partial_rotary_factor is 0.5"),
    (GEMMA3, {"rope_parameters": {SLIDING: {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
                                  FULL: {"rope_type": "default", "rope_theta": 1e6}},
              "sliding_window_pattern": 2}, r"config.rope_parameters.sliding_attention is \{"),
    (LLAMA, {"is_causal": False}, r"config.is_causal is False"),
    (GEMMA2, {"final_logit_softcapping": -1.0}, r"model.final_softcap is -1.0: it must be a number from"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "fields", "says"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_refused_by_name(architecture, fields, says):
    hf_model = tiny(architecture, **fields)
    with pytest.raises(UserError, match=says) as refused:
        from_transformers(hf_model)
    assert str(refused.value).count(". ") == 0 and str(refused.value).endswith(".")
    from_transformers(tiny(architecture))  # the control: without the field the model is imported


def test_other_classes_are_refused():
    import transformers

    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        """A class outside transformers, with an unknown forward."""

    with pytest.raises(UserError, match="LlamaForCausalLM is not a class of transformers"):
        from_transformers(LlamaForCausalLM(tiny(LLAMA).config))


def test_weights_that_do_not_fit_are_refused():
    def refuses(hf_model, says: str) -> None:
        with pytest.raises(UserError, match=says):
            from_transformers(hf_model)

    adapted = tiny(LLAMA)
    adapted.model.layers[0].self_attn.q_proj.lora_A = torch.nn.Linear(64, 2, bias=False)
    refuses(adapted, r"The weights have model.layers.0.self_attn.q_proj.lora_A.weight")
    resized = tiny(LLAMA)
    resized.config.intermediate_size = 88
    refuses(resized, r"gate_proj.weight has shape \(80, 64\), but the configuration needs \(88, 64\)")
    away = tiny(LLAMA)
    away.model.layers[1].mlp.to("meta")
    refuses(away, "not in memory")
    quantized = tiny(LLAMA)
    quantized.lm_head.weight = torch.nn.Parameter(torch.zeros(96, 64, dtype=torch.int8), requires_grad=False)
    refuses(quantized, "lm_head.weight is torch.int8")


@pytest.mark.parametrize(("architecture", "windowed"), [(LLAMA, 0), (OLMO2, 0), (QWEN3, 5)])
@torch.no_grad()
def test_a_window_that_the_class_takes_no_notice_of_is_none_here(architecture, windowed):
    more = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 5, "use_sliding_window": True}
    hf_model = tiny(architecture, **more)
    model = from_transformers(hf_model)
    assert model.config.window == windowed
    theirs = logits_of(hf_model, some_ids())
    assert (model(some_ids()) - theirs).abs().max() < 1e-5
    other = EarlyFusionTransformer(replace(model.config, window=5 - windowed)).double()
    other.load_state_dict(model.state_dict())
    assert (other(some_ids()) - theirs).abs().max() > 1e-2
