"""Convert an `EarlyFusionTransformer` to a Hugging Face model in the layout of Chameleon, Llama or Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.store import UserError

from .read import CHAMELEON, IMAGE_PREFIX, IMAGE_TOKENIZER, LLAMA, QWEN3, STORED_SIZES, WRITTEN, hf_name, qk_norm_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# No layout has anything but the defaults of these fields.
_DEFAULT = (
    "norm", "norm_gain", "attention", "attn_softcap", "final_softcap", "weight_reparam", "layer_scale",
    "embed_sqrt_d", "embed_norm", "attn_gate", "attn_sink", "head_scale", "mlp_clamp", "mlp_norm", "residual_gate",
    "depth_scale", "deep_norm", "separate_first", "separate_last", "patch",
)  # fmt: skip
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
# The smallest image tokenizer that Chameleon's class accepts; it is untrained.
_VQ = {
    "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "latent_channels": 32, "embed_dim": 32,
    "resolution": 32,
}  # fmt: skip


def to_transformers(model: EarlyFusionTransformer) -> PreTrainedModel:
    """Return the equivalent Hugging Face model, with the same weights, dtype and mode (training or evaluation).

    | layout    | for a model with                                                                          |
    | --------- | ----------------------------------------------------------------------------------------- |
    | Llama     | no QK-Norm, norms before the sublayers                                                    |
    | Qwen3     | QK-Norm rms with shared gain and the eps of the other norms, norms before the sublayers   |
    | Chameleon | QK-Norm layer with bias and eps 1e-5, norms before the sublayers or, with swin_norm,      |
    |           | after them; a gain that all heads share is written once per head                         |

    Chameleon's image tokenizer (`vqmodel`) is **untrained** in the result, because mmqk's model has none. Copy it,
    with `vq_config` and `vocabulary_map`, from the checkpoint whose image tokenizer made the ids (docs/interop.md).
    Chameleon's `forward` sets the logits of image ids to the smallest number of the dtype; apply `lm_head` to the
    last hidden state to get these logits. The fields for residual dropout and initial values, which matter in
    training only, are dropped.

    Raises:
        UserError: a field (named with its value) has no counterpart in the layout, or transformers is not installed.
    """
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return build(model.config, weights).train(model.training)


def build(config: ModelConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return the Hugging Face model of `config`. It shares the tensors of `weights`, which have mmqk's names."""
    architecture = architecture_of(config)
    transformers = import_transformers()
    hf_config = getattr(transformers, architecture).config_class(**_fields(architecture, config))
    # On the meta device no weights are drawn or allocated; modules without mmqk weights are created again below.
    with torch.device("meta"):
        hf_model = getattr(transformers, architecture)(hf_config)
    hf_model.model.rotary_emb = type(hf_model.model.rotary_emb)(config=hf_config)
    hf_weights = {}
    for source, tensor in weights.items():
        name = hf_name(source, architecture, config)
        shape = hf_model.get_parameter(name).shape
        # A gain that all heads share is repeated, because Chameleon's class has one gain per head.
        hf_weights[name] = tensor if tensor.shape == shape else tensor.expand(shape).clone()
    if architecture == CHAMELEON:
        tokenizer = type(hf_model.model.vqmodel)(hf_config.vq_config).to(weights["embed.weight"].dtype)
        hf_weights |= {IMAGE_TOKENIZER + name: tensor for name, tensor in tokenizer.state_dict().items()}
    hf_model.load_state_dict(hf_weights, assign=True)
    hf_model.tie_weights()
    hf_model.config.dtype = weights["embed.weight"].dtype
    return hf_model


