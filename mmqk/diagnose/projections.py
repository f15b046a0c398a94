"""Queries and keys of each layer of a checkpoint: their projections, the norm before and the QK-Norm after them.

mmqk's checkpoints are read through their model, all others by the names and shapes of their parameters.

Shapes: D model width, H query heads, G key heads, N either of both, K head_dim. E is D + 1; the last column of a
projection is its bias.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmqk.diagnose.names import PARAMETERS
from mmqk.diagnose.tensors import Weights
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.linear import ByModality, SigmaLinear
from mmqk.model.norms import L2Norm, Norm
from mmqk.model.transformer import Block
from mmqk.monitors.adapters import layer_of
from mmqk.store import UserError
from mmqk.store.errors import reason_of

_ROLES = {  # names of parameters after the number of the layer
    role: re.compile(rf"(?:.*\.)?(?:{PARAMETERS[role]})\.(weight|bias|gain|scale)")
    for role in ("q", "k", "qkv", "q_norm", "k_norm", "input")
}
_OTHER = re.compile(r"cross|encoder_attn|vision|visual|audio|vqmodel")
_BY_KEY_HEAD = ("query_key_value", "linear_qkv")  # GPT-NeoX, Megatron: rows are the queries of a key head, key, value
# Model types of transformers whose norms multiply by 1 + weight.
_ZERO_CENTERED = re.compile(r"gemma[23]?(_text)?|recurrent_gemma|t5gemma2?|vaultgemma|qwen3_(next|5)(_moe)?(_text)?")
_FLAGS = ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm")
_LATENT = {"kv_a_proj_with_mqa", "kv_b_proj", "wkv_a", "wkv_b", "linear_kv_up_proj"}  # keys of DeepSeek, Megatron


@dataclass
class Side:
    """The queries or the keys of one layer.

    Attributes:
        raw: the projection (N, K, E); several if modalities have their own.
        folded: the projections as functions of the normalized input u, with |u|^2 <= D, and 1 for the bias; empty if
            the input has no norm, so that its size is not known.
        stretch_NK: under QK-Norm, the largest length of a normalized vector, times each gain; else None.
        shift_N: length of the bias of QK-Norm.
    """

    raw: list[Tensor]
    folded: list[Tensor]
    stretch_NK: Tensor | None
    shift_N: Tensor


@dataclass
class Projections:
    """Queries and keys of one layer; ``qk_norm`` and ``layout`` are words, ``scale`` is the factor on q.k."""

    layer: int
    qk_norm: str
    layout: str
    scale: float
    softcap: float | None
    q: Side
    k: Side


@torch.no_grad()
def projections(weights: Weights, notes: list[str]) -> Iterator[Projections]:
    """Yield the queries and keys of each layer, which are read one layer at a time.

    A sentence on each thing that cannot be read is added to ``notes``.
    """
    try:
        yield from _of_mmqk(weights) if weights.format == "mmqk checkpoint" else _named_layers(weights, notes)
    except (UserError, RuntimeError, TypeError) as error:  # of load_state_dict after model.patch, of a newer config
        notes.append(f"{reason_of(error)}: no bounds are computed.")


def _of_mmqk(weights: Weights) -> Iterator[Projections]:
    config = replace(ModelConfig.from_dict(weights.config), patch="")
    with torch.device("meta"):
        model = EarlyFusionTransformer(config, "math")
    model.load_state_dict({name: reader() for name, reader in weights.readers.items()}, assign=True)
    yield from (_own(model, layer) for layer in range(config.n_layers))


def _named_layers(weights: Weights, notes: list[str]) -> Iterator[Projections]:
    layers: dict[str, dict[int, dict[tuple[str, str], str]]] = {}
    for name in weights.readers:
        place = layer_of(name)
        if place is None or _OTHER.search(name):
            continue
        prefix, number = place
        rest = name.removeprefix(f"{prefix}.").partition(".")[2]
        for role, pattern in _ROLES.items():
            if found := pattern.fullmatch(rest):
                layers.setdefault(prefix, {}).setdefault(number, {})[role, found[1]] = name
    if any(_LATENT & set(name.split(".")) for name in weights.readers):
        raise UserError("The keys are made from a latent vector (multi-head latent attention)")
    needed = {("q", "weight"), ("qkv", "weight")}
    stacks = [{n: names for n, names in stack.items() if needed & names.keys()} for stack in layers.values()]
    stack = max(stacks, key=len, default={})
    if not stack:
        raise UserError("No projections of queries and keys are known by these names")
    for number, names in sorted(stack.items()):
        layer = _Named(weights, names, number).projections()
        if math.isnan(layer.scale) and number == min(stack):
            notes.append("No config.json has the number of heads: all heads are taken as one, without bounds.")
        yield layer


def field(config: Mapping[str, Any], *names: str) -> Any:
    """Return the first field that is set in a configuration or in that of its text model; None if none is."""
    parts = [config, *(config[k] for k in ("text_config", "llm_config", "model") if isinstance(config.get(k), Mapping))]
    return next((part[n] for part in parts for n in names if part.get(n) is not None), None)


def rope_factor(config: Mapping[str, Any]) -> float:
    """Return the factor of RoPE on queries and keys, as in transformers: that of YaRN (arXiv 2309.00071, eq. 22) and
    LongRoPE (arXiv 2402.13753), else 1."""
    rope = field(config, "rope_parameters", "rope_scaling") or {}
    if by_layer := [part for part in rope.values() if isinstance(part, Mapping)]:  # a dictionary for each kind of layer
        return max(rope_factor(dict(config) | {"rope_parameters": part}) for part in by_layer)
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in ("yarn", "longrope", "su"):
        return 1.0
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    original = field({**config, **rope}, "original_max_position_embeddings")
    factor = rope.get("factor") or field(config, "max_position_embeddings") / original
    if factor <= 1:
        return 1.0
    if kind != "yarn":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    over, under = (over, under) if over and under else (1, 0)
    return (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1)


def is_centered(config: Mapping[str, Any], name: str) -> bool:
    """Return whether the gain of the norm with this name is 1 + weight."""
    qk_norm = config.get("qk_norm")
    if isinstance(qk_norm, Mapping):
        kind = qk_norm.get("gain") if re.search(r"[qkv]_norm", name) else config.get("norm_gain")
        return kind == "zero_centered"
    return bool(_ZERO_CENTERED.fullmatch(str(field(config, "model_type")))) or bool(field(config, "apply_layernorm_1p"))


def _fold(weight_NKE: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Return W (g u + b) + bias as one matrix for (u, 1)."""
    matrix = weight_NKE[..., :-1]
    return torch.cat((matrix * gain, (weight_NKE[..., -1] + (matrix * bias).sum(-1))[..., None]), -1)


