"""The whole model: against a forward written out in other operations, and by its symmetries and bounds."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig, modality_of_ids
from mmqk.model.norms import LayerNorm, RMSNorm

BLOCKS = {"text": 11, "image": 6, "sound": 4}
V = 21
VARIANTS = {
    "llama": {},
    "chameleon": {"qk_norm": QKNormConfig("layer", bias=True), "mlp": "gelu"},
    "swin": {"qk_norm": QKNormConfig("rms", eps=1e-6), "pre_norm": False, "post_norm": True, "d_ff": 40},
    "sandwich, capped": {"post_norm": True, "attn_softcap": 0.8, "final_softcap": 2.0},
    "inverse scale": {"attn_scale": "inverse", "norm_eps": 1e-3, "rope_theta": 100.0},
    "no scale": {"attn_scale": "none", "n_heads": 2},
}


def build(seed=0, backend="math", **fields):
    """A small model whose gains and biases are randomised: unit gains hide errors of order."""
    config = ModelConfig(**({"blocks": BLOCKS, "d_model": 16, "n_layers": 3, "n_heads": 4} | fields))
    model = EarlyFusionTransformer(config, backend, seed).eval()
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        if isinstance(module, RMSNorm | LayerNorm):
            for parameter in module.parameters():
                parameter.data += torch.empty_like(parameter).uniform_(-0.3, 0.3, generator=generator)
    return model


def ids_of(*shape, seed=0, low=0, high=V):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def written_out(state, ids_T, c):
    """One sequence in fp64, a head at a time, RoPE as complex numbers, norms and attention by torch."""
    state = {name: value.double() for name, value in state.items()}

    def rms(x, name, eps):
        return F.rms_norm(x, x.shape[-1:], state[name + ".weight"], eps) if name + ".weight" in state else x

    def qk_norm(x, name):
        if c.qk_norm.kind == "layer":
            return F.layer_norm(
                x, x.shape[-1:], state[name + ".weight"], state[name + ".bias"], c.qk_norm.eps
            )
        return rms(x, name, c.qk_norm.eps)

    def rotate(x_TK):
        half = x_TK.shape[1] // 2
        angle = torch.arange(len(ids_T))[:, None] * c.rope_theta ** (-torch.arange(half).double() / half)
        turned = torch.complex(x_TK[:, :half], x_TK[:, half:]) * torch.exp(1j * angle)
        return torch.cat((turned.real, turned.imag), -1)

    def capped(x, cap):
        return x if cap is None else cap * torch.tanh(x / cap)

    x_TD = state["embed.weight"][ids_T]
    hidden_TT = torch.full((len(ids_T), len(ids_T)), float("-inf"), dtype=torch.float64).triu(1)
    for layer in range(c.n_layers):
        at = f"blocks.{layer}."
        y_TD = rms(x_TD, at + "attn_pre_norm", c.norm_eps)
        heads = []
        for h in range(c.n_heads):
            rows = slice(h * c.head_dim, (h + 1) * c.head_dim)
            q, k, v = (y_TD @ state[f"{at}attention.w_{n}.weight"][rows].T for n in "qkv")
            q, k = (rotate(qk_norm(x, f"{at}attention.{n}_norm")) for x, n in ((q, "q"), (k, "k")))
            scale = {"rsqrt": c.head_dim**-0.5, "inverse": c.head_dim**-1, "none": 1}[c.attn_scale]
            heads.append(torch.softmax(capped(scale * q @ k.T, c.attn_softcap) + hidden_TT, -1) @ v)
        y_TD = torch.cat(heads, -1) @ state[at + "attention.w_o.weight"].T
        x_TD = x_TD + rms(y_TD, at + "attn_post_norm", c.norm_eps)

        y_TD = rms(x_TD, at + "mlp_pre_norm", c.norm_eps)
        up, down = state[at + "mlp.w_up.weight"], state[at + "mlp.w_down.weight"]
        hidden = F.gelu(y_TD @ up.T) if c.mlp == "gelu" else F.silu(y_TD @ state[at + "mlp.w_gate.weight"].T)
        y_TD = (hidden if c.mlp == "gelu" else hidden * (y_TD @ up.T)) @ down.T
        x_TD = x_TD + rms(y_TD, at + "mlp_post_norm", c.norm_eps)
    return capped(rms(x_TD, "final_norm", c.norm_eps) @ state["head.weight"].T, c.final_softcap)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_the_forward_written_out(variant):
    model = build(**VARIANTS[variant]).double()
    ids_BT = ids_of(2, 12)
    with torch.no_grad():
        logits_BTV = model(ids_BT)
        expected = torch.stack([written_out(model.state_dict(), ids_T, model.config) for ids_T in ids_BT])
        torch.testing.assert_close(logits_BTV, expected, rtol=0, atol=1e-5)
        # With the same weights every other variant whose parameters have the same names is another function.
        for other in ({"attn_scale": "none"}, {"attn_softcap": 0.5}, {"norm_eps": 0.1}, {"rope_theta": 10.0}):
            changed = ModelConfig(**{**vars(model.config), **other})
            if changed != model.config:
                wrong = written_out(model.state_dict(), ids_BT[0], changed)
                assert (logits_BTV[0] - wrong).abs().max() > 1e-3, other


def test_pre_and_post_norm_cannot_be_taken_for_each_other():
    pre, post = build(), build(pre_norm=False, post_norm=True)
    with pytest.raises(RuntimeError, match="attn_post_norm"):
        post.load_state_dict(pre.state_dict())
    renamed = {name.replace("_pre_norm", "_post_norm"): value for name, value in pre.state_dict().items()}
    post.load_state_dict(renamed)
    ids_BT = ids_of(2, 10)
    assert (pre(ids_BT) - post(ids_BT)).abs().max() > 0.1


def future_gradient(model, T=9, t=4):
    """How far the logits up to position t depend on the input embeddings after t, and on those up to t."""
    caught = []

    def catch(module, inputs, output):
        caught.append(output.detach().requires_grad_())
        return caught[-1]

    handle = model.embed.register_forward_hook(catch)
    logits_BTV = model(ids_of(2, T))
    handle.remove()
    (grad_BTD,) = torch.autograd.grad(logits_BTV[:, : t + 1].square().sum(), caught)
    return grad_BTD[:, t + 1 :].abs().max(), grad_BTD[:, : t + 1].abs().amax(-1).min()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_no_gradient_reaches_the_future(variant, backend):
    if backend == "sdpa" and "attn_softcap" in VARIANTS[variant]:
        pytest.skip("refused by name")
    after, before = future_gradient(build(backend=backend, **VARIANTS[variant]))
    assert after == 0
    assert before > 0


def test_a_leak_of_one_key_would_be_seen(monkeypatch):
    monkeypatch.setattr("mmqk.model.attention.visible_keys", lambda *_: torch.ones(9, 9).tril(1).bool())
    after, _ = future_gradient(build())
    assert after > 0


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_packed_documents_equal_separate_runs(backend):
    model = build(backend=backend)
    ids_BT = ids_of(2, 12)
    document_BT = torch.tensor([[0] * 5 + [1] * 7, [3] * 9 + [8] * 3])
    packed = model(ids_BT, document_BT=document_BT)
    for row, cut in ((0, 5), (1, 9)):
        for part in (slice(0, cut), slice(cut, 12)):
            torch.testing.assert_close(packed[row, part], model(ids_BT[row : row + 1, part])[0])
    assert (packed[0, 5:] - model(ids_BT)[0, 5:]).abs().max() > 1e-2


def test_modality_comes_from_block_ranges():
    ids = torch.arange(V)
    expected = torch.tensor([0] * 11 + [1] * 6 + [2] * 4)
    assert torch.equal(modality_of_ids(ids, BLOCKS), expected)
    assert torch.equal(modality_of_ids(ids.view(3, 7), BLOCKS), expected.view(3, 7))
    assert not torch.equal(modality_of_ids(ids, {"text": 10, "image": 7, "sound": 4}), expected)
    model = build()
    assert torch.equal(model(ids[None]), model(ids[None], modality_BT=expected[None]))


def test_parameter_count_and_buffers():
    for fields, per_layer in (
        ({"d_ff": 48}, 4 * 16 * 16 + 3 * 16 * 48 + 2 * 16),
        ({"mlp": "gelu", "post_norm": True}, 4 * 16 * 16 + 2 * 16 * 64 + 4 * 16),
        ({"d_ff": 48, "qk_norm": QKNormConfig("layer", bias=True)}, 4 * 16 * 16 + 3 * 16 * 48 + 2 * 16 + 4 * 4),
    ):
        model = build(**fields)
        assert sum(p.numel() for p in model.parameters()) == 2 * 21 * 16 + 16 + 3 * per_layer
        assert list(model.buffers()) == []
    assert ModelConfig().mlp_width == 176


def test_sink_sees_every_site_and_changes_nothing():
    model = build(post_norm=True, final_softcap=1.5)
    ids_BT, seen = ids_of(2, 8), {}
    logits_BTV = model(ids_BT, sink=lambda site, layer, tensor: seen.update({(site, layer): tensor}))
    assert torch.equal(logits_BTV, model(ids_BT))
    heads = ("q_raw", "k_raw", "q", "k", "v")
    streams = ("attn_out", "mlp_out", "resid")
    assert set(seen) == {("final", -1), ("logits", -1), *itertools.product(heads + streams, range(3))}
    assert all(seen[site, 1].shape == (2, 4, 8, 4) for site in heads)
    assert all(seen[site, 1].shape == (2, 8, 16) for site in streams)
    assert seen["final", -1] is seen["resid", 2]
    # What a block adds to the residual stream is what the two sites say it adds.
    torch.testing.assert_close(
        seen["resid", 1], seen["resid", 0] + seen["attn_out", 1] + seen["mlp_out", 1], rtol=0, atol=1e-5
    )
    # The sink has the logits before the cap, the caller after it.
    torch.testing.assert_close(logits_BTV, 1.5 * torch.tanh(seen["logits", -1] / 1.5))
    assert logits_BTV.abs().max() < 1.5 < seen["logits", -1].abs().max()


def test_post_norm_sets_the_size_of_what_is_added():
    for post_norm in (True, False):
        model, seen = build(post_norm=post_norm), {}
        for block in model.blocks:
            if post_norm:
                torch.nn.init.ones_(block.mlp_post_norm.weight)
        model(ids_of(2, 8), sink=lambda site, layer, tensor, seen=seen: seen.update({(site, layer): tensor}))
        rms_BT = seen["mlp_out", 1].square().mean(-1).sqrt()
        assert bool(((rms_BT - 1).abs() < 1e-2).all()) == post_norm


def test_residual_dropout_follows_the_generator_and_only_in_training():
    model, ids_BT = build(residual_dropout=0.3), ids_of(2, 8)
    assert torch.equal(model(ids_BT), build()(ids_BT))
    model.train()

    def run(seed):
        torch.manual_seed(seed)
        return model(ids_BT)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    without = build().train()
    state = torch.random.get_rng_state()
    without(ids_BT)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("qk", ["none", "rms", "layer"])
@pytest.mark.parametrize("placement", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_every_combination_trains_on_any_mix_of_modalities(qk, placement, mlp, cap):
    pre_norm, post_norm = placement
    model = build(
        qk_norm=QKNormConfig(qk),
        pre_norm=pre_norm,
        post_norm=post_norm,
        mlp=mlp,
        attn_softcap=cap,
        final_softcap=cap,
        residual_dropout=0.1,
    ).train()
    for ids_BT in (ids_of(2, 8), ids_of(2, 8, high=11), ids_of(2, 8, low=11, high=17), ids_of(1, 1)):
        loss = model(ids_BT).logsumexp(-1).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert loss.isfinite() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("qk", ["none", "rms"])
def test_bf16_autocast_keeps_the_residual_stream_and_the_logits_wide(qk):
    model, seen = build(qk_norm=QKNormConfig(qk)), {}
    with torch.autocast("cpu", torch.bfloat16):
        logits_BTV = model(ids_of(2, 8), sink=lambda site, layer, x: seen.update({site: x.dtype}))
    assert logits_BTV.dtype == torch.float32
    wide = {site for site, dtype in seen.items() if dtype == torch.float32}
    assert wide == {"resid", "final", "logits"}
    torch.testing.assert_close(logits_BTV, model(ids_of(2, 8)), rtol=0, atol=0.2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_into_one_graph(variant):
    model, ids_BT = build(**VARIANTS[variant]), ids_of(2, 8)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids_BT), model(ids_BT), rtol=0, atol=1e-6)


def test_blocks_must_be_given_and_the_variant_is_printed():
    with pytest.raises(ValueError, match=r"model\.blocks is empty"):
        EarlyFusionTransformer(ModelConfig())
    printed = str(build(**VARIANTS["swin"]))
    assert "post_norm=True" in printed and "kind='rms'" in printed and "backend=math" in printed
