"""Compares the detected residual stream with the model's hidden states, and sizes of matrices with numpy's singular
values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from mmqk.monitors import attach
from mmqk.monitors.foreign.output import missing_series
from tests.monitors import brute_force
from tests.monitors.attach.nets import D, Layer, Net, SelfAttention, V, batches
from tests.monitors.attach.test_exact import HUGGING_FACE, IMAGE, NAMES, hugging_face, modality_of, same
from tests.monitors.attach.test_sides import random_

L = 3
SIZE = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": L,
        "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
SHARED = {"num_key_value_heads": 4}
DEEPSEEK = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}  # fmt: skip
# Model -> configuration and its options, path of a layer, paths of what its attention and MLP add to the residual
# stream, and whether a norm follows the last layer.
FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": V, "n_embd": 32, "n_layer": L, "n_head": 4, "n_positions": 64},
                        "transformer.h.{}", "attn", "mlp", True),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZE, "gpt_neox.layers.{}", "attention", "mlp", True),
    "BertForMaskedLM": ("BertConfig", SIZE, "bert.encoder.layer.{}", "attention.output.dense", "output.dense", False),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", SIZE | SHARED | DEEPSEEK, "model.layers.{}", "self_attn",
                              "mlp", True),
}  # fmt: skip
# Models with an adapter of mmqk, for each placement of the norms: name in `HUGGING_FACE`, options, paths as above.
ADAPTED = {
    "Chameleon": ("chameleon", {}, "self_attn", "mlp"),
    "Chameleon 34B": ("chameleon", {"swin_norm": True}, "input_layernorm", "post_attention_layernorm"),
    "Gemma 2": ("gemma 2", {}, "post_attention_layernorm", "post_feedforward_layernorm"),
}
WITHOUT = ", ".join(("attn_in_norm", "q_raw_norm", "k_raw_norm", "q_weight_gain", "k_weight_gain"))


def built(name):
    """Return a model of `FAMILIES` or `ADAPTED`, the three paths, and whether it has a final norm."""
    transformers = pytest.importorskip("transformers")
    if name in ADAPTED:
        key, options, attn, mlp = ADAPTED[name]
        family, kind, config, own, *_ = HUGGING_FACE[key]
        return hugging_face(family, kind, config, own | options, layers=L), "model.layers.{}", attn, mlp, True
    config, options, *places = FAMILIES[name]
    return random_(getattr(transformers, name)(getattr(transformers, config)(**options))), *places


@pytest.mark.parametrize("name", [*FAMILIES, *ADAPTED])
def test_the_residual_stream_is_that_of_the_models_own_hidden_states(name):
    model, layer, attn, mlp, final = built(name)
    (ids,), recorded = batches(1, B=3), {}
    measured = attach(model, modality=IMAGE).probe(input_ids=ids).flat()
    for n in range(L):
        block = model.get_submodule(layer.format(n))
        for site, module in (
            ("attn_out", block.get_submodule(attn)), ("mlp_out", block.get_submodule(mlp)), ("resid", block)
        ):  # fmt: skip
            module.register_forward_hook(
                lambda m, x, out, at=(site, n): recorded.update({at: out[0] if isinstance(out, tuple) else out})
            )
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    for n in range(L - 1):  # the last of the model's hidden states comes after the final norm
        torch.testing.assert_close(recorded["resid", n], states[n + 1])
    if final:
        recorded["final", -1] = recorded["resid", L - 1]
    else:
        torch.testing.assert_close(recorded["resid", L - 1], states[L])
    arrays = {at: x.detach().double().numpy() for at, x in recorded.items()}
    modality, valid = modality_of(ids), np.ones(ids.shape, bool)
    expected = brute_force.streams(arrays, modality, valid, NAMES)
    assert same(measured, expected) and len(expected) == 12 * L + 4 * final
    # Control: with the layers in reverse order, the comparison fails.
    turned = {(site, L - 1 - n if n >= 0 else n): x for (site, n), x in arrays.items()}
    assert not same(measured, brute_force.streams(turned, modality, valid, NAMES))
    if name in ADAPTED:
        assert "q_raw_norm/text/layer01" in measured
        return
    absent = WITHOUT if final else f"{WITHOUT}, final_norm"
    assert missing_series(measured, NAMES) == (
        f"statistics not measured: {absent} (pass an adapter that names their modules)"
    )


class InPlace(Layer):
    """A layer with in-place additions to the stream and to the branch."""

    def forward(self, x, mask=None):
        x = x.clone()
        x += self.attention(self.norm1(x), mask)
        out = self.mlp(self.norm2(x))
        return out.add_(x)


class Parts(Layer):
    """A layer whose attention output has two parts (direct and projected) and whose MLP output has a gated part."""

    def __init__(self, attention, dropout=0.0):
        super().__init__(attention, dropout)
        self.low, self.gate, self.expert = nn.Linear(D, D), nn.Parameter(torch.tensor(0.7)), nn.Linear(D, D)

    def forward(self, x, mask=None):
        out = self.attention(self.norm1(x), mask)
        x = torch.add(x, out + self.low(out))
        h = self.norm2(x)
        return self.gate * self.mlp(h) + self.expert(h) + x


class Normed(Layer):
    """A post-norm layer, with the norm inside the residual branch."""

    def forward(self, x, mask=None):
        x = x + self.norm1(self.attention(x, mask))
        return x + self.norm2(self.mlp(x))


class Chain(nn.Sequential):
    def forward(self, x, mask=None):
        return super().forward(x)


def by_hand(layer: Layer, x):
    """Return (attn_out, mlp_out, resid) of a layer, computed without in-place additions."""
    if isinstance(layer, Normed):
        attn = layer.norm1(layer.attention(x))
        mlp = layer.norm2(layer.mlp(x + attn))
    elif isinstance(layer, Parts):
        out = layer.attention(layer.norm1(x))
        attn = out + layer.low(out)
        h = layer.norm2(x + attn)
        mlp = layer.gate * layer.mlp(h) + layer.expert(h)
    else:
        attn = layer.attention(layer.norm1(x))
        mlp = layer.mlp(layer.norm2(x + attn))
    return attn, mlp, x + attn + mlp


@pytest.mark.parametrize("kind", [Layer, InPlace, Parts, Normed])
@pytest.mark.parametrize("wrapped", [False, True])
def test_however_it_is_added(kind, wrapped):
    torch.manual_seed(0)
    net, (ids,) = Net(["sdpa"] * L), batches(1, B=3)
    layers = [kind(SelfAttention()) for _ in range(L)]
    net.layers = nn.ModuleList(layers if not wrapped else [Chain(layer) for layer in layers])
    random_(net)
    # If wrapped, the path of layer 1 is 0.layers.1.0: only the second number is the number of the layer.
    whole = nn.Sequential(net) if wrapped else net
    measured = attach(whole, modality=IMAGE).probe(**({"input": ids} if wrapped else {"ids": ids})).flat()
    x, sites = net.embed(ids), {}
    for n, layer in enumerate(layers):
        attn, mlp, x = by_hand(layer, x)
        sites |= {("attn_out", n): attn, ("mlp_out", n): mlp, ("resid", n): x}
    arrays = {at: x.detach().double().numpy() for at, x in sites.items()}
    valid = np.ones(ids.shape, bool)
    expected = brute_force.streams(arrays, modality_of(ids), valid, NAMES)
    assert same(measured, expected) and len(expected) == 12 * L
    swapped = {({"attn_out": "mlp_out", "mlp_out": "attn_out"}.get(s, s), n): x for (s, n), x in arrays.items()}
    assert not same(measured, brute_force.streams(swapped, modality_of(ids), valid, NAMES))


class Block(nn.Module):
    """A block without attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x, mask=None):
        return x + 20 * self.mlp(self.norm(x))


