"""Reference layers of other libraries, as functions of leaf tensors with mmqk's parameter names."""

from functools import partial
from importlib import import_module
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests.model.comparison import LAYERS, D, Function, H, K, Leaves, T, rope64, sigma_vectors

# RoPE rotates channels i and i + K/2 together in mmqk, but i and i + 1 in x-transformers.
INTERLEAVED = torch.arange(K).view(2, K // 2).T.flatten()


def _tables() -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each of shape (T, K), in the half-split layout."""
    cos, signed_sin = (table[:, 0] for table in rope64())
    return cos, torch.cat((signed_sin[:, K // 2 :], signed_sin[:, K // 2 :]), -1)


def projections(leaves: Leaves, *names: str) -> dict[str, Tensor]:
    """Return W_q, W_k, W_v and W_o under the names of a library."""
    return {f"{name}.weight": leaves[f"w_{n}.weight"] for name, n in zip(names, "qkvo", strict=True)}


def timm_attention(norm: type[nn.Module] | None = None, kv_heads: int = H, **options) -> Function:
    """Return timm's AttentionRope with QK-Norm per head (the heads share gain and bias)."""

    def forward(leaves: Leaves) -> Tensor:
        from timm.layers import AttentionRope

        module = AttentionRope(
            D, H, qkv_bias=False, qkv_fused=False, proj_bias=False, num_prefix_tokens=0, rotate_half=True,
            num_kv_heads=kv_heads, qk_norm=norm is not None, norm_layer=norm and partial(norm, **options),
        ).double()  # fmt: skip
        module.fused_attn = False
        parameters = projections(leaves, "q_proj", "k_proj", "v_proj", "proj")
        parameters |= {name: leaf for name, leaf in leaves.items() if "_norm." in name}
        cos, sin = _tables()
        rope = torch.cat((sin, cos), -1)
        return functional_call(module, parameters, leaves["x"], {"rope": rope, "is_causal": True}, strict=True)

    return forward


def timm_block(kind: str, init_values: float | None = None, seed: int | None = None, **options) -> Function:
    """Return timm's causal Block or ResPostBlock (LayerNorm, exact GELU, no positions).

    With `init_values`, ResPostBlock uses timm's initial gains instead of the leaves' values, but the gradients still
    go to the leaves.
    """

    def forward(leaves: Leaves) -> Tensor:
        import timm.models.vision_transformer as vit

        module = getattr(vit, kind)(
            D, H, proj_bias=False, norm_layer=nn.LayerNorm, init_values=init_values, **options
        ).double()
        module.train(seed is not None)
        module.attn.fused_attn = False
        module.mlp.drop1.p = 0.0  # our blocks apply dropout only to the output of a branch
        ours = "post" if kind == "ResPostBlock" else "pre"
        parameters = {
            "attn.qkv.weight": torch.cat([leaves[f"attention.w_{n}.weight"] for n in "qkv"]),
            "attn.proj.weight": leaves["attention.w_o.weight"],
            "mlp.fc1.weight": leaves["mlp.w_up.weight"],
            "mlp.fc2.weight": leaves["mlp.w_down.weight"],
        }
        for n, sublayer in ((1, "attn"), (2, "mlp")):
            for leaf in ("weight", "bias"):
                parameters[f"norm{n}.{leaf}"] = leaves[f"{sublayer}_{ours}_norm.{leaf}"]
            if hasattr(module, "ls1") and init_values:
                parameters[f"ls{n}.gamma"] = leaves[f"{sublayer}_layer_scale.weight"]
            elif init_values is not None:
                gain = parameters[f"norm{n}.weight"]
                first = module.get_parameter(f"norm{n}.weight").detach()
                parameters[f"norm{n}.weight"] = first + (gain - gain.detach())
        parameters |= {
            name.replace("attention", "attn"): leaf
            for name, leaf in leaves.items()
            if "q_norm" in name or "k_norm" in name
        }
        with torch.random.fork_rng():
            torch.manual_seed(seed or 0)
            return functional_call(module, parameters, leaves["x"], {"is_causal": True}, strict=True)

    return forward


def swin_v2_attention(leaves: Leaves) -> Tensor:
    """Run timm's WindowAttention of Swin V2: cosine attention with a learned scale, clamped at 100.

    Its relative position bias is constant here, and the causal mask replaces its mask of shifted windows.
    """
    from timm.models.swin_transformer_v2 import WindowAttention

    module = WindowAttention(D, (3, T // 3), H, qkv_bias=False).double()
    own = dict(module.named_parameters())
    parameters = {
        **dict(module.named_buffers()),
        "logit_scale": leaves["q_norm.weight"][..., None],
        "qkv.weight": torch.cat([leaves[f"w_{n}.weight"] for n in "qkv"]),
        "proj.weight": leaves["w_o.weight"],
        "proj.bias": torch.zeros(D).double(),
        **{name: torch.zeros_like(own[name]) for name in own if name.startswith("cpb_mlp")},
    }
    mask = torch.full((1, T, T), float("-inf"), dtype=torch.float64).triu(1)
    return functional_call(module, parameters, (leaves["x"], mask), strict=True)


def x_transformers_attention(zero_centered: bool = False, bias: float | None = None, **options) -> Function:
    """Return x-transformers' causal Attention with rotary positions; `bias` is added to all logits."""

    def gamma(weight: Tensor) -> Tensor:
        return weight.expand(H, K)[:, None] - (0 if zero_centered else 1)

    def forward(leaves: Leaves) -> Tensor:
        from x_transformers.x_transformers import Attention

        module = Attention(D, dim_head=K, heads=H, causal=True, **options).double()
        parameters = projections(leaves, "to_q", "to_k", "to_v", "to_out")
        for n in "qk":
            rows = parameters[f"to_{n}.weight"].view(H, K, D)
            parameters[f"to_{n}.weight"] = rows[:, INTERLEAVED].flatten(0, 1)
        # mmqk has one scale per head; x-transformers also multiplies by 1 / sqrt(head_dim).
        if options.get("qk_norm_dim_scale"):
            parameters["qk_norm_q_scale"] = leaves["q_norm.weight"].expand(H, K)[:, None] * K**0.5
            parameters["qk_norm_k_scale"] = torch.ones(H, 1, K).double()
        if options.get("qk_rmsnorm"):
            for n in "qk":
                parameters[f"{n}_rmsnorm.gamma"] = gamma(leaves[f"{n}_norm.weight"])[..., INTERLEAVED]
        if options.get("gate_values"):
            parameters["to_v_gate.weight"] = leaves["w_g.weight"]
        if options.get("head_scale"):
            parameters["head_scale_params"] = leaves["head_scale.weight"].view(1, H, 1, 1)
        if options.get("head_learned_sink"):
            parameters["attend.head_attn_sink"] = leaves["sink.weight"]
        if options.get("value_rmsnorm"):
            parameters["value_rmsnorm.gamma"] = gamma(leaves["v_norm.weight"])
        freqs = torch.arange(T)[:, None] * 10.0 ** (-torch.arange(K // 2, dtype=torch.float64) / (K // 2))
        inputs = {"rotary_pos_emb": (freqs.repeat_interleave(2, -1)[None], 1.0)}
        if bias is not None:
            inputs["attn_bias"] = torch.full((H, T, T), bias, dtype=torch.float64)
        return functional_call(module, parameters, leaves["x"], inputs, strict=True)

    return forward


def first_layer(leaves: Leaves) -> dict[str, Tensor]:
    """Return the matrices of attention as those of the first of x-transformers' AttentionLayers."""
    inside = {name.removeprefix("attention."): leaf for name, leaf in leaves.items()}
    matrices = projections(inside, "to_q", "to_k", "to_v", "to_out")
    return {f"layers.0.1.{name}": leaf for name, leaf in matrices.items()}


def x_transformers_sandwich(leaves: Leaves) -> Tensor:
    """Run x-transformers' AttentionLayers of depth 1 with `sandwich_norm`, without the final norm."""
    from x_transformers.x_transformers import AttentionLayers

    inner = leaves["mlp.w_up.weight"].shape[0]
    module = AttentionLayers(
        D, 1, H, causal=True, use_rmsnorm=True, norm_add_unit_offset=False, sandwich_norm=True, attn_dim_head=K,
        ff_glu=True, ff_swish=True, ff_no_bias=True, ff_mult=inner / D, pre_norm_has_final_norm=False,
    ).double()  # fmt: skip
    parameters = {
        "layers.1.1.ff.0.proj.weight": torch.cat([leaves["mlp.w_up.weight"], leaves["mlp.w_gate.weight"]]),
        "layers.1.1.ff.0.proj.bias": torch.zeros(2 * inner).double(),
        "layers.1.1.ff.2.weight": leaves["mlp.w_down.weight"],
    } | first_layer(leaves)
    for n, sublayer in enumerate(("attn", "mlp")):
        for place, norm in enumerate(("pre", "post")):
            parameters[f"layers.{n}.0.{place}.g"] = leaves[f"{sublayer}_{norm}_norm.weight"]
    return functional_call(module, parameters, leaves["x"], strict=True)


def x_transformers_deep_norm(alpha: float) -> Function:
    """Return x-transformers' AttentionLayers of depth 1, post-norm, with the residual stream scaled by `alpha`."""

    def forward(leaves: Leaves) -> Tensor:
        from x_transformers.x_transformers import AttentionLayers

        inner = leaves["mlp.w_up.weight"].shape[0]
        module = AttentionLayers(
            D, 1, H, causal=True, pre_norm=False, scale_residual_constant=alpha, norm_add_unit_offset=False,
            attn_dim_head=K, ff_no_bias=True, ff_mult=inner / D,
        ).double()  # fmt: skip
        parameters = first_layer(leaves)
        own = dict(module.named_parameters())
        for name, n in (("0.0", "up"), ("2", "down")):
            parameters[f"layers.1.1.ff.{name}.weight"] = leaves[f"mlp.w_{n}.weight"]
            bias = f"layers.1.1.ff.{name}.bias"
            parameters |= {bias: torch.zeros_like(own[bias])} if bias in own else {}
        for n, sublayer in enumerate(("attn", "mlp")):
            parameters[f"layers.{n}.0.2.gamma"] = leaves[f"{sublayer}_deep_norm.weight"]
        return functional_call(module, parameters, leaves["x"], strict=True)

    return forward


def hf_attention(family: str, kv_heads: int, extra: dict[str, str], half: bool = False, **fields) -> Function:
    """Return the eager attention layer of a transformers model. The norms and the softmax are in fp32.

    Args:
        family: "folder Name" of the model: ``transformers.models.folder`` has NameAttention.
        kv_heads: number of key heads.
        extra: names of the parameters beside the projections, in transformers and in mmqk.
        half: whether the model takes RoPE tables of K / 2 channels.
        fields: more fields of the configuration.
    """

    def forward(leaves: Leaves) -> Tensor:
        import transformers

        folder, name = family.split()
        config = getattr(transformers, f"{name}Config")(
            hidden_size=D, num_attention_heads=H, num_key_value_heads=kv_heads, head_dim=K, rms_norm_eps=1e-5,
            attn_implementation="eager", **fields,
        )  # fmt: skip
        modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
        module = getattr(modeling, f"{name}Attention")(config, 0).double()
        module.qk_scale_factor = 1.0  # of Muse Glimmer
        parameters = projections(leaves, "q_proj", "k_proj", "v_proj", "o_proj")
        for theirs, ours in extra.items():
            parameters[theirs] = leaves[ours].flatten() if "norm" in ours else leaves[ours]
        tables = tuple(table[None, :, : K // 2 if half else K] for table in _tables())
        mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        return functional_call(module, parameters, (leaves["x"], tables, mask), strict=True)[0]

    return forward


def hf_norms(q: str, k: str) -> dict[str, str]:
    """Return the parameters of the QK-Norm, with the names of its modules in transformers."""
    return {f"{q}.weight": "q_norm.weight", f"{k}.weight": "k_norm.weight"}


ONE_LAYER = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
OLMO2 = hf_attention("olmo2 Olmo2", 2, hf_norms("q_norm", "k_norm"))
HUNYUAN = hf_attention("hunyuan_v1_dense HunYuanDenseV1", 2, hf_norms("query_layernorm", "key_layernorm"))
# With two key heads, and gates per channel and QK-Norm without gain in Muse Glimmer.
GPT_OSS = hf_attention("gpt_oss GptOss", 2, {"sinks": "sink.weight"}, half=True, attention_bias=False, **ONE_LAYER)
GLIMMER = hf_attention("muse_glimmer MuseGlimmerText", 2, {"gate_proj.weight": "w_g.weight"}, **ONE_LAYER)


def muse_spark_residual_gate(temperature: float) -> Function:
    """Return transformers' MuseSparkResidualGate, applied to the stream `x` and the branch `branch`."""

    def forward(leaves: Leaves) -> Tensor:
        from transformers.models.muse_spark.modeling_muse_spark import MuseSparkResidualGate

        config = SimpleNamespace(hidden_size=D, residual_gate_temperature=temperature)
        module = MuseSparkResidualGate(config).double()
        return functional_call(module, {"gate": leaves["weight"]}, (leaves["x"], leaves["branch"]), strict=True)

    return forward


def gpt_oss_swiglu(limit: float) -> Function:
    """Return gpt-oss's clamped SwiGLU between projections, with alpha 1 and `up` in place of `up + 1`."""

    def forward(leaves: Leaves) -> Tensor:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        gate, up = (leaves["x"] @ leaves[f"w_{n}.weight"].T for n in ("gate", "up"))
        settings = SimpleNamespace(limit=limit, alpha=1.0)
        stacked = torch.stack((gate, up), -1).flatten(-2)
        gated = GptOssExperts._apply_gate(settings, stacked)  # (clamp(up) + 1) * glu
        glu = GptOssExperts._apply_gate(settings, torch.stack((gate, torch.zeros_like(up)), -1).flatten(-2))
        return (gated - glu) @ leaves["w_down.weight"].T

    return forward


def torch_attention(scale: float, kv_heads: int = H) -> Function:
    """Return torch's scaled_dot_product_attention between projections, with timm's RoPE."""

    def forward(leaves: Leaves) -> Tensor:
        from timm.layers import apply_rot_embed_cat

        q, k, v = ((leaves["x"] @ leaves[f"w_{n}.weight"].T).unflatten(-1, (-1, K)).transpose(1, 2) for n in "qkv")
        cos, sin = _tables()
        q, k = (apply_rot_embed_cat(x, torch.cat((sin, cos), -1), half=True) for x in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=kv_heads != H)
        return out.transpose(1, 2).flatten(2) @ leaves["w_o.weight"].T

    return forward


def torch_spectral_norm(steps: int) -> Function:
    """Return torch's spectral_norm with the singular vectors of `sigma_vectors`, times gamma."""

    def forward(leaves: Leaves) -> Tensor:
        ours = sigma_vectors(leaves, steps)
        theirs = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D, bias=False)).double().eval()
        vectors = theirs.parametrizations.weight[0]
        vectors._u, vectors._v = ours.u, ours.v
        parameters = {"parametrizations.weight.original": leaves["weight"]}
        return leaves["gamma"] * functional_call(theirs, parameters, leaves["x"])

    return forward


def x_transformers_post_act_norm(leaves: Leaves) -> Tensor:
    """Run x-transformers' FeedForward with exact GELU and a LayerNorm without bias before its last matrix."""
    from x_transformers.x_transformers import FeedForward

    module = FeedForward(D, post_act_ln=True, no_bias=True, mult=leaves["w_up.weight"].shape[0] / D).double()
    own = dict(module.named_parameters())
    gain = next(name for name in own if own[name].ndim == 1)
    first, last = (name for name in own if own[name].ndim == 2)
    offset = 1.0 if own[gain].detach().eq(0).all() else 0.0  # the gain of x-transformers may be 1 + gamma
    parameters = {first: leaves["w_up.weight"], last: leaves["w_down.weight"], gain: leaves["norm.weight"] - offset}
    return functional_call(module, parameters, leaves["x"])


def x_transformers_softclamp(cap: float, logits: Function) -> Function:
    """Return x-transformers' softclamp of these logits."""

    def forward(leaves: Leaves) -> Tensor:
        from x_transformers.x_transformers import softclamp

        return softclamp(logits(leaves), cap)

    return forward


def gpt2_initial_sizes(_: Leaves) -> Tensor:
    """Return the standard deviations of GPT-2's output matrices in transformers, divided by `initializer_range`."""
    import transformers

    config = transformers.GPT2Config(n_embd=256, n_layer=LAYERS, n_head=4, vocab_size=8, n_positions=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2Model(config)
    matrices = [m.weight for block in model.h for m in (block.attn.c_proj, block.mlp.c_proj)]
    return torch.stack([m.std() / config.initializer_range for m in matrices]).detach()
