"""Published recipes work at any size, and equal the implementations that they cite."""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from mmqk.config import resolve
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.store import flatten
from mmqk.training.optimizers import hidden_matrices
from tests import recipe_peers
from tests.model.comparison import outcome
from tests.training.toy import MODEL, apart, fit, module_of, toy_batch, weights
from tests.versions import older

FOLDER = Path("configs/recipes")
# mmqk.interop reads the models that the recipes in CONVERTED cite; tests/recipe_peers.py has the models of PEERED.
CONVERTED = ("chameleon_7b", "chameleon_34b", "llama2", "olmo2", "qwen3", "gemma2", "gemma3")
PEERED = ("muse_spark", "muse_glimmer", "gpt_oss", "qwen3_next", "kimi_k2")
NAMES = (*CONVERTED, *PEERED, "swin_v2", "vit_22b")
# Fields that the run sets and a recipe must not set: size, data, length, and fields that depend on the size.
OF_THE_RUN = {
    "model": {"vocab_sizes", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "window",
        "global_every"},
    "optim": {"lr", "warmup_steps"},
    "trainer": {"max_steps", "precision", "accelerator", "devices", "accumulate_grad_batches"},
}  # fmt: skip


def path(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def fields_of(name: str) -> dict[str, object]:
    """Return the fields that a recipe sets, by dotted name."""
    return flatten(yaml.load(path(name).read_text(), Loader=yaml.SafeLoader))


@cache
def as_run(name: str, *more: str, base: str = "configs/demo.yaml"):
    return resolve(["--config", base, "--config", str(path(name)), *more])


# A recipe works at any size --------------------------------------------------------------------------------


def test_all_recipes_are_there():
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_leaves_size_data_and_length_to_the_run(name):
    recipe = yaml.safe_load(path(name).read_text())
    assert recipe.keys() <= {"backend", "model", "loss", "optim", "trainer"}
    for section, own in OF_THE_RUN.items():
        assert not own & recipe.get(section, {}).keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_merges_onto_a_run_of_any_size_and_overrides_all_it_speaks_of(name):
    small = as_run(name)
    assert (small.model.d_model, small.model.n_layers) == (64, 4)
    large = as_run(name, "--model.d_model=96", "--model.n_layers=3", "--model.n_heads=6", "--model.n_kv_heads=2")
    assert (large.model.d_model, large.model.n_layers, large.model.kv_heads) == (96, 3, 2)
    # configs/cpu.yaml sets QK-Norm and z-loss; none of its values may remain where a recipe sets the field.
    other = as_run(name, base="configs/cpu.yaml")
    for run in (small, large, other):
        resolved = flatten(run.nested())
        for key, value in fields_of(name).items():
            assert resolved[key] == value, key


@pytest.mark.parametrize("under", ["gemma2", "chameleon_7b", "swin_v2", "vit_22b", "muse_spark", "gpt_oss"])
def test_of_two_recipes_the_last_says_what_the_model_is(under):
    """Together, the recipes in ``under`` set nearly every field of a recipe to a value other than the default."""
    for name in NAMES:
        assert as_run(name, base=str(path(under))).model == as_run(name).model, name
    assert as_run(under).model != as_run("llama2").model


# Settings equal those of the cited classes -----------------------------------------------------------------

SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 48,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# Fields in which a recipe intentionally differs from the class's defaults: the class's value, and the reason.
DIFFERS = {
    # The class has no residual dropout, and stores a copy of the shared gain for every head.
    "chameleon_7b": {"residual_dropout": 0.0, "qk_norm.gain": "per_head"},
    "chameleon_34b": {"qk_norm.gain": "per_head"},
    # The classes' defaults are not the values of the trained models, which the config of a checkpoint sets.
    "llama2": {"norm_eps": 1e-6},
    "olmo2": {"norm_eps": 1e-5, "qk_norm.eps": 1e-5},
}


def peer(name: str) -> nn.Module:
    """Return a tiny model of the class that a recipe cites; its norms have the class's defaults."""
    transformers = pytest.importorskip("transformers")
    if name.startswith("chameleon"):
        vq = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "num_embeddings": 4,
              "embed_dim": 4, "latent_channels": 4, "resolution": 8}  # fmt: skip
        names = {"<image>": 4, **{f"IMGIMG{letter}Z": 8 + i for i, letter in enumerate("ABCD")}}
        config = transformers.ChameleonConfig(
            **SMALL, vq_config=vq, vocabulary_map=names, swin_norm=name.endswith("34b")
        )
        return transformers.ChameleonForConditionalGeneration(config)
    kind = {"llama2": "Llama"}.get(name, name.capitalize())
    # These classes set head_dim separately, and Gemma's attention scale is set for the default head_dim.
    more = {"head_dim": 8} if kind in ("Qwen3", "Gemma2", "Gemma3") else {}
    more |= {"query_pre_attn_scalar": 8} if kind.startswith("Gemma") else {}
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    return getattr(transformers, f"{kind}ForCausalLM")(config(**SMALL, **more))


