"""The page and the printed table of ``python -m mmqk.inspect``, made from the configuration of a run.

The same configuration gives the same bytes: a page contains no time and no absolute path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mmqk.analysis.formatting import listed, nats, number, plural
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.mixture import CYCLE
from mmqk.data.order.order import Content
from mmqk.inspection.decode import IdDecoder, Originals, Pictures
from mmqk.inspection.reading import WINDOW, read
from mmqk.inspection.tables import dial_rows, percent, statistics_rows, step_rows, table_lines
from mmqk.inspection.views import SequenceView, Viewer
from mmqk.report import render as report
from mmqk.store import find_file, without_roots

if TYPE_CHECKING:
    from mmqk.config import RunConfig

LARGEST_PAGE = 5_000_000
PICTURE_BYTES = 2_500_000  # limit for all images of a page, before base64 encoding
TEMPLATES = Path(__file__).parent / "templates"
FILTERS: dict[str, Callable[..., str]] = {
    "percent": percent,
    "number": number,
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
    plain = without_roots(read(run, data, tokens, decoder.grid if decoder else 0))
    rows = statistics_rows(plain)
    content = {
        "page": {
            "kicker": f"{name + ' · ' if name else ''}seed {run.seed} · training data",
            "title": title(plain),
            "subtitle": subtitle(plain),
        },
        "names": list(plain["modalities"]),
        "rows": rows,
        "steps": step_rows(plain),
        "fresh": _about_epochs(plain),
        "cycle": CYCLE,
        "window": WINDOW,
        "words": SLOT_WORDS,
        "plain": plain,
        "command": command,
        "config": yaml.safe_dump(plain["data"], sort_keys=False, allow_unicode=True).strip(),
        "dial": dial_rows(plain),
        **_sequences(run, data, decoder, plain, min(sequences, plain["run_sequences"])),
    }
    files = {"index.html": render(content), "statistics.json": plain}
    first = [line for line in (data.few_held_out(), subtitle(plain)[0]) if line]
    return files, [*first, "", *table_lines(list(plain["modalities"]), rows)]


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
    if not targets:
        return f"The sequences of {length} positions have no targets"
    shares = [f"{percent(count / sum(targets.values()))} {name}" for name, count in targets.items()]
    which = f"all {next(iter(targets))}" if len(targets) == 1 else listed(shares)
    return f"The targets are {which} tokens, in sequences of {length:,} positions"


def subtitle(plain: dict[str, Any]) -> list[str]:
    """Return the one or two sentences below the title."""
    first = (
        f"Read: the first {plain['sequences']:,} of the run's {plural(plain['run_sequences'], 'sequence')}, with"
        f" {plural(sum(plain['targets'].values()), 'target')};"
        f" {percent(plain['padding'])} of the positions are padding."
    )
    if "dial" in plain:
        floors = plain["dial"]["floors"]
        values = listed([f"{value:.3f} nats per {m} token" for m, value in floors.items()])
        return [first, f"The floor of the loss: {values}."]
    measured = {m: s for m, s in plain["modalities"].items() if s["model"] is not None}
    if not measured:
        return [first]
    model = listed([f"{nats(s['model'])} ({m})" for m, s in measured.items()])
    unigram = listed([nats(s["unigram"]) for s in measured.values()])
    entropy = "unigram entropy is" if len(measured) == 1 else "unigram entropies are"
    tokens = listed([f"{s['tokens']:,} {m}" for m, s in measured.items()])
    return [
        first,
        f"The held-out loss of a small n-gram model is {model} nats per token; the {entropy} {unigram} (sample:"
        f" {tokens} tokens).",
    ]


def _about_epochs(plain: dict[str, Any]) -> str:
    again = plain["sequences"] - plain["fresh_sequences"]
    if not again:
        return ""
    verb = "is" if again == 1 else "are"
    return f"{plural(again, 'sequence')} from the second or a later epoch of a source {verb} not in the estimates."


def _sequences(
    run: RunConfig, data: TokenDataModule, decoder: IdDecoder | None, plain: dict[str, Any], shown: int
) -> dict[str, Any]:
    """Return the sequences of the page, from a batch made with the batch builder that training uses."""
    layout, order = data.builder.layout, data.order
    pictures = Pictures(PICTURE_BYTES)
    dial = run.data.dial if "dial" in run.data.family else None
    viewer = Viewer(
        layout, plain["loss_weights"], pictures, decoder, dial.grid if dial else None, dial is not None
    )
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
