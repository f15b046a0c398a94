"""Compare the chunked loss with the dense loss: values, gradients, training runs and memory.

test_loss.py compares the dense loss with torch's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmqk.config import LossConfig
from mmqk.training.losses import LossSums, chunked_losses, loss_parts, modality_losses, total_loss
from tests.training.toy import MODEL, apart, cut, fit, module_of, toy_batch, weights

B, T, D, V, M, Z = 3, 7, 6, 13, 3, 0.05
N = B * T
WEIGHTS = (1.0, 0.3, 2.0)
BOTH = {"z_loss": 0.01, "weights": {"image": 0.5}}


def inputs(dtype=torch.float64):
    """Return hidden states, the head's weight, targets (-100 if ignored), the modality of each target (two of the
    three occur) and the mask."""
    generator = torch.Generator().manual_seed(0)
    hidden_BTD = torch.randn(B, T, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head_VD = 2 * torch.randn(V, D, generator=generator, dtype=torch.float64)
    targets_BT = torch.randint(0, V, (B, T), generator=generator)
    mask_BT = torch.rand(B, T, generator=generator) < 0.7
    modality_BT = (targets_BT >= 8).long()
    return (hidden_BTD, head_VD.to(dtype).requires_grad_(), targets_BT.where(mask_BT, -100), modality_BT, mask_BT)


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def dense(hidden, head, targets, modality, mask, softcap=None):
    return modality_losses(capped(F.linear(hidden, head), softcap), targets, modality, mask, M)


def gradients(loss, hidden, head):
    return torch.autograd.grad(loss, (hidden, head), retain_graph=True)


@pytest.mark.parametrize(("z_loss", "softcap"), [(0.0, None), (Z, None), (Z, 3.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk", [1, 4, 7, 10 * N])
def test_equals_the_dense_form_for_any_chunk(chunk, dtype, tolerance, z_loss, softcap):
    hidden, head, *of = inputs(dtype)
    weighing = torch.tensor(WEIGHTS, dtype=dtype), z_loss, of[-1].sum()
    here = chunked_losses(hidden, head, *of, *weighing[:2], chunk, softcap, by_modality=True)
    there = dense(hidden, head, *of, softcap)

    def close(a, b):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)

    for name in ("count", "ce", "log_z", "log_z_sq"):
        torch.testing.assert_close(
            getattr(here, name), getattr(there, name), rtol=tolerance, atol=tolerance, check_dtype=True
        )
    loss, expected = total_loss(here, *weighing), total_loss(there, *weighing)
    close(loss, expected)
    close(gradients(loss, hidden, head), gradients(expected, hidden, head))
    parts, expected_parts = loss_parts(here, *weighing), loss_parts(there, *weighing)
    close(parts, expected_parts)
    for m in range(M):
        close(gradients(parts[m], hidden, head), gradients(expected_parts[m], hidden, head))
    # The controls: with a different softcap, mask or z-loss, the loss differs.
    for other, z in (
        (dense(hidden, head, *of, softcap=1.0), z_loss),
        (dense(hidden, head, of[0].clamp_min(0), of[1], of[2].roll(1, 1), softcap), z_loss),
        (there, z_loss + Z),
    ):
        assert abs(float((total_loss(other, weighing[0], z, weighing[2]) - loss).detach())) > 1e-3


def test_the_total_is_the_same_bit_for_bit_with_and_without_parts():
    hidden, head, *of = inputs(torch.float32)
    given = torch.tensor(WEIGHTS), Z
    both = [chunked_losses(hidden, head, *of, *given, 4, by_modality=asked) for asked in (False, True)]
    plain, asked = (gradients(total_loss(sums, *given, 7.0), hidden, head) for sums in both)
    assert all(torch.equal(a, b) for a, b in zip(plain, asked, strict=True))
    by_parts = gradients(loss_parts(both[1], *given, 7.0).sum(), hidden, head)
    assert not torch.equal(by_parts[1], asked[1])  # the control: the order of addition changes the sum


def test_in_bf16_autocast_it_is_as_near_to_the_exact_gradient_as_the_dense_form():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 64, 32, generator=generator, requires_grad=True)
    head = torch.randn(50, 32, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (4, 64), generator=generator)
    of = targets, (targets >= 30).long(), torch.rand(4, 64, generator=generator) < 0.8
    given, n = (torch.tensor(WEIGHTS), Z), of[-1].sum()
    with torch.autocast("cpu", torch.bfloat16):
        here = chunked_losses(hidden, head, *of, *given, 48)
        there = dense(hidden, head, *of)
    assert {here.ce.dtype, here.total.dtype} == {torch.float32}
    for name in ("ce", "log_z", "log_z_sq"):  # both forms compute these from the same bf16 logits
        torch.testing.assert_close(getattr(here, name), getattr(there, name), rtol=1e-5, atol=1e-5)
    exact = gradients(total_loss(dense(hidden.double(), head.double(), *of), given[0].double(), Z, n), hidden, head)
    narrow, known = (gradients(total_loss(sums, *given, n), hidden, head) for sums in (here, there))
    for own, other, true in zip(narrow, known, exact, strict=True):
        assert own.dtype == torch.float32
        error, of_dense = (float((g - true).norm() / true.norm()) for g in (own, other))
        assert 1e-4 < error < 1.1 * of_dense < 0.02  # the lower bound shows that bf16 was used


# In the model and in training ------------------------------------------------------------------------------


RUNS = {
    "split moments, capped": ({"final_softcap": 1.5}, {"split_second_moment": True}),
    "clipped logits, dropout, tied": ({"residual_dropout": 0.2, "tie_embeddings": True}, {"qk_clip": 1e-3}),
}


@pytest.mark.parametrize(("model", "optim"), RUNS.values(), ids=RUNS)
def test_a_run_in_chunks_is_the_dense_run(model, optim):
    batches = [part for seed in range(3) for part in cut(toy_batch(seed), 2)]
    modules = [module_of(replace(MODEL, **model), LossConfig(**BOTH, chunk_size=c), **optim) for c in (None, 7)]
    lines = [fit(module, batches, accumulate=2, clip=0.5) for module in modules]
    assert apart(*map(weights, modules)) < 1e-9
    assert lines[0] == [pytest.approx(line, rel=1e-6) for line in lines[1]]
    # The control: without the z-loss the run differs.
    other = module_of(replace(MODEL, **model), LossConfig(weights=BOTH["weights"], chunk_size=7), **optim)
    fit(other, batches, accumulate=2, clip=0.5)
    assert apart(weights(other), weights(modules[1])) > 1e-4


# Memory ----------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def largest(chunk: int | None, **optim) -> int:
    """Return the number of elements of the largest tensor in a forward and backward pass over 96 tokens, with 500 ids
    and d_model 16."""
    module = module_of(
        replace(MODEL, vocab_sizes={"text": 300, "image": 200}, final_softcap=5.0),
        LossConfig(z_loss=0.1, chunk_size=chunk), **optim,
    )  # fmt: skip
    batch = toy_batch(0, B=4, T=24)
    with Largest() as seen:
        sums: LossSums = module.losses(batch, by_modality=bool(optim))
        weighing = module.loss_weighting(batch)
        (loss_parts(sums, *weighing).sum() if optim else total_loss(sums, *weighing)).backward()
    return seen.elements


@pytest.mark.parametrize("chunk", [20, 48])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(chunk):
    assert largest(chunk) == chunk * 500
    # The head's gradients of the total loss and of the losses of the two modalities have the shape (3, V, D).
    assert largest(chunk, split_second_moment=True) == max(chunk, 3 * 16) * 500
    assert largest(None) == 96 * 500  # the control: the dense form computes all logits
