"""Which sequences of the data's order a run reads in a step, from its folder; shard and key of their samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmqk.data.order import sequence_numbers
from mmqk.data.shards.archives import index_tar
from mmqk.data.shards.manifest import load_manifest
from mmqk.data.tokens.folder import is_token_folder, read_header, read_keys
from mmqk.store import UserError, read_json, read_run
from mmqk.store.formatting import relative

if TYPE_CHECKING:
    from mmqk.data.datamodule import TokenDataModule


@dataclass(frozen=True)
class Position:
    """The position of a run in its data.

    Attributes:
        batch_size: sequences per optimizer step.
        ahead: number that is added to ``(step - 1) * batch_size`` to get the first place of a step in the order.
        skip: numbers of the sequences that the run leaves out, ascending.
        first: the first step that the run trains; later than 1 for a fork.
        parent: folder or checkpoint of the parent of a fork.
    """

    batch_size: int
    ahead: int = 0
    skip: tuple[int, ...] = ()
    first: int = 1
    parent: str = ""

    @classmethod
    def of(cls, folder: Path) -> Position:
        """Return the position of a run; a fork has it in fork.json.

        Raises:
            UserError: the folder is no run, or a fork without this file.
        """
        details = (read_run(folder) or {}).get("details") or {}
        if "config" not in details:
            raise UserError(f"{folder} is not the folder of a run of mmqk train: name one that has a run.json.")
        size, fork = details["config"]["data"]["batch_size"], details.get("fork")
        if fork is None:
            return cls(size)
        data = (read_json(folder / "fork.json") or {}).get("data")
        if data is None:
            raise UserError(f"{folder} is a fork without its position in fork.json: name another run.")
        return cls(size, data["ahead"], tuple(data.get("skip", ())), fork["step"] + 1, fork["given"])

    def numbers(self, step: int) -> list[int]:
        """Return the numbers of the sequences of a step, by its number in metrics.jsonl (the first is 1).

        Raises:
            UserError: the run has no such step.
        """
        if step < self.first:
            advice = f"it is a fork, so name its parent {self.parent}" if self.parent else "name a later step"
            raise UserError(f"The run begins with step {self.first} and has no step {step}: {advice}.")
        places = np.arange(self.batch_size) + (step - 1) * self.batch_size + self.ahead
        numbers: list[int] = sequence_numbers(places, self.skip).tolist()
        return numbers


Place = Callable[[int], tuple[str, str]]  # of a training document: its shard and its key there


def places_of(data: TokenDataModule) -> dict[str, Place]:
    """Return a function for each kind of source that gives shard and key of a document by its index."""
    config = data.config
    if "dial" in config.family:
        return {"dial": lambda n: ("the synthetic source", f"document {n}")}
    folders = {"tokens": Path(config.tokens)} if "tokens" in config.family else config.sources
    places: dict[str, Place] = {}
    for kind, folder in folders.items():
        places[kind] = _of_tokens(folder) if is_token_folder(folder) else _of_manifest(folder)
    return places


def samples_of(data: TokenDataModule, places: dict[str, Place], number: int) -> list[dict[str, Any]]:
    """Return the samples of a sequence, in order: each with ``kind``, ``shard``, ``key``, and the tokens ``start`` to
    ``end`` of its document that the sequence has. With data.pairing shuffled, a pair has an image and a caption."""
    found = []
    for content in data.order.samples(number):
        kind = "pair" if content.kind == "image" else content.kind
        other = getattr(data.stores.get(kind, {}).get("train"), "caption_of_N", None) if kind == content.kind else None
        parts = [(content.kind, content.item)]
        if other is not None:
            parts = [("image", content.item), ("caption", int(other[content.item]))]
        for name, item in parts:
            shard, key = places[kind](item)
            tokens = {"start": content.start, "end": content.end}
            found.append({"kind": name, "shard": relative(shard), "key": key, **tokens})
    return found


def _of_manifest(folder: Path) -> Place:
    """Return the places of a folder of shards with a manifest, whose documents are its samples in order."""
    shards = load_manifest(folder).splits["train"]
    first_S = np.cumsum([0, *(shard.samples for shard in shards)])
    index = cache(index_tar)

    def place(n: int) -> tuple[str, str]:
        s = int(np.searchsorted(first_S, n, side="right")) - 1
        path, i = folder / shards[s].file, n - int(first_S[s])
        return str(path), index(path).keys[i] if path.suffix == ".tar" else f"line {i + 1}"

    return place


def _of_tokens(folder: Path) -> Place:
    """Return the places of a token folder: of `mmqk data tokenize`, shard and key; of `mmqk data ids`, the part."""
    header = read_header(folder)
    parts, shards = header.splits["train"], header.about.get("shards") or []
    first_P = np.cumsum([0, *(part.documents for part in parts)])
    keys = cache(lambda name: read_keys(folder, "train", name))

    def place(n: int) -> tuple[str, str]:
        p = int(np.searchsorted(first_P, n, side="right")) - 1
        name, i = parts[p].name, n - int(first_P[p])
        kept = keys(name)
        number = name.partition("_")[0]
        known = bool(shards) and number.isdecimal() and int(number) < len(shards)
        shard = str(shards[int(number)]["file"]) if known else str(folder / "train" / name)
        return shard, f"document {i} of part {name}" if kept is None else kept[i]

    return place
