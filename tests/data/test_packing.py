"""Check that packing uses each document once per epoch, fills the rows, and keeps attention inside documents."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from mmqk.data.mixture import CYCLE, Packing, fit
from mmqk.data.order import TrainingOrder
from mmqk.data.sequences import SequenceBuilder
from mmqk.data.tokens.folder import Layout, TokenStore
from mmqk.model import EarlyFusionTransformer, ModelConfig

LAYOUT = Layout({"text": 20, "image": 12}, bos=0, eos=1, pad=2, begin_image=3, end_image=4)


def lengths(n, seed=0, mean=40, room=512):
    return np.random.default_rng(seed).geometric(1 / mean, n).clip(1, room)


@pytest.mark.parametrize("room", [60, 512])
def test_rows_hold_every_length_once_and_none_overflows(room):
    given = lengths(5000, room=room)
    rows = fit(given, room)
    assert Counter(np.concatenate(rows).tolist()) == Counter(given.tolist())
    assert max(row.sum() for row in rows) <= room


@pytest.mark.parametrize(("n", "mean"), [(5000, 40), (20000, 120), (2000, 20)])
def test_at_most_two_per_cent_is_padding(n, mean):
    given = lengths(n, mean=mean)
    packing = Packing(given, 512, seed=0, stream=9)
    assert packing.padding == pytest.approx(1 - given.sum() / (512 * len(packing))) and packing.padding <= 0.02
    one_a_row = 1 - given.sum() / (512 * n)
    assert one_a_row > 0.5
    # The control: rows of documents in their original order have more padding.
    used = rows = 0
    for length in given:
        if used + length > 512 or not rows:
            rows, used = rows + 1, 0
        used += length
    assert 1 - given.sum() / (512 * rows) > 0.02


def test_rows_do_not_gather_documents_of_one_length():
    """Rows mix documents of different lengths. Best fit alone would fill most rows with documents of one length."""
    given = np.random.default_rng(0).integers(78, 98, 5000)
    rows = fit(given, 1024)
    assert np.mean([len(set(row.tolist())) for row in rows]) > 5 and 1 - given.sum() / (1024 * len(rows)) < 0.05
    ordered = np.sort(given)[::-1]
    assert np.mean([len(set(ordered[i : i + 11].tolist())) for i in range(0, 5000, 11)]) < 2


def test_an_epoch_is_every_document_once_and_the_next_is_another():
    packing = Packing(lengths(700), 512, seed=3, stream=9)
    epochs = [[packing.items(e * len(packing) + i) for i in range(len(packing))] for e in (0, 1)]
    for rows in epochs:
        assert sorted(d for row in rows for d in row) == list(range(700))
    assert epochs[0] != epochs[1]
    assert epochs[0] != [Packing(lengths(700), 512, seed=4, stream=9).items(i) for i in range(len(packing))]
    # The first document of a row is not always its longest.
    sizes = lengths(700)
    first_is_longest = [sizes[row[0]] == sizes[row].max() for row in epochs[0] if len(row) > 3]
    assert np.mean(first_is_longest) < 0.6


@pytest.fixture(scope="module")
def order():
    random = np.random.default_rng(0)
    documents = [np.append(random.integers(5, 32, random.integers(2, 30)), 1) for _ in range(200)]
    sizes = np.array([len(d) for d in documents])
    store = TokenStore("interleaved", LAYOUT, [np.concatenate(documents)], [sizes])
    builder = SequenceBuilder({"interleaved": store}, LAYOUT, 64)
    return TrainingOrder(builder, {"interleaved": 1.0}, 0.5, seed=0, pack=True)


def test_packed_rows_are_whole_documents(order):
    for i in range(CYCLE):
        row = order.row(i)
        assert len(row.ids) <= 64 and (row.ids[list(row.starts)] == 0).all() and (row.ids == 0).sum() == len(row.starts)
        assert all(row.ids[s - 1] == 1 for s in row.starts[1:])


def test_no_target_crosses_a_document(order):
    rows = [order.row(i) for i in range(8)]
    batch = order.builder.batch(rows, documents=True)
    assert batch.document_BT is not None
    for b, row in enumerate(rows):
        targets = batch.targets_BT[b][batch.target_mask_BT[b]].tolist()
        assert targets == [int(t) for i, t in enumerate(row.ids) if i not in row.starts]
        assert 0 not in targets
        assert batch.document_BT[b].unique().numel() == len(row.starts) + bool((~batch.valid_BT[b]).any())
    assert batch.step_targets == sum(row.targets for row in rows)
    assert order.builder.batch(rows).document_BT is None  # attention crosses documents


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_a_packed_document_is_seen_as_if_alone(order, backend):
    """Rotary positions are relative, so a document has the same logits alone and in a packed row."""
    config = ModelConfig(d_model=32, n_layers=2, n_heads=2, vocab_sizes=LAYOUT.vocab_sizes)
    model = EarlyFusionTransformer(config, backend=backend, seed=0).double()
    row = next(order.row(i) for i in range(50) if len(order.row(i).starts) > 3)
    packed = order.builder.batch([row], documents=True)
    seen = model(packed.ids_BT, packed.modality_BT, packed.document_BT)[0]
    open_ = model(packed.ids_BT, packed.modality_BT)[0]
    edges = [*row.starts, len(row.ids)]
    differs = 0.0
    for start, end in pairwise(edges):
        alone = model(torch.from_numpy(row.ids[start:end])[None])[0]
        torch.testing.assert_close(seen[start:end], alone, atol=1e-5, rtol=1e-5)
        differs = max(differs, float((open_[start:end] - alone).abs().max().detach()))
    assert differs > 1e-2
