"""Check QK-Clip: exact largest logits by head, exact scaling, and no change below the threshold."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmqk.model import PerModalityConfig
from mmqk.training import guards as qk_clip
from mmqk.training.callbacks import Validation
from mmqk.training.guards import clip_heads, gamma_of, largest_logits
from tests.peers import Peer
from tests.training.toy import MODEL, apart, fit, module_of, toy_batch, weights

WRITTEN_OUT = Peer(("qk_clip",), "formula written out", 1e-12)
X_TRANSFORMERS = Peer(("qk_clip",), "x-transformers Attention.qk_clip_, a module for each head", 1e-12)
PEERS = [WRITTEN_OUT, X_TRANSFORMERS]


def brute_force(q, k, scale, valid, document=None, window=0) -> list[float]:
    """Return the largest logit of each head by its definition, one pair at a time."""
    B, H, T, _ = q.shape
    best = [-math.inf] * H
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        for s in range(t + 1):
            seen = valid[b, t] and valid[b, s] and (not window or t - s < window)
            if seen and (document is None or document[b, t] == document[b, s]):
                best[h] = max(best[h], scale * float(q[b, h, t] @ k[b, h, s]))
    return best


def queries_and_keys(B=2, H=3, T=9, K=4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, B, H, T, K, generator=generator, dtype=torch.float64))  # type: ignore[return-value]


# What is measured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("elements", "documents", "window"), [(1, True, 0), (200, True, 3), (2**24, False, 1)])
def test_the_largest_logit_is_exact_over_visible_pairs(monkeypatch, elements, documents, window):
    monkeypatch.setattr(qk_clip, "CHUNK_ELEMENTS", elements)
    (q, k), batch = queries_and_keys(), toy_batch(1, 2, 9, padding=2, documents=documents)
    batch.valid_BT[:, 1:3] = False  # padding in the middle, with queries after it
    seen = (batch.valid_BT, batch.document_BT, window)
    expected = torch.tensor(brute_force(q, k, 0.7, *seen), dtype=q.dtype)
    torch.testing.assert_close(largest_logits(q, k, 0.7, *seen), expected, rtol=0, atol=1e-12)
    # The controls: hidden pairs have larger logits, and the largest absolute logit differs.
    every = (0.7 * q @ k.transpose(-1, -2)).amax((0, 2, 3))
    assert (every > expected + 0.1).any()
    assert (largest_logits(-q, k, 0.7, *seen) > expected + 0.1).any()


def test_a_head_whose_logits_are_all_negative_has_a_negative_maximum():
    x = torch.ones(1, 1, 5, 4, dtype=torch.float64)
    assert largest_logits(x, -x, 0.5, torch.ones(1, 5, dtype=torch.bool)).tolist() == [-2.0]
    assert largest_logits(x, x, 0.5, torch.zeros(1, 5, dtype=torch.bool)).tolist() == [-math.inf]


@pytest.mark.parametrize(
    "variant",
    [{}, {"n_kv_heads": 2, "attn_scale": "none"}, {"window": 3, "global_every": 2}, {"separate_first": 1}],
    ids=["plain", "grouped keys, no scale", "windows", "a separated layer"],
)
def test_a_step_measures_the_attention_that_it_computed(monkeypatch, variant):
    """Compare with the inputs of torch's softmax, which are the logits of each layer and head."""
    batch = toy_batch(2, padding=3, documents=True)
    module = module_of(replace(MODEL, **variant), backend="sdpa", qk_clip=1.0)
    reference, rows = module_of(replace(MODEL, **variant), backend="math"), []
    softmax = torch.softmax

    def watching(logits, dim):
        if logits.ndim == 4:
            valid = batch.valid_BT[:, None, :, None] & batch.valid_BT[:, None, None, :]
            rows.append(logits.detach().masked_fill(~valid, -math.inf).amax((0, 2, 3)))
        return softmax(logits, dim)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "softmax", watching)
        reference.losses(batch)
    module.losses(batch, module.qk_clip.observer(batch))
    found = torch.stack([module.qk_clip._largest[layer] for layer in range(2)])
    torch.testing.assert_close(found, torch.stack(rows), rtol=0, atol=1e-12)
    assert float((found[0] - found[1]).abs().max()) > 1e-2  # the control: the layers differ
    assert module.qk_clip.measured().tolist()[:2] == found.amax(1).tolist()


