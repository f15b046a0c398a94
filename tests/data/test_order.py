"""Check the order of a run: exact proportions, rows that depend on the index only, and the form of sequences."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from mmqk.data import mixture
from mmqk.data.config import DataConfig, data_identity
from mmqk.data.loader import MicroBatches
from mmqk.data.mixture import CYCLE, Epochs, Mixture, random_stream
from mmqk.data.order import TEXT_OFFSET, TrainingOrder, Windows, validation_rows
from mmqk.data.sequences import SequenceBuilder, pieces
from mmqk.data.tokenizers.files import BEGIN_IMAGE, BOS, END_IMAGE, EOS, TextTokenizer, vocab_sizes_of
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokens.encode import open_source
from mmqk.data.tokens.folder import Layout, TokenStore, layout_of
from mmqk.store import UserError, identity_hash
from tests.data.test_pairing import module


@pytest.fixture(scope="module")
def first_code(tiny_data) -> int:
    return vocab_sizes_of(tiny_data / "tokenizers")["text"]


def builder_of(tiny_data, split="train") -> SequenceBuilder:
    tokenizers, cache = tiny_data / "tokenizers", tiny_data / "cache"
    folders = {"pair": tiny_data / "pairs", "text": tiny_data / "text"}
    stores = {k: open_source(k, folder, tokenizers, cache)[split] for k, folder in folders.items()}
    return SequenceBuilder(stores, layout_of(tokenizers), 96)


@pytest.fixture(scope="module")
def builder(tiny_data) -> SequenceBuilder:
    return builder_of(tiny_data)


def furthest(slots, weights, window):
    """Return the largest difference between the number of samples of a kind in a window and the expected number.

    The maximum is over all kinds and all windows of this length.
    """
    return max(
        max(abs(sum(s == slot for s in slots[i : i + window]) - share * window) for i in range(len(slots) - window))
        for slot, share in weights.items()
    )


@pytest.mark.parametrize("seed", [0, 3])
def test_weights_are_met_in_any_window(seed):
    mixture = Mixture({"pair": 3.0, "text": 1.0, "image": 0.5}, image_first=0.5, seed=seed)
    slots = [mixture.draw(i).slot for i in range(5 * CYCLE)]
    shares = {"image_first": 1 / 3, "caption_first": 1 / 3, "text": 2 / 9, "image": 1 / 9}
    assert furthest(slots, shares, 300) <= 4 and furthest(slots, shares, 100) <= 4
    assert slots[:CYCLE] != slots[CYCLE : 2 * CYCLE]
    for start in range(0, len(slots), CYCLE):  # in a cycle they are met exactly
        counts = Counter(slots[start : start + CYCLE])
        assert counts == {name: round(CYCLE * share) for name, share in shares.items()}
    # The control: shuffled cycles, which also have exact proportions over whole cycles.
    random = np.random.default_rng(0)
    shuffled = [s for c in range(5) for s in random.permutation(slots[c * CYCLE : (c + 1) * CYCLE]).tolist()]
    assert furthest(shuffled, shares, 300) > 8


def test_draws_count_each_source_without_gaps():
    mixture = Mixture({"pair": 2.0, "text": 1.0, "image": 1.0}, image_first=0.25, seed=0)
    nth: dict[str, list[int]] = {}
    for i in range(3 * CYCLE):
        draw = mixture.draw(i)
        nth.setdefault({"image_first": "pair", "caption_first": "pair"}.get(draw.slot, draw.slot), []).append(draw.nth)
    assert all(counts == list(range(len(counts))) for counts in nth.values()) and set(nth) == {"pair", "text", "image"}


def test_changing_one_weight_leaves_the_order_of_the_others():
    def pairs(weights):
        mixture = Mixture(weights, image_first=1.0, seed=5)
        draws = (mixture.draw(i) for i in range(4 * CYCLE))
        return [d.nth for d in draws if d.slot == "image_first"]

    some, all_ = pairs({"pair": 1.0, "text": 1.0}), pairs({"pair": 1.0})
    assert some == all_[: len(some)]


@pytest.mark.parametrize("large", [False, True])
def test_epochs_visit_every_item_once_and_reshuffle(monkeypatch, large):
    """The order of 2**40 items is computed item by item; that of a small set, in the same way, is a permutation."""
    if large:
        epochs = Epochs(2**40, seed=1, stream=1)
        items = [epochs.item(e * 2**40 + i) for e in (0, 1) for i in range(2000)]
        assert len(set(items)) == 4000 and max(item for _, item in items) > 2**39
        monkeypatch.setattr(mixture, "LARGE", 2)
    epochs = Epochs(1001, seed=1, stream=1)
    first, second = ([epochs.item(e * 1001 + i)[1] for i in range(1001)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1001)) and first != second
    assert first != [Epochs(1001, seed=2, stream=1).item(i)[1] for i in range(1001)]


def test_sequences_have_the_promised_form(tiny_data, builder, first_code):
    """In both orders, the row of a pair decodes to the image and the caption of the pair."""
    text, image = (t.load(tiny_data / "tokenizers") for t in (TextTokenizer, ImageTokenizer))
    from mmqk.data.shards.manifest import read_pairs

    pair = list(read_pairs(tiny_data / "pairs", "train"))[7]
    pixels = torch.from_numpy(np.array(pair.image)).permute(2, 0, 1)[None].float() / 255
    codes = image.encode(pixels)[0].numpy()
    for image_first in (True, False):
        row = builder.pair(7, image_first).ids
        begin, end = list(row).index(BEGIN_IMAGE), list(row).index(END_IMAGE)
        assert row[0] == BOS and row[-1] == EOS and end - begin == 65
        assert (row[begin + 1 : end] - first_code == codes).all()
        caption = row[end + 1 : -1] if image_first else row[1:begin]
        assert pair.caption.startswith(text.decode(caption - 5))
        assert (begin == 1) is image_first


def test_one_field_switches_a_modality_off(builder, first_code):
    text_only = TrainingOrder(builder, {"text": 1.0}, 0.5, seed=0)
    image_only = TrainingOrder(builder, {"image": 1.0}, 0.5, seed=0)
    assert all((text_only.row(i).ids < first_code).all() for i in range(50))
    assert all(
        ((image_only.row(i).ids >= first_code).sum() == 64) and len(image_only.row(i).ids) == 68 for i in range(50)
    )


@pytest.mark.parametrize(("accumulate", "world"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_global_batch_is_the_same_however_it_is_dealt(builder, accumulate, world):
    order = TrainingOrder(builder, {"pair": 3.0, "text": 1.0}, 0.5, seed=2)
    whole = MicroBatches(order, 8, 1, 0, 1, steps=5)
    sent = pickle.loads(pickle.dumps(order))  # as to the workers of a loader that are spawned instead of forked
    parts = [MicroBatches(sent, 8, accumulate, rank, world, steps=5) for rank in range(world)]
    for step in range(5):
        dealt = [parts[r][step * accumulate + m] for m in range(accumulate) for r in range(world)]
        assert torch.equal(torch.cat([b.ids_BT for b in dealt]), whole[step].ids_BT)
        assert {float(b.step_targets) for b in dealt} == {float(whole[step].target_mask_BT.sum())}


def test_validation_rows_are_fixed_and_hold_every_form(tiny_data):
    builder = builder_of(tiny_data, "val")
    rows = [row.ids for row in validation_rows(builder, 8)]
    forms = ["text" if BEGIN_IMAGE not in row else "first" if row[1] == BEGIN_IMAGE else "last" for row in rows]
    assert forms == ["first", "last", "first", "text", "last", "first", "last", "text"]
    # There are 12 held-out pairs, and every fourth row is text.
    rows = [row.ids.tolist() for row in validation_rows(builder, 100)]
    assert len(rows) == 16 and len(set(map(tuple, rows))) == 16 and sum(BEGIN_IMAGE in row for row in rows) == 12
    assert rows == [row.ids.tolist() for row in validation_rows(builder, 16)]
    # A run of images alone reads no caption; the control reads the captions of pairs.
    alone = len(builder.image(0).ids)
    assert {len(row.ids) for row in module(tiny_data, mix={"image": 1.0}).val_rows} == {alone}
    assert min(len(row.ids) for row in module(tiny_data, mix={"pair": 1.0}).val_rows) > alone


def test_what_is_not_in_the_mixture_is_not_read(tiny_data, tmp_path):
    """A source that is not in ``data.mix`` is not read, and does not affect the identity of the data."""

    def of(mix, cache, **others):
        data = module(tiny_data, seq_len=88, mix=mix, cache=str(tmp_path / cache), **others)
        forms = {BEGIN_IMAGE in row.ids for row in data.val_rows}
        return set(data.stores), forms, data_identity(data.config)

    kinds, forms, identity = of({"pair": 1.0}, "a")
    assert (kinds, forms) == ({"pair"}, {True}) and identity == of({"pair": 1.0}, "a", text="nowhere")[2]
    assert of({"image": 1.0}, "b", text="")[0] == {"pair"}
    assert of({"text": 1.0}, "c", pairs="nowhere")[:2] == ({"text"}, {False})
    # The control: a source in the mixture is read and validated on.
    assert of({"pair": 3.0, "text": 1.0}, "d")[:2] == ({"pair", "text"}, {True, False})
    with pytest.raises(UserError, match="nowhere"):
        of({"pair": 3.0, "text": 1.0}, "d", text="nowhere")


def test_cache_is_made_once_and_a_damaged_one_is_named(tiny_data, tmp_path, capsys):
    arguments = ("pair", tiny_data / "pairs", tiny_data / "tokenizers", tmp_path)
    open_source(*arguments)
    assert capsys.readouterr().err.count("tokenizing the ") == 2
    open_source(*arguments)
    assert not capsys.readouterr().err
    (made,) = (path for path in tmp_path.iterdir() if path.is_dir() and path.name != "compared")
    np.save(made / "train/00000.ids.npy", np.zeros(10, dtype=np.uint16))
    with pytest.raises(UserError, match="does not match its shards and tokenizers: delete it"):
        open_source(*arguments)


def test_unigram_loss_is_the_cross_entropy_of_counted_frequencies(tiny_data, first_code):
    data = module(tiny_data, seq_len=88)
    found = data.unigram_loss()
    seen = [t for i in range(512) for t in data.order.row(i).ids[1:].tolist()]
    held = [t for row in data.val_rows for t in row.ids[1:].tolist()]
    for name, mine, size in (("text", lambda t: 5 <= t < first_code, 300), ("image", lambda t: t >= first_code, 32)):
        counts = Counter(t for t in seen if mine(t))
        total = sum(counts.values()) + size
        nats = [-np.log((counts[t] + 1) / total) for t in held if mine(t)]
        free = sum(t < 5 for t in held) if name == "text" else 0  # special tokens have loss 0
        expected = sum(nats) / (len(nats) + free)
        assert found[name] == pytest.approx(expected)
    assert found["image"] < np.log(32) + 0.5 < np.log(337)


def text_store(*sizes):
    parts = [np.arange(start, start + n) + 5 for start, n in zip(np.cumsum([0, *sizes]), sizes, strict=False)]
    return TokenStore("text", Layout({"text": 20000}, bos=0), parts, [np.array([n]) for n in sizes])


def test_text_is_one_stream_over_all_parts():
    """The rows do not depend on the shards: 21 shards with 7,000 tokens give the rows of one shard with 7,000."""
    many, one = text_store(*[150] * 20, 4000), text_store(7000)
    orders = [TrainingOrder(SequenceBuilder({"text": s}, s.layout, 88), {"text": 1.0}, 0.5, 0) for s in (many, one)]
    rows = [[order.row(i).ids.tolist() for i in range(200)] for order in orders]
    assert rows[0] == rows[1] and {len(row) for row in rows[0]} == {88}
    # An epoch leaves out less than two windows of tokens.
    epoch = orders[0].rows_of_an_epoch["text"]
    assert len({tuple(row) for row in rows[0][:epoch]}) == epoch == 7000 // 87 - 1
    assert [many.stream(140, 25).tolist()] == [list(range(145, 170))]


def test_validation_is_spread_over_what_is_held_out():
    store = text_store(7000)
    rows = validation_rows(SequenceBuilder({"text": store}, store.layout, 88), 8)
    starts = [int(row.ids[1]) for row in rows]
    assert len({tuple(row.ids.tolist()) for row in rows}) == 8
    assert starts == [i * 80 // 8 * 87 + 5 for i in range(8)]


def test_fields_that_change_no_sample_are_no_part_of_the_identity(tiny_data):
    fields = {name: str(tiny_data / name) for name in ("pairs", "text", "tokenizers")}

    def identity(**more):
        return identity_hash(data_identity(DataConfig(**{**fields, **more})))

    same = identity()
    assert same == identity(val_fraction=0.5) == identity(document_mask=False)
    assert identity(mix={"text": 1.0}) == identity(mix={"text": 1.0}, image_first_prob=0.1)
    changed = [{"image_first_prob": 0.4}, {"seq_len": 96}, {"pack": "documents"}, {"mix": {"pair": 1.0}},
               {"pack": "documents", "document_mask": False}, {"val_sequences": 4}]  # fmt: skip
    assert len({same, *(identity(**more) for more in changed)}) == 1 + len(changed)
    # A field that is newer than the first runs is not in the identity of runs that do not set it.
    assert "pairing" not in data_identity(DataConfig(**fields))
    assert len({identity(pairing=pairing) for pairing in ("matched", "shuffled", "captions")}) == 3
    # With text alone there are no pairs; with images alone the training rows stay, but the held-out pairs do not.
    assert identity(mix={"text": 1.0}) == identity(mix={"text": 1.0}, pairing="shuffled")
    assert identity(mix={"image": 1.0}) != identity(mix={"image": 1.0}, pairing="shuffled")


def test_pieces_without_a_first_token_lose_no_target():
    """Without ``<bos>``, the pieces of a document overlap by one token, so each token but the first is predicted."""
    store = TokenStore("tokens", Layout({"a": 99}), [np.arange(45)], [np.array([20, 25])])
    cut = pieces(store, 19)
    targets = [store[d][s:e][1:].tolist() for d, s, e in cut.tolist()]
    assert [t for piece in targets for t in piece] == [*range(1, 20), *range(21, 45)] and min(map(len, targets)) > 0
    with pytest.raises(ValueError, match=r"document 1 of data\.tokens has one token"):
        pieces(TokenStore("tokens", Layout({"a": 99}), [np.arange(4)], [np.array([3, 1])]), 19)


def test_statistics_leave_out_what_is_read_again(tiny_data):
    data = module(tiny_data, seq_len=110)
    fresh = [data.order.is_fresh(i) for i in range(512)]
    read = [row.ids[1:] for row, first in zip(data.sample, fresh, strict=True) if first]
    codes = [(ids >= 305).sum() for ids in read]
    assert data.statistics()["image"]["tokens"] == sum(codes) and sum(fresh) < 512


def test_windows_begin_elsewhere_in_each_epoch_and_alike_in_a_copy(builder):
    windows = Windows(builder, "text", seed=4)
    store = builder.stores["text"]
    stream = store.stream(0, store.tokens).tolist()
    copy = pickle.loads(pickle.dumps(windows))  # as in a loader worker
    begins = []
    for epoch in range(3):
        offset = int(random_stream(4, TEXT_OFFSET, epoch).integers(windows.length))
        begins.append(offset)
        for nth in (epoch * len(windows), epoch * len(windows) + 1):
            start = offset + windows._epochs.item(nth)[1] * windows.length
            row = windows.row(nth, "text").ids.tolist()
            assert row[1:] == stream[start : start + windows.length]
            assert copy.row(nth, "text").ids.tolist() == row
    assert len(set(begins)) > 1
