"""Compares every statistic of a probe with a brute-force fp64 computation that shares no code with mmqk."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig
from mmqk.monitors import probe
from mmqk.monitors.formulas import reduce
from mmqk.monitors.formulas.attention import AttentionStatistics
from mmqk.monitors.formulas.reduce import FEWEST_KEYS, Pairs, output_statistics, selection, visible_pairs
from tests.monitors import brute_force

NAMES = ("text", "image")


def make_batch(B=3, T=40, pad=7) -> TokenBatch:
    """Return random ids of two modalities; the last sequence is padded at its end."""
    random = torch.Generator().manual_seed(0)
    modality_BT = (torch.rand(B, T, generator=random) < 0.5).long()
    low, size = torch.tensor([0, 30]), torch.tensor([30, 12])
    ids_BT = low[modality_BT] + (torch.rand(B, T, generator=random) * size[modality_BT]).long()
    valid_BT = torch.ones(B, T, dtype=torch.bool)
    if pad:
        valid_BT[-1, -pad:] = False
        modality_BT = modality_BT.where(valid_BT, torch.zeros_like(modality_BT))
    target_mask_BT = valid_BT & valid_BT.roll(-1, 1)
    target_mask_BT[:, -1] = False
    return TokenBatch(ids_BT, modality_BT, target_mask_BT, valid_BT, torch.tensor(1.0))


def make_model(seed=0, **changes) -> EarlyFusionTransformer:
    config = ModelConfig(vocab_sizes={"text": 30, "image": 12}, d_model=16, n_layers=2, n_heads=2, **changes)
    model = EarlyFusionTransformer(config, backend="math", seed=seed)
    with torch.no_grad():  # gains of 1 would hide errors
        for name, p in model.named_parameters():
            if p.ndim < 2 or "norm" in name:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
            elif "w_q" in name or "w_k" in name:
                p.mul_(3)
    return model


def expected_of(model, batch) -> dict[str, float]:
    """Return every statistic in float64, from the tensors that `forward` hands to its observer."""
    c, sites = model.config, {}
    model.double()(batch.ids_BT, observer=lambda site, layer, t: sites.__setitem__((site, layer), t.detach().numpy()))
    rows = {name: w.detach().numpy() for name, w in (("embed", model.embed.weight), ("head", model.head.weight))}
    gains = {}
    for layer, block in enumerate(model.blocks):
        for side, norm in (("q", block.attention.q_norm), ("k", block.attention.k_norm)):
            stored = [p.detach().numpy().ravel() for name, p in norm.named_parameters() if "weight" in name]
            if stored:
                weight = np.concatenate(stored)
                gains[side, layer] = np.exp(np.minimum(weight, math.log(c.qk_norm.scale_max))) if (
                    c.qk_norm.scale_max) else np.abs(weight + (c.qk_norm.gain == "zero_centered"))  # fmt: skip
    model.float()
    scale = {"rsqrt": c.head_dim**-0.5, "inverse": 1 / c.head_dim, "none": 1.0}[c.attn_scale]
    if c.qk_norm.kind == "l2":
        scale = 1.0  # the queries are already scaled
    modality, valid = batch.modality_BT.numpy(), batch.valid_BT.numpy()
    expected = brute_force.streams(sites, modality, valid, NAMES)
    for layer in range(c.n_layers):
        far = not c.window or (c.global_every and layer % c.global_every == c.global_every - 1)
        reach = modality.shape[1] if far else c.window

        def sees(b, t, s, reach=reach):
            return valid[b, s] and t - reach < s <= t

        q, k, softmax = sites["q", layer], sites["k", layer], c.attention == "softmax"
        sink = model.blocks[layer].attention.sink
        sinks = None if sink is None else sink.weight.detach().double().numpy()
        expected |= brute_force.attention(
            q, k, scale, modality, sees, NAMES, layer, c.attn_softcap, softmax, valid, sinks
        )
    logits = sites["logits", -1]
    capped = logits if c.final_softcap is None else c.final_softcap * np.tanh(logits / c.final_softcap)
    trained, target = batch.target_mask_BT.numpy(), np.roll(modality, -1, axis=1)
    expected |= brute_force.output(capped, target, trained, c.vocab_sizes)
    for (side, layer), gain in gains.items():
        expected[f"{side}_gain_mean/layer{layer:02d}"] = gain.mean()
        expected[f"{side}_gain_max/layer{layer:02d}"] = gain.max()
    for layer in range(c.n_layers if c.weight_reparam == "sigma" else 0):
        found = [m for m in model.blocks[layer].modules() if hasattr(m, "sigma")]
        triples = [(m.u.numpy(), m.weight.detach().numpy(), m.v.numpy()) for m in found]
        ratios = [u @ w @ v / np.linalg.svd(w, compute_uv=False)[0] for u, w, v in triples]
        expected[f"sigma_ratio/layer{layer:02d}"] = min(ratios)
    for name, weight in rows.items():
        for m, block in enumerate(np.split(weight, [c.vocab_sizes["text"]])):
            expected[f"{name}_row_norm/{NAMES[m]}"] = np.linalg.norm(block, axis=-1).mean()
    return expected


VARIANTS = {
    "none": {},
    "rms": {"qk_norm": QKNormConfig("rms")},
    "layer-post": {"qk_norm": QKNormConfig("layer"), "pre_norm": False, "post_norm": True},
    "cap": {"attn_softcap": 2.0, "attn_scale": "none", "final_softcap": 0.5},
    "window-gqa": {"window": 9, "global_every": 2, "n_kv_heads": 1},
    "window": {"window": 5},
    "sigmoid-full": {"attention": "sigmoid", "qk_norm": QKNormConfig("rms", "full", "per_head")},
    "cosine": {"qk_norm": QKNormConfig("l2", gain="per_head", scale_max=10.2, normalize_v=True)},
    "untied": {
        "per_modality": PerModalityConfig(norms=True, qk=True, mlp=True), "layer_scale": 0.5,
        "weight_reparam": "sigma",
    },
    "deep-norm": {"deep_norm": True, "pre_norm": False},
    "sink-gate": {"attn_sink": True, "attn_gate": "head"},
    "sink-cap-gates": {"attn_sink": True, "attn_softcap": 2.0, "attn_gate": "element", "window": 12, "n_kv_heads": 1},
}  # fmt: skip
# All pairs of queries and keys in one chunk, or in many.
CHUNKS = [*((name, 2**24) for name in VARIANTS), *((name, 500) for name in ("none", "untied", "sink-cap-gates"))]


@pytest.mark.parametrize(("name", "chunk"), CHUNKS)
def test_probe_equals_brute_force(name, chunk, monkeypatch):
    monkeypatch.setattr(reduce, "CHUNK_ELEMENTS", chunk)
    model, batch = make_model(**VARIANTS[name]), make_batch()
    measured = {k: v for k, v in probe(model, batch).flat().items() if not k.startswith("attn_logit_bound")}
    expected = expected_of(model, batch)
    assert measured.keys() == expected.keys()
    assert measured == {k: pytest.approx(v, rel=2e-4, abs=1e-5) for k, v in expected.items()}
    # Control: if the modalities are exchanged, the comparison fails.
    swapped = probe(model, TokenBatch(batch.ids_BT, 1 - batch.modality_BT, batch.target_mask_BT, batch.valid_BT,
                                      batch.step_targets)).flat()  # fmt: skip
    assert any(swapped.get(k) != pytest.approx(v, rel=2e-4, abs=1e-5) for k, v in expected.items())


def with_sinks(logit: float, **changes) -> EarlyFusionTransformer:
    """Return a model whose sinks have this logit, and whose gates, if any, are often almost closed."""
    model = make_model(attn_sink=True, **changes)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.sink.weight.fill_(logit)
            if changes:
                block.attention.w_g.weight.mul_(20)
    return model


def test_masses_and_sink_sum_to_one_and_a_sink_without_weight_changes_nothing():
    batch = make_batch()
    plain, sink = (probe(model, batch, heads=True).flat() for model in (make_model(), with_sinks(8.0)))
    for place in ("text/layer00", "image/layer01", "text/layer01/head01"):
        of, rest = place.split("/", 1)
        masses = [sink[f"attn_mass/{of}-{key}/{rest}"] for key in NAMES]
        assert sum(masses) + sink[f"sink_mass/{place}"] == pytest.approx(1, rel=1e-5)
        assert sum(masses) < 0.99
        parts = sink[f"attn_entropy_block/{place}"] + sink[f"attn_entropy_within/{place}"]
        assert parts == pytest.approx(sink[f"attn_entropy/{place}"], rel=1e-5)
    assert {tag for tag in sink if tag not in plain} == {tag for tag in sink if tag.startswith("sink_mass")}
    # A sink with a logit far below all others has no effect. A sink with a logit far above all others takes all
    # weight, and the rank of the matrix stays finite.
    model = with_sinks(-1e4, attn_gate="element")
    weightless = probe(model, batch).flat()
    assert all(v == 0 for tag, v in weightless.items() if tag.startswith("sink_mass"))
    without = make_model(attn_gate="element")
    without.load_state_dict({k: v for k, v in model.state_dict().items() if "sink" not in k})
    for tag, value in probe(without, batch).flat().items():
        assert weightless[tag] == pytest.approx(value, rel=1e-5), tag
    full = probe(with_sinks(1e3), batch).flat()
    assert full["sink_mass/image/layer00"] == 1 and full["attn_entropy/image/layer00"] == 0
    assert all(math.isfinite(value) for value in full.values()) and full["attn_rank/layer00"] > 0.999


@pytest.mark.parametrize(("present", "documents"), [((0, 1, 2), True), ((0, 2), False), ((1,), True)], ids=str)
def test_three_modalities_packed_documents_and_a_sequence_of_one_token_equal_brute_force(present, documents):
    names, sizes, starts = (*NAMES, "sound"), torch.tensor([9, 7, 5]), torch.tensor([0, 9, 16])
    random, B, T = torch.Generator().manual_seed(3), 3, 40
    modality_BT = torch.tensor(present)[torch.randint(len(present), (B, T), generator=random)]
    ids_BT = starts[modality_BT] + (torch.rand(B, T, generator=random) * sizes[modality_BT]).long()
    valid_BT = torch.ones(B, T, dtype=torch.bool)
    valid_BT[1, 1:], valid_BT[2, 30:] = False, False
    document_BT = (torch.arange(T) // 13).expand(B, T).clone()
    trained_BT = valid_BT & valid_BT.roll(-1, 1)
    trained_BT[:, -1] = False
    batch = TokenBatch(ids_BT, modality_BT, trained_BT, valid_BT, torch.tensor(1.0), document_BT if documents else None)
    vocab_sizes = dict(zip(names, sizes.tolist(), strict=True))
    model = EarlyFusionTransformer(ModelConfig(vocab_sizes=vocab_sizes, d_model=16, n_layers=2, n_heads=2), "math")
    with torch.no_grad():
        for block in model.blocks:
            block.attention.w_q.weight.mul_(5)
    measured = {k: v for k, v in probe(model, batch).flat().items() if "row_norm" not in k}
    sites: dict = {}
    model.double()(ids_BT, modality_BT, batch.document_BT,
                   lambda site, layer, t: sites.__setitem__((site, layer), t.detach().numpy()))  # fmt: skip
    modality, valid = modality_BT.numpy(), valid_BT.numpy()

    def sees(b, t, s):
        return valid[b, s] and s <= t and not (documents and s // 13 != t // 13)

    expected = brute_force.streams(sites, modality, valid, names)
    for layer in range(2):
        q, k = sites["q", layer], sites["k", layer]
        expected |= brute_force.attention(q, k, 8**-0.5, modality, sees, names, layer, valid=valid)
    output = brute_force.output(sites["logits", -1], np.roll(modality, -1, 1), trained_BT.numpy(), vocab_sizes)
    absent = {name for m, name in enumerate(names) if m not in present}
    expected |= {k: v for k, v in output.items() if k.split("-")[-1] not in absent}  # of present blocks
    assert measured.keys() == expected.keys()
    assert measured == {k: pytest.approx(v, rel=2e-4, abs=1e-5) for k, v in expected.items()}
    # Control: the result depends on whether tokens see other documents.
    whole = TokenBatch(ids_BT, modality_BT, trained_BT, valid_BT, torch.tensor(1.0), None if documents else document_BT)
    first = f"attn_entropy/{names[present[0]]}/layer00"
    assert probe(model.float(), whole).flat()[first] != pytest.approx(expected[first], rel=1e-2)


def test_entropy_has_its_known_values():
    """n equal logits give an entropy of log n, and one dominant logit gives 0, for logits of any size."""
    T = 32
    valid, modality = torch.ones(1, T, dtype=torch.bool), torch.zeros(1, T, dtype=torch.long)
    q = torch.ones(1, 1, T, 2)

    def entropy(k):
        rows = AttentionStatistics(q, k, 1.0, Pairs(modality, visible_pairs(valid), 1, 1)).rows
        return float((rows.sum / rows.count)[5, 0])  # 4 statistics of logits and 1 offset come first

    rows = [math.log(n) for n in range(FEWEST_KEYS, T + 1)]
    assert entropy(torch.full((1, 1, T, 2), 3e4)) == pytest.approx(np.mean(rows), rel=1e-5)
    spike = torch.zeros(1, 1, T, 2)
    spike[:, :, 0] = 5e4
    assert entropy(spike) == pytest.approx(0.0, abs=1e-6)
    # Equal logits of the output have no spread, and each modality gets the share of its ids.
    of = selection(modality, valid, 2)
    by_name, _ = output_statistics(torch.full((1, T, 10), 100.0), modality, of, {"text": 7, "image": 3})
    found = [float(by_name[name].sum[0] / by_name[name].count[0]) for name in ("out_logit_spread", "out_wrong_mass")]
    assert found == pytest.approx([0, 3 / 10], abs=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_no_logit_passes_the_qk_norm_bound(kind):
    model, batch = make_model(qk_norm=QKNormConfig(kind)), make_batch()
    values = probe(model, batch).flat()
    for layer in range(2):
        bound = values[f"attn_logit_bound/layer{layer:02d}"]
        seen = [v for k, v in values.items() if k.startswith("attn_logit_absmax") and k.endswith(f"layer{layer:02d}")]
        assert 0 < max(seen) <= bound
    assert "attn_logit_bound/layer00" not in probe(make_model(), batch).flat()


def test_probe_leaves_the_model_as_it_was():
    model, batch = make_model(residual_dropout=0.5), make_batch()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    model.train()
    model.blocks[0].eval()  # a part in evaluation mode stays there
    modes = [module.training for module in model.modules()]
    first = probe(model, batch).flat()
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert probe(model.eval(), batch).flat() == first and not model.training


def test_nan_of_one_modality_does_not_spread_to_the_other():
    model, batch = make_model(), make_batch()
    with torch.no_grad():
        model.embed.weight[30:] = float("nan")
    values = probe(model, batch).flat()
    assert math.isnan(values["v_norm/image/layer00"])
    assert math.isfinite(values["v_norm/text/layer00"])


@pytest.mark.parametrize("chunk", [2**24, 500])
def test_a_sequence_of_padding_alone_adds_nothing(chunk, monkeypatch):
    monkeypatch.setattr(reduce, "CHUNK_ELEMENTS", chunk)
    model, batch = make_model(), make_batch(pad=0)
    valid_BT = batch.valid_BT.clone()
    valid_BT[-1] = False
    emptied = replace(batch, valid_BT=valid_BT, target_mask_BT=batch.target_mask_BT & valid_BT)
    assert probe(model, emptied).flat() == pytest.approx(probe(model, batch.first(2)).flat(), rel=1e-5, abs=1e-6)
    assert probe(model, emptied).flat() != pytest.approx(probe(model, batch).flat(), rel=1e-5)


def test_keys_that_are_all_zero_have_no_growth_and_no_direction():
    """An infinite statistic would raise the alarm for values that are not finite."""
    model = make_model()
    with torch.no_grad():
        model.blocks[0].attention.w_k.weight.zero_()
    found = probe(model, make_batch()).flat()
    gone = set(probe(make_model(), make_batch()).flat()) - set(found)
    pairs = ("text-text", "text-image", "image-text", "image-image")
    parts = ("logit_q_power", "logit_k_power", "logit_alignment", "logit_masked")
    assert gone == {f"{part}/{pair}/layer00" for part in parts for pair in pairs} | {
        f"k_common/{name}/layer00" for name in ("text", "image")
    }
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("backend", ["flex", "sdpa_flash", "sdpa_cudnn"])
def test_a_probe_attends_densely_where_its_backend_has_no_kernel_for_it(backend, monkeypatch):
    """On a GPU, flash and cuDNN refuse fp32, and flex attention is fused only if it is compiled."""
    dense, batch = make_model(), make_batch()
    model = EarlyFusionTransformer(dense.config, backend=backend)
    model.load_state_dict(dense.state_dict())
    wanted = probe(dense, batch).flat()
    found = probe(model, batch).flat()
    assert model.backend == backend
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[t], wanted[t], equal_nan=True) for t in wanted)

    asked = []
    monkeypatch.setattr("mmqk.model.attention.attention", lambda *a, backend, **k: asked.append(backend) or 1 / 0)
    for other in (model, EarlyFusionTransformer(dense.config, backend="sdpa")):  # the second model is a control
        with pytest.raises(ZeroDivisionError):
            probe(other, batch)
    assert asked == ["math", "sdpa"]
