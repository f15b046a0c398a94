"""The whole model equals a forward pass written with other operations, and has the expected symmetries and bounds."""

import itertools
from dataclasses import replace

import pytest
import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig, RopeScalingConfig
from mmqk.model.transformer import modality_of_ids
from tests.model.small import BLOCKS, VARIANTS, V, build, ids_of, refuses_sdpa
from tests.model.written_out import WrittenOut

# For each variant, changes of the configuration that change the logits although the parameters stay the same.
WRONG = {
    "llama": [{"rope_theta": 10.0}, {"norm_eps": 0.1}, {"attn_scale": "inverse"}, {"norm": "layer"}],
    "chameleon": [
        {"qk_norm": {"place": "after_rope"}},
        {"qk_norm": {"eps": 0.1}},
        {"qk_norm": {"kind": "rms", "bias": False}},
    ],
    "swin": [{"qk_norm": {"place": "after_rope"}}, {"norm_eps": 0.1}],
    "deep norm": [{"deep_norm": False, "post_norm": True}, {"n_layers": 2}, {"layer_scale": None}],
    "sandwich, capped": [{"attn_softcap": None}, {"final_softcap": None}],
    "inverse scale": [{"attn_scale": "none"}, {"norm_eps": 0.1}],
    "no scale": [{"attn_scale": "rsqrt"}],
    "scale of its own": [{"attn_scale": "rsqrt"}, {"embed_sqrt_d": False}],
    "layer norm": [{"norm": "rms", "norm_bias": False}, {"norm_eps": 0.1}],
    "norms without gain": [
        {"norm": "layer"},
        {"qk_norm": {"kind": "rms", "bias": False}},
        {"qk_norm": {"place": "after_rope"}},
    ],
    "olmo": [{"qk_norm": {"scope": "head"}}, {"qk_norm": {"place": "after_rope"}}],
    "full, one gain": [{"qk_norm": {"scope": "head"}}, {"qk_norm": {"kind": "rms", "bias": False}}],
    "hf chameleon": [{"qk_norm": {"scope": "full"}}, {"qk_norm": {"kind": "rms", "bias": False}}],
    "gemma": [
        {"norm_gain": "plain"},
        {"qk_norm": {"gain": "shared"}},
        {"window": 5},
        {"global_every": 3},
        {"local_rope_theta": None},
        {"rope_scaling": RopeScalingConfig()},
        {"mlp": "swiglu"},
        {"embed_scale": {"text": 2.0}},
        {"embed_sqrt_d": False},
    ],
    "after rope": [{"qk_norm": {"place": "before_rope"}}, {"window": 0}],
    "qkv norm": [{"qk_norm": {"normalize_v": False}}, {"qk_norm": {"kind": "rms", "bias": False}}],
    "l2": [{"qk_norm": {"normalize_v": False}}, {"qk_norm": {"scale_max": 1e6}}],
    "l2 fixed": [{"qk_norm": {"scale_init": 5.0}}],
    "l2 per head": [{"qk_norm": {"normalize_v": True}}],
    "cosine": [{"qk_norm": {"scale_max": None}}, {"qk_norm": {"scale_max": 10.0}}],
    "sigmoid": [{"attention": "softmax"}, {"window": 0}, {"attn_softcap": None}],
    "sigma reparam": [{"weight_reparam": "none"}],
    "llama 3.1": [{"rope_scaling": RopeScalingConfig()}, {"rope_scaling": RopeScalingConfig("linear", 4.0)}],
    "untied": [{"qk_norm": {"scope": "full"}}, {"norm": "rms", "norm_bias": False}],
    "untied, everything else": [{"attention": "softmax"}, {"embed_scale": {}}, {"layer_scale": None}],
    "separated ends": [{"separate_last": 0}, {"separate_first": 0}, {"window": 0}],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_the_forward_written_out(variant):
    model, ids_BT = build(**VARIANTS[variant]).double(), ids_of(2, 9)
    state = model.state_dict()
    with torch.no_grad():
        logits_BTV = model(ids_BT)
        expected = torch.stack([WrittenOut(state, model.config)(ids_T) for ids_T in ids_BT])
        torch.testing.assert_close(logits_BTV, expected, rtol=0, atol=1e-5)
        for fields in WRONG[variant]:
            changed = dict(fields)
            if "qk_norm" in fields:
                changed["qk_norm"] = replace(model.config.qk_norm, **fields["qk_norm"])
            wrong = WrittenOut(state, replace(model.config, **changed))(ids_BT[0])
            assert (logits_BTV[0] - wrong).abs().max() > 1e-3, fields


def test_an_untied_model_gives_each_token_the_copy_of_its_modality():
    model, ids_BT = build(**VARIANTS["untied"]).double(), torch.tensor([[1, 12, 2, 18, 3, 13, 20, 4]])
    state, right = model.state_dict(), [0, 1, 0, 2, 0, 1, 2, 0]
    with torch.no_grad():
        for given in (right, [0] * 8, [1] * 8, [0, 1] * 4):
            expected = WrittenOut(state, model.config, given)(ids_BT[0])
            ours = model(ids_BT, modality_BT=torch.tensor([given]))[0]
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
            assert given == right or (model(ids_BT)[0] - expected).abs().max() > 1e-2
        torch.testing.assert_close(
            model(ids_BT)[0], WrittenOut(state, model.config, right)(ids_BT[0]), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize(
    ("ends", "apart"),
    [((1, 0), {0}), ((1, 1), {0}), ((2, 0), {0, 1}), ((2, 1), {0, 1, 2}), ((0, 3), {0, 1, 2}), ((0, 2), set())],
)
def test_no_image_token_reaches_a_text_token_in_separated_layers(backend, ends, apart):
    """Before the first shared layer, a changed image token changes no bit of the residual stream of text tokens."""
    model = build(backend=backend, separate_first=ends[0], separate_last=ends[1])
    ids_T = torch.tensor([1, 12, 2, 13, 3, 4, 14, 5])
    other_T, text_T = ids_T.clone(), ids_T < BLOCKS["text"]
    other_T[1] = 15
    resid: list[dict] = [{}, {}]
    for ids, seen in zip((ids_T, other_T), resid, strict=True):
        model(ids[None], observer=lambda site, layer, x, seen=seen: seen.__setitem__((site, layer), x[0]))
    for layer in range(3):
        one, two = (seen["resid", layer] for seen in resid)
        assert torch.equal(one[text_T], two[text_T]) == (layer in apart), layer
        assert not torch.equal(one[~text_T], two[~text_T])


@pytest.mark.parametrize("variant", [name for name, fields in VARIANTS.items() if not refuses_sdpa(fields)])
def test_the_backends_agree(variant):
    ids_BT, document_BT = ids_of(2, 12), torch.tensor([[0] * 5 + [1] * 7, [3] * 12])
    math, fused = (build(backend=backend, **VARIANTS[variant]) for backend in ("math", "sdpa"))
    for documents in (None, document_BT):
        with torch.no_grad():
            torch.testing.assert_close(
                math(ids_BT, document_BT=documents), fused(ids_BT, document_BT=documents), rtol=0, atol=2e-5
            )


def test_pre_and_post_norm_cannot_be_taken_for_each_other():
    pre, post = build(), build(pre_norm=False, post_norm=True)
    with pytest.raises(RuntimeError, match="attn_post_norm"):
        post.load_state_dict(pre.state_dict())
    renamed = {name.replace("_pre_norm", "_post_norm"): value for name, value in pre.state_dict().items()}
    post.load_state_dict(renamed)
    ids_BT = ids_of(2, 10)
    assert (pre(ids_BT) - post(ids_BT)).abs().max() > 0.1


def future_gradient(model, T=9, t=4):
    """Return how much the logits up to position t depend on the input embeddings after t, and on those up to t."""
    caught = []

    def catch(module, inputs, output):
        caught.append(output.detach().requires_grad_())
        return caught[-1]

    handle = model.embed.register_forward_hook(catch)
    logits_BTV = model(ids_of(2, T))
    handle.remove()
    (grad_BTD,) = torch.autograd.grad(logits_BTV[:, : t + 1].square().sum(), caught)
    return grad_BTD[:, t + 1 :].abs().max(), grad_BTD[:, : t + 1].abs().amax(-1).min()


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        (name, b)
        for name, f in VARIANTS.items()
        for b in ("math", "sdpa")
        if b == "math" or not refuses_sdpa(f)
    ],
)
def test_no_gradient_reaches_the_future(variant, backend):
    after, before = future_gradient(build(backend=backend, **VARIANTS[variant]))
    assert after == 0
    assert before > 0