def test_gamma_is_its_formula_and_one_where_there_is_nothing_to_clip():
    largest = torch.tensor([4.0, 2.0, 1.0, 0.0, -5.0, -math.inf, math.inf, math.nan], dtype=torch.float64)
    assert gamma_of(largest, 2.0).tolist() == [0.5, 1, 1, 1, 1, 1, 1, 1]
    assert gamma_of(largest, 3.0)[0] == 0.75


# What is scaled --------------------------------------------------------------------------------------------


def logits_by_head(model, batch) -> list[Tensor]:
    """Return the raw logits of every pair, (H, B, T, T) for each layer."""
    found: dict[tuple[str, int], Tensor] = {}
    with torch.no_grad():
        model(
            batch.ids_BT, batch.modality_BT, observer=lambda site, layer, x: found.__setitem__((site, layer), x.clone())
        )
    layers = range(model.config.n_layers)
    return [(model.attn_scale_value * found["q", i] @ found["k", i].transpose(-1, -2)).transpose(0, 1) for i in layers]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("untied", [False, True])
def test_logits_of_a_head_shrink_by_exactly_its_gamma(kv_heads, untied):
    """Only the first layer is compared, because clipping does not change the input of the first layer."""
    config = replace(MODEL, n_kv_heads=kv_heads, per_modality=PerModalityConfig(qk=untied))
    model, batch = module_of(config).model, toy_batch(3)
    attention = model.blocks[0].attention
    if untied:  # make the copies differ, so that scaling only one is detected
        with torch.no_grad():
            attention.w_q.copies[1].weight.mul_(-1.5)
            attention.w_k.copies[1].weight.mul_(0.5)
    gamma = torch.tensor([0.25, 1.0, 0.64, 0.9], dtype=torch.float64)
    before = logits_by_head(model, batch)[0]
    clip_heads(attention.w_q, attention.w_k, gamma, kv_heads)
    after = logits_by_head(model, batch)[0]
    expected = gamma[:, None, None, None] * before
    torch.testing.assert_close(after, expected, rtol=0, atol=WRITTEN_OUT.tolerance)
    # The controls: gamma squared, or no gamma, gives different logits.
    for wrong in (gamma.square(), torch.ones_like(gamma)):
        assert float((after - wrong[:, None, None, None] * before).abs().max()) > 1e-3


def test_it_is_the_clip_of_x_transformers():
    """The reference has a module for each head, because with several heads x-transformers 2.31 scales the columns of
    W_q and W_k, not the rows."""
    from x_transformers.x_transformers import Attention

    D, T, batch = MODEL.d_model, 12, toy_batch(3)
    model = module_of(replace(MODEL, d_head=D)).model  # square matrices: x-transformers broadcasts its factors
    attention, found = model.blocks[0].attention, {}
    with torch.no_grad():
        model(batch.ids_BT, observer=lambda site, layer, x: layer or found.__setitem__(site, x.clone()))
    logits = model.attn_scale_value * found["q"] @ found["k"].transpose(-1, -2)
    logits = logits.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    tau = float(logits.amax((0, 2, 3)).median())
    expected, other = [], []
    for h in range(MODEL.n_heads):
        for threshold, outcome in ((tau, expected), (2 * tau, other)):
            head = Attention(D, dim_head=D, heads=1, causal=True).double()
            with torch.no_grad():
                for theirs, ours in ((head.to_q, attention.w_q), (head.to_k, attention.w_k)):
                    theirs.weight.copy_(ours.weight[h * D : (h + 1) * D])
            head.qk_clip_(logits[:, h : h + 1], tau=threshold)
            outcome.append(torch.stack([head.to_q.weight, head.to_k.weight]).detach())
    largest_H = largest_logits(found["q"], found["k"], model.attn_scale_value, batch.valid_BT)
    clip_heads(attention.w_q, attention.w_k, gamma_of(largest_H, tau), MODEL.n_heads)
    after = torch.stack([attention.w_q.weight, attention.w_k.weight]).detach()
    torch.testing.assert_close(after, torch.cat(expected, 1), rtol=0, atol=X_TRANSFORMERS.tolerance)
    # The controls: a different order of heads, and a different threshold.
    for wrong in (torch.cat(expected[::-1], 1), torch.cat(other, 1)):
        assert float((after - wrong).abs().max()) > 1e-3


