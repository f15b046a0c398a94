"""Check that token folders return the documents that were written, and that errors name damaged files."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from mmqk.data.config import DataConfig
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.sequences import SequenceBuilder, pieces
from mmqk.data.tokens.folder import Layout, TokenStore, TokenWriter, open_tokens, tokens_hash
from mmqk.data.tokens.ids import main
from mmqk.store import UserError, cli_main

LAYOUT = Layout({"text": 20, "image": 12}, bos=0, eos=1, pad=2, begin_image=3, end_image=4)


def write(folder, documents, parts=3, layout=LAYOUT, kind="interleaved"):
    writer = TokenWriter(folder, kind, layout, tokenizers="0123456789")
    for p in range(parts):
        writer.add_part("train", f"{p:05d}", documents[p::parts])
    writer.add_part("val", "00000", documents[:2])
    writer.finish(dropped={"no caption": 2})
    return folder


def some(n):
    random = np.random.default_rng(0)
    return [random.integers(5, 32, random.integers(1, 30)) for _ in range(n)]


def test_documents_come_back_in_the_order_of_the_parts(tmp_path):
    documents = some(50)
    stores = open_tokens(write(tmp_path / "t", documents))
    train = stores["train"]
    expected = [d for p in range(3) for d in documents[p::3]]
    assert len(train) == 50 and train.tokens == sum(map(len, documents)) and len(stores["val"]) == 2
    assert all((train[i] == expected[i]).all() for i in range(50)) and train[7].dtype == np.int64
    assert any(len(train[i]) != len(documents[i]) for i in range(50))  # the control: another order


def test_the_hash_is_that_of_the_content(tmp_path):
    documents = some(20)
    same = [tokens_hash(write(tmp_path / name, documents)) for name in "ab"]
    documents[3] = documents[3][::-1] if len(set(documents[3])) > 1 else documents[3] + 1
    assert same[0] == same[1] != tokens_hash(write(tmp_path / "c", documents))


def test_modality_is_that_of_the_block():
    layout = Layout({"a": 3, "b": 2, "c": 4})
    assert layout.modality(np.arange(9)).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]


def test_an_unfinished_or_damaged_folder_is_named(tmp_path):
    folder = write(tmp_path / "t", some(9))
    with open(folder / "train/00001.ids.npy", "r+b") as file:
        file.truncate(140)
    with pytest.raises(UserError, match=r"00001"):
        open_tokens(folder)
    np.save(folder / "train/00001.ids.npy", np.zeros(3, dtype=np.uint16))
    with pytest.raises(UserError, match=r"00001\.ids\.npy differs from tokens\.json"):
        open_tokens(folder)
    with open(folder / "train/00001.ids.npy", "wb") as file:
        np.savez(file, np.zeros(3, dtype=np.uint16))
    with pytest.raises(UserError, match=r"00001 of a token folder cannot be read"):
        open_tokens(folder)
    (folder / "tokens.json").unlink()
    with pytest.raises(UserError, match=r"tokens\.json is missing"):
        open_tokens(folder)


def flip(path, place=-1):
    """Flip one bit of a file, and increase its modification time by one second."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    about = path.stat()
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 10**9))


@pytest.mark.parametrize("what", ["ids", "lengths"])
@pytest.mark.parametrize("cached", [False, True])
def test_arrays_are_compared_with_their_hashes(tmp_path, what, cached):
    folder = write(tmp_path / "t", [np.array([5, 6, 7])] * 12)
    cache = tmp_path / "cache" if cached else None
    for _ in range(2):
        open_tokens(folder, cache)
    path = folder / f"train/00001.{what}.npy"
    whole = path.read_bytes()
    if what == "ids":
        flip(path, -2)
    else:  # the same number of tokens, in documents of other lengths
        np.save(path, np.array([3, 3, 2, 4], dtype=np.uint32))
    for _ in range(2):  # also the second time: a damaged file is not recorded as valid
        with pytest.raises(UserError, match=rf"00001\.{what}\.npy differs from tokens\.json .*make the folder again"):
            open_tokens(folder, cache)
    path.write_bytes(whole)
    assert len(open_tokens(folder, cache)["train"]) == 12


