"""What weights say: bounds on logits by brute force, QK-Norm in words, splits of fused projections, laws of growth."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from mmqk.checkpoint import PREFIX, save_checkpoint
from mmqk.diagnose.projections import projections, rope_factor
from mmqk.diagnose.tensors import Weights, read
from mmqk.diagnose.weights import Description, bounds, grew
from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.model.attention import apply_rope, rope_tables
from mmqk.model.config import PerModalityConfig
from mmqk.monitors.own.probe import logit_bound

VOCABULARY = {"text": 20, "image": 12}


def weights_of(tensors: dict, config: dict, kind: str = "PyTorch file") -> Weights:
    readers = {name: (lambda x=x: x) for name, x in tensors.items()}
    return Weights("planted", kind, readers, config, 0)


def own(**fields) -> tuple[EarlyFusionTransformer, Weights]:
    """Return a model with random gains and biases, and its checkpoint."""
    config = ModelConfig(vocab_sizes=VOCABULARY, d_model=16, n_layers=2, n_heads=4, **fields)
    model = EarlyFusionTransformer(config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p += torch.empty_like(p).uniform_(-0.5, 0.5)
    return model, weights_of(model.state_dict(), asdict(config), "mmqk checkpoint")


def largest_logits(model: EarlyFusionTransformer, layer: int, at_equal_positions: bool) -> torch.Tensor:
    """Return by head the largest |logit| of many inputs, among them the worst ones for each head, at all distances of
    0 to 31 tokens."""
    block, c = model.blocks[layer], model.config
    attention, T = block.attention, 32
    raw_q, raw_k = (m.weight.detach().unflatten(0, (-1, c.head_dim)) for m in (attention.w_q, attention.w_k))
    raw_k = raw_k.repeat_interleave(c.n_heads // c.kv_heads, 0)
    folded_q, folded_k = raw_q * block.attn_pre_norm.gain(), raw_k * block.attn_pre_norm.gain()
    right_q, right_k = torch.linalg.svd(folded_q)[2], torch.linalg.svd(folded_k)[2]
    left, _, right = torch.linalg.svd(folded_q.mT @ folded_k)
    worst = torch.cat([right_q[:, 0], right_k[:, 0], left[:, :, 0], right[:, 0]])
    rows = torch.cat([worst, torch.randn(40, c.d_model)])
    x_BTD = block.attn_pre_norm(rows)[:, None].expand(-1, T, -1)
    q, k = (w(x_BTD).unflatten(-1, (-1, c.head_dim)) for w in (attention.w_q, attention.w_k))
    q, k = attention.q_norm(q), attention.k_norm(k)
    rope = rope_tables(T, c.head_dim, c.rope_theta, q.device)
    q, k = apply_rope(q, rope)[:, : 1 if at_equal_positions else T], apply_rope(k, rope)[:, :1]
    k = k.repeat_interleave(c.n_heads // c.kv_heads, 2)
    logits = torch.einsum("bthk,cshk->hbtcs", q, k) * model.attn_scale_value
    return logits.abs().flatten(1).amax(1).detach()


CASES = {
    "no QK-Norm": {},
    "grouped heads": {"n_kv_heads": 2},
    "inverse scale": {"attn_scale": "inverse", "n_kv_heads": 1},
    "layer norms with bias": {"norm": "layer", "norm_bias": True},
    "gains of 1 + w": {"norm_gain": "zero_centered"},
    "rms": {"qk_norm": QKNormConfig("rms")},
    "rms, gains by head": {"qk_norm": QKNormConfig("rms", gain="per_head"), "n_kv_heads": 2},
    "rms, full width": {"qk_norm": QKNormConfig("rms", scope="full", gain="per_head")},
    "layer with bias": {"qk_norm": QKNormConfig("layer", bias=True)},
    "l2": {"qk_norm": QKNormConfig("l2", gain="per_head")},
}


@pytest.mark.parametrize("name", CASES)
def test_no_logit_is_above_the_bound(name):
    model, weights = own(**CASES[name])
    layers = list(projections(weights, []))
    for layer in range(2):
        _, unrotated, bound = bounds(layers[layer])
        rotated, equal = (largest_logits(model, layer, at) for at in (False, True))
        assert (rotated <= bound * 1.00001).all()
        assert (equal <= unrotated * 1.00001).all()
        assert (unrotated <= bound * 1.00001).all()
        if model.config.qk_norm.kind == "none" and model.config.norm == "rms":
            assert (equal > 0.99 * unrotated).all()  # the bound is reached, so it is not trivially large
        if model.config.qk_norm.kind != "none":
            whole = float(logit_bound(model, layer))  # of all heads together
            is_shared = model.config.qk_norm.gain == "shared"
            assert float(bound.max()) == pytest.approx(whole) if is_shared else float(bound.max()) <= whole


def test_rotation_breaks_the_bounds_for_equal_positions():
    """RoPE mixes channels with different gains, and turns W_q away from W_k."""
    for fields, planted in (({}, "w"), ({"qk_norm": QKNormConfig("rms")}, "norm")):
        model, _ = own(**fields)
        attention = model.blocks[0].attention
        with torch.no_grad():
            if planted == "norm":  # a large gain on channel 0 of queries and 2 of keys, which are one pair of RoPE
                attention.q_norm.weight.copy_(torch.tensor([4.0, 0.1, 0.1, 0.1]))
                attention.k_norm.weight.copy_(torch.tensor([0.1, 0.1, 4.0, 0.1]))
            else:
                attention.w_q.weight.zero_(), attention.w_k.weight.zero_()
                attention.w_q.weight[0, 0] = attention.w_k.weight[2, 0] = 1.0
        weights = weights_of(model.state_dict(), asdict(model.config), "mmqk checkpoint")
        _, unrotated, bound = bounds(next(projections(weights, [])))
        logits = largest_logits(model, 0, False)
        assert logits[0] > 2 * unrotated[0]
        assert logits[0] <= bound[0]


def test_copies_of_modalities_are_bounded_together():
    copies = PerModalityConfig(norms=True, qk=True)
    model, _ = own(per_modality=copies)
    with torch.no_grad():
        model.blocks[0].attention.w_q.copies[1].weight *= 3
    weights = weights_of(model.state_dict(), asdict(model.config), "mmqk checkpoint")
    largest = []
    for q in (0, 1):
        for k in (0, 1):
            block = model.blocks[0]
            a = block.attention.w_q.copies[q].weight * block.attn_pre_norm.copies[q].weight
            b = block.attention.w_k.copies[k].weight * block.attn_pre_norm.copies[k].weight
            norms = [torch.linalg.matrix_norm(x.unflatten(0, (4, 4)), 2) for x in (a, b)]
            largest.append(norms[0] * norms[1] * 16 * 4**-0.5)
    expected = torch.stack(largest).amax(0).detach()
    torch.testing.assert_close(bounds(next(projections(weights, [])))[2].float(), expected)


# transformers

HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 40}
FAMILIES = {
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "Qwen2ForCausalLM": {"num_key_value_heads": 2},  # biases of q and k
    "Phi3ForCausalLM": {"num_key_value_heads": 2, "pad_token_id": 0},  # one matrix: all q, all k, all v
    "GPTNeoXForCausalLM": {},  # one matrix: q, k, v of each head
    "GPT2LMHeadModel": {"n_inner": 48},  # one transposed matrix
    "GemmaForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},  # gains of 1 + w
    "GraniteForCausalLM": {"attention_multiplier": 0.3},
    "Qwen3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
    "Olmo2ForCausalLM": {},
    "Gemma3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
    "CohereForCausalLM": {"num_key_value_heads": 2, "use_qk_norm": True},
}
WORDS = {
    "Qwen3ForCausalLM": "norm per head, one gain",
    "Gemma3ForCausalLM": "norm per head, one gain",
    "Olmo2ForCausalLM": "norm over the full width",
    "CohereForCausalLM": "norm per head, a gain for each head",
}


@pytest.fixture(scope="module")
def calls():
    """Queries, keys and scale of each attention call of transformers, in order."""
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def attention(module, query, key, value, mask, scaling=None, **rest):
        seen.append((query.detach(), key.detach(), scaling))
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **rest)

    transformers.AttentionInterface.register("seen_by_test", attention)
    return seen


def hugging_face(architecture: str):
    import transformers

    kind = getattr(transformers, architecture)
    config = kind.config_class(**HEADS | {"initializer_range": 0.3} | FAMILIES[architecture])
    config._attn_implementation = "seen_by_test"
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                p += torch.empty_like(p).uniform_(-0.4, 0.4)
    return model, weights_of(model.state_dict(), config.to_dict())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_bounds_and_projections_are_those_of_transformers(architecture, calls):
    model, weights = hugging_face(architecture)
    calls.clear()
    with torch.no_grad():
        hidden = model(torch.randint(1, 40, (4, 24)), output_hidden_states=True).hidden_states
    layers = list(projections(weights, notes := []))
    assert len(layers) == 2 and not notes
    for layer, (q, k, scale), x in zip(layers, calls, hidden, strict=False):
        assert layer.qk_norm == WORDS.get(architecture, "none")
        assert layer.scale == pytest.approx(scale if scale is not None else q.shape[-1] ** -0.5)
        k_BHTK = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        logits = layer.scale * (q @ k_BHTK.mT).abs().amax((0, 2, 3))
        bound = bounds(layer)[2]
        assert (logits <= bound).all() and (logits > bound / 1000).all()
        if architecture not in WORDS:  # RoPE keeps the norms of queries and keys
            u = x - x.mean(-1, keepdim=True) if architecture.startswith("GPT") else x
            u = u / u.square().mean(-1, keepdim=True).sqrt()
            ones = torch.cat([u, torch.ones_like(u[..., :1])], -1)
            for side, seen in ((layer.q, q), (layer.k, k)):
                found = torch.einsum("nke,bte->bntk", side.folded[0], ones).norm(dim=-1)
                torch.testing.assert_close(found, seen.norm(dim=-1), rtol=1e-3, atol=1e-4)


def test_layers_are_read_one_at_a_time():
    """A large model need not fit into memory."""
    _, weights = hugging_face("LlamaForCausalLM")
    seen = []

    def counted(name):
        seen.append(name)
        return weights.readers[name]()

    readers = {name: partial(counted, name) for name in weights.readers}
    next(projections(Weights("", "", readers, weights.config, 0), []))
    assert seen and all(".layers.0." in name for name in seen)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}


@pytest.mark.parametrize(
    "rope",
    [
        YARN, YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}, YARN | {"attention_factor": 1.7}, YARN | {"factor": 1.0},
        LONG | {"factor": 4.0, "original_max_position_embeddings": 64},
        LONG | {"original_max_position_embeddings": 128}, {"rope_type": "linear", "factor": 8.0},
    ],
)  # fmt: skip
def test_the_factor_of_rope_is_that_of_transformers(rope):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**HEADS, max_position_embeddings=256, rope_parameters=rope | {"rope_theta": 1e4})
    kind = rope["rope_type"]
    expected = ROPE_INIT_FUNCTIONS[kind](config, "cpu")[1]
    assert rope_factor(config.to_dict()) == pytest.approx(expected)
    assert (expected == 1) is (kind == "linear" or rope["factor"] == 1 if "factor" in rope else False)


def test_yarn_stretches_the_bound():
    _, weights = hugging_face("LlamaForCausalLM")
    plain, yarn = (
        next(projections(replace(weights, config=weights.config | {"rope_parameters": rope}), []))
        for rope in ({}, YARN)
    )
    assert yarn.scale == pytest.approx(plain.scale * (0.1 * np.log(8) + 1) ** 2)


def test_what_cannot_be_read_is_said():
    _, weights = hugging_face("GPT2LMHeadModel")
    found = Description(replace(weights, config={}))
    assert found.heads.empty and "how many heads" in found.notes[0]
    bare = {f"layers.0.{name}_proj.weight": torch.eye(8) for name in "qk"}
    found = Description(weights_of(bare, {}))
    assert found.heads.qk_spectral.tolist() == [1] and found.heads.attn_logit_bound.isna().all()
    assert "number of heads" in found.notes[0]
    latent = {f"layers.0.{name}.weight": torch.ones(8, 8) for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj")}
    assert "latent" in Description(weights_of(latent, {})).notes[0]
    assert "No projections" in Description(weights_of({"a.0.weight": torch.ones(2, 2)}, {})).notes[0]


def test_faults_gains_and_rows_by_block(monkeypatch):
    model, weights = own(qk_norm=QKNormConfig("rms"))
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    assert Description(weights).faults.empty  # negative control
    tensors["blocks.1.mlp.w_up.weight"][2, 3] = torch.nan
    tensors["blocks.0.mlp.w_up.weight"][:] = 0
    tensors["blocks.0.attention.q_norm.weight"] = torch.ones(4, dtype=torch.bfloat16)
    tensors["blocks.0.attention.k_norm.weight"] = torch.tensor([1, 1, 1, 1.5]).bfloat16()
    tensors["embed.weight"][20:] = 3.0
    found = Description(weights_of(tensors, weights.config, weights.format))
    problems = dict(found.faults.itertuples(index=False))
    places = ("1.mlp.w_up.weight", "0.mlp.w_up.weight", "0.attention.q_norm.weight")
    assert set(problems) == {f"blocks.{place}" for place in places}
    assert "1 of" in problems["blocks.1.mlp.w_up.weight"]
    gains = found.gains.set_index("name").loc["blocks.0.attention.k_norm.weight"]
    assert gains[["min", "median", "max", "exactly_1"]].tolist() == [1, 1, 1.5, 0.75]
    rows = found.rows.set_index(["matrix", "block"])
    assert rows.loc[("embed", "image"), ["rows", "mean", "max"]].tolist() == [12, 12, 12]
    ranged = Description(weights_of(tensors, {}), {"image": range(22, 32)}).rows.set_index(["matrix", "block"])
    assert ranged.loc[("embed", "image"), "rows"] == 10 and ranged.loc[("embed", "text"), "rows"] == 22
    matrix = model.blocks[1].attention.w_k.weight.detach().double()
    singular = np.linalg.svd(matrix.numpy())[1]
    for largest in (1024, 8):  # exact, and by Lanczos
        monkeypatch.setattr("mmqk.diagnose.weights._LARGEST_SVD", largest)
        layer = Description(weights).layers.iloc[1]
        assert layer.w_k_spectral == pytest.approx(singular[0], rel=1e-4)
        assert layer.w_k_stable_rank == pytest.approx((singular**2).sum() / singular[0] ** 2, rel=1e-4)


# Growth

STEPS = np.array([1000, 2000, 3000, 5000, 7000, 9000])
TRUE = {
    "exponential": (lambda t: 2 * np.exp(t / 2500), 2500 * np.log(500)),
    "linear": (lambda t: 2 + t / 500, 499000),
    "saturating": (lambda t: 10 - 8 * np.exp(-t / 2000), np.inf),
}


@pytest.mark.parametrize("law", TRUE)
def test_laws_of_growth_are_found_under_noise(law):
    function, at_limit = TRUE[law]
    noise = np.exp(0.003 * np.random.default_rng(0).standard_normal((len(STEPS), 40)))
    found = grew(pd.DataFrame(function(STEPS)[:, None] * noise, index=STEPS), 1000)
    is_listed = [law in (row.law, *row.also.split(", ")) for row in found.itertuples()]
    assert np.mean(found.law == law) > 0.8 and np.mean(is_listed) > 0.95
    assert found[law].median() == pytest.approx(at_limit, rel=0.1)


def test_a_constant_does_not_grow():
    for n, most in ((3, 0.15), (6, 0.1)):
        noise = np.exp(0.02 * np.random.default_rng(1).standard_normal((n, 100)))
        found = grew(pd.DataFrame(7 * noise, index=STEPS[:n]), 1000)
        assert np.mean(found.law == "does not grow") > 1 - most
    falling = grew(pd.DataFrame({"a": 9 * np.exp(-STEPS / 3000)}, index=STEPS), 1000)
    assert falling.law.tolist() == ["falls"] and np.isinf(falling.exponential).all()


def test_growth_without_a_clear_law_is_growth():
    series = {"bends": [10.0, 30, 60], "late": [10.0, 12, 100], "same": [10.0, 10.3, 10.1]}
    found = grew(pd.DataFrame(series, index=STEPS[:3]), 1000)
    assert found.law.tolist() == ["no law fits clearly", "no law fits clearly", "does not grow"]


def test_two_checkpoints_give_a_ratio_and_no_law():
    found = grew(pd.DataFrame({"a": [2.0, 8.0], "zero": [0.0, 1.0]}, index=[1000, 3000]), 32.0)
    row = found.loc["a"]
    assert list(found.index) == ["a"] and row.law == "" and row.ratio == 4
    assert row.per_1000_linear == 3 and row.per_1000_log == pytest.approx(np.log(2))
    assert row.exponential == pytest.approx(5000) and row.linear == pytest.approx(11000)


def test_numbers_of_checkpoints_that_grow(tmp_path):
    """W_q and W_k that grow exponentially make the bound grow at twice the rate."""
    model, _ = own()
    series = {}
    for step in (100, 200, 300):
        with torch.no_grad():
            for block in model.blocks:
                block.attention.w_q.weight *= 1.5
                block.attention.w_k.weight *= 1.5
        path = tmp_path / f"step{step:08d}.ckpt"
        state = {PREFIX + name: x for name, x in model.state_dict().items()}
        save_checkpoint({"mmqk_model": asdict(model.config), "state_dict": state, "global_step": step}, path)
        found = read(path)
        series[found.step] = Description(found).numbers()
    table = grew(pd.DataFrame.from_dict(series, orient="index"), 1000)
    row = table.loc["attn_logit_bound/layer01/head03"]
    assert row.law == "exponential" and row.per_1000_log == pytest.approx(20 * np.log(1.5))
    assert table.loc["w_k_stable_rank/layer00", "law"] == "does not grow"
