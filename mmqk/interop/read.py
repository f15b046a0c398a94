"""Convert a Hugging Face model to an `EarlyFusionTransformer`: fields of the configuration, and weights by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig, RopeScalingConfig
from mmqk.model.config import MlpKind
from mmqk.model.transformer import evaluation_mode
from mmqk.store import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Hugging Face names of the parameters. The matrices have the same names in all architectures. The names of the norms
# around the sublayers, and what each name means, depend on the architecture.
_MODEL = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_LAYER = {
    **{f"attention.w_{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"attention.{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"mlp.w_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
# Norms before and after attention, and before and after the MLP. Chameleon's norms keep their names when swin_norm
# moves them from before to after a sublayer, so the state dict does not show where they are.
_PRE = {"attn_pre_norm": "input_layernorm", "mlp_pre_norm": "post_attention_layernorm"}
_SWIN = {"attn_post_norm": "input_layernorm", "mlp_post_norm": "post_attention_layernorm"}
_OLMO2 = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_SANDWICH = {"attn_pre_norm": "input_layernorm", "mlp_pre_norm": "pre_feedforward_layernorm"} | _OLMO2

CHAMELEON = "ChameleonForConditionalGeneration"
LLAMA = "LlamaForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
OLMO2 = "Olmo2ForCausalLM"
GEMMA2 = "Gemma2ForCausalLM"
GEMMA3 = "Gemma3ForCausalLM"


class _Family(NamedTuple):
    """What the models of an architecture have in common.

    Attributes:
        norms: names of the norms around the sublayers.
        qk_norm: their QK-Norm.
        own_eps: whether the QK-Norm has another eps than the other norms.
        windows: whether layers can have a sliding window; other classes do not use layer_types and sliding_window.
        gemma: whether embeddings, gains and scale of the logits are those of Gemma.
    """

    norms: dict[str, str]
    qk_norm: QKNormConfig = QKNormConfig()
    own_eps: bool = True
    windows: bool = False
    gemma: bool = False


_FAMILIES = {
    # The eps is hard-coded in ChameleonLayerNorm.forward; config.rms_norm_eps is not used there.
    CHAMELEON: _Family(_PRE, QKNormConfig("layer", gain="per_head", bias=True, eps=1e-5)),
    LLAMA: _Family(_PRE),
    QWEN3: _Family(_PRE, QKNormConfig("rms"), own_eps=False, windows=True),
    OLMO2: _Family(_OLMO2, QKNormConfig("rms", scope="full", gain="per_head"), own_eps=False),
    GEMMA2: _Family(_SANDWICH, windows=True, gemma=True),
    GEMMA3: _Family(_SANDWICH, QKNormConfig("rms", gain="zero_centered"), own_eps=False, windows=True, gemma=True),
}
READ = tuple(_FAMILIES)
WRITTEN = (CHAMELEON, LLAMA, QWEN3)
IMAGE_TOKENIZER = "model.vqmodel."  # prefix of the parameters of Chameleon's image tokenizer
# Field of a Hugging Face config in which `to_transformers` stores the vocabulary sizes: pairs [name, size] in the
# order of the ids.
# A mapping would lose the order, because config.json has sorted keys.
STORED_SIZES = "mmqk_vocab_sizes"
IMAGE_PREFIX = "IMGIMG"  # prefix of the image tokens in Chameleon's vocabulary_map
_GATES: dict[str, MlpKind] = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}


def from_transformers(
    hf_model: PreTrainedModel, vocab_sizes: Mapping[str, int] | None = None
) -> EarlyFusionTransformer:
    """Return the equivalent model of mmqk, with the same weights, dtype and mode (training or evaluation).

    Args:
        hf_model: A ChameleonForConditionalGeneration, LlamaForCausalLM, Qwen3ForCausalLM, Olmo2ForCausalLM,
            Gemma2ForCausalLM or Gemma3ForCausalLM of transformers 5. It is unchanged and shares no memory with the
            result. Chameleon's image tokenizer (`vqmodel`) is not converted: the model reads image tokens as ids.
        vocab_sizes: Number of ids by modality, in the order of the ids. By default, the sizes that
            `to_transformers` stored in the configuration. If it stores none, Chameleon has the modalities `special`,
            `image` and `text`, and its image ids are those with names IMGIMG... in its vocabulary_map. All ids of
            any other model are `text`.

    Returns:
        The model. Its attention backend is math if the attention logits are capped, otherwise sdpa.

    Raises:
        UserError: the class is unknown, a field has no counterpart, the weights cannot be used, `vocab_sizes` does
            not fit the vocabulary, or the logits of the two models differ, because `hf_model` was changed after it
            was built from its configuration.
    """
    model = adopt(hf_model, vocab_sizes)
    _check_logits(hf_model, model)
    return copy.deepcopy(model)


@torch.no_grad()
def _check_logits(hf_model: PreTrainedModel, model: EarlyFusionTransformer) -> None:
    """Compare the logits of 8 tokens, because a hook, a replaced activation or a configuration that was changed later
    does not show in the weights.

    Raises:
        UserError: the logits differ by more than rounding.
    """
    (V, _), device = model.embed.weight.shape, model.embed.weight.device
    if any(p.device != device for p in model.parameters()):
        return
    ids_BT = torch.arange(0, V, max(1, V // 8), device=device)[None, :8]
    with evaluation_mode(hf_model), evaluation_mode(model):
        expected = hf_model(input_ids=ids_BT, use_cache=False).logits
        logits = model(ids_BT)
    kept = expected > torch.finfo(expected.dtype).min  # Chameleon's forward hides the logits of image ids
    wanted, found = expected[kept].double(), logits[kept].double()
    tolerance = 1e-3 if model.embed.weight.dtype.itemsize > 2 else 0.1  # 16-bit models round at different points
    error = ((found - wanted).square().mean() / wanted.square().mean()).sqrt().item()
    if error > tolerance:
        raise UserError(
            f"The logits of the {type(hf_model).__name__} differ from those of its configuration and weights by"
            f" {error:.2g} of their RMS: it was changed after it was built, for example by a hook. Load it again."
        )


def adopt(hf_model: PreTrainedModel, vocab_sizes: Mapping[str, int] | None = None) -> EarlyFusionTransformer:
    """Return what `from_transformers` returns, without a copy: the result shares its weights with `hf_model`."""
    architecture = type(hf_model).__name__
    if architecture not in READ:
        raise UserError(f"{architecture} is not an architecture that mmqk reads: use {', '.join(READ)}.")
    if not type(hf_model).__module__.startswith("transformers."):
        raise UserError(f"{architecture} is not a class of transformers: its forward may differ.")
    hf_weights = hf_model.state_dict()
    for name, tensor in hf_weights.items():
        if tensor.is_meta:
            raise UserError(f"{name} is not in memory: load the model without offloading.")
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise UserError(f"{name} is {tensor.dtype}: load the model unquantized.")
    try:
        config = config_of(hf_model, vocab_sizes)
        # On the meta device no weights are drawn or allocated; the tensors of hf_model are assigned below.
        with torch.device("meta"):
            model = EarlyFusionTransformer(config, "sdpa" if config.attn_softcap is None else "math")
    except ValueError as error:
        raise UserError(f"{architecture} has no counterpart in mmqk ({str(error).rstrip('.')}).") from None
    model.load_state_dict(weights_of(hf_weights, architecture, model), assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model.requires_grad_().train(hf_model.training)


def weights_of(hf_weights: Mapping[str, Tensor], architecture: str, model: EarlyFusionTransformer) -> dict[str, Tensor]:
    """Return the Hugging Face tensors under the names and in the shapes of `model`.

    Raises:
        UserError: a tensor is missing, has another size, or has no counterpart.
    """
    weights, used = {}, set()
    for target, parameter in model.state_dict().items():
        name = hf_name(target, architecture, model.config)
        if name not in hf_weights:
            raise UserError(f"The weights have no {name}: load the complete model, without adapters or offloading.")
        if hf_weights[name].numel() != parameter.numel():
            raise UserError(
                f"{name} has shape {tuple(hf_weights[name].shape)}, but the configuration needs"
                f" {tuple(parameter.shape)}: the weights belong to another model."
            )
        # OLMo 2 stores the gains of all heads in one vector, mmqk in a matrix with one row per head.
        weights[target] = hf_weights[name].detach().reshape(parameter.shape)
        used.add(name)
    unused = sorted(name for name in set(hf_weights) - used if not name.startswith(IMAGE_TOKENIZER))
    if unused:
        raise UserError(f"The weights have {unused[0]}, which mmqk cannot use: load the model without adapters.")
    return weights


def config_of(hf_model: PreTrainedModel, vocab_sizes: Mapping[str, int] | None = None) -> ModelConfig:
    """Return the `ModelConfig` that is equivalent to `hf_model.config`.

    Raises:
        UserError: a field cannot be represented.
        ValueError: ModelConfig refuses the values.
    """
    architecture, c = type(hf_model).__name__, hf_model.config
    _check_fields(c)
    family = _FAMILIES[architecture]
    norms = _SWIN if getattr(c, "swin_norm", False) else family.norms
    activation = "hidden_activation" if family.gemma else "hidden_act"
    gate = _GATES.get(getattr(c, activation))
    if gate is None:
        raise no_counterpart(activation, getattr(c, activation), f"mmqk has {', '.join(_GATES)}")
    embedding: Any = hf_model.get_input_embeddings().weight
    heads, width = c.num_attention_heads, embedding.shape[1]
    head_dim = getattr(c, "head_dim", None) or width // heads
    vocab_sizes = vocab_sizes_of(c, len(embedding), vocab_sizes)
    fields: dict[str, Any] = {}
    if family.gemma:
        fields["embed_sqrt_d"] = True
        scale, named = c.query_pre_attn_scalar**-0.5, {head_dim**-0.5: "rsqrt", 1 / head_dim: "inverse", 1.0: "none"}
        fields["attn_scale"] = named.get(scale, scale)
        fields["final_softcap"] = c.final_logit_softcapping
    if architecture == GEMMA2:
        fields["attn_softcap"] = c.attn_logit_softcapping
    elif family.gemma and c.attn_logit_softcapping is not None:
        why = "Gemma3ForCausalLM itself does not apply it"
        raise no_counterpart("attn_logit_softcapping", c.attn_logit_softcapping, why)
    return ModelConfig(
        vocab_sizes=vocab_sizes,
        d_model=width,
        n_layers=c.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=0 if c.num_key_value_heads in (None, heads) else c.num_key_value_heads,
        d_head=0 if head_dim * heads == width else head_dim,
        d_ff=c.intermediate_size,
        mlp=gate,
        pre_norm="attn_pre_norm" in norms,
        post_norm="attn_post_norm" in norms,
        norm_gain="zero_centered" if family.gemma else "plain",
        norm_eps=c.rms_norm_eps,
        qk_norm=qk_norm_of(architecture, c.rms_norm_eps),
        attn_dropout=c.attention_dropout or 0.0,
        tie_embeddings=hf_model.get_output_embeddings().weight is embedding,
        **_layers(architecture, c),
        **fields,
    )


def qk_norm_of(architecture: str, norm_eps: float) -> QKNormConfig:
    """Return the QK-Norm of an architecture whose other norms have this eps."""
    family = _FAMILIES[architecture]
    return family.qk_norm if family.own_eps else replace(family.qk_norm, eps=norm_eps)


def vocab_sizes_of(config: Any, vocab_size: int, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the number of ids by modality.

    These are the given sizes, otherwise those stored in the configuration, otherwise those of its vocabulary_map.

    Raises:
        UserError: the sizes do not add up to the vocabulary, or the image ids have gaps.
    """
    stored: Any = getattr(config, STORED_SIZES, None)
    if given is None and stored is None:
        return _by_vocabulary(getattr(config, "vocabulary_map", None) or {}, vocab_size)
    vocab_sizes: dict[str, int] = dict(stored if given is None else given)
    if sum(vocab_sizes.values()) != vocab_size:
        named = ", ".join(f"{name}={size}" for name, size in vocab_sizes.items())
        raise UserError(
            f"The sizes {named} add up to {sum(vocab_sizes.values())}, but the vocabulary has {vocab_size} ids: give"
            " each id to one modality."
        )
    return vocab_sizes