def test_a_leak_of_one_key_would_be_seen(monkeypatch):
    monkeypatch.setattr("mmqk.model.backends.visible_keys", lambda *_: torch.ones(9, 9).tril(1).bool())
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


def test_an_observer_sees_every_site_and_changes_nothing():
    model = build(post_norm=True, final_softcap=1.5)
    ids_BT, seen = ids_of(2, 8), {}
    logits_BTV = model(ids_BT, observer=lambda site, layer, tensor: seen.update({(site, layer): tensor}))
    assert torch.equal(logits_BTV, model(ids_BT))
    heads = ("q_raw", "k_raw", "q", "k", "v")
    streams = ("attn_in", "attn_out", "mlp_out", "resid")
    assert set(seen) == {("final", -1), ("logits", -1), *itertools.product(heads + streams, range(3))}
    assert all(seen[site, 1].shape == (2, 4, 8, 4) for site in heads)
    assert all(seen[site, 1].shape == (2, 8, 16) for site in streams)
    assert seen["final", -1] is seen["resid", 2]
    # A block adds exactly attn_out and mlp_out to the residual stream.
    torch.testing.assert_close(
        seen["resid", 1], seen["resid", 0] + seen["attn_out", 1] + seen["mlp_out", 1], rtol=0, atol=1e-5
    )
    # The observer gets the logits before the cap, and the caller gets the capped logits.
    torch.testing.assert_close(logits_BTV, 1.5 * torch.tanh(seen["logits", -1] / 1.5))
    assert logits_BTV.abs().max() < 1.5 < seen["logits", -1].abs().max()


