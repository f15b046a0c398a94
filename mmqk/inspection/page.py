"""The page and the printed table of ``python -m mmqk.inspect``, made from the configuration of a run.

The same configuration gives the same bytes: a page contains no time and no absolute path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mmqk.data.datamodule import TokenDataModule
from mmqk.data.mixture import CYCLE
from mmqk.data.order.order import Content
from mmqk.inspection.decode import IdDecoder, Originals, Pictures
from mmqk.inspection.reading import WINDOW, read
from mmqk.inspection.views import SequenceView, Viewer
from mmqk.lab.formatting import listed, nats, number, plural
from mmqk.lab.page import render as report
from mmqk.store import find_file, without_roots
from mmqk.store.formatting import text_table

if TYPE_CHECKING:
    from mmqk.config import RunConfig

Row = dict[str, Any]


def percent(share: float) -> str:
    """Format a share in percent."""
    return f"{number(100 * share)} %"


LARGEST_PAGE = 5_000_000
PICTURE_BYTES = 2_500_000  # limit for all images of a page, before base64 encoding
TEMPLATES = Path(__file__).parent / "templates"
FILTERS: dict[str, Callable[..., str]] = {
    "percent": percent,
    "number": number,
    "value": lambda v: number(v, digits=4) if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v,
    "thousands": lambda value: "–" if value is None else f"{value:,}",
}
SLOT_WORDS = {
    "image_first": "image, then its caption",
    "caption_first": "caption, then its image",
    "text": "text",
    "image": "image without caption",
    "interleaved": "interleaved text and images",
    "tokens": "ids of other tokenizers",
    "dial": "the synthetic source",
}


def inspect(
    run: RunConfig, sequences: int, tokens: int, command: str, name: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Read the first sequences of a run and describe them.

    Args:
        run: configuration of the run.
        sequences: how many of the first sequences to show.
        tokens: number of tokens to read for the statistics.
        command: the command that reproduces the page.
        name: name of the configuration.

    Returns:
        Files by name (text, or plain data for JSON), and the lines to print.

    Raises:
        UserError: the data cannot be read.
    """
    data = TokenDataModule(run.data, run.seed)
    data.setup()
    decoder = IdDecoder(run.data.tokenizers_folder) if "pair" in run.data.family else None
    plain = without_roots(read(run, data, tokens))
    rows = statistics_rows(plain)
    content = {
        "page": {
            "kicker": f"{name + ' · ' if name else ''}seed {run.seed} · training data",
            "title": title(plain),
            "subtitle": subtitle(plain),
        },
        "names": list(plain["modalities"]),
        "rows": rows,
        "later": plain["sequences"] - plain["fresh_sequences"],
        "cycle": CYCLE,
        "window": WINDOW,
        "words": SLOT_WORDS,
        "plain": plain,
        "command": command,
        "config": yaml.safe_dump(plain["data"], sort_keys=False, allow_unicode=True).strip(),
        **_sequences(run, data, decoder, plain, min(sequences, plain["run_sequences"])),
    }
    files = {"index.html": render(content), "statistics.json": plain}
    first = [line for line in (data.few_held_out(), subtitle(plain)[0]) if line]
    cells = [["", *plain["modalities"]], *([row["label"], *row["cells"]] for row in rows)]
    notes = ["", *(row["note"] for row in rows)]
    table = [f"{line}  {note}".rstrip() for line, note in zip(text_table(cells, {0}), notes, strict=True)]
    return files, [*first, "", *table]