def settings_of(model: EarlyFusionTransformer, name: str) -> dict[str, object]:
    """Return the values that a model built from the class has for the fields of the recipe, by dotted name."""
    c = model.config
    ours = flatten(yaml.safe_load(path(name).read_text())["model"])
    theirs = flatten({key: value for key, value in vars(c).items() if key != "qk_norm"})
    theirs |= {f"qk_norm.{key}": value for key, value in vars(c.qk_norm).items()}
    if c.attn_scale_value == pytest.approx(c.head_dim**-0.5):
        theirs["attn_scale"] = "rsqrt"
    return {key: theirs[key] for key in ours}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_recipe_has_the_norms_of_the_class_it_cites(name):
    interop = pytest.importorskip("mmqk.interop")
    theirs = settings_of(interop.from_transformers(peer(name)), name)
    ours = flatten(yaml.safe_load(path(name).read_text())["model"])
    assert {key: theirs[key] for key in ours if theirs[key] != ours[key]} == DIFFERS.get(name, {})
    # The control: another class does not have the settings of the recipe.
    other = {"llama2": "qwen3", "chameleon_7b": "chameleon_34b"}.get(name, "llama2")
    theirs = settings_of(interop.from_transformers(peer(other)), name)
    assert {key: theirs[key] for key in ours if theirs[key] != ours[key]} != DIFFERS.get(name, {})


@torch.no_grad()
def of_timm_swin() -> dict[str, object]:
    """Return the settings of timm's Swin V2, from its modules and from their outputs."""
    from timm.models.swin_transformer_v2 import SwinTransformerV2, WindowAttention

    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depths": (1,), "num_heads": (4,), "window_size": 4}
    block = SwinTransformerV2(**size, drop_path_rate=0.0).double().layers[0].blocks[0]
    attention, x = block.attn, 1e4 * torch.randn(2, 4, 4, 16, dtype=torch.float64)
    assert isinstance(attention, WindowAttention) and isinstance(block.norm1, nn.LayerNorm)
    silent = torch.equal(block(x), x)  # every branch starts at 0
    gain = block.norm1.weight.unique().item()
    nn.init.ones_(block.norm1.weight)
    added = block(x) - x  # the attention branch alone: it has mean 0 and variance 1 if the norm is last
    last = bool((added.var(-1, unbiased=False) - 1).abs().max() < 1e-2)

    def out_at(scale: float) -> torch.Tensor:
        nn.init.constant_(attention.logit_scale, torch.tensor(scale).log().item())
        return attention(x.flatten(1, 2))

    first = attention.logit_scale.exp()
    assert not torch.equal(out_at(50), out_at(99)) and torch.equal(out_at(101), out_at(5000))
    nn.init.constant_(attention.logit_scale, 0.0)
    before = attention(x.flatten(1, 2))
    attention.qkv.weight[:16] *= 3.0
    after = attention(x.flatten(1, 2))
    assert torch.allclose(after, before, rtol=1e-9)  # cosine attention: the length of q has no effect
    return {
        "mlp": "gelu" if torch.equal(block.mlp.act(x / 1e4), F.gelu(x / 1e4)) else "other",
        "pre_norm": not last,
        "post_norm": last,
        "post_gain_init": gain if silent else None,
        "norm": "layer",
        "norm_bias": block.norm1.bias is not None,
        "norm_eps": block.norm1.eps,
        "qk_norm.kind": "l2",
        "qk_norm.gain": "per_head" if attention.logit_scale.shape == (4, 1, 1) else "shared",
        "qk_norm.eps": inspect.signature(F.normalize).parameters["eps"].default,
        "qk_norm.scale_init": round(first.unique().item(), 5),
        "qk_norm.scale_max": 100.0,
        "residual_dropout": block.mlp.drop1.p,
        "attn_dropout": attention.attn_drop.p,
    }


