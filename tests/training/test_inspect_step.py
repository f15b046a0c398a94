"""`mmqk inspect RUN --step N` against the batches that runs really trained on, and against the shards."""

from __future__ import annotations

import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmqk.config import resolve
from mmqk.data.tokenizers.files import TextTokenizer
from mmqk.data.tokens.folder import TokenStore
from mmqk.data.tokens.tokenize import main as tokenize
from mmqk.inspection import main
from mmqk.inspection.step import Position, step_batch
from mmqk.model import EarlyFusionTransformer
from mmqk.store import UserError
from tests.tiny import data_of
from tests.training.batches import recorded
from tests.training.runs import checkpoint, rewind, saved

MIX = '--data.mix={"pair": 2, "text": 1, "image": 1}'
NO_PROBES = ("--monitor.every_n_steps=0", "--logging=[]")


def said(folder: Path, *words: str) -> dict:
    """Return step.json of ``mmqk inspect``."""
    out = folder.parent / f"page-{folder.name}"
    assert main([str(folder), *words, f"--out={out}"]) == 0
    return json.loads((out / "step.json").read_text())


def ids_of_step(folder: Path, step: int) -> list[list[int]]:
    """Return what inspect shows of a step: the ids of each sequence without the padding."""
    args = ["--config", str(folder / "config.yaml"), f"--out={folder}"]
    batch = step_batch(resolve(args), data_of(args), Position.of(folder), step)
    return [np.asarray(i[v]).tolist() for i, v in zip(batch.ids_BT.numpy(), batch.valid_BT.numpy(), strict=True)]


def check(folder: Path, batches: dict[int, list[list[int]]]) -> None:
    shown = {step: ids_of_step(folder, step) for step in batches}
    assert shown == batches
    later = {step: ids_of_step(folder, step + 1) for step in batches if step + 1 in batches}
    assert all(later[step] != batches[step] for step in later)  # the control


@pytest.mark.parametrize(
    "fields",
    [(), ("--data.pack=documents", "--data.seq_len=200", MIX, "--trainer.accumulate_grad_batches=2")],
    ids=["plain", "packed mixture"],
)
def test_it_shows_the_batches_of_a_run_and_of_its_forks(tiny_args, tmp_path, monkeypatch, fields):
    args = [*tiny_args, *NO_PROBES, *fields, "--checkpoint.keep=9", "--checkpoint.every_n_steps=2"]
    batches = recorded(monkeypatch, args, tmp_path / "run")
    assert sorted(batches) == list(range(1, 13))
    check(tmp_path / "run", batches)
    forked = [f"--fork={checkpoint(tmp_path / 'run', 8)}", "--fork_skip_batches=3", "--data.batch_size=2",
              "--fork_skip=45"]  # fmt: skip
    batches = recorded(monkeypatch, forked, tmp_path / "fork")
    assert sorted(batches) == [9, 10, 11, 12]
    check(tmp_path / "fork", batches)
    numbers = [entry["sequence"] for entry in said(tmp_path / "fork", "--step=11")["sequences"]]
    assert numbers == [42, 43] and said(tmp_path / "fork", "--step=12")["sequences"][1]["sequence"] == 46
    with pytest.raises(UserError, match="begins with step 9 and has no step 8: it is a fork"):
        said(tmp_path / "fork", "--step=8")


def test_a_run_that_was_resumed_twice(whole, tmp_path, monkeypatch):
    first = recorded(monkeypatch, rewind(whole, tmp_path / "run", 4), tmp_path / "run")
    rewind(tmp_path / "run", tmp_path / "again", 8)
    second = recorded(monkeypatch, rewind(whole, tmp_path / "other", 8), tmp_path / "again")
    assert sorted(first) == list(range(5, 13)) and sorted(second) == list(range(9, 13))
    check(tmp_path / "again", first | second)