@pytest.mark.parametrize("cached", [False, True])
def test_ids_outside_the_layout_are_named_before_training(tmp_path, cached):
    folder = write(tmp_path / "t", [np.array([5, 31])] * 6)
    record = json.loads((folder / "tokens.json").read_text())
    open_tokens(folder, tmp_path / "cache")
    record["layout"]["vocab_sizes"]["image"] = 11
    (folder / "tokens.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"ids\.npy has the id 31, but the ids of tokens\.json are 0 to 30"):
        open_tokens(folder, tmp_path / "cache" if cached else None)


def test_pieces_are_the_document_and_never_part_of_an_image():
    image = [3, *range(20, 26), 4]
    words = list(range(5, 12))
    documents = [np.array(d) for d in (words, words + image, image * 5, words * 4 + image + words, [6] * 11)]
    lengths = np.array([len(d) for d in documents])
    store = TokenStore("interleaved", LAYOUT, [np.concatenate(documents)], [lengths])
    cut = pieces(store, room=11)
    for n, document in enumerate(documents):
        mine = cut[cut[:, 0] == n]
        assert np.concatenate([store[n][s:e] for _, s, e in mine]).tolist() == document.tolist()
        for _, s, e in mine:
            part = document[s:e].tolist()
            assert len(part) <= 11 and part.count(3) == part.count(4)
    # The control: a cut every 11 tokens would cut images.
    assert any(documents[2][i : i + 11].tolist().count(3) != documents[2][i : i + 11].tolist().count(4)
               for i in range(0, 40, 11))  # fmt: skip
    with pytest.raises(ValueError, match="an image of 6 codes"):
        pieces(store, room=7)


def test_the_length_that_an_image_needs_is_the_least_that_works():
    image = [3, *range(20, 26), 4]
    document = [5, 6, 7, *image, *[8] * 9]
    for bos in (0, None):
        layout = Layout({"text": 20, "image": 12}, bos=bos, begin_image=3, end_image=4)
        store = TokenStore("interleaved", layout, [np.array(document)], [np.array([len(document)])])

        def cut(seq_len, store=store):
            room = SequenceBuilder({"interleaved": store}, store.layout, seq_len).room
            return [document[start:end] for _, start, end in pieces(store, room)]

        with pytest.raises(ValueError, match="an image of 6 codes: at least 9 is needed"):
            cut(8)
        assert [part[part.index(3) :][:8] for part in cut(9) if 3 in part] == [image]


# Arrays of other tokenizers --------------------------------------------------------------------------


SIZES = "--vocab-sizes=text=100,image=50"


def ids_of(n, length, seed):
    """Return n rows of text ids (0 to 99) that end with 6 image ids (100 to 149)."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.integers(0, 100, (n, length - 6)), random.integers(100, 150, (n, 6))], axis=1)


@pytest.fixture
def arrays(tmp_path):
    np.save(tmp_path / "train-0.npy", ids_of(40, 18, 0).astype(np.int32))
    ragged = [ids_of(1, n, n)[0] for n in (7, 18, 45, 12)]
    np.save(tmp_path / "train-1.npy", np.concatenate(ragged))
    np.save(tmp_path / "train-1.lengths.npy", np.array([7, 18, 45, 12]))
    np.save(tmp_path / "val-0.npy", ids_of(9, 18, 1))
    return tmp_path


def test_arrays_are_used_as_they_are(arrays, capsys):
    assert main([f"--train={arrays}/train-*.npy", f"--val={arrays}/val-*.npy", SIZES, f"--out={arrays / 't'}"]) == 0
    assert "44 training and 9 held-out" in capsys.readouterr().out
    config = DataConfig(tokens=str(arrays / "t"), mix={"tokens": 1.0}, seq_len=20, batch_size=4, val_sequences=9)
    data = TokenDataModule(config, seed=0)
    data.setup()
    whole = {tuple(row) for row in np.load(arrays / "train-0.npy").tolist()}
    rows = [tuple(data.order.row(i).ids.tolist()) for i in range(46)]  # the document of 45 ids is in three pieces
    assert whole <= set(rows) and len(set(rows)) == 46
    batch = data.probe_batch(4)
    assert (batch.ids_BT[:, :18].numpy() == np.load(arrays / "val-0.npy")[:4]).all()
    assert not batch.valid_BT[:, 18:].any() and (batch.modality_BT[:, 12:18] == 1).all()


def test_held_out_documents_are_chosen_by_their_content(arrays):
    twice = np.concatenate([ids_of(60, 18, 0), ids_of(60, 18, 0)])
    np.save(arrays / "all.npy", twice)
    assert main([f"--train={arrays}/all.npy", SIZES, "--val-fraction=0.3", f"--out={arrays / 't'}"]) == 0
    train, val = ({tuple(s[i]) for i in range(len(s))} for s in open_tokens(arrays / "t").values())
    assert not train & val and len(train) + len(val) == 60 and 5 < len(val) < 35


# Errors of `mmqk data ids`, and the files that it leaves --------------------------------------------------


def test_a_run_that_failed_leaves_nothing_to_the_next(arrays, capsys):
    np.save(arrays / "train-2.npy", np.full((3, 18), 999))
    argv = [f"--val={arrays}/val-*.npy", SIZES, f"--out={arrays / 't'}"]
    before = sorted(arrays.rglob("*"))
    assert cli_main(main)([f"--train={arrays}/train-0.npy", *argv, "--val-fraction=0.1"]) == 2
    assert cli_main(main)([f"--train={arrays}/train-*.npy", *argv]) == 2
    assert "train-2.npy does not fit" in capsys.readouterr().err and sorted(arrays.rglob("*")) == before
    (arrays / "t").mkdir()  # --out may be an empty folder
    assert main([f"--train={arrays}/train-0.npy", *argv]) == 0
    assert len(open_tokens(arrays / "t")["train"]) == 40
    assert {p.name for p in arrays.iterdir()} == {p.name for p in before} | {"t"}
    assert (arrays / "t").stat().st_mode == (arrays / "t/train").stat().st_mode
