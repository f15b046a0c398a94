"""Check the row statistics of backend flex: by layer and modality, over micro-batches, and for QK-Clip.

flex is compiled for GPUs only, so these tests replace it by a dense function with the same interface.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmqk.model import EarlyFusionTransformer, RowStats
from mmqk.store import parse_tag
from mmqk.training.guards import RowLog
from tests.model.attend import dense_flex
from tests.training.toy import MODEL, apart, cut, fit, module_of, toy_batch, weights

NAMES = ("text", "image")


@pytest.fixture
def flex(monkeypatch) -> None:
    monkeypatch.setattr("mmqk.model.backends._compiled", lambda: dense_flex)


def some_rows(B=3, L=2, H=2, T=12, seed=0) -> list[RowStats]:
    generator = torch.Generator().manual_seed(seed)
    return [RowStats(*torch.randn(2, B, H, T, generator=generator, dtype=torch.float64)) for _ in range(L)]


def by_hand(rows: list[RowStats], batch) -> dict[str, float]:
    """Return the row statistics, computed one query at a time."""
    found: dict[str, float] = {}
    for (layer, of), (m, name) in itertools.product(enumerate(rows), enumerate(NAMES)):
        seen = [
            (float(of.max_BHT[b, h, t]), float(of.lse_BHT[b, h, t]))
            for b, h, t in itertools.product(*map(range, of.max_BHT.shape))
            if batch.valid_BT[b, t] and batch.modality_BT[b, t] == m
        ]
        if seen:
            found[f"attn_row_max/{name}/layer{layer:02d}"] = max(x for x, _ in seen)
            found[f"attn_row_lse/{name}/layer{layer:02d}"] = sum(x for _, x in seen) / len(seen)
    return found


def together(parts: list[list[RowStats]]) -> list[RowStats]:
    return [RowStats(*(torch.cat(x) for x in zip(*layers, strict=True))) for layers in zip(*parts, strict=True)]


# What is collected -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", [None, "text", "image"])
@pytest.mark.parametrize("n", [1, 3])
def test_the_numbers_of_every_row_and_nothing_of_padding(n, only):
    batch, rows = toy_batch(4, B=3, padding=3, only=only), some_rows()
    for of in rows:  # padding has the largest values
        of.max_BHT[..., -3:] += 100
        of.lse_BHT[..., -3:] -= 100
    log = RowLog(NAMES)
    heads = [
        log.add([RowStats(*(x[i : i + 3 // n] for x in of)) for of in rows], part)
        for i, part in zip(range(0, 3, 3 // n), cut(batch, n), strict=True)
    ]
    expected = by_hand(rows, batch)
    assert log.values(log.measured().tolist()) == pytest.approx(expected, rel=1e-12)
    # An absent modality has no tag.
    assert {parse_tag(t).modality for t in expected} == ({only} if only else set(NAMES))
    # `add` returns the largest logit of each head over all modalities, which QK-Clip uses.
    kept = torch.stack([r.max_BHT.masked_fill(~batch.valid_BT[:, None], -math.inf) for r in rows])
    torch.testing.assert_close(torch.stack(heads).amax(0), kept.amax((1, 3)), rtol=0, atol=0)
    # The controls: with padding counted, or with exchanged modalities, the numbers differ.
    for wrong in (replace(batch, valid_BT=batch.valid_BT | True), replace(batch, modality_BT=1 - batch.modality_BT)):
        assert by_hand(rows, wrong) != pytest.approx(expected, rel=1e-3)
    log.add(rows, batch)  # no value is carried over to the next step
    assert log.values(log.measured().tolist()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_number_stays_with_its_modality_and_layer(poison):
    batch, rows = toy_batch(4, B=3, padding=2), some_rows()
    b, t = (batch.modality_BT == 1).nonzero()[0].tolist()
    rows[1].max_BHT[b, 0, t] = rows[1].lse_BHT[b, 1, t] = poison
    rows[0].max_BHT[..., -1] = rows[0].lse_BHT[..., -1] = poison  # padding
    log = RowLog(NAMES)
    heads_LH = log.add(rows, batch)
    found = log.values(log.measured().tolist())
    bad = {name for name, value in found.items() if not math.isfinite(value)}
    assert bad == {"attn_row_max/image/layer01", "attn_row_lse/image/layer01"} and len(found) == 8
    assert heads_LH.isfinite().tolist() == [[True, True], [False, True]]


# In training -----------------------------------------------------------------------------------------------


def dense_rows(model: EarlyFusionTransformer, batch) -> list[RowStats]:
    """Return the row statistics, computed from the queries and keys of a forward pass."""
    seen: dict[tuple[str, int], Tensor] = {}
    with torch.no_grad(), model.use_backend("math"):
        model(*(batch.ids_BT, batch.modality_BT, batch.document_BT), lambda s, i, x: seen.update({(s, i): x}))
    rows, c = [], model.config
    for layer in range(c.n_layers):
        logits = model.attn_scale_value * seen["q", layer] @ seen["k", layer].transpose(-1, -2)
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        if window := c.window_of(layer):
            hidden = hidden | torch.ones_like(hidden).tril(-window)
        if batch.document_BT is not None:
            hidden = hidden | (batch.document_BT[:, None, :, None] != batch.document_BT[:, None, None, :])
        cap = c.attn_softcap
        capped = logits if cap is None else cap * torch.tanh(logits / cap)
        logits, capped = (x.masked_fill(hidden, -math.inf) for x in (logits, capped))
        rows.append(RowStats(logits.amax(-1), capped.logsumexp(-1)))
    return rows


VARIANTS = {"a cap": {"attn_softcap": 2.0}, "shared keys, windows": {"n_kv_heads": 2, "window": 3, "global_every": 2}}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_step_logs_the_attention_that_it_computed(flex, variant):
    module = module_of(replace(MODEL, **variant), backend="flex")
    batch = toy_batch(2, padding=3, documents=True)
    expected = by_hand(dense_rows(module.model, batch), batch)
    [line] = fit(module, cut(batch, 2), accumulate=2)
    found = {name: value for name, value in line.items() if name.startswith("attn_row")}
    assert found == pytest.approx(expected, rel=1e-5)  # the values of a step are fp32
    other = by_hand(dense_rows(module.model, batch), batch)  # the control: the updated weights differ
    assert found != pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("variant", [{}, {"n_kv_heads": 2, "window": 3}], ids=str)
def test_qk_clip_takes_them_and_clips_as_where_it_looks_itself(flex, variant):
    batches = [part for seed in range(4) for part in cut(toy_batch(seed, padding=2, documents=True), 2)]
    modules = {
        name: module_of(replace(MODEL, **variant), backend=backend, qk_clip=tau)
        for name, backend, tau in (("flex", "flex", 0.1), ("sdpa", "sdpa", 0.1), ("free", "flex", 1e9))
    }
    lines = {name: fit(module, batches, accumulate=2) for name, module in modules.items()}
    assert apart(weights(modules["flex"]), weights(modules["sdpa"])) < 1e-9
    assert apart(weights(modules["flex"]), weights(modules["free"])) > 1e-3  # the control: clipping has an effect
    for ours, theirs in zip(lines["flex"], lines["sdpa"], strict=True):
        own = {name for name in ours if name.startswith("attn_row")}
        assert len(own) == 8 and ours.keys() - own == theirs.keys()
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-5)
        for layer in ("layer00", "layer01"):
            most = max(ours[f"attn_row_max/{name}/{layer}"] for name in NAMES)
            assert ours[f"qk_clip_logit/{layer}"] == pytest.approx(most, rel=1e-6)
    assert min(line["qk_clip_gamma/layer00"] for line in lines["flex"]) < 0.9