def test_losses_are_those_of_the_weights(whole):
    """The newest checkpoint before the step gives the losses, which plain torch gives too."""
    record = said(whole, "--step=9")
    assert record["weights"].endswith("step00000008.ckpt")
    args = ["--config", str(whole / "config.yaml"), f"--out={whole}"]
    run, data = resolve(args), data_of(args)
    model = EarlyFusionTransformer(run.model, "math").eval()
    model.load_state_dict({k.removeprefix("model."): v for k, v in saved(whole, 8)["state_dict"].items()})
    for entry, number in zip(record["sequences"], range(32, 36), strict=True):
        ids = torch.as_tensor(data.order.row(number).ids)
        loss_T = F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="none")
        first_image = run.model.vocab_sizes["text"]
        for name, mask_T in (("text", ids[1:] < first_image), ("image", ids[1:] >= first_image)):
            if mask_T.any():
                assert entry["loss"][name] == pytest.approx(loss_T[mask_T].mean().item(), abs=1e-4)
            else:
                assert name not in entry["loss"]
        counts = [int((ids < first_image).sum()), int((ids >= first_image).sum())]
        assert entry["sequence"] == number and list(entry["tokens"].values()) == counts
    # The control: other weights give other losses.
    other = said(whole, "--step=9", "--from", str(checkpoint(whole, 4)))
    assert other["sequences"][0]["loss"] != record["sequences"][0]["loss"]


def captions_of(folder: Path) -> dict[tuple[str, str], str]:
    """Return the caption or the text of each sample by shard and key, read without mmqk."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    content = json.loads(tar.extractfile(member).read())  # type: ignore[union-attr]
                    found[path.name, member.name.removesuffix(".json")] = content["caption"]
    for path in sorted(folder.glob("*.jsonl.xz")):
        lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        found |= {(path.name, f"line {n}"): json.loads(line)["text"] for n, line in enumerate(lines, 1)}
    return found


@pytest.mark.parametrize("how", ["cache", "tokens", "shuffled"])
def test_shard_and_key_name_the_sample(tiny_args, tiny_data, tmp_path, how):
    """The text of each sequence is that of the samples that inspect names, read from the shards."""
    fields = [MIX]
    if how == "tokens":
        assert tokenize(["--shards", str(tiny_data / "pairs/train-*.tar"), "--out", str(tmp_path / "tokens"),
                         "--tokenizers", str(tiny_data / "tokenizers"), "--workers=0"]) == 0  # fmt: skip
        fields += [f"--data.pairs={tmp_path / 'tokens'}"]
    fields += ["--data.pairing=shuffled"] if how == "shuffled" else []
    args = [*tiny_args, *fields, "--data.batch_size=16"]
    assert main([*args, "--step=2", f"--out={tmp_path / 'page'}"]) == 0
    record = json.loads((tmp_path / "page/step.json").read_text())
    texts = captions_of(tiny_data / "pairs") | captions_of(tiny_data / "text")
    run, data = resolve(args), data_of(args)
    tokenizer = TextTokenizer.load(run.data.tokenizers_folder)
    checked = 0
    for entry in record["sequences"]:
        ids = data.order.row(entry["sequence"]).ids
        words = tokenizer.decode([int(i) - 5 for i in ids if 5 <= i < run.model.vocab_sizes["text"]])
        written = [texts[Path(s["shard"]).name, s["key"]] for s in entry["samples"] if s["kind"] != "image"]
        if words.strip():
            assert len(words) > 12 and words.strip() in "".join(written), entry  # a caption may be cut
            checked += 1
        # The control: the samples of other sequences have other texts.
        others = [text for text in texts.values() if text not in written]
        assert not words.strip() or sum(words.strip() in text for text in others) < len(others) / 4
    assert checked >= 4
    assert isinstance(data.stores["pair"]["val"], TokenStore) or how == "shuffled"


def test_code_in_a_folder_runs_only_if_named(tiny_args, tmp_path):
    from mmqk.train import main as train

    patch = "--data.patch=mmqk.bench.faults:one_bad_batch"
    assert train([*tiny_args, *NO_PROBES, "--trainer.max_steps=2", patch, f"--out={tmp_path / 'run'}"]) == 0
    with pytest.raises(UserError, match=r"is code that runs only if you name it too"):
        said(tmp_path / "run", "--step=2")
    assert len(said(tmp_path / "run", "--step=2", patch)["sequences"]) == 4
