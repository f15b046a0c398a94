"""The sequences of one optimizer step: where each comes from, and its loss by modality. ``mmqk inspect RUN --step N``.

Step N is the line of metrics.jsonl with this number. It used the weights of the checkpoint of step N - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from mmqk.checkpoint import load_checkpoint, model_of
from mmqk.data.batch import TokenBatch
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.loader import MicroBatches
from mmqk.data.mixture import source_of
from mmqk.data.order import sequence_numbers
from mmqk.data.shards.files import index_tar
from mmqk.data.tokens.folder import is_token_folder, read_header, read_keys
from mmqk.inspection.page import FILTERS, TEMPLATES, folders_of, sequence_views
from mmqk.inspection.views import shard_of
from mmqk.lab import formatting as report
from mmqk.model import EarlyFusionTransformer
from mmqk.model.patch import named_function
from mmqk.store import UserError, read_details, read_json
from mmqk.store.checkpoint_files import checkpoints_in, step_of
from mmqk.store.formatting import plain, relative, text_table

if TYPE_CHECKING:
    from mmqk.config import RunConfig

LOGITS_AT_ONCE = 2**26


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
        details = read_details(folder)
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
    if "dial" in data.config.family:
        return {"dial": lambda n: ("the synthetic source", f"document {n}")}
    folders = folders_of(data.config).items()
    return {kind: _of_tokens(folder) if is_token_folder(folder) else _of_manifest(folder) for kind, folder in folders}


def samples_of(data: TokenDataModule, places: dict[str, Place], number: int) -> list[dict[str, Any]]:
    """Return the samples of a sequence, in order: each with ``kind``, ``shard``, ``key``, and the tokens ``start`` to
    ``end`` of its document that the sequence has. With data.pairing shuffled, a pair has an image and a caption."""
    found = []
    for content in data.order.samples(number):
        kind = source_of(content.kind)
        parts = [(content.kind, content.item)]
        if content.kind == "pair" and data.config.pairing == "shuffled":
            caption_of_N = data.stores["pair"]["train"].caption_of_N
            parts = [("image", content.item), ("caption", int(caption_of_N[content.item]))]
        for name, item in parts:
            shard, key = places[kind](item)
            tokens = {"start": content.start, "end": content.end}
            found.append({"kind": name, "shard": relative(shard), "key": key, **tokens})
    return found


def _of_manifest(folder: Path) -> Place:
    """Return the places of a folder of shards with a manifest, whose documents are its samples in order."""
    find, index = shard_of(folder), cache(index_tar)

    def place(n: int) -> tuple[str, str]:
        path, i = find(n)
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


def inspect_step(
    run: RunConfig, folder: Path | None, step: int, given: Path | None, shown: int, command: str
) -> tuple[dict[str, Any], list[str]]:
    """Describe the sequences of an optimizer step.

    Args:
        run: configuration of the run.
        folder: the run folder; None for a run from the start that needs no folder.
        step: number of the step in metrics.jsonl.
        given: checkpoint whose weights give the losses; None for the newest one of the run before the step.
        shown: most sequences on the page; of more, those with the largest loss.
        command: the command that reproduces the page.

    Returns:
        Files by name (text, or plain data for JSON), and the lines to print.

    Raises:
        UserError: the run has no such step, or its data or the checkpoint cannot be read.
    """
    position = Position(run.data.batch_size) if folder is None else Position.of(folder)
    numbers = position.numbers(step)
    if step > (last := run.trainer.max_steps):
        raise UserError(f"The run ends with step {last} and has no step {step}: name an earlier one.")
    data = TokenDataModule(run.data, run.seed)
    data.setup()
    batch = step_batch(run, data, position, step)
    own = [] if folder is None else [p for p in checkpoints_in(folder / "checkpoints") if step_of(p) < step]
    path = given or (own[-1] if own else None)
    names = list(run.model.vocab_sizes)
    losses: list[dict[str, float]] = [{} for _ in numbers]
    weights = f"no losses: no checkpoint before step {step} is left; name one with --from"
    if path is not None:
        content = load_checkpoint(path, "name another one after --from")
        model, trained = model_of(content), content.get("global_step", "?")
        if list(model.config.vocab_sizes.items()) != list(run.model.vocab_sizes.items()):
            raise UserError(f"The vocabulary of {path} is not that of the run: name another one after --from.")
        losses = losses_of(model, batch, run.data.documents_apart)
        weights = f"losses (nats per token, fp32, no dropout) with the weights of step {trained}"
    record = _record(run, data, batch, numbers, losses)
    chosen = sorted(sorted(range(len(numbers)), key=lambda b: -max(losses[b].values(), default=0))[:shown])
    views = sequence_views(run, data, batch, [numbers[b] for b in chosen], chosen)
    for view, b in zip(views["sequences"], chosen, strict=True):
        where = [f"{sample['shard']} {sample['key']}" for sample in record[b]["samples"]]
        loss = [f"loss {name} {plain(value, 4)}" for name, value in losses[b].items()]
        view["facts"] = " · ".join([view["facts"], *loss, *where])
    spread = run.trainer.processes > 1 or run.trainer.accumulate_grad_batches > 1
    rows = _rows(record, names, path is not None, spread)
    page: dict[str, Any] = {
        "name": "" if folder is None else folder.parent.name,
        "title": f"Step {step} reads sequences {numbers[0]} to {numbers[-1]}",
        "summary": f"{weights[:1].upper()}{weights[1:]}.",
        "rows": [],
        "samples": rows,
        "command": command,
        **views,
    }
    plain_record = {"step": step, "weights": None if path is None else str(path), "sequences": record}
    files = {"index.html": report.render("inspect.html", page, TEMPLATES, FILTERS), "step.json": plain_record}
    return files, [page["title"], weights, "", *text_table(rows, set(range(len(rows[0]))))]


def _record(
    run: RunConfig, data: TokenDataModule, batch: TokenBatch, numbers: list[int], losses: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """Return for each sequence of a step its number, its place, its samples, its tokens and its losses."""
    places, modality_BT = places_of(data), batch.modality_BT.where(batch.valid_BT, -1)
    micro = run.data.batch_size // run.trainer.accumulate_grad_batches
    return [
        {
            "sequence": number,
            "slot": data.order.mixture.draw(number).slot,
            "micro_batch": place // micro,
            "rank": place % micro // (micro // run.trainer.processes),
            "samples": samples_of(data, places, number),
            "tokens": {name: int((modality_BT[place] == m).sum()) for m, name in enumerate(run.model.vocab_sizes)},
            "loss": losses[place],
        }
        for place, number in enumerate(numbers)
    ]


def step_batch(run: RunConfig, data: TokenDataModule, position: Position, step: int) -> TokenBatch:
    """Return all sequences of a step over all micro-batches and ranks, in order, with document numbers."""
    patch = named_function(run.data.patch) if run.data.patch else None
    size, accumulate = run.data.batch_size, run.trainer.accumulate_grad_batches
    micro = MicroBatches(data.order, size, accumulate, 0, run.trainer.processes, run.trainer.max_steps, True, patch)
    micro.ahead, micro.skip = position.ahead, list(position.skip)
    return micro.first_rows((step - 1) * accumulate, size)


@torch.inference_mode()
def losses_of(model: EarlyFusionTransformer, batch: TokenBatch, documents_apart: bool) -> list[dict[str, float]]:
    """Return the mean loss of each sequence by modality of the target, nats; a modality without targets is absent."""
    names = model.config.modalities
    chunk = max(1, LOGITS_AT_ONCE // (batch.ids_BT.shape[1] * model.config.vocab_size))
    found = []
    for at in range(0, len(batch.ids_BT), chunk):
        part = batch._map(lambda t, at=at: t[at : at + chunk] if t.ndim else t)  # type: ignore[misc]
        logits_BTV = model(part.ids_BT, part.modality_BT, part.document_BT if documents_apart else None)
        ce_BT = F.cross_entropy(logits_BTV.float().transpose(1, 2), part.targets_BT, reduction="none")
        for ce_T, mask_T, modality_T in zip(ce_BT, part.target_mask_BT, part.target_modality_BT, strict=True):
            of_modality = {name: ce_T[mask_T & (modality_T == m)] for m, name in enumerate(names)}
            found.append({name: float(ce_N.mean()) for name, ce_N in of_modality.items() if len(ce_N)})
    return found


def _rows(record: list[dict[str, Any]], names: list[str], has_losses: bool, spread: bool) -> list[list[str]]:
    """Return the table: a row per sample; the numbers of a sequence stand in the row of its first sample."""
    heads = ["sequence", *["micro-batch", "rank"] * spread, "sample", "shard", "key", *names]
    rows = [[*heads, *([f"loss {name}" for name in names] if has_losses else [])]]
    for entry in record:
        place = [str(entry["sequence"]), *[str(entry["micro_batch"]), str(entry["rank"])] * spread]
        losses = [plain(entry["loss"][name], 4) if name in entry["loss"] else "–" for name in names]
        counts = [*(str(entry["tokens"][name]) for name in names), *(losses if has_losses else [])]
        for sample in entry["samples"]:
            rows.append([*place, sample["kind"], sample["shard"], sample["key"], *counts])
            place, counts = [""] * len(place), [""] * len(counts)
    return rows