@pytest.mark.parametrize("after", [0, 1, 2])
def test_the_final_norm_of_a_model_whose_last_blocks_have_no_attention(after):
    class Hybrid(Net):
        def __init__(self):
            super().__init__(["sdpa"] * 2)
            self.layers.extend(Block() for _ in range(after))
            self.last = nn.LayerNorm(D)

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.last(x))

    net, (ids,), seen = random_(Hybrid()), batches(1, B=3), {}
    net.last.register_forward_hook(lambda m, x, out: seen.update(last=x[0]))
    net.layers[1].register_forward_hook(lambda m, x, out: seen.update(attention=out))
    measured = attach(net, modality=IMAGE).probe(ids=ids).flat()
    text = torch.tensor(modality_of(ids) == 0)
    last, attention = (seen[at].norm(dim=-1)[text].mean().item() for at in ("last", "attention"))
    assert measured["final_norm/text"] == pytest.approx(last, rel=1e-5)
    assert measured["resid_norm/text/layer01"] == pytest.approx(attention, rel=1e-5)
    assert (last == pytest.approx(attention, rel=0.1)) == (after == 0)  # the control


def test_a_model_without_a_final_norm_does_not_have_that_of_a_block():
    net, (ids,) = Net(["sdpa"] * 2), batches(1, B=3)
    net.layers.append(Block())
    assert "final_norm/text" not in attach(net, modality=IMAGE).probe(ids=ids).flat()


def test_a_model_without_a_residual_stream_has_none():
    class Straight(Layer):
        def forward(self, x, mask=None):
            return self.mlp(self.norm2(self.attention(self.norm1(x), mask)))

    for kind in (Straight, Layer):
        net, (ids,) = Net(["sdpa"] * 2), batches(1)
        net.layers = nn.ModuleList(kind(SelfAttention()) for _ in range(2))
        tags = attach(net, modality=IMAGE).probe(ids=ids).flat()
        assert any(tag.startswith("resid") for tag in tags) == (kind is Layer)


@pytest.mark.parametrize("name, expected", [
    ("GPT2LMHeadModel", {"attn_c_attn": "attn.c_attn", "mlp_c_fc": "mlp.c_fc"}),
    ("GPTNeoXForCausalLM", {"attention_query_key_value": "attention.query_key_value"}),
])  # fmt: skip
def test_sizes_equal_those_of_the_singular_values(name, expected):
    model, layer, *_ = built(name)
    (ids,) = batches(1, B=2)
    flat = attach(model, modality=IMAGE, matrices=True).probe(input_ids=ids).flat()
    for n in range(L):
        matrices = [m for m in model.get_submodule(layer.format(n)).parameters() if m.ndim == 2]
        assert sum(tag.endswith(f"_stable_rank/layer{n:02d}") for tag in flat) == len(matrices) == 4
        for tag, path in expected.items():
            s = np.linalg.svd(model.get_submodule(f"{layer.format(n)}.{path}").weight.detach().numpy())[1]
            values = [flat[f"{tag}_{size}/layer{n:02d}"] for size in ("norm", "spectral", "stable_rank")]
            norm = np.sqrt((s**2).sum())
            np.testing.assert_allclose(values, [norm, s[0], (norm / s[0]) ** 2], rtol=1e-5)
    # Control: another layer has another stable rank. By default no matrix is measured.
    assert values[2] != flat[f"{tag}_stable_rank/layer00"]
    assert not any("stable_rank" in tag for tag in attach(model, modality=IMAGE).probe(input_ids=ids).flat())
