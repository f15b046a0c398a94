"""Adapters for decoder families of transformers, by layer class and module names."""

from mmqk.monitors.adapters.adapter import Adapter, Site

_LAYER = r"(.*\.)?layers\.\d+"
_COMMON = (
    Site("attn_in", _LAYER + r"\.self_attn\.q_proj", of="input"),
    Site("q_raw", _LAYER + r"\.self_attn\.q_proj"),
    Site("k_raw", _LAYER + r"\.self_attn\.k_proj"),
    Site("resid", _LAYER),
    Site("final", r"([a-z_]+\.)*norm", of="input"),
)


def _family(layer: str, attn_out: str, mlp_out: str) -> Adapter:
    sublayers = (Site("attn_out", rf"{_LAYER}\.{attn_out}"), Site("mlp_out", rf"{_LAYER}\.{mlp_out}"))
    return Adapter(rf"transformers\..*\.({layer})DecoderLayer", _COMMON + sublayers)


ADAPTERS = (
    # Pre-norm.
    _family("Llama|Mistral|Qwen2|Qwen3|Chameleon", "self_attn", "mlp"),
    # Post-norm: the norm is the last step before the addition.
    _family("Gemma2|Gemma3|Olmo2|Olmo3", "post_attention_layernorm", "post_feedforward_layernorm"),
    # Post-norm under other module names: Chameleon-34B.
    _family("ChameleonSwin", "input_layernorm", "post_attention_layernorm"),
)
