"""Comparisons of blocks, whole models, σReparam and initial weights with peers; `test_peers` runs them."""

import torch
import torch.nn.functional as F

from mmqk.model import ModelConfig, PerModalityConfig
from mmqk.model.transformer import modality_of_ids
from tests.model import comparison as own
from tests.model import outside
from tests.model.comparison import EXACT, FP32_INSIDE, Comparison, block, compare, initial_sizes, model, qk
from tests.model.small import BLOCKS, SMALL
from tests.model.written_out import WrittenOut


def renamed(function, old, new):
    """Return a function that replaces `old` by `new` in the names of its leaves and passes them to `function`."""
    return lambda leaves: function({name.replace(old, new): leaf for name, leaf in leaves.items()})


def first_gains(**fields):
    """Return the function of a block whose norms keep their initial gains instead of those in the leaves."""
    make, ours = block(**fields)
    return lambda leaves: ours({**leaves, **{n: p for n, p in make().double().named_parameters() if "_norm" in n}})


def written(**fields):
    """Return a function that runs `WrittenOut` on `IDS_BT`, as `comparison.model` runs our whole model."""
    config = ModelConfig(**(SMALL | {"n_layers": 2} | fields))
    return lambda leaves: torch.stack([WrittenOut(leaves, config)(ids_T) for ids_T in own.IDS_BT])


def scaled_rows(*factors):
    """Return the function of a model without embedding scale, whose embedding rows are scaled by modality."""
    rows = [factor for factor, size in zip(factors, BLOCKS.values(), strict=True) for _ in range(size)]
    factor_V1 = torch.tensor(rows, dtype=torch.float64)[:, None]
    return lambda leaves: model()[1]({**leaves, "embed.weight": factor_V1 * leaves["embed.weight"]})


def matrix_norm_2(leaves):
    """Return `gamma / |W|_2 W x`, with the largest singular value computed by torch.linalg."""
    return leaves["gamma"] / torch.linalg.matrix_norm(leaves["weight"], 2) * leaves["x"] @ leaves["weight"].T


def scaled_gains(factor, norms="_pre_norm", **fields):
    """Return the function of a block without depth scale whose norm gains are multiplied by `factor`."""
    return lambda leaves: block(**fields)[1]({n: factor * leaf if norms in n else leaf for n, leaf in leaves.items()})


def normed_rows(leaves):
    """Run a plain model whose embedding rows are normalized with torch's rms_norm."""
    rows = F.rms_norm(leaves["embed.weight"], leaves["embed.weight"].shape[-1:], eps=1e-5)
    return model()[1]({**leaves, "embed.weight": rows})


