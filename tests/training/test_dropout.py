"""Dropout of residual branches and attention weights depends on seed and micro-batch only. Evaluation has none."""

from __future__ import annotations

from dataclasses import replace

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from tests.model.attend import attention
from tests.peers import Peer
from tests.training.toy import MODEL, apart, fit, module_of, toy_batch, weights

ATTENTION = Peer(("attn_dropout",), "formula written out", 1e-12)
PEERS = [ATTENTION]
BACKENDS = [("attn_dropout", "sdpa"), ("residual_dropout", "math")]


def with_dropout(kind: str, backend: str = "math", seed: int = 0, p: float = 0.3):
    return module_of(replace(MODEL, **{kind: p}), backend=backend, seed=seed)


def first_loss(module, index: int = 0, batch_seed: int = 0) -> float:
    module._trainer = None
    # Keep a reference to the Trainer, because the module has only a weak one.
    module.trainer = trainer = L.Trainer(max_steps=1, barebones=True)
    assert trainer.max_steps == 1
    return float(module.training_step(toy_batch(batch_seed), index).detach())


@pytest.mark.parametrize(("kind", "backend"), BACKENDS)
def test_it_is_a_function_of_seed_and_micro_batch(kind, backend):
    module = with_dropout(kind, backend)
    first = first_loss(module)
    torch.manual_seed(1234)  # the state of the global generator has no effect
    torch.rand(7)
    assert first_loss(module) == first
    # The controls: a different micro-batch, a different seed with the same weights, and no dropout give different
    # values.
    assert first_loss(module, index=1) != first
    module.seed = 1
    assert first_loss(module) != first
    assert first_loss(module_of(backend=backend)) != first


@pytest.mark.parametrize(("kind", "backend"), BACKENDS)
def test_runs_repeat_bit_for_bit_and_validation_has_none(kind, backend):
    batches = [toy_batch(seed) for seed in range(3)]
    runs = [with_dropout(kind, backend) for _ in range(2)]
    for module, disturb in zip(runs, (0, 99), strict=True):
        torch.manual_seed(disturb)
        fit(module, batches)
    assert apart(weights(runs[0]), weights(runs[1])) == 0
    plain = module_of(backend=backend)
    fit(plain, batches)
    assert apart(weights(runs[0]), weights(plain)) > 1e-4  # the control: a run without dropout differs
    # In evaluation mode the outputs equal those of a model without dropout.
    plain.model.load_state_dict(runs[0].model.state_dict())
    state = torch.get_rng_state()
    values = [m.model.eval()(batches[0].ids_BT).detach() for m in (runs[0], runs[0], plain)]
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(runs[0].model.train()(batches[0].ids_BT), values[0])


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_attention_drops_weights_after_the_softmax(kind):
    """Compare with the formula under the same mask: kept weights are divided by 0.6, so rows no longer sum to 1."""
    q, k, v = torch.randn(3, 2, 3, 7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(5)
    out = attention(q, k, v, scale=0.5, kind=kind, dropout=0.4)
    torch.manual_seed(5)
    kept = (F.dropout(torch.ones(2, 3, 7, 7, dtype=torch.float64), 0.4) > 0).double()
    logits = 0.5 * torch.einsum("bhtk,bhsk->bhts", q, k)
    hidden = torch.ones(7, 7).triu(1).bool()
    if kind == "softmax":
        weight = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    else:
        weight = torch.sigmoid(logits - torch.tensor(7.0).double().log()).masked_fill(hidden, 0.0)
    expected = (weight * kept / 0.6) @ v
    torch.testing.assert_close(out, expected, rtol=0, atol=ATTENTION.tolerance)
    # The controls: dropout before the normalization, dropout without rescaling, and no dropout.
    renormalized = weight * kept / (weight * kept).sum(-1, keepdim=True).clamp_min(1e-9)
    for wrong in (renormalized, weight * kept, weight):
        assert float((out - wrong @ v).abs().max()) > 1e-2
