"""Adapter for timm vision transformers, which project q, k and v with one matrix."""

from mmqk.monitors.adapters.adapter import Adapter, Site

ADAPTERS = (
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