def test_an_observer_has_the_heads_of_the_keys_once_and_as_they_are_used():
    seen = {}
    model = build(n_kv_heads=2, qk_norm=QKNormConfig("rms"))
    model(ids_of(2, 8), observer=lambda site, layer, tensor: seen.update({(site, layer): tensor}))
    assert seen["q_raw", 0].shape == (2, 4, 8, 4) and seen["k_raw", 0].shape == (2, 2, 8, 4)
    assert all(seen[site, 0].shape == (2, 4, 8, 4) for site in "qkv")
    assert torch.equal(seen["k", 0][:, 0], seen["k", 0][:, 1])
    assert not torch.equal(seen["k", 0][:, 1], seen["k", 0][:, 2])


def test_post_norm_sets_the_size_of_what_is_added():
    for post_norm in (True, False):
        model, seen = build(post_norm=post_norm), {}
        for block in model.blocks:
            if post_norm:
                torch.nn.init.ones_(block.mlp_post_norm.weight)
        model(
            ids_of(2, 8), observer=lambda site, layer, tensor, seen=seen: seen.update({(site, layer): tensor})
        )
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_autocast_keeps_the_residual_stream_and_the_logits_wide(variant):
    model, seen = build(**VARIANTS[variant]), {}
    with torch.autocast("cpu", torch.bfloat16):
        logits_BTV = model(ids_of(2, 8), observer=lambda site, layer, x: seen.update({site: x.dtype}))
    assert logits_BTV.dtype == torch.float32
    assert {seen[site] for site in "qkv"} == {torch.bfloat16}
    wide = {site for site, dtype in seen.items() if dtype == torch.float32}
    assert wide == {"attn_in", "resid", "final", "logits"}
    torch.testing.assert_close(logits_BTV, model(ids_of(2, 8)), rtol=0, atol=0.2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_into_one_graph(variant):
    model, ids_BT = build(**(VARIANTS[variant] | {"n_layers": 2})), ids_of(2, 8)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids_BT), model(ids_BT), rtol=0, atol=1e-6)


def test_vocab_sizes_must_be_given_and_the_variant_is_printed():
    with pytest.raises(ValueError, match=r"model\.vocab_sizes is empty"):
        EarlyFusionTransformer(ModelConfig())
    printed = str(build(**VARIANTS["swin"]))
    assert "post_norm=True" in printed and "kind='rms'" in printed and "backend=math" in printed