def architecture_of(config: ModelConfig) -> str:
    """Return the name of the Hugging Face class whose layout fits `config`.

    Raises:
        UserError: no class fits; the message names the field.
    """
    qk, H, K = config.qk_norm, config.n_heads, config.head_dim
    chosen = {"none": LLAMA, "rms": QWEN3, "layer": CHAMELEON}.get(qk.kind)
    if chosen is None:
        raise UserError(f"model.qk_norm.kind is {qk.kind}, which no layout of {', '.join(WRITTEN)} has.")
    swin = chosen == CHAMELEON and not config.pre_norm
    layout = qk_norm_of(chosen, config.norm_eps)
    if qk.gain == "shared":
        layout = replace(layout, gain="shared")  # a gain per head can hold it
    windowed = any(config.window_of(layer) for layer in range(config.n_layers))
    # (field, its value, the value that the layout needs)
    needed: list[tuple[str, object, object]] = [
        *((name, getattr(config, name), getattr(ModelConfig(), name)) for name in _DEFAULT),
        ("post_norm", config.post_norm, swin),
        ("mlp", config.mlp, config.mlp if config.mlp in _ACTIVATIONS else "swiglu"),
        ("attn_scale", config.attn_scale_value, K**-0.5),
        ("embed_scale", config.embed_scale, dict.fromkeys(config.embed_scale, 1.0)),
        *((f"per_modality.{name}", value, False) for name, value in asdict(config.per_modality).items()),
        *((f"qk_norm.{name}", getattr(qk, name), value) for name, value in asdict(layout).items()),
    ]
    if chosen == QWEN3:
        needed.append(("local_rope_theta", config.local_rope_theta if windowed else None, None))
    else:
        needed.append(("window", config.window if windowed else 0, 0))
        # Llama accepts any head_dim, but the number of heads must divide the width.
        needed.append(("n_heads", H, H if config.d_model % H == 0 else f"a divisor of {config.d_model}"))
    if chosen == CHAMELEON:
        needed.append(("d_head", K, config.d_model // H))
    for name, value, need in needed:
        if value != need:
            raise UserError(f"model.{name} is {value}, but {chosen}, the nearest layout, needs {need}.")
    return chosen


def _fields(architecture: str, config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of the configuration of `architecture`."""
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "hidden_act": _ACTIVATIONS[config.mlp],
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.attn_dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": _rope_parameters(config),
        # mmqk does not store these ids.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        STORED_SIZES: [[name, size] for name, size in config.vocab_sizes.items()],
    }
    scaling = config.rope_scaling
    if scaling.kind == "llama3":
        fields["max_position_embeddings"] = int(scaling.original_length * scaling.factor)
    if architecture != CHAMELEON:
        fields["head_dim"] = config.head_dim
    else:
        fields["swin_norm"] = config.post_norm
        fields["vocabulary_map"] = chameleon_vocabulary(config.vocab_sizes)
        fields["vq_config"] = _VQ | {"num_embeddings": max(len(fields["vocabulary_map"]), 1)}
    if architecture == QWEN3:
        windows = [config.window_of(layer) for layer in range(config.n_layers)]
        fields["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windows]
        fields["use_sliding_window"], fields["sliding_window"] = any(windows), config.window or None
    return fields


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    scaling, parameters = config.rope_scaling, {"rope_theta": config.rope_theta, "rope_type": "default"}
    if scaling.kind != "none":
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    return parameters


def chameleon_vocabulary(vocab_sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a vocabulary_map with the names of the image tokens only, in the order of the ids of block `image`.

    Chameleon spells the number in letters: code 12 is IMGIMGBCZ.
    """
    start, vocabulary = 0, dict[str, int]()
    for name, size in vocab_sizes.items():
        if name == "image":
            letters = str.maketrans("0123456789", "ABCDEFGHIJ")
            vocabulary = {f"{IMAGE_PREFIX}{str(code).translate(letters)}Z": start + code for code in range(size)}
        start += size
    return vocabulary


def import_transformers() -> Any:
    """Return the transformers package.

    Raises:
        UserError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise UserError("transformers 5 is not installed: pip install 'mmqk[interop]'.") from None
    return transformers