# timm's blocks have LayerNorm with bias, exact GELU and no positions.
OTHER_EPS = {"norm_eps": 1e-3}
LAYER, RMS = {"norm": "layer", "norm_bias": True}, {"norm": "rms", "norm_bias": False}
POST = {"pre_norm": False, "post_norm": True}
DEEP = {"pre_norm": False, "deep_norm": True}
BLOCK_PEERS: list[Comparison] = [
    compare(("layer_norm", "layer_scale"), "timm Block with LayerScale", EXACT, block,
        LAYER | {"layer_scale": 0.3}, outside.timm_block("Block", 0.3),
        {"RMSNorm": RMS, "no LayerScale": {"layer_scale": None}, "no bias": {"norm_bias": False},
         "another epsilon": OTHER_EPS}),
    compare(("qk_norm_layer_bias",), "timm Block(qk_norm)", EXACT, block, LAYER | qk("layer", bias=True),
        outside.timm_block("Block", qk_norm=True), {"no QK-Norm": qk(), "no bias": qk("layer")}),
    compare(("post_norm",), "timm ResPostBlock", EXACT, block, LAYER | POST, outside.timm_block("ResPostBlock"),
        {"another epsilon": OTHER_EPS, "RMSNorm": RMS, "pre-norm": renamed(block(**LAYER)[1], "_post_", "_pre_")}),
    compare(("post_gain_zero",), "timm ResPostBlock(init_values=0)", EXACT, block,
        LAYER | POST | {"post_gain_init": 0.0}, outside.timm_block("ResPostBlock", 0.0),
        {"first value 1": first_gains(**LAYER, **POST),
         "first value 0.01": first_gains(**LAYER, **POST, post_gain_init=0.01)}, spread=0.0),
    compare(("sandwich",), "x-transformers AttentionLayers(sandwich_norm)", FP32_INSIDE, block,
        {"post_norm": True, "norm_eps": own.TINY, "mlp": "swiglu"}, outside.x_transformers_sandwich,
        {"pre-norm alone": {"post_norm": False}, "post-norm alone": {"pre_norm": False}, "epsilon": OTHER_EPS}),
    compare(
        ("deep_norm",), "x-transformers AttentionLayers(pre_norm=False, scale_residual_constant)", FP32_INSIDE, block,
        DEEP | {"n_layers": 8, "norm": "layer"}, outside.x_transformers_deep_norm(2.0),
        {"another depth": {"n_layers": 7}, "post-norm": renamed(block(norm="layer", **POST)[1], "_deep_", "_post_"),
         "epsilon": OTHER_EPS, "RMSNorm": {"norm": "rms"}},
    ),
    compare(("residual_dropout",), "timm Block(proj_drop), same random numbers", EXACT, block,
        LAYER | {"residual_dropout": 0.3, "seed": 5}, outside.timm_block("Block", seed=5, proj_drop=0.3),
        {"none": {"residual_dropout": 0.0}, "other random numbers": {"seed": 6}, "not in training": {"seed": None}}),
    compare(("attn_dropout",), "timm Block(attn_drop), same random numbers", EXACT, block,
        LAYER | {"attn_dropout": 0.3, "seed": 5}, outside.timm_block("Block", seed=5, attn_drop=0.3),
        {"none": {"attn_dropout": 0.0}, "other random numbers": {"seed": 6}, "not in training": {"seed": None}}),
]  # fmt: skip

# Single parts of a block.
BLOCK_PEERS += [
    compare(("residual_gate",), "transformers MuseSparkResidualGate", EXACT, own.residual_gate, {"temperature": 0.3},
        outside.muse_spark_residual_gate(0.3),
        {"another temperature": {"temperature": 0.4}, "the sum": lambda p: p["x"] + p["branch"]}, spread=1.5),
    compare(("mlp_clamp",), "transformers GptOssExperts", EXACT, own.mlp, {"mlp_clamp": 0.7},
        outside.gpt_oss_swiglu(0.7),
        {"no clamp": {"mlp_clamp": None}, "another clamp": {"mlp_clamp": 0.8}}),
    compare(("mlp_norm",), "x-transformers FeedForward(post_act_ln)", FP32_INSIDE, own.mlp,
        {"mlp_norm": True, "mlp": "gelu", "norm": "layer"}, outside.x_transformers_post_act_norm,
        {"no norm": lambda p: own.mlp(mlp="gelu")[1](p), "RMSNorm": {"norm": "rms"}}),
    compare(("depth_scale_norm",), "formula written out", EXACT, block, {"depth_scale": "norm", "layer": 3},
        scaled_gains(0.5), {"not scaled": {"depth_scale": "none"}, "another layer": {"layer": 2}}),
    compare(("depth_scale_branch",), "formula written out", EXACT, block,
        {"depth_scale": "branch", "post_norm": True, "n_layers": 8}, scaled_gains(0.25, "_post_norm", post_norm=True),
        {"not scaled": {"depth_scale": "none"}, "another depth": {"n_layers": 7}}),
]  # fmt: skip

