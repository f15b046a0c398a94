"""Adapters for layer classes of transformers and timm."""

from mmqk.monitors.adapters.adapter import Adapter, Site

_LAYER = r"(.*\.)?layers\.\d+"
_DECODER = (
    Site("attn_in", _LAYER + r"\.self_attn\.q_proj", of="input"),
    Site("q_raw", _LAYER + r"\.self_attn\.q_proj"),
    Site("k_raw", _LAYER + r"\.self_attn\.k_proj"),
    Site("resid", _LAYER),
    Site("final", r"([a-z_]+\.)*norm", of="input"),
)


def _decoder(layer: str, attn_out: str, mlp_out: str) -> Adapter:
    sublayers = (Site("attn_out", rf"{_LAYER}\.{attn_out}"), Site("mlp_out", rf"{_LAYER}\.{mlp_out}"))
    return Adapter(rf"transformers\..*\.({layer})DecoderLayer", _DECODER + sublayers)


ADAPTERS = (
    # Pre-norm.
    _decoder("Llama|Mistral|Qwen2|Qwen3|Chameleon", "self_attn", "mlp"),
    # Post-norm: the norm is the last step before the addition.
    _decoder("Gemma2|Gemma3|Olmo2|Olmo3", "post_attention_layernorm", "post_feedforward_layernorm"),
    # Post-norm under other module names: Chameleon-34B.
    _decoder("ChameleonSwin", "input_layernorm", "post_attention_layernorm"),
    # Vision transformers of timm, which project q, k and v with one matrix.
    Adapter(
        r"timm\.models\.vision_transformer\.Block",
        (
            Site("attn_in", r"(.*\.)?blocks\.\d+\.attn\.qkv", of="input"),
            Site("q_raw", r"(.*\.)?blocks\.\d+\.attn\.qkv", take=lambda qkv: qkv.chunk(3, -1)[0]),
            Site("k_raw", r"(.*\.)?blocks\.\d+\.attn\.qkv", take=lambda qkv: qkv.chunk(3, -1)[1]),
            Site("attn_out", r"(.*\.)?blocks\.\d+\.ls1"),
            Site("mlp_out", r"(.*\.)?blocks\.\d+\.ls2"),
            Site("resid", r"(.*\.)?blocks\.\d+"),
            Site("final", r"norm", of="input"),
        ),
    ),
)