def _by_vocabulary(vocabulary: Mapping[str, int], vocab_size: int) -> dict[str, int]:
    image = sorted(i for name, i in vocabulary.items() if name.startswith(IMAGE_PREFIX))
    if not image:
        return {"text": vocab_size}
    start, end = image[0], image[-1] + 1
    if image != list(range(start, end)) or end > vocab_size:
        raise UserError(
            f"The {len(image)} image ids of config.vocabulary_map are not one range within the {vocab_size} ids: give"
            " vocab_sizes, such as text=300,image=32."
        )
    # The ids before the image ids are text if no ids follow the image ids, otherwise they are special tokens.
    before, after = ("text", "") if end == vocab_size else ("special", "text")
    sizes = {before: start, "image": end - start, after: vocab_size - end}
    return {name: size for name, size in sizes.items() if size}


def _layers(architecture: str, c: Any) -> dict[str, Any]:
    """Return the fields for windows and rotary positions. Gemma 3 has separate frequencies in windowed layers."""
    kinds = list((_FAMILIES[architecture].windows and c.layer_types) or ["full_attention"] * c.num_hidden_layers)
    window, global_every = _windows(kinds, c)
    fields: dict[str, Any] = {"window": window, "global_every": global_every}
    if architecture != GEMMA3:
        theta, scaling = _rope("rope_parameters", c.rope_parameters)
        return fields | {"rope_theta": theta, "rope_scaling": scaling}
    rope = {kind: _rope(f"rope_parameters.{kind}", c.rope_parameters[kind]) for kind in sorted(set(kinds))}
    theta, scaling = rope.get("full_attention") or rope["sliding_attention"]
    local = rope.get("sliding_attention", (theta, scaling))
    if local != (theta, scaling) and local[1].kind != "none":
        why = "windowed layers need unscaled frequencies, or those of the other layers"
        raise no_counterpart("rope_parameters.sliding_attention", c.rope_parameters["sliding_attention"], why)
    local_theta = None if local == (theta, scaling) else local[0]
    return fields | {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local_theta}