# Whole models.
RIGHT_BT = modality_of_ids(own.IDS_BT, BLOCKS)
WRONG_COPY = {
    "the first copy for all": {"given": torch.zeros_like(RIGHT_BT)},
    "the second copy for all": {"given": torch.ones_like(RIGHT_BT)},
    "two copies swapped": {"given": torch.tensor([1, 0, 2])[RIGHT_BT]},
}
UNTIED = {
    "untie_norms": {"per_modality": PerModalityConfig(norms=True), "norm_gain": "zero_centered", "post_norm": True},
    "untie_qk_norm": {"per_modality": PerModalityConfig(qk_norm=True), **qk("layer", gain="per_head", bias=True)},
    "untie_qk": {"per_modality": PerModalityConfig(qk=True), "n_kv_heads": 2},
    "untie_mlp": {"per_modality": PerModalityConfig(mlp=True)},
}
BLOCK_PEERS += [
    compare((remedy,), "formula written out", FP32_INSIDE, model, fields, written(**fields), WRONG_COPY)
    for remedy, fields in UNTIED.items()
]
ENDS = {"separate_first": 1, "separate_last": 1, "n_layers": 3, "layer_scale": 0.5, **qk("layer", gain="per_head")}
BLOCK_PEERS += [
    compare(("separate_ends",), "formula written out, a stack for each modality", FP32_INSIDE, model, ENDS,
        written(**ENDS),
        {**WRONG_COPY, "attention between modalities": written(**(ENDS | {"separate_first": 0, "separate_last": 0})),
         "at one end": written(**(ENDS | {"separate_last": 0}))}),
]  # fmt: skip
BLOCK_PEERS += [
    compare(("final_softcap",), "x-transformers softclamp", EXACT, model, {"final_softcap": 1.5},
        outside.x_transformers_softclamp(1.5, model()[1]),
        {"no cap": {"final_softcap": None}}),
    compare(("embed_scale",), "formula written out", EXACT, model, {"embed_scale": {"text": 3.0, "image": 0.5}},
        scaled_rows(3.0, 0.5, 1.0),
        {"no scale": {"embed_scale": {}}, "all modalities": {"embed_scale": dict.fromkeys(BLOCKS, 3.0)}}),
    compare(("embed_sqrt_d",), "formula written out", EXACT, model, {"embed_sqrt_d": True}, scaled_rows(4.0, 4.0, 4.0),
        {"no scale": {"embed_sqrt_d": False}}),
    compare(("embed_norm",), "torch rms_norm", EXACT, model, {"embed_norm": True}, normed_rows,
        {"no norm": {"embed_norm": False}, "scaled after": {"embed_sqrt_d": True}}),
]  # fmt: skip

# σReparam, and standard deviations of initial weights divided by 1 / sqrt(fan_in).
SIZES = "measured standard deviations"
BLOCK_PEERS += [
    Comparison(("sigma_reparam",), "torch spectral_norm", EXACT, leaves=own.sigma_leaves, ours=own.sigma_linear(1),
        theirs=outside.torch_spectral_norm(1),
        controls={"plain": lambda p: p["x"] @ p["weight"].T, "other vectors": own.sigma_linear(2)}),
    Comparison(("sigma_reparam",), "torch matrix_norm(ord=2)", 1e-8, leaves=own.sigma_leaves,
        ours=own.sigma_linear(3000),
        theirs=matrix_norm_2, controls={"few power steps": own.sigma_linear(1)}),
    Comparison(
        ("output_init_total",), "transformers GPT2Model", own.MEASURED, SIZES, ours=initial_sizes(output_init="total"),
        theirs=outside.gpt2_initial_sizes,
        controls={how: initial_sizes(output_init=how) for how in ("plain", "depth")},
    ),
    Comparison(("deep_norm",), "formula written out", own.MEASURED, SIZES, ours=initial_sizes("every matrix", **DEEP),
        theirs=lambda _: torch.tensor(own.LAYERS * [1, 1, *5 * [(8 * own.LAYERS) ** -0.25]]),
        controls={"plain": initial_sizes("every matrix"),
                  "the last matrices alone": initial_sizes("every matrix", output_init="total")}),
    Comparison(("output_init_depth",), "formula written out", own.MEASURED, SIZES,
        ours=initial_sizes(output_init="depth"),
        theirs=lambda _: torch.tensor([(2 * (n // 2 + 1)) ** -0.5 for n in range(2 * own.LAYERS)]),
        controls={how: initial_sizes(output_init=how) for how in ("plain", "total")}),
    Comparison(("embed_init",), "formula written out", own.MEASURED, SIZES,
        ours=initial_sizes(of="embed", embed_init={"text": 0.25, "image": 1.5}),
        theirs=lambda _: torch.tensor([0.25, 1.5, 1.0]),
        controls={"all alike": initial_sizes(of="embed"),
                  "swapped": initial_sizes(of="embed", embed_init={"text": 1.5, "image": 0.25})}),
]  # fmt: skip
