"""The backends, documents, observers and dtypes of the whole model. `test_fuzz` and `test_peers` compare it with a
forward pass written out."""

import itertools

import pytest
import torch

from tests.model.small import VARIANTS, build, ids_of, refuses_sdpa


@pytest.mark.parametrize("variant", [name for name, fields in VARIANTS.items() if not refuses_sdpa(fields)])
def test_the_backends_agree(variant):
    ids_BT, document_BT = ids_of(2, 12), torch.tensor([[0] * 5 + [1] * 7, [3] * 12])
    math, fused = (build(backend=backend, **VARIANTS[variant]) for backend in ("math", "sdpa"))
    for documents in (None, document_BT):
        with torch.no_grad():
            ours, theirs = (model(ids_BT, document_BT=documents) for model in (math, fused))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


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