def _windows(kinds: list[str], c: Any) -> tuple[int, int]:
    """Return (window, global_every) for these layer types."""
    if set(kinds) == {"full_attention"}:
        return 0, 0
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    expected = ["full_attention" if every and (i + 1) % every == 0 else "sliding_attention" for i in range(len(kinds))]
    if kinds != expected:
        why = "layers must be full_attention or sliding_attention, with full_attention as the last layer of each period"
        raise no_counterpart("layer_types", kinds, why)
    if not c.sliding_window:
        raise no_counterpart("sliding_window", c.sliding_window, "layer_types has sliding_attention")
    return c.sliding_window, every


def _rope(field: str, parameters: Mapping[str, Any]) -> tuple[float, RopeScalingConfig]:
    """Return the theta and scaling in a `rope_parameters` of transformers 5."""
    kind, theta = parameters["rope_type"], float(parameters["rope_theta"])
    if kind not in ("default", "linear", "llama3"):
        raise no_counterpart(f"{field}.rope_type", kind, "use default, linear or llama3")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        factor = parameters["partial_rotary_factor"]
        raise no_counterpart(f"{field}.partial_rotary_factor", factor, "RoPE rotates all channels")
    if kind == "default":
        return theta, RopeScalingConfig()
    names = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    fields: dict[str, Any] = {name: float(parameters[name]) for name in names}
    if kind == "llama3":
        fields["original_length"] = parameters["original_max_position_embeddings"]
    return theta, RopeScalingConfig(kind, **fields)


