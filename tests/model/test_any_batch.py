"""Every variant trains on every kind of row. Rows of one token, windows and per-modality copies give the expected
values."""

from dataclasses import replace

import pytest
import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig
from tests.model.attend import attention
from tests.model.small import BLOCKS, VARIANTS, build, ids_of, refuses_sdpa

T, H, K = 12, 4, 8


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_on_any_mix_of_modalities(variant):
    rows = {
        "one token": ids_of(1, 1),
        "all text": ids_of(2, 8, high=11),
        "all image": ids_of(2, 8, low=11, high=17),
        "all of the last": ids_of(2, 8, low=17),
        "three modalities": ids_of(2, 8),
    }
    dropout = {"residual_dropout": 0.1, "attn_dropout": 0.1}
    for backend in ("math", "sdpa"):
        if backend == "sdpa" and refuses_sdpa(VARIANTS[variant]):
            continue
        model = build(backend=backend, **(VARIANTS[variant] | dropout)).train()
        for name, ids_BT in rows.items():
            loss = model(ids_BT).logsumexp(-1).mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            assert loss.isfinite() and all(grad.isfinite().all() for grad in grads), name


def test_one_token_comes_out_as_its_own_value():
    # A single key has weight 1 with softmax attention, and sigmoid(logit - log 1) with sigmoid attention.
    for variant in ("llama", "l2", "untied"):
        seen = {}
        build(**VARIANTS[variant])(
            ids_of(1, 1), observer=lambda site, layer, x, seen=seen: seen.update({(site, layer): x})
        )
        q, k, v = (seen[site, 0] for site in "qkv")
        torch.testing.assert_close(attention(q, k, v, scale=1.0), v)
        weight = torch.sigmoid((q * k).sum(-1, keepdim=True))
        torch.testing.assert_close(attention(q, k, v, scale=1.0, kind="sigmoid"), weight * v)


def test_an_untied_model_starts_as_the_tied_one():
    tied = {"norm": "layer", "norm_bias": True, "qk_norm": QKNormConfig("layer", bias=True)}
    untie = PerModalityConfig(norms=True, qk_norm=True, qk=True, mlp=True)
    config = ModelConfig(vocab_sizes=BLOCKS, d_model=16, n_layers=2, **tied)
    ids_BT = ids_of(2, T)
    one, other = EarlyFusionTransformer(config), EarlyFusionTransformer(replace(config, per_modality=untie))
    torch.testing.assert_close(other(ids_BT), one(ids_BT), rtol=0, atol=1e-6)
    other.blocks[0].mlp.copies[1].w_up.weight.data *= 2
    assert (other(ids_BT) - one(ids_BT)).abs().max() > 1e-3


def test_only_the_own_copy_learns_from_a_row_of_one_modality():
    """The other copies have the gradient 0, not None, for which DDP would wait; AdamW decays them."""
    model = build(**VARIANTS["untied"])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(ids_of(2, 8, high=11)).logsumexp(-1).mean().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
    for name, parameter in model.named_parameters():
        if ".copies." in name and "bias" not in name:
            assert bool((parameter.grad != 0).any()) == (".copies.0." in name), name
            decayed = torch.allclose(parameter, 0.95 * before[name], rtol=1e-6, atol=0)
            assert decayed == (".copies.0." not in name), name


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_a_window_of_the_whole_row_is_none_and_a_smaller_one_is_a_mask(backend):
    q, k, v = torch.randn(3, 2, H, T, K, generator=torch.Generator().manual_seed(7))
    documents = torch.tensor([[0] * 5 + [1] * (T - 5), [2] * T])

    def out(window, documents=None):
        return attention(q, k, v, scale=0.5, window=window, document_BT=documents, backend=backend)

    for window in (T, T + 5):
        torch.testing.assert_close(out(window), out(0), rtol=0, atol=1e-6)
    assert (out(T - 1) - out(0)).abs().max() > 1e-3
    for row, numbers in enumerate(documents.tolist()):
        for t in range(T):
            seen = [s for s in range(T) if t - 4 < s <= t and numbers[s] == numbers[t]]
            weights = torch.softmax(0.5 * q[row, :, t : t + 1] @ k[row][:, seen].mT, -1)
            expected = (weights @ v[row][:, seen])[:, 0]
            torch.testing.assert_close(out(4, documents)[row, :, t], expected, rtol=0, atol=1e-5)
