"""Compares the gradient agreement of a batch and bf16 absorption with direct computations."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.monitors.formulas.reduce import selection
from mmqk.monitors.formulas.weights import absorption
from mmqk.monitors.own.callback import gradient_agreement
from mmqk.monitors.own.probe import residual_absorption

NAMES = ("text", "image")


def make_model(**changes) -> EarlyFusionTransformer:
    config = ModelConfig(vocab_sizes={"text": 9, "image": 7}, d_model=16, n_layers=2, n_heads=4, **changes)
    return EarlyFusionTransformer(config, backend="math").double()


def make_batch(B=5, T=12, seed=0, high=16) -> TokenBatch:
    random = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, high, (B, T), generator=random)
    mask_BT = torch.rand(B, T, generator=random) < 0.8
    mask_BT[:, -1] = False
    valid_BT = torch.ones_like(mask_BT)
    return TokenBatch(ids_BT, (ids_BT >= 9).long(), mask_BT, valid_BT, torch.tensor(1e9))


def parts(model, batch) -> torch.Tensor:
    ce_BT = F.cross_entropy(model(batch.ids_BT).transpose(1, 2), batch.targets_BT, reduction="none")
    ce_BT = ce_BT * batch.target_mask_BT
    sums = [(ce_BT * (batch.target_modality_BT == m)).sum() for m in range(2)]
    return torch.stack(sums) / batch.step_targets


def written_out(model, batch) -> dict[str, float]:
    """Return the expected values, from one backward pass on a fresh copy of the model for each half and modality."""
    vectors = {}
    for half in (0, 1):
        rows = list(range(half, len(batch.ids_BT), 2))
        own = batch._map(lambda t, rows=rows: t[rows] if t.ndim else t)
        own = replace(own, step_targets=own.target_mask_BT.sum())
        for m, name in enumerate(NAMES):
            fresh = copy.deepcopy(model).eval()
            parts(fresh, own)[m].backward()
            for group in ("", "blocks.0.", "blocks.1."):
                vectors[name, half, group] = torch.cat(
                    [p.grad.flatten() for n, p in fresh.named_parameters() if n.startswith(group)]
                )
    expected = {}
    for group, end in (("", ""), ("blocks.0.", "/layer00"), ("blocks.1.", "/layer01")):
        (ta, tb), (ia, ib) = ([vectors[name, half, group] for half in (0, 1)] for name in NAMES)
        for name, a, b in (("text", ta, tb), ("image", ia, ib)):
            expected[f"grad_signal/{name}{end}"] = float(a @ b)
            expected[f"grad_noise/{name}{end}"] = float((a - b).square().sum() / 2)
        if ta @ tb > 0 and ia @ ib > 0:
            expected[f"grad_agreement/text-image{end}"] = float(
                (ta @ ib + ia @ tb) / 2 / ((ta @ tb) * (ia @ ib)).sqrt()
            )
    return expected


@pytest.mark.parametrize("tied", [False, True])
def test_agreement_equals_two_backward_passes_written_out(tied):
    model, batch = make_model(residual_dropout=0.3, tie_embeddings=tied), make_batch()
    model.train()
    expected = written_out(model, batch)
    state = torch.get_rng_state()
    found = gradient_agreement(model, batch, lambda half: parts(model, half))
    assert found == pytest.approx(expected, rel=1e-8)
    assert "grad_signal/text" in found
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(p.grad is None for p in model.parameters())
    # Control: other halves of the batch give other numbers.
    order = [0, 2, 1, 3, 4]
    other = gradient_agreement(model, batch._map(lambda t: t[order] if t.ndim else t), lambda half: parts(model, half))
    assert other["grad_noise/text"] != pytest.approx(found["grad_noise/text"], rel=1e-3)


def test_a_parameter_that_a_loss_does_not_reach_counts_as_zero():
    model, batch = make_model(), make_batch()
    extra = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    model.register_parameter("extra", extra)

    def with_extra(half):  # the gradient of the text loss gets (1, 1) more
        return parts(model, half) + torch.stack([extra.sum(), extra.new_zeros(())])

    found, plain = (gradient_agreement(model, batch, f) for f in (with_extra, lambda half: parts(model, half)))
    assert found["grad_signal/text"] == pytest.approx(plain["grad_signal/text"] + 2)
    assert found["grad_signal/image"] == pytest.approx(plain["grad_signal/image"])


def test_an_absent_modality_is_an_absent_key():
    model = make_model()
    found = gradient_agreement(model, make_batch(high=9), lambda half: parts(model, half))
    assert {tag.split("/")[1] for tag in found} == {"text"} and "grad_agreement" not in str(found)
    nothing = replace(make_batch(), target_mask_BT=torch.zeros(5, 12, dtype=torch.bool))
    assert gradient_agreement(model, nothing, lambda half: parts(model, half)) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deep", [False, True])
def test_absorption_is_that_of_the_stream_that_the_layers_add_to(dtype, deep):
    model, batch = make_model(residual_dropout=0.3, deep_norm=deep, pre_norm=not deep).to(dtype), make_batch()
    alpha = 4**0.25 if deep else 1.0
    model.train()
    seen: dict[tuple[str, int], torch.Tensor] = {}
    model.eval()
    with torch.no_grad():
        model(batch.ids_BT, observer=lambda site, layer, t: seen.__setitem__((site, layer), t.clone()))
        first = model.embed(batch.ids_BT)
    model.train()
    found = residual_absorption(model, batch).flat()
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())
    of_MBT = selection(batch.modality_BT, batch.valid_BT, 2)
    ending = "" if dtype == torch.bfloat16 else "_if_bf16"
    assert len(found) == 2 * 2 * 3
    for layer in range(2):
        x = first if layer == 0 else seen["resid", 0]
        attention, mlp = seen["attn_out", layer], seen["mlp_out", layer]
        a, added = absorption(alpha * x, attention, of_MBT), alpha * x + attention
        with torch.no_grad():
            between = model.blocks[layer].attn_deep_norm(added) if deep else added
        b = absorption(alpha * between, mlp, of_MBT)
        for statistic in ("absorb_error", "absorb_bias", "absorbed"):
            for m, name in enumerate(NAMES):
                both = [p[statistic] for p in (a, b)]
                mean = sum(float(p.sum[m]) for p in both) / sum(float(p.count[m]) for p in both)
                assert found[f"{statistic}{ending}/{name}/layer0{layer}"] == pytest.approx(mean, rel=1e-6)
    if dtype == torch.float32 and not deep:  # control: a larger residual stream has larger rounding errors
        with torch.no_grad():
            model.embed.weight.mul_(1000)
        more = residual_absorption(model, batch).flat()
        assert more["absorb_error_if_bf16/text/layer00"] > 10 * found["absorb_error_if_bf16/text/layer00"]
