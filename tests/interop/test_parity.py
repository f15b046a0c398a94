"""An imported model has the logits and gradients of transformers, and a model that differs in one detail fails the
comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from mmqk.interop import from_transformers
from mmqk.interop.read import hf_name
from mmqk.model import EarlyFusionTransformer, ModelConfig, RopeScalingConfig
from mmqk.model.norms import RMSNorm
from tests.interop.models import CHAMELEON, logits_of, some_ids, tiny
from tests.peers import Peer

# transformers computes the softmax and the rotary angles in fp32 even in an fp64 model, which limits the agreement.
TOLERANCE = 1e-5
Change = Callable[[ModelConfig], ModelConfig]


def change(**fields) -> Change:
    """Return a function that changes fields of a ModelConfig, or of its qk_norm (names that begin with `qk_`)."""
    qk = {name.removeprefix("qk_"): value for name, value in fields.items() if name.startswith("qk_")}
    rest = {name: value for name, value in fields.items() if not name.startswith("qk_")}
    return lambda c: replace(c, **rest, qk_norm=replace(c.qk_norm, **qk))


@dataclass(frozen=True)
class Model(Peer):
    """A Hugging Face model, and changes of the imported configuration that the comparison must detect."""

    architecture: str = ""
    fields: dict[str, object] = field(default_factory=dict)
    controls: dict[str, Change] = field(default_factory=dict)


def peer(architecture: str, remedies: tuple[str, ...] = (), controls=None, **fields) -> Model:
    return Model(remedies, f"transformers {architecture}", TOLERANCE, "fp64", architecture, fields, controls or {})


AFTER_ROPE = {"norm after RoPE": change(qk_place="after_rope")}
POST = {"post instead of pre": change(pre_norm=False, post_norm=True)}
PRE = {"pre instead of post": change(pre_norm=True, post_norm=False)}
EPS = {"eps of the norms": lambda c: replace(c, norm_eps=1e-6 if c.norm_eps == 1e-5 else 1e-5)}
QK_EPS = {"eps of QK-Norm": change(qk_eps=1e-4)}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
GEMMA2 = {"sliding_window": 7, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
GEMMA3 = {
    "sliding_window": 7, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "layer_types": None,
    "sliding_window_pattern": 3,
}  # fmt: skip
CHAMELEON_CONTROLS = {
    **AFTER_ROPE,
    **EPS,
    "QK eps 1e-6 instead of 1e-5": change(qk_eps=1e-6),
    "RMS instead of LayerNorm": change(qk_kind="rms", qk_bias=False),
    "full width instead of per head": change(qk_scope="full"),
    "GELU gate": change(mlp="geglu"),
}
PEERS: list[Model] = [
    peer("LlamaForCausalLM", controls={**POST, **EPS, "other theta": change(rope_theta=9000.0)}),
    peer("LlamaForCausalLM", tie_word_embeddings=True, head_dim=8, controls=POST),
    peer(
        "LlamaForCausalLM",
        rope_parameters=LLAMA3,
        controls={
            "no rope scaling": change(rope_scaling=RopeScalingConfig()),
            "linear instead of llama3": change(rope_scaling=RopeScalingConfig("linear", 4.0)),
        },
    ),
    peer("Qwen3ForCausalLM", ("qk_norm_rms",), {**AFTER_ROPE, **EPS, **POST, **QK_EPS}, head_dim=32),
    peer(
        "Olmo2ForCausalLM",
        ("qk_norm_full", "post_norm"),
        {**AFTER_ROPE, **EPS, **PRE, **QK_EPS, "per head instead of full width": change(qk_scope="head")},
    ),
    peer(
        "Gemma2ForCausalLM",
        ("attn_softcap", "final_softcap", "sandwich", "embed_sqrt_d"),
        {
            **EPS,
            "no attention cap": change(attn_softcap=None),
            "no final cap": change(final_softcap=None),
            "plain gains": change(norm_gain="plain"),
            "no embedding scale": change(embed_sqrt_d=False),
            "no window": change(window=0),
            "window by one": change(window=6),
            "window in the other layers": change(global_every=3),
            "SiLU gate": change(mlp="swiglu"),
            "scale of head_dim": change(attn_scale="rsqrt"),
        },
        **GEMMA2,
    ),
    peer("Gemma2ForCausalLM", ("attn_scale_inverse",), {"rsqrt": change(attn_scale="rsqrt")},
         query_pre_attn_scalar=256),
    peer("Gemma2ForCausalLM", ("attn_scale_none",), {"rsqrt": change(attn_scale="rsqrt")},
         query_pre_attn_scalar=1),
    peer(
        "Gemma3ForCausalLM",
        ("qk_norm_rms", "qk_norm_zero_centered", "sandwich", "embed_sqrt_d"),
        {
            **AFTER_ROPE,
            **EPS,
            **QK_EPS,
            "plain QK gains": change(qk_gain="shared"),
            "plain gains": change(norm_gain="plain"),
            "no window": change(window=0),
            "global layers elsewhere": change(global_every=2),
            "one theta for all layers": change(local_rope_theta=None),
            "wrong local theta": change(local_rope_theta=9000.0),
            "scale of head_dim": change(attn_scale="rsqrt"),
        },
        **GEMMA3,
    ),
    peer(
        "Gemma3ForCausalLM",
        rope_parameters={"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}},
        controls={
            "no rope scaling": change(rope_scaling=RopeScalingConfig()),
            "local layers scaled too": change(local_rope_theta=None),
        },
        **{**GEMMA3, "tie_word_embeddings": False},
    ),
    peer(CHAMELEON, ("qk_norm_layer_bias", "qk_norm_per_head"), {**CHAMELEON_CONTROLS, **POST}),
    peer(
        CHAMELEON,
        ("qk_norm_layer_bias", "qk_norm_per_head", "post_norm"),
        {**CHAMELEON_CONTROLS, **PRE},
        swin_norm=True,
    ),
]  # fmt: skip
NAMES = [f"{number} {p.architecture}" for number, p in enumerate(PEERS)]
PEER = pytest.mark.parametrize("peer", PEERS, ids=NAMES)
CONTROLS = [
    pytest.param(p, control, id=f"{name}: {what}")
    for name, p in zip(NAMES, PEERS, strict=True)
    for what, control in p.controls.items()
]


def mean_loss(logits_BTV: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), some_ids()[:, 1:].flatten())


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


@cache
def theirs_of(index: int):
    """Return the model of transformers, its logits, and its gradients by name."""
    hf_model = tiny(PEERS[index].architecture, **PEERS[index].fields)
    logits_BTV = logits_of(hf_model, some_ids())
    mean_loss(logits_BTV).backward()
    return hf_model, logits_BTV, {n: p.grad for n, p in hf_model.named_parameters() if p.grad is not None}


def ours_of(model: EarlyFusionTransformer, architecture: str, config: ModelConfig) -> Result:
    """Return mmqk's logits, and the gradients under the names of transformers.

    The gradient of a tied matrix is the sum of the gradients as embedding and as head.
    """
    logits_BTV = model(some_ids())
    mean_loss(logits_BTV).backward()
    names = {n: hf_name(moved(n, model.config, config), architecture, config) for n in model.state_dict()}
    return logits_BTV, {names[n]: p.grad for n, p in model.named_parameters()}


def moved(name: str, there: ModelConfig, here: ModelConfig) -> str:
    """Translate a parameter name of configuration `there` to configuration `here`: pre-norm and post-norm models name
    their norms differently."""
    if there.pre_norm == here.pre_norm:
        return name
    was, now = ("pre", "post") if there.pre_norm else ("post", "pre")
    return name.replace(f"_{was}_norm", f"_{now}_norm")


def assert_same(ours: Result, theirs: Result, tolerance: float) -> None:
    """Check that logits differ by at most `tolerance`, and gradients by at most `tolerance` times their largest
    element.

    The loss is a mean, so the largest element is below 1 and the absolute difference is below `tolerance` too.
    """
    assert (ours[0] - theirs[0]).abs().max() <= tolerance
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        largest = gradient.abs().max()
        assert 0 < largest < 1, name
        assert (ours[1][name].reshape(gradient.shape) - gradient).abs().max() <= tolerance * largest, name


@PEER
def test_same_logits_and_gradients(peer):
    hf_model, *theirs = theirs_of(PEERS.index(peer))
    model = from_transformers(hf_model)
    assert model.embed.weight.dtype == torch.float64
    assert_same(ours_of(model, peer.architecture, model.config), tuple(theirs), peer.tolerance)


@pytest.mark.parametrize(("peer", "control"), CONTROLS)
def test_one_detail_away_fails(peer, control):
    hf_model, *theirs = theirs_of(PEERS.index(peer))
    right = from_transformers(hf_model)
    wrong = changed(right, control(right.config))
    with pytest.raises(AssertionError):
        assert_same(ours_of(wrong, peer.architecture, right.config), tuple(theirs), peer.tolerance)


def changed(model: EarlyFusionTransformer, config: ModelConfig) -> EarlyFusionTransformer:
    """Return a model of another configuration with the weights of `model`; norms in other places are renamed."""
    weights = {moved(name, model.config, config): weight for name, weight in model.state_dict().items()}
    other = EarlyFusionTransformer(config).double()
    # A control without biases has no biases to load; every other parameter must exist.
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not missing and all(name.endswith("_norm.bias") for name in unexpected)
    return other


def test_sdpa_and_math_are_the_same_import():
    """An import uses sdpa unless the model has a cap; the math backend gives equal numbers."""
    hf_model, *theirs = theirs_of(0)
    model = from_transformers(hf_model)
    assert model.blocks[0].attention.backend == "sdpa"
    assert_same(ours_of(changed(model, model.config), "LlamaForCausalLM", model.config), tuple(theirs), TOLERANCE)
    gemma = from_transformers(tiny("Gemma2ForCausalLM", **GEMMA2))
    assert gemma.config.attn_softcap == 1.0 and gemma.blocks[0].attention.backend == "math"


# Bounds of the root mean square (RMS) and of the maximum of the difference, both relative to the RMS of the logits.
# Measured: 0.009 to 0.020 and 0.04 to 0.11.
BF16_RMS, BF16_MAX = 0.03, 0.2


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = theirs.square().mean().sqrt()
    assert (ours - theirs).square().mean().sqrt() <= BF16_RMS * scale
    assert (ours - theirs).abs().max() <= BF16_MAX * scale


@PEER
@torch.no_grad()
def test_bf16_logits_are_near(peer):
    hf_model = tiny(peer.architecture, torch.bfloat16, **peer.fields)
    theirs = logits_of(hf_model, some_ids())
    model = from_transformers(hf_model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and theirs.dtype == torch.bfloat16
    assert_near(model(some_ids()), theirs.float())
    weights = {n: w.double() for n, w in model.state_dict().items()}
    plain = EarlyFusionTransformer(replace(model.config, rope_theta=3.0, local_rope_theta=None)).double()
    plain.load_state_dict(weights)
    with pytest.raises(AssertionError):
        assert_near(plain(some_ids()).float(), theirs.float())


ROUNDING = {
    "same": ("Olmo2RMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"),
    "first": ("LlamaRMSNorm", "Qwen3RMSNorm", "ChameleonRMSNorm"),
}
NORMS = [(name, order) for order, names in ROUNDING.items() for name in names]


@pytest.mark.parametrize(("name", "order"), NORMS)
@torch.no_grad()
def test_rounding_order_of_norms(name, order):
    """For "same", the output equals that of mmqk's norm, (w * x).to(bf16), bit for bit. For "first", the class rounds
    the normalized x before the product with w, and a quarter of the elements differ."""
    module = name.removesuffix("RMSNorm").lower()
    kind = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 4, 16, generator=generator).bfloat16()
    theirs = kind(16, eps=1e-5)
    ours = RMSNorm((16,), 1e-5, gain="zero_centered" if module.startswith("gemma") else "plain")
    theirs.weight.add_(torch.empty(16).uniform_(-0.3, 0.3, generator=generator))
    theirs = theirs.bfloat16()
    ours.load_state_dict(theirs.state_dict(), assign=True)
    differ = (ours(x) != theirs(x)).double().mean()
    assert differ == 0 if order == "same" else 0.1 < differ < 0.6