def _own(model: EarlyFusionTransformer, layer: int) -> Projections:
    c, block = model.config, cast(Block, model.blocks[layer])
    attention, factor = block.attention, block.input_scale or 1.0

    def copies(module: nn.Module) -> list[Any]:
        return list(module.copies) if isinstance(module, ByModality) else [module] * len(c.modalities)

    def side(projection: nn.Module, norm: nn.Module, n: int) -> Side:
        raw, folded = [], []
        for linear, before in zip(copies(projection), copies(block.attn_pre_norm), strict=True):
            sigma = linear.gamma / linear.sigma() if isinstance(linear, SigmaLinear) else 1.0
            weight = nn.functional.pad(sigma * linear.weight.float(), (0, 1)).unflatten(0, (n, -1))
            raw.append(weight)
            if isinstance(before, Norm):
                gain = torch.ones(()) if (g := before.gain()) is None else g.float()
                bias = torch.zeros(()) if before.bias is None else before.bias.float()
                folded.append(_fold(weight, factor * gain, factor * bias))
        is_shared = projection is copies(projection)[0] and block.attn_pre_norm is copies(block.attn_pre_norm)[0]
        norms = [m for m in copies(norm) if isinstance(m, Norm)]
        stretch_NK, shift_N = None, torch.zeros(n)
        if norms:
            units = [m.fixed if isinstance(m, L2Norm) else math.prod(m.shape) ** 0.5 for m in norms]
            gains = [torch.ones(()) if (g := m.gain()) is None else g.float().abs() for m in norms]
            stretch_NK = torch.stack([u * g.expand(n, c.head_dim) for u, g in zip(units, gains, strict=True)]).amax(0)
            shifts = [m.bias.float().norm(dim=-1).expand(n) for m in norms if m.bias is not None]
            shift_N = torch.stack(shifts).amax(0) if shifts else shift_N
        return Side(raw[:1] if is_shared else raw, folded[:1] if is_shared else folded, stretch_NK, shift_N)

    norm = c.qk_norm
    over = {"head": "per head", "full": "over the full width"}[norm.scope]
    words = "none" if norm.kind == "none" else f"{norm.kind} {over}, gain {norm.gain}, {norm.place.replace('_', ' ')}"
    q, k = side(attention.w_q, attention.q_norm, c.n_heads), side(attention.w_k, attention.k_norm, c.kv_heads)
    return Projections(layer, words, "separate", c.attn_scale_value, c.attn_softcap, q, k)