def _check_fields(c: Any) -> None:
    if not hasattr(c, "rope_parameters"):
        raise UserError("The model's config has no rope_parameters: update to transformers 5 or later.")
    if getattr(c, "quantization_config", None) is not None:
        raise no_counterpart("quantization_config", "set", "load the model unquantized")
    for name, needed, why in (
        ("attention_bias", False, "its matrices have no biases"),
        ("mlp_bias", False, "its matrices have no biases"),
        ("use_bidirectional_attention", False, "its attention is causal"),
        ("is_causal", True, "its attention is causal"),
    ):
        if (value := bool(getattr(c, name, needed))) != needed:
            raise no_counterpart(name, value, why)


def no_counterpart(field: str, value: object, why: str) -> UserError:
    """Return the error for a field without a counterpart."""
    return UserError(f"The model's config.{field} is {value!r}, which mmqk cannot represent: {why}.")


def hf_name(name: str, architecture: str, config: ModelConfig) -> str:
    """Return the name that `architecture` gives to the parameter `name` of a model with this configuration."""
    module, _, parameter = name.rpartition(".")
    if module in _MODEL:
        return f"{_MODEL[module]}.{parameter}"
    swin = architecture == CHAMELEON and config.post_norm
    norms = _SWIN if swin else _FAMILIES[architecture].norms
    _, layer, inside = module.split(".", 2)
    return f"model.layers.{layer}.{(_LAYER | norms)[inside]}.{parameter}"
