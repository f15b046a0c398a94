"""Dropout of residual branches and attention weights depends on seed and micro-batch only. Evaluation has none.

`tests/model/test_peers.py` compares both with timm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.one_step import build
from tests.training.toy import MODEL, apart, fit, module_of, toy_batch, weights

BACKENDS = [("attn_dropout", "sdpa"), ("residual_dropout", "math")]
SIGMOID = ("attn_dropout", "math", "sigmoid")


@pytest.mark.parametrize(("kind", "backend", "attention"), [*((*b, "softmax") for b in BACKENDS), SIGMOID])
def test_it_is_a_function_of_seed_and_micro_batch(kind, backend, attention):
    settings = {f"model.{kind}": 0.3, "model.attention": attention, "backend": backend}
    module, batch = build(settings, MODEL), toy_batch(0)

    def loss(index: int = 0) -> float:
        return float(module.training_step(batch, index).detach())

    first = loss()
    torch.manual_seed(1234)  # the state of the global generator has no effect
    torch.rand(7)
    assert loss() == first
    # The controls: a different micro-batch, a different seed with the same weights, and no dropout give different
    # values.
    assert loss(index=1) != first
    module.seed = 1
    assert loss() != first
    module.eval()
    assert loss() != first


@pytest.mark.parametrize(("kind", "backend"), BACKENDS)
def test_runs_repeat_bit_for_bit_and_validation_has_none(kind, backend):
    batches = [toy_batch(seed) for seed in range(3)]
    runs = [module_of(replace(MODEL, **{kind: 0.3}), backend=backend) for _ in range(2)]
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