class _Named:
    """The parameters of attention in one layer, by (role, kind) of their names."""

    def __init__(self, weights: Weights, names: Mapping[tuple[str, str], str], layer: int) -> None:
        self.weights, self.names, self.layer, self.config = weights, names, layer, weights.config

    def get(self, role: str, *kinds: str) -> Tensor | None:
        name = next((self.names[role, kind] for kind in kinds if (role, kind) in self.names), None)
        return None if name is None else self.weights.readers[name]().float()

    def gain(self, role: str) -> Tensor | None:
        gain = self.get(role, "weight", "gain", "scale")
        return gain if gain is None else gain + is_centered(self.config, role)

    def matrix(self, role: str) -> Tensor:
        """Return a projection (rows, E)."""
        weight, bias = self.get(role, "weight"), self.get(role, "bias")
        if weight is None:
            raise UserError(f"Layer {self.layer} has queries without keys")
        if role == "qkv" and weight.shape[1] > weight.shape[0]:  # Conv1D of GPT-2
            weight = weight.T
        return torch.cat((weight, weight.new_zeros(len(weight), 1) if bias is None else bias[:, None]), 1)

    def split(self) -> tuple[str, Tensor, Tensor]:
        """Return the layout of the rows, W_q (H, K, E) and W_k (G, K, E)."""
        c = self.config
        H = field(c, "num_attention_heads", "n_head", "n_heads", "num_heads")
        K = field(c, "head_dim", "d_head", "kv_channels", "head_size")
        if ("q", "weight") in self.names:
            q, k = self.matrix("q"), self.matrix("k")
            gain = self.get("q_norm", "weight", "gain", "scale")
            if H is None and K is None and gain is not None and gain.ndim == 1 and 1 < gain.numel() < len(q):
                K = gain.numel()
            K = K or len(q) // (H or 1)
            H = H or len(q) // K
            if len(q) not in (H * K, 2 * H * K) or len(k) % K or H % (len(k) // K):
                raise UserError(f"The {len(q)} and {len(k)} rows of W_q and W_k do not fit {H} heads of {K}")
            gated = ", query and gate by head" if len(q) == 2 * H * K else ""  # Qwen3-Next
            return f"separate{gated}", q.unflatten(0, (H, -1))[:, :K], k.unflatten(0, (-1, K))
        fused, name = self.matrix("qkv"), self.names["qkv", "weight"]
        is_single = field(c, "multi_query") and not field(c, "new_decoder_architecture")
        G = 1 if is_single else field(c, "num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_query_groups") or H
        if H is None or len(fused) % (H + 2 * G):
            raise UserError(f"{name} has q, k and v in one matrix, and the configuration does not say how many heads")
        K = len(fused) // (H + 2 * G)
        if G > 1 and any(n in name for n in _BY_KEY_HEAD) and field(c, "model_type") != "chatglm":
            groups = fused.unflatten(0, (G, H // G + 2, K))
            return "fused by key head: q, k, v", groups[:, :-2].flatten(0, 1), groups[:, -2]
        return "fused: q, k, v", fused[: H * K].unflatten(0, (H, K)), fused[H * K : (H + G) * K].unflatten(0, (G, K))

    def stretch(self, role: str, n: int, K: int) -> tuple[Tensor | None, Tensor, str]:
        """Return `Side.stretch_NK`, `Side.shift_N` and the QK-Norm in words."""
        gain, bias = self.gain(role), self.get(role, "bias")
        shift_N = torch.zeros(n) if bias is None else bias.reshape(-1, K).norm(dim=-1).expand(n)
        if gain is None:
            has_flag = any(field(self.config, flag) is True for flag in _FLAGS)
            words = "norm per head without gain, by the configuration" if has_flag else "none"
            return torch.full((n, K), math.sqrt(K)) if has_flag else None, shift_N, words
        kind, size = "norm" if bias is None else "layer norm", gain.numel()
        if size in (1, n) and size != K:
            return gain.abs().reshape(-1, 1).expand(n, K), shift_N, "cosine attention, a learned scale only"
        if size == K:
            return math.sqrt(K) * gain.abs().reshape(1, K).expand(n, K), shift_N, f"{kind} per head, one gain"
        if size != n * K:
            raise UserError(f"The QK-Norm of layer {self.layer} has {size} gains for {n} heads of {K}")
        is_full = gain.ndim == 1
        words = f"{kind} over the full width" if is_full else f"{kind} per head, a gain for each head"
        return math.sqrt(n * K if is_full else K) * gain.abs().reshape(n, K), shift_N, words

    def projections(self) -> Projections:
        """Return queries and keys."""
        c, (layout, q_HKE, k_GKE) = self.config, self.split()
        K, gain, bias = q_HKE.shape[1], self.gain("input"), self.get("input", "bias")
        if field(c, "swin_norm") or field(c, "do_layer_norm_before") is False:
            gain = None  # this norm is after attention
        sides, words = [], []
        for role, weight_NKE in (("q_norm", q_HKE), ("k_norm", k_GKE)):
            stretch_NK, shift_N, of_side = self.stretch(role, len(weight_NKE), K)
            folded = [] if gain is None else [_fold(weight_NKE, gain, torch.zeros(()) if bias is None else bias)]
            sides.append(Side([weight_NKE], folded, stretch_NK, shift_N))
            words.append(of_side)
        scale = field(c, "attention_multiplier") or (field(c, "query_pre_attn_scalar") or K) ** -0.5
        scale *= rope_factor(c) ** 2
        scale /= self.layer + 1 if field(c, "scale_attn_by_inverse_layer_idx") else 1
        if len(q_HKE) == 1 and field(c, "num_attention_heads", "n_head", "n_heads", "num_heads") is None:
            scale = math.nan  # all heads together, because their number is not known
        qk_norm = words[0] if words[0] == words[1] else f"queries: {words[0]}; keys: {words[1]}"
        return Projections(self.layer, qk_norm, layout, scale, field(c, "attn_logit_softcapping"), *sides)
