"""Builds mmqk's model in transformers and in litgpt, with equal weights."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Absent
from benchmarks.loops import Loop, ids_and_labels
from mmqk.config import RunConfig
from mmqk.interop import to_transformers
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.transformer import compile_blocks


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy over the trained targets, in fp32, as transformers and litgpt compute it."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())


def transformers_loop(run: RunConfig, device: str, compiled: bool) -> Loop:
    """Return a loop of the run's model in transformers: Qwen3 for QK-Norm of kind rms, Chameleon for kind
    layer, else Llama.

    Head and loss are applied here, because Chameleon's forward overwrites the logits of image ids.
    """
    needs("transformers")
    model: Any = to_transformers(EarlyFusionTransformer(run.model, "math", run.seed))
    model.set_attn_implementation(_causal_sdpa())
    model.to(device).train()
    if hasattr(model.model, "vqmodel"):  # the image tokenizer is not used
        model.model.vqmodel.requires_grad_(False)

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        ids_BT, labels_BT = pair
        hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return cross_entropy(model.lm_head(hidden_BTD), labels_BT)

    return Loop(model, maybe(loss, compiled), ids_and_labels(run, device), run, device)


def _causal_sdpa() -> str:
    """Register transformers' SDPA without its mask: a compiled model would build a T x T mask, and the flash kernel
    accepts no mask."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return "causal_sdpa"


def litgpt_loop(run: RunConfig, device: str, compiled: bool) -> Loop:
    """Return a loop of litgpt's GPT, with the forward pass that litgpt uses for pretraining."""
    needs("litgpt")
    model = to_litgpt(EarlyFusionTransformer(run.model, "math", run.seed), run.data.seq_len).to(device).train()

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(pair[0]), pair[1])

    return Loop(model, maybe(loss, compiled), ids_and_labels(run, device), run, device)


def bare_loop(run: RunConfig, device: str, whole: bool = False) -> Loop:
    """Return a loop of mmqk's blocks with a plain cross-entropy, without Lightning, data loading or monitors: a
    lower bound on the time.

    If `run.compile` is true, blocks and loss are compiled separately, as in training. With `whole`, forward and loss
    are compiled as one graph.
    """
    model = EarlyFusionTransformer(run.model, run.backend, run.seed).to(device).train()
    in_place = run.compile and not whole
    if in_place:
        compile_blocks(model)
    of_logits = maybe(cross_entropy, in_place)

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        return of_logits(model(pair[0]), pair[1])

    return Loop(model, maybe(loss, whole), ids_and_labels(run, device), run, device)


def maybe(loss: Callable[..., Tensor], compiled: bool) -> Callable[..., Tensor]:
    """Return the loss, compiled if `compiled` is true."""
    return torch.compile(loss, dynamic=False) if compiled else loss


def needs(package: str) -> None:
    """Raise `Absent` if the package is not installed."""
    if find_spec(package) is None:
        raise Absent(f"{package} is not installed: pip install {package}")


def to_litgpt(model: EarlyFusionTransformer, tokens: int) -> nn.Module:
    """Return litgpt's GPT with the weights of `model`: a pre-norm SwiGLU model without QK-Norm, or with kind rms.

    Raises:
        ValueError: litgpt cannot represent this model.
    """
    from litgpt import GPT, Config

    c = model.config
    _check(c)
    config = Config(
        name="mmqk", block_size=tokens, n_layer=c.n_layers, n_embd=c.d_model, vocab_size=c.vocab_size,
        padded_vocab_size=c.vocab_size, norm_class_name="RMSNorm", norm_eps=c.norm_eps,
        norm_qk=c.qk_norm.kind == "rms", parallel_residual=False, n_head=c.n_heads, head_size=c.head_dim,
        n_query_groups=c.kv_heads, rope_base=int(c.rope_theta), rotary_percentage=1.0, bias=False,
        intermediate_size=c.mlp_width, mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    theirs = GPT(config)
    theirs.load_state_dict(_litgpt_weights(model))
    if c.tie_embeddings:
        theirs.lm_head.weight = theirs.transformer.wte.weight
    return theirs


def _check(c: ModelConfig) -> None:
    plain = ModelConfig(
        vocab_sizes=c.vocab_sizes, d_model=c.d_model, n_layers=c.n_layers, n_heads=c.n_heads, n_kv_heads=c.n_kv_heads,
        d_head=c.d_head, d_ff=c.d_ff, norm_eps=c.norm_eps, rope_theta=c.rope_theta, qk_norm=c.qk_norm,
        tie_embeddings=c.tie_embeddings,
    )  # fmt: skip
    qk = c.qk_norm
    same = qk.kind == "none" or (qk.kind, qk.scope, qk.gain, qk.place) == ("rms", "head", "shared", "before_rope")
    if c != plain or not same or qk.normalize_v or (qk.kind == "rms" and qk.eps != c.norm_eps):
        raise ValueError(f"litgpt has no such model: {EarlyFusionTransformer(c).extra_repr()}")


def _litgpt_weights(model: EarlyFusionTransformer) -> dict[str, Tensor]:
    ours = model.state_dict()
    theirs = {
        "transformer.wte.weight": ours["embed.weight"],
        "transformer.ln_f.weight": ours["final_norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    names = {
        "norm_1": "attn_pre_norm", "norm_2": "mlp_pre_norm", "attn.proj": "attention.w_o", "mlp.fc_1": "mlp.w_gate",
        "mlp.fc_2": "mlp.w_up", "mlp.proj": "mlp.w_down",
    }  # fmt: skip
    if model.config.qk_norm.kind == "rms":
        names |= {"attn.norm_q": "attention.q_norm", "attn.norm_k": "attention.k_norm"}
    for i in range(model.config.n_layers):
        block, h = f"blocks.{i}", f"transformer.h.{i}"
        theirs |= {f"{h}.{a}.weight": ours[f"{block}.{b}.weight"] for a, b in names.items()}
        qkv = [ours[f"{block}.attention.w_{x}.weight"] for x in "qkv"]
        theirs[f"{h}.attn.qkv.weight"] = torch.cat(qkv)
    return theirs
