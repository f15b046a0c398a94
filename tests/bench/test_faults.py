"""Each fault of the bench does what its name says, and only from its step on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmqk.bench import faults
from mmqk.config import resolve
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.sequences import Row
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.config import QKNormConfig
from mmqk.monitors import probe
from mmqk.monitors.preflight import preflight


@pytest.fixture(scope="module")
def data(tiny_data) -> TokenDataModule:
    from tests.tiny import tiny_args

    run = resolve(tiny_args(tiny_data))
    module = TokenDataModule(run.data, run.seed)
    module.setup()
    return module


def model_of(data, **fields) -> EarlyFusionTransformer:
    return EarlyFusionTransformer(ModelConfig(vocab_sizes=data.vocab_sizes, n_layers=2, **fields))


def statistics(model, data) -> dict[str, float]:
    return probe(model, data.probe_batch(2)).flat()


def test_a_loud_head_has_eight_times_the_logits(data):
    model = model_of(data)
    before = probe(model, data.probe_batch(2), heads=True).flat()
    faults.loud_head(model)
    after = probe(model, data.probe_batch(2), heads=True).flat()
    heads = {tag for tag in before if tag.startswith("attn_logit_absmax/") and "layer01/head" in tag}
    for tag in heads:
        factor = 8 if tag.endswith(f"head{faults.HEAD:02d}") else 1
        assert after[tag] == pytest.approx(factor * before[tag], rel=1e-4), tag


def test_a_dead_head_and_uniform_attention_get_no_gradient_that_could_mend_them(data):
    batch = data.probe_batch(2)
    for fault, names in ((faults.dead_head, ("w_v", "w_o")), (faults.uniform_attention, ("w_q", "w_k"))):
        model = model_of(data)
        fault(model)
        model(batch.ids_BT).square().sum().backward()
        attention = model.blocks[faults.LAYER].attention
        gradients = {name: getattr(attention, name).weight.grad for name in ("w_q", "w_k", "w_v", "w_o")}
        channels = faults._channels(model)
        if fault is faults.dead_head:
            parts = {"w_v": gradients["w_v"][channels], "w_o": gradients["w_o"][:, channels]}
            rest = [gradients["w_v"][channels.stop :], gradients["w_q"][channels.stop :]]
        else:
            parts, rest = {name: gradients[name] for name in names}, [gradients["w_v"], gradients["w_o"]]
        assert all(not part.any() for part in parts.values()), fault.__name__
        assert all(part.any() for part in rest), fault.__name__


def test_loud_images_are_ten_times_as_long_and_text_is_as_before(data):
    model = model_of(data)
    before = statistics(model, data)
    faults.loud_image_rows(model)
    after = statistics(model, data)
    assert after["embed_row_norm/image"] == pytest.approx(10 * before["embed_row_norm/image"], rel=1e-4)
    assert after["embed_row_norm/text"] == pytest.approx(before["embed_row_norm/text"])


def test_preflight_sees_the_leak_and_the_unused_gain(data):
    batch = data.probe_batch(2)

    def loss(model, batch):
        return F.cross_entropy(model(batch["ids_BT"])[:, :-1].flatten(0, 1), batch["ids_BT"][:, 1:].flatten())

    for fault, fields in ((faults.future_leak, {}), (faults.gain_unused, {"qk_norm": QKNormConfig(kind="rms")})):
        model = model_of(data, **fields)
        sound = preflight(model, {"ids_BT": batch.ids_BT}, loss).failed
        fault(model)
        assert len(preflight(model, {"ids_BT": batch.ids_BT}, loss).failed) > len(sound), fault.__name__


def test_a_probe_of_a_patched_qk_norm_has_all_but_its_bound(data):
    model = model_of(data, qk_norm=QKNormConfig(kind="rms"))
    before = statistics(model, data)
    faults.gain_unused(model)
    missing = before.keys() - statistics(model, data).keys()
    assert missing and all(tag.startswith(("attn_logit_bound/", "q_gain_", "k_gain_")) for tag in missing)


def test_norm_over_tokens_leaves_the_channels_of_a_head_at_different_sizes(data):
    model = model_of(data)
    faults.norm_over_tokens(model)
    x_BTHK = torch.randn(2, 16, 4, 16) * torch.arange(1.0, 17)
    normed = model.blocks[0].attention.q_norm(x_BTHK)
    assert torch.allclose(normed.square().mean(1), torch.ones(2, 4, 16), atol=1e-3)
    assert not torch.allclose(normed.square().mean(-1), torch.ones(2, 16, 4), atol=0.1)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("corrupted_rows", 300, 339),
        ("one_bad_batch", 300, 300),
        ("one_batch", 301, 599),
        ("seen_again", 300, 599),
        ("shuffled_images", 300, 599),
        ("codes_off_by_one", 300, 599),
        ("shifted_targets", 0, 599),
    ],
)
def test_a_fault_of_the_data_changes_the_steps_that_it_names(data, name, first, last):
    fault, order = getattr(faults, name), data.order

    def changed(step):
        rows = [order.row(n) for n in range(8 * step, 8 * step + 8)]
        other = fault(rows, step, order)
        assert len(other) == len(rows) and all(len(row.ids) <= order.builder.seq_len for row in other)
        return any(
            not np.array_equal(a.ids, b.ids) or (b.target_ids is not None and not np.array_equal(a.ids, b.target_ids))
            for a, b in zip(rows, other, strict=True)
        )

    assert changed(first) and changed(last)
    assert not (first and changed(first - 1))
    assert last == 599 or not changed(last + 1)


def test_shuffled_images_keep_every_image_and_caption_of_a_step(data):
    order = data.order
    rows = [order.row(n) for n in range(2400, 2408)]
    other = faults.shuffled_images(rows, 300, order)

    def parts(rows):
        masks = [faults._is_image(row, order) for row in rows]
        return (
            sorted(tuple(row.ids[mask]) for row, mask in zip(rows, masks, strict=True)),
            [tuple(row.ids[~mask]) for row, mask in zip(rows, masks, strict=True)],
        )

    assert parts(rows) == parts(other)


def test_trained_padding_fills_the_row(data):
    short = Row(data.order.row(0).ids[:5])
    (row,) = faults.trained_padding([short], 0, data.order)
    batch = data.order.builder.batch([row])
    assert batch.valid_BT.all() and batch.target_mask_BT.sum() == data.order.builder.seq_len - 1
    assert data.order.builder.batch([short]).target_mask_BT.sum() == 4


def test_bursts_have_rows_of_one_kind(data):
    for step, wants in ((300, 300 // faults.BURST % 2), (320, 320 // faults.BURST % 2)):
        rows = faults.bursts([data.order.row(n) for n in range(8 * step, 8 * step + 8)], step, data.order)
        assert {bool(faults._is_image(row, data.order).any()) for row in rows} == {bool(wants)}
