"""Tests that the first site that is not finite is described with its layer and modality."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.monitors.own.probe import first_bad_site

IDS_BT = torch.tensor([[0, 1, 9, 2, 10, 3], [4, 11, 5, 12, 6, 0]])
VALID_BT = torch.tensor([[True] * 6, [True] * 5 + [False]])
BATCH = TokenBatch(IDS_BT, (IDS_BT >= 9).long(), VALID_BT.roll(-1, 1), VALID_BT, torch.tensor(9))


@pytest.fixture
def model() -> EarlyFusionTransformer:
    return EarlyFusionTransformer(
        ModelConfig(vocab_sizes={"text": 9, "image": 7}, d_model=16, n_layers=3, n_heads=4), backend="math"
    )


def loss_of(model):
    def loss(observer):
        logits_BTV = model(BATCH.ids_BT, BATCH.modality_BT, None, observer)
        return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), IDS_BT[:, 1:].flatten())

    return loss


def spoil(value, positions):
    """Return a forward hook that writes a number into some tokens of a module's output."""

    def hook(module, inputs, out):
        out = out.clone()
        for b, t in positions:
            out[b, t, 0] = value
        return out

    return hook


def test_a_finite_step_has_none(model):
    assert first_bad_site(model, BATCH, loss_of(model)) is None
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("module", "value", "positions", "description"),
    [
        ("blocks.1.attention.w_o", float("nan"), [(0, 2)], "attn_out of layer 1, at image tokens, is NaN"),
        ("blocks.2.mlp", float("inf"), [(0, 0), (1, 1)], "mlp_out of layer 2, at text and image tokens, is infinite"),
        ("blocks.0.attention.w_q", float("-inf"), [(1, 4)], "q_raw of layer 0, at text tokens, is infinite"),
        ("blocks.1.attention.w_k", float("nan"), [(1, 5)], "k_raw of layer 1, at padding tokens, is NaN"),
        ("final_norm", float("nan"), [(0, 0)], "logits, at text tokens, is NaN"),
    ],
)  # fmt: skip
def test_a_planted_site_is_named(model, module, value, positions, description):
    handle = model.get_submodule(module).register_forward_hook(spoil(value, positions))
    assert first_bad_site(model, BATCH, loss_of(model)) == description
    handle.remove()
    assert first_bad_site(model, BATCH, loss_of(model)) is None


def test_finite_queries_and_keys_may_overflow_in_their_product(model):
    with torch.no_grad():
        for name in ("w_q", "w_k"):
            getattr(model.blocks[1].attention, name).weight.mul_(1e25)
    assert str(first_bad_site(model, BATCH, loss_of(model))).startswith(
        "attn_logits of layer 1, at text and image tokens, is"
    )


def test_a_weight_comes_before_what_it_makes(model):
    with torch.no_grad():
        model.blocks[2].mlp.w_down.weight[0, 0] = float("nan")
    assert first_bad_site(model, BATCH, loss_of(model)) == "the weight blocks.2.mlp.w_down.weight is NaN"


def test_a_gradient_that_breaks_on_its_way_back_is_named_where_it_does(model):
    def plant(module, inputs, out):
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient.clone().index_fill_(0, torch.tensor(1), torch.inf))

    handle = model.blocks[1].attention.w_o.register_forward_hook(plant)
    # The backward pass reaches layer 2 and the MLP of layer 1 first; their gradients are finite.
    description = "the gradient at attn_out of layer 1, at text and image and padding tokens, is infinite"
    assert first_bad_site(model, BATCH, loss_of(model)) == description
    handle.remove()
    assert first_bad_site(model, BATCH, loss_of(model)) is None


def test_a_gradient_that_is_bad_in_a_parameter_alone_names_it(model):
    model.blocks[0].mlp.w_up.weight.register_hook(lambda gradient: gradient * float("nan"))
    assert first_bad_site(model, BATCH, loss_of(model)) == "the gradient of blocks.0.mlp.w_up.weight is NaN"


def test_a_loss_that_is_not_finite_over_finite_logits_says_so(model):
    assert first_bad_site(model, BATCH, lambda observer: loss_of(model)(observer) / 0.0) == (
        "the loss is infinite though all logits are finite"
    )
