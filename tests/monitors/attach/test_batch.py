"""Tests which batch `attach` probes, when it probes, and what it stores."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from mmqk.monitors import attach
from mmqk.store import UserError
from tests.monitors.attach.nets import Net, batches, loss_of
from tests.monitors.preflight.families import model_of

IMAGE = {"image": range(10, 40)}


def llama():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    return model_of("llama").train()


def test_a_forward_without_gradients_is_not_the_batch_of_the_step():
    model, (ids, other) = Net(), batches(2)
    seen: list[torch.Tensor] = []

    def modality(inputs):
        seen.append(inputs["ids"])
        return (inputs["ids"] > 9).long()

    watch = attach(model, modality=modality, every_n_steps=1, strict=True)
    for way in (torch.no_grad, torch.inference_mode):
        model(ids)
        with way():
            model(other[:2, :5])
        watch.step()
        assert torch.equal(seen.pop(), ids[:4])
    # Control: if both forwards have gradients, the later batch is probed.
    model(ids)
    model(other)
    with torch.no_grad():
        watch.step()
    assert torch.equal(seen.pop(), other[:4])
    with torch.no_grad():
        model(ids)
    with pytest.raises(UserError, match="not called with gradients before step 4"):
        watch.step()


def test_packed_documents_of_a_checkpointed_model_stay_apart(monkeypatch):
    """In evaluation mode transformers uses a cache, and its attention mask then lets documents see each other."""
    (ids,) = batches(1, B=3, T=20)
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None].expand(3, -1)
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    watch = attach(model, modality=IMAGE)
    logged = watch.probe(input_ids=ids, position_ids=packed).flat()
    assert model.config.use_cache and model.training
    sdpa, masks = F.scaled_dot_product_attention, []

    def keeping(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return sdpa(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", keeping)
    model(input_ids=ids, position_ids=packed)
    monkeypatch.undo()
    assert all(mask is not None and int(mask.sum()) == 3 * (36 + 78) for mask in masks)  # as in training
    plain = llama()
    mask = torch.zeros(3, 1, 20, 20, dtype=torch.bool)
    mask[..., :8, :8], mask[..., 8:, 8:] = (torch.ones(n, n, dtype=torch.bool).tril() for n in (8, 12))
    apart = attach(plain, modality=IMAGE).probe(input_ids=ids, position_ids=packed, attention_mask=mask).flat()
    assert logged["attn_entropy/image/layer01"] == pytest.approx(apart["attn_entropy/image/layer01"], rel=1e-4)
    # Control: with the cache of evaluation mode the numbers differ.
    whole = attach(llama().eval(), modality=IMAGE).probe(input_ids=ids, position_ids=packed).flat()
    assert logged["attn_entropy/image/layer01"] != pytest.approx(whole["attn_entropy/image/layer01"], rel=1e-2)


@pytest.mark.parametrize("lengths", [[6, 0, 0, 3], [0, 4]])
def test_an_empty_batch_puts_the_probe_off(lengths):
    model, steps = Net(), []

    class Maybe(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, ids):
            return self.net(ids) if len(ids) else ids.new_zeros(())

    maybe, (ids,) = Maybe(), batches(1)
    watch = attach(maybe, modality=IMAGE, every_n_steps=2, log=lambda values, step: steps.append(step))
    for n in lengths:
        maybe(ids[:n])
        watch.step()
    # The probe is due at step 2. If the batch of step 2 is empty, the probe waits for the next batch with sequences.
    assert steps == ([4] if lengths[1] == 0 else [2])


def test_steps_that_a_trainer_counts_by_more_than_one():
    model, (ids,) = Net(["sdpa"]), batches(1)
    steps: list[int] = []
    watch = attach(model, modality=IMAGE, every_n_steps=10, log=lambda values, step: steps.append(step))
    watch.steps = 100
    for number in range(103, 140, 3):
        model(ids)
        watch.step(number)
    assert steps == [112, 121, 130]
    steps.clear()
    again = attach(model, modality=IMAGE, every_n_steps=10, log=lambda values, step: steps.append(step))
    for number in range(96, 121):
        model(ids)
        again.step(number)
    assert steps == [100, 110, 120]  # step 100 counts as the first probe, so step 105 has none


def test_a_probe_keeps_nothing_of_the_batch():
    model, (ids,) = Net(["sdpa"] * 2), batches(1, B=4, T=64)
    watch = attach(model, modality=IMAGE, every_n_steps=1)

    def elements_after_a_step() -> int:
        loss_of(model(ids.clone()), ids).backward()
        watch.step()
        model.zero_grad()
        gc.collect()
        return sum(x.numel() for x in gc.get_objects() if issubclass(type(x), torch.Tensor))

    before = elements_after_a_step()
    assert elements_after_a_step() - before < 100  # a mask has 64 * 64 elements
    held = model(ids)  # the control
    assert elements_after_a_step() - before > 1000 and held is not None
