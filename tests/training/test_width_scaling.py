"""`optim.width_scaling: mup` against the package `mup` (Microsoft), in the initial weights and in training."""

import copy

import mup
import pytest
import torch
from torch import nn

from mmqk.config import OptimConfig
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.training.optimizers import make_optimizer, scale_initial
from tests.peers import Peer

PEERS = (Peer(("mup",), "microsoft mup MuAdamW, MuReadout", 1e-8),)
BASE, WIDE, LR, DECAY, EPS = 32, 128, 0.01, 0.1, 1e-15


def model_of(width, scaling="mup", seed=0):
    config = ModelConfig(
        d_model=width, n_heads=width // 16, n_layers=2, d_ff=3 * width, vocab_sizes={"text": 40, "image": 24}
    )
    model = EarlyFusionTransformer(config, seed=seed).double()
    optim = OptimConfig(lr=LR, weight_decay=DECAY, eps=EPS, width_scaling=scaling, base_width=BASE)
    scale_initial(optim, model)
    return model, make_optimizer(optim, model)


def theirs(model):
    """Return a copy whose head is a MuReadout, with mup's base shapes, and MuAdamW. The readout divides its input by
    the width, so that the same function has a weight larger by this factor."""
    (base, _), (delta, _) = model_of(BASE), model_of(2 * BASE)
    copied = copy.deepcopy(model)
    for each in (copied, base, delta):
        vocabulary, width = each.head.weight.shape
        head = mup.MuReadout(width, vocabulary, bias=False)
        head.weight = nn.Parameter(each.head.weight.detach() * width / BASE)
        each.head = head
    mup.set_base_shapes(copied, base, delta=delta, rescale_params=False)
    matrices = {m.weight for m in copied.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    rest = [p for p in copied.parameters() if p not in matrices]
    groups = [{"params": list(matrices), "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    return copied, mup.MuAdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)


def trained(model, optimizer, steps=12):
    """Return the logits of new tokens after some steps of cross-entropy on random tokens."""
    random = torch.Generator().manual_seed(5)
    for _ in range(steps):
        ids_BT = torch.randint(64, (4, 17), generator=random)
        loss = nn.functional.cross_entropy(model(ids_BT[:, :-1]).flatten(0, 1), ids_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return model(torch.randint(64, (4, 16), generator=random))


@pytest.mark.parametrize("scaling", ["mup", "none"])
def test_a_wide_model_trains_as_with_the_package_mup(scaling):
    model, optimizer = model_of(WIDE, scaling)
    expected = trained(*theirs(model))
    difference = (trained(model, optimizer) - expected).abs().max()
    # With scaling "none" the same initial weights train with other learning rates: the negative control.
    assert difference < PEERS[0].tolerance if scaling == "mup" else difference > 0.1


@pytest.mark.parametrize("scaling", ["mup", "none"])
def test_initial_sizes_over_width_are_those_of_the_package_mup(scaling):
    (base, _), (model, _) = model_of(BASE, scaling), model_of(WIDE, scaling)
    shapes, _ = theirs(model)
    agree = []
    for (name, ours), (_, small), (_, shaped) in zip(
        model.named_parameters(), base.named_parameters(), shapes.named_parameters(), strict=True
    ):
        if ours.ndim == 2:
            mup.init.normal_(shaped, std=float(small.detach().std()))
            expected = float(shaped.detach().std()) / (WIDE / BASE if name == "head.weight" else 1)
            agree.append(abs(float(ours.detach().std()) / expected - 1) < 0.06)
    assert all(agree) if scaling == "mup" else not all(agree)


def test_at_the_base_width_nothing_changes():
    same = [trained(*model_of(BASE, scaling)) for scaling in ("mup", "none")]
    assert torch.equal(*same)