def render(content: dict[str, Any]) -> str:
    """Render the page, with fewer sequences if it would exceed `LARGEST_PAGE` bytes."""
    css = (report.TEMPLATES / "page.css").read_text(encoding="utf-8").strip()
    sequences = content["sequences"]
    while True:
        missing = len(content["sequences"]) - len(sequences)
        shown = {**content, "sequences": sequences, "missing": missing, "css": css}
        page = report.render("inspect.html", shown, TEMPLATES, FILTERS)
        if len(page.encode()) <= LARGEST_PAGE or len(sequences) == 1:
            return page
        sequences = sequences[: len(sequences) // 2]


def title(plain: dict[str, Any]) -> str:
    """Return the title: the shares of targets by modality, and the length of the sequences."""
    targets, length = plain["targets"], plain["data"]["seq_len"]
    shares = listed([f"{percent(count / sum(targets.values()))} {name}" for name, count in targets.items()])
    return f"{f'The targets are {shares} tokens' if targets else 'No targets'}, in sequences of {length:,} positions"


def subtitle(plain: dict[str, Any]) -> list[str]:
    """Return the one or two sentences below the title."""
    first = (
        f"Read: the first {plain['sequences']:,} of the run's {plural(plain['run_sequences'], 'sequence')}, with"
        f" {plural(sum(plain['targets'].values()), 'target')}; {percent(plain['padding'])} of the positions are"
        " padding."
    )
    floors = plain["dial"]["floors"] if "dial" in plain else {}
    values = listed([f"{value:.3f} nats per {m} token" for m, value in floors.items()])
    return [first, f"The floor of the loss: {values}."] if floors else [first]


def statistics_rows(plain: dict[str, Any]) -> list[Row]:
    """Return the table of statistics: label, note, and one cell per modality."""
    dial = plain.get("dial")

    def row(label: str, note: str, cell: Callable[[str, dict[str, Any]], str]) -> Row:
        return {"label": label, "note": note, "cells": [cell(m, s) for m, s in plain["modalities"].items()]}

    return [
        row("targets", "predicted tokens that were read", lambda m, s: f"{plain['targets'][m]:,}"),
        row("share", "of all targets", lambda m, s: percent(s["share"])),
        row("ids used", "of the block", lambda m, s: f"{s['used']:,} of {s['block']:,}"),
        row("uniform", "ln of the block size, nats per token", lambda m, s: nats(math.log(s["block"]))),
        row("sample", "tokens of the estimates below", lambda m, s: f"{s['tokens']:,}"),
        row("unigram entropy", "nats per token, Miller-Madow", lambda m, s: nats(s["unigram"])),
        *(
            (
                row("true loss", "−log p of these targets, nats", lambda m, s: f"{dial['met'][m]:.3f}"),
                row("floor", "mean over all tokens, nats", lambda m, s: f"{dial['floors'][m]:.3f}"),
            )
            if dial
            else ()
        ),
        row("repeated", "tokens in 8-token passages read before", lambda m, s: percent(s["repeated"])),
        row(
            "held-out, repeated",
            "held-out tokens in 8-token passages of the training data",
            lambda m, s: "no held-out data" if s["repeated_held_out"] is None else percent(s["repeated_held_out"]),
        ),
        row("duplicates", "documents equal to an earlier one", lambda m, s: percent(s["duplicates"])),
        row("loss weight", "0: no loss", lambda m, s: f"{plain['loss_weights'][m]:g}"),
    ]


def _sequences(
    run: RunConfig, data: TokenDataModule, decoder: IdDecoder | None, plain: dict[str, Any], shown: int
) -> dict[str, Any]:
    """Return the sequences of the page, from a batch made with the batch builder that training uses."""
    layout, order = data.builder.layout, data.order
    pictures = Pictures(PICTURE_BYTES)
    dial = run.data.dial if "dial" in run.data.family else None
    viewer = Viewer(layout, plain["loss_weights"], pictures, decoder, dial.grid if dial else None, dial is not None)
    originals = Originals(find_file(run.data.pairs)) if decoder and run.data.pairs else None
    batch = data.builder.batch([order.row(i) for i in range(shown)], documents=True)
    sequences = []
    for index in range(shown):
        contents = order.contents(index)
        images = {}
        if originals is not None and decoder is not None:
            pictured = ((n, c.item) for n, c in enumerate(contents) if c.kind in ("pair", "image"))
            images = {n: originals.image(item, decoder.image_size) for n, item in pictured}
        view = viewer.view(batch, index, images)
        heads = [_head(data, decoder, c) for c in contents] or [("", "")] * len(view.documents)
        sequences.append(
            {
                "index": index,
                "slot": SLOT_WORDS[order.mixture.draw(index).slot],
                "facts": _facts(view, run.data.seq_len),
                "strip": view.strip,
                "lane": view.lane,
                "documents": list(zip(heads, view.documents, strict=True)),
            }
        )
    return {
        "sequences": sequences,
        "colors": viewer.colors,
        "specials": bool(layout.specials),
        "left_out": pictures.left_out,
    }


def _facts(view: SequenceView, length: int) -> list[str]:
    facts = [f"{view.filled:,} of {length:,} positions filled, {length - view.filled:,} padding"]
    if len(view.documents) > 1:
        facts.append(plural(len(view.documents), "document"))
    counts = [
        f"{masked:,} {name}" + ("" if trained == masked else f" ({trained:,} of them trained)")
        for name, (masked, trained) in view.targets.items()
    ]
    return [*facts, f"targets: {listed(counts) or 'none'}"]


def _head(data: TokenDataModule, decoder: IdDecoder | None, content: Content) -> tuple[str, str]:
    """Return the label of a document with its index in the source, and the part of its caption that was cut."""
    kind, item = content.kind, content.item
    if kind == "image":
        return f"Image of pair {item:,}", ""
    store = data.builder.stores[kind]
    if kind == "pair":
        words, room = store[item][store.image_tokens : -1], data.builder.caption_room
        if len(words) <= room:
            return f"Pair {item:,}", ""
        cut = "".join(decoder.words(words[room:])) if decoder else ""
        return f"Pair {item:,}, caption cut: {room:,} of its {len(words):,} tokens fit", cut
    length = int(store.lengths_N[item])
    whole = content.end - content.start >= length
    part = "" if whole else f", tokens {content.start:,} to {content.end - 1:,} of {length:,}"
    return f"Document {item:,}{part}", ""
