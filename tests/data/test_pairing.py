"""Check `data.pairing`: "shuffled" pairs each image with the caption of another, "captions" removes the images."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mmqk.data.config import DataConfig
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.tokens.encode import ChangedPairs
from mmqk.data.tokens.folder import Layout, TokenStore

LAYOUT = Layout({"text": 2000, "image": 50}, bos=0, eos=1, pad=2, begin_image=3, end_image=4)


def pairs_of(n: int) -> TokenStore:
    """Return n pairs. Image n has the id 5 + n and caption n the id 1000 + n; no other pair has these ids."""
    documents = [np.array([3, 2000 + n % 50, 5 + n, 4, *[1000 + n] * (1 + n % 7), 1]) for n in range(n)]
    lengths = np.array([len(d) for d in documents])
    return TokenStore("pair", LAYOUT, [np.concatenate(documents).astype(np.uint16)], [lengths])


def halves(store, image_tokens: int = 4) -> list[tuple[bytes, bytes]]:
    documents = [store[n] for n in range(len(store))]
    return [(d[:image_tokens].tobytes(), d[image_tokens:].tobytes()) for d in documents]


@pytest.mark.parametrize("n", [2, 3, 400])
def test_shuffled_pairs_hold_the_same_images_and_captions_and_no_pair_of_before(n):
    pairs = pairs_of(n)
    shuffled, again = ChangedPairs(pairs, "shuffled"), ChangedPairs(pairs_of(n), "shuffled")
    before, after = halves(pairs), halves(shuffled)
    for side in (0, 1):
        assert Counter(p[side] for p in before) == Counter(p[side] for p in after)
    assert not set(before) & set(after)
    assert after == halves(again)
    assert [len(shuffled[i]) for i in range(n)] == shuffled.lengths_N.tolist()
    assert shuffled.tokens == shuffled.lengths_N.sum() == pairs.tokens and shuffled.image_tokens == 4


def module(tiny_data, **more) -> TokenDataModule:
    folders = {name: str(tiny_data / name) for name in ("pairs", "text", "tokenizers", "cache")}
    data = TokenDataModule(DataConfig(**{**folders, "seq_len": 112, "val_sequences": 8, **more}), seed=3)
    data.setup()
    return data


@pytest.mark.parametrize("pack", ["none", "documents"])
def test_rows_of_a_run_change_as_the_field_says(tiny_data, pack):
    """Over an epoch, shuffled pairs have the same token counts as matched pairs, and captions without images have the
    same counts of text tokens."""
    rows = {}
    for pairing in ("matched", "shuffled", "captions"):
        data = module(tiny_data, pairing=pairing, mix={"pair": 1.0}, pack=pack)
        # An epoch has 40 pairs, one per row without packing.
        epoch = range(data.order.rows_of_an_epoch["pair"])
        rows[pairing] = [data.order.row(i).ids for i in epoch]
        modality = data.builder.layout.modality(np.concatenate([row.ids for row in data.val_rows]))
        assert bool(modality.any()) == (pairing != "captions")
        assert data.statistics(16)["text"]["targets"] > 0
        data.builder.batch([data.order.row(0)])
    layout = data.builder.layout
    counts = {name: np.bincount(np.concatenate(of), minlength=layout.size) for name, of in rows.items()}
    assert (counts["matched"] == counts["shuffled"]).all()
    joint = {name: {row.tobytes() for row in of} for name, of in rows.items()}
    assert joint["matched"] != joint["shuffled"]
    assert joint["matched"] == {
        module(tiny_data, mix={"pair": 1.0}, pack=pack).order.row(i).ids.tobytes() for i in range(len(rows["matched"]))
    }
    text = np.arange(5, layout.edges[1])  # without special tokens
    assert (counts["captions"][text] == counts["matched"][text]).all()
    assert not counts["captions"][layout.edges[1] :].any()