def test_swin_v2_has_the_settings_of_timm():
    ours = flatten(yaml.safe_load(path("swin_v2").read_text())["model"])
    theirs = of_timm_swin()
    assert {key: ours[key] for key in theirs} == theirs
    assert {key: flatten(as_run("llama2").nested()["model"])[key] for key in theirs} != theirs


def test_vit_22b_normalizes_queries_over_the_same_axis_as_timm():
    from timm.models.vision_transformer import ParallelScalingBlock

    block = ParallelScalingBlock(16, 2, qk_norm=True)
    config = as_run("vit_22b", "--model.d_model=16", "--model.n_heads=2").model
    ours = EarlyFusionTransformer(config).blocks[0].attention.q_norm
    assert tuple(block.q_norm.normalized_shape) == ours.shape == tuple(ours.weight.shape) == (8,)
    full = replace(config, qk_norm=replace(config.qk_norm, scope="full", gain="per_head"))
    assert EarlyFusionTransformer(full).blocks[0].attention.q_norm.shape != (8,)


# Logits and gradients equal those of the cited models ------------------------------------------------------

FP32_INSIDE = 2e-5  # relative to the largest value; transformers computes norms and rotary tables in fp32
# A different value for every field that affects the output of a model.
OTHERWISE = {
    "mlp": "geglu", "pre_norm": False, "norm": "layer", "norm_eps": 1e-4, "qk_norm.kind": "layer",
    "qk_norm.scope": "full", "qk_norm.gain": "per_head", "qk_norm.eps": 1e-4, "qk_norm.place": "after_rope",
    "qk_norm.normalize_v": True, "qk_norm.scale_init": 44.0, "attention": "sigmoid", "attn_scale": 0.4,
    "attn_softcap": 5.0, "final_softcap": 30.0, "layer_scale": 0.9, "embed_sqrt_d": True, "tie_embeddings": True,
    "residual_dropout": 0.1, "attn_dropout": 0.1,
}  # fmt: skip
SWITCHED = {
    "post_norm": True, "norm_gain": "zero_centered", "attn_gate": "element", "attn_sink": True, "mlp_clamp": 7.0,
    "residual_gate": 0.3, "embed_norm": True,
}  # fmt: skip
# Fields that do not affect the logits: those of initial weights and of other kinds of norms.
UNSEEN = {"post_gain_init", "norm_bias", "qk_norm.bias", "weight_reparam"}
# Fields that do not affect the logits with kind l2: the scale is fixed, and a norm without gain commutes with RoPE.
UNSEEN_L2 = {"qk_norm.scope", "qk_norm.gain", "qk_norm.eps", "qk_norm.place", "qk_norm.scale_max", "attn_scale"}
WITH = {("gpt_oss", "mlp"): {"mlp_clamp": None}, ("gpt_oss", "attention"): {"attn_sink": False}}


def with_fields(config: ModelConfig, fields: dict[str, object]) -> ModelConfig:
    """Return the configuration with these fields changed; the keys are dotted names."""
    nested = {key.removeprefix("qk_norm."): value for key, value in fields.items() if "." in key}
    plain = {key: value for key, value in fields.items() if "." not in key}
    return replace(config, qk_norm=replace(config.qk_norm, **nested), **plain)


