"""Hugging Face names of the parameters of an `EarlyFusionTransformer`.

The matrices have the same names in all architectures. The names of the norms around the sublayers, and what each name
means, depend on the architecture.
"""

from mmqk.model import ModelConfig

_MODEL = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_LAYER = {
    "attention.w_q": "self_attn.q_proj",
    "attention.w_k": "self_attn.k_proj",
    "attention.w_v": "self_attn.v_proj",
    "attention.w_o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}
# Norms before and after attention, and before and after the MLP. Chameleon's norms keep their names when swin_norm
# moves them from before to after a sublayer, so the state dict does not show where they are.
_PRE = {"attn_pre_norm": "input_layernorm", "mlp_pre_norm": "post_attention_layernorm"}
_SWIN = {"attn_post_norm": "input_layernorm", "mlp_post_norm": "post_attention_layernorm"}
_OLMO2 = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_SANDWICH = {
    "attn_pre_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_pre_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

CHAMELEON = "ChameleonForConditionalGeneration"
LLAMA = "LlamaForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
OLMO2 = "Olmo2ForCausalLM"
GEMMA2 = "Gemma2ForCausalLM"
GEMMA3 = "Gemma3ForCausalLM"
READ = (CHAMELEON, LLAMA, QWEN3, OLMO2, GEMMA2, GEMMA3)
WRITTEN = (CHAMELEON, LLAMA, QWEN3)
CHAMELEON_QK_EPS = 1e-5  # hard-coded in ChameleonLayerNorm.forward; config.rms_norm_eps is not used there
IMAGE_TOKENIZER = "model.vqmodel."  # prefix of the parameters of Chameleon's image tokenizer


def hf_name(name: str, architecture: str, config: ModelConfig) -> str:
    """Return the name that `architecture` gives to the parameter `name` of a model with this configuration."""
    module, _, parameter = name.rpartition(".")
    if module in _MODEL:
        return f"{_MODEL[module]}.{parameter}"
    _, layer, inside = module.split(".", 2)
    return f"model.layers.{layer}.{(_LAYER | _norms(architecture, config))[inside]}.{parameter}"


def _norms(architecture: str, config: ModelConfig) -> dict[str, str]:
    if architecture == OLMO2:
        return _OLMO2
    if config.pre_norm:
        return _SANDWICH if config.post_norm else _PRE
    return _SWIN