def test_shared_keys_stay_as_they_are_and_a_factor_of_1_changes_no_bit():
    gamma = torch.tensor([0.25, 1.0, 0.64, 1.0], dtype=torch.float64)
    attention = module_of(replace(MODEL, n_kv_heads=2)).model.blocks[0].attention
    before = [w.weight.detach().clone() for w in (attention.w_q, attention.w_k, attention.w_v)]
    clip_heads(attention.w_q, attention.w_k, gamma, 2)
    factors = gamma.repeat_interleave(4)[:, None]
    assert torch.equal(attention.w_q.weight, before[0] * factors)
    assert torch.equal(attention.w_k.weight, before[1]) and torch.equal(attention.w_v.weight, before[2])


def test_a_step_is_the_update_and_then_the_clip():
    """The expected weights are computed from an unclipped step and the logits of the weights before the step."""
    batch = toy_batch(4)
    start, plain = module_of(), module_of()
    largest = [x.masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf).amax((1, 2, 3))
               for x in logits_by_head(start.model, batch)]  # fmt: skip
    tau = float(torch.cat(largest).median())
    fit(plain, [batch])
    clipped = module_of(qk_clip=tau)
    [line] = fit(clipped, [batch])
    expected = weights(plain)
    for layer, S_H in enumerate(largest):
        gamma = (tau / S_H).clamp(max=1.0)
        assert line[f"qk_clip_logit/layer{layer:02d}"] == pytest.approx(float(S_H.max()), rel=1e-6)
        assert line[f"qk_clip_gamma/layer{layer:02d}"] == pytest.approx(float(gamma.min()), rel=1e-6)
        for name in ("w_q", "w_k"):
            expected[f"blocks.{layer}.attention.{name}.weight"] *= gamma.sqrt().repeat_interleave(4)[:, None]
    assert apart(weights(clipped), expected) < WRITTEN_OUT.tolerance
    # The control: no clipping gives different weights.
    assert apart(weights(clipped), weights(plain)) > 1e-3


def test_below_the_threshold_it_changes_no_bit():
    batches = [toy_batch(seed) for seed in range(5)]
    plain, idle, active = module_of(), module_of(qk_clip=1e3), module_of(qk_clip=0.3)
    for module in (plain, idle, active):
        lines = fit(module, batches)
        gammas = [line.get("qk_clip_gamma/layer00") for line in lines]
        assert module is plain or (min(gammas) == 1.0) is (module is idle)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain).values(), weights(idle).values(), strict=True))
    assert apart(weights(plain), weights(active)) > 1e-3


def test_nothing_carries_over_from_one_step_to_the_next_or_from_validation():
    """The values of a later step equal those of a module that starts at that step. Only the logits of training
    batches cause clipping; those of held-out batches, which are as large, do not."""
    hot, mild = toy_batch(5), toy_batch(6)
    module, fresh, again = module_of(qk_clip=1e3), module_of(qk_clip=1e3), module_of(qk_clip=1e3)
    second = fit(module, [hot, mild])[1]
    [first] = fit(fresh, [hot])
    again.model.load_state_dict(fresh.model.state_dict())
    [alone] = fit(again, [mild])
    assert alone["qk_clip_logit/layer00"] == second["qk_clip_logit/layer00"] != first["qk_clip_logit/layer00"]
    validated, plain = module_of(qk_clip=1.0), module_of(qk_clip=1.0)
    fit(validated, [mild, mild], callbacks=[Validation(lambda: iter([hot]), 1)])
    fit(plain, [mild, mild])
    assert apart(weights(validated), weights(plain)) == 0