def another(name: str, key: str, value: object) -> dict[str, object]:
    """Return a different value for a field of a recipe, with the changes of other fields that this value requires."""
    if key == "pre_norm":
        return {"pre_norm": False, "post_norm": True}
    if key in SWITCHED:
        off = {"post_norm": False, "norm_gain": "plain", "attn_gate": "none", "attn_sink": False, "embed_norm": False}
        return {key: SWITCHED[key] if value != SWITCHED[key] else off.get(key)}
    return {key: OTHERWISE[key]} | WITH.get((name, key), {})


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the largest difference between tensors, relative to the largest value of the reference tensor."""
    pairs = zip(ours, theirs, strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


@pytest.fixture(scope="module")
def peers():
    """Return a function that gives, for a recipe, a small configuration, weights, and the logits and gradients of the
    cited model."""
    pytest.importorskip("transformers")
    known = {}

    def peer_of(name: str):
        if name in ("muse_spark", "muse_glimmer", "gpt_oss") and older("transformers", "5.20"):
            pytest.skip("the cited model has its present form since transformers 5.20")
        if name not in known:
            config = recipe_peers.small(as_run(name).model, name)
            leaves = recipe_peers.leaves_for(config, name)
            known[name] = config, leaves, outcome(lambda given: recipe_peers.theirs(name, given), leaves)
        return known[name]

    return peer_of


@pytest.mark.parametrize("name", PEERED)
def test_logits_and_gradients_are_those_of_the_model_that_a_recipe_cites(name, peers):
    config, leaves, theirs = peers(name)
    ours = outcome(lambda given: recipe_peers.ours(config, given), leaves)
    assert len(ours) == len(leaves) + 1 > 20
    assert furthest(ours, theirs) < FP32_INSIDE


@pytest.mark.parametrize("name", PEERED)
def test_another_value_of_any_field_gives_other_logits(name, peers):
    """The control of the comparison above, for each field."""
    config, leaves, theirs = peers(name)
    fields = flatten(yaml.safe_load(path(name).read_text())["model"])
    unseen = UNSEEN | (UNSEEN_L2 if config.qk_norm.kind == "l2" else set())
    for key, value in fields.items():
        if key not in unseen and not (key == "qk_norm.kind" and value == "none"):
            wrong = with_fields(config, another(name, key, value))
            assert furthest([recipe_peers.ours(wrong, leaves)], theirs[:1]) > 10 * FP32_INSIDE, key


def muonclip(model: EarlyFusionTransformer, batches, lr: float) -> None:
    """Train with Kimi K2's Algorithm 1: torch's Muon and AdamW, x-transformers' QK-Clip, a cosine schedule."""
    from x_transformers.x_transformers import Attention

    matrices = hidden_matrices(model)
    decaying = [model.embed.weight, model.head.weight]
    gains = [p for p in model.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(
        [p for p in model.parameters() if p in matrices], momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, batch in enumerate(batches):
        seen: dict[tuple[str, int], torch.Tensor] = {}
        logits = model(
            batch.ids_BT, observer=lambda site, layer, x, seen=seen: seen.update({(site, layer): x.detach()})
        )
        targets = batch.ids_BT.roll(-1, 1)[batch.target_mask_BT]
        F.cross_entropy(logits[batch.target_mask_BT], targets).backward()
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / len(batches))))
            optimizer.step()
            optimizer.zero_grad()
        for layer, block in enumerate(model.blocks):
            q, k = seen["q", layer], seen["k", layer]
            before = q @ k.mT / q.shape[-1] ** 0.5
            before = before.masked_fill(torch.ones(before.shape[-2:]).triu(1).bool(), -torch.inf)
            # qk_clip_ scales the columns of a matrix; the columns of W^T are the rows of a head.
            of = block.attention
            q, k = (SimpleNamespace(weight=w.weight.data.T) for w in (of.w_q, of.w_k))
            turned = SimpleNamespace(to_q=q, to_k=k)
            Attention.qk_clip_(turned, before, tau=100.0)


def test_kimi_k2_updates_as_torchs_muon_with_x_transformers_qk_clip():
    pytest.importorskip("x_transformers")
    batches = [toy_batch(seed) for seed in range(3)]
    recipe = {**asdict(as_run("kimi_k2").optim), "lr": 0.05, "warmup_steps": 0}
    size = {name: getattr(MODEL, name) for name in ("vocab_sizes", "d_model", "n_layers", "n_heads")}
    config = replace(as_run("kimi_k2").model, **size)

    def module(**changed):
        made = module_of(config, **(recipe | changed))
        with torch.no_grad():  # logits above 100 in the first two heads alone
            for block in made.model.blocks:
                for matrix in (block.attention.w_q, block.attention.w_k):
                    matrix.weight[:8] *= 15.0
        return made

    trained = module()
    reference = copy.deepcopy(trained.model)
    records = fit(trained, batches)
    assert all(0 < record[f"qk_clip_gamma/layer0{layer}"] < 1 for record in records[:1] for layer in (0, 1))
    muonclip(reference, batches, 0.05)
    expected = {name: tensor.detach() for name, tensor in reference.state_dict().items()}
    assert apart(weights(trained), expected) < 1e-9
    controls = (
        {"matrices": "adamw"}, {"qk_clip": None}, {"qk_clip": 90.0}, {"weight_decay": 0.0},
        {"decay_mode": "independent"}, {"schedule": "constant"}, {"final_lr_ratio": 0.2},
    )  # fmt: skip
    for changed in controls:
        wrong = module(**changed)
        fit(wrong, batches)
        assert apart(weights(wrong), expected) > 1e-4, changed
