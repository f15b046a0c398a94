"""The page and the printed table of ``mmqk inspect``, made from the configuration of a run.

The same configuration gives the same bytes: a page contains no time and no absolute path.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mmqk.data.batch import TokenBatch
from mmqk.data.config import DataConfig
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.dial import Dial
from mmqk.data.mixture import CYCLE
from mmqk.data.order import Content
from mmqk.data.sequences import Row, count_targets, describe, floors
from mmqk.data.tokens.folder import is_token_folder, read_header
from mmqk.inspection.views import IdDecoder, Viewer, originals
from mmqk.lab import formatting as report
from mmqk.lab.formatting import listed, nats, number, plural
from mmqk.store import find_file, without_roots
from mmqk.store.formatting import percent, text_table

if TYPE_CHECKING:
    from mmqk.config import RunConfig


TEMPLATES = Path(__file__).parent / "templates"
FILTERS: dict[str, Callable[..., str]] = {
    "percent": partial(percent, digits=3),
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


def inspect(run: RunConfig, sequences: int, tokens: int, command: str, name: str) -> tuple[dict[str, Any], list[str]]:
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
    plain = without_roots(read(run, data, tokens))
    rows, targets, length = statistics_rows(plain), plain["targets"], plain["data"]["seq_len"]
    shown = min(sequences, plain["run_sequences"])
    batch = data.builder.batch([data.order.row(i) for i in range(shown)], documents=True)
    total = sum(targets.values())
    shares = listed([f"{percent(count / total, 3)} {name}" for name, count in targets.items()])
    summary = (
        f"Read: the first {plain['sequences']:,} of the run's {plural(plain['run_sequences'], 'sequence')}, with"
        f" {plural(total, 'target')}; {percent(plain['padding'], 3)} of the positions are padding."
    )
    content = {
        "name": name,
        "title": f"The targets are {shares or 'no'} tokens, in sequences of {length:,} positions",
        "summary": summary,
        "rows": rows,
        "words": SLOT_WORDS,
        "plain": plain,
        "command": command,
        "config": yaml.safe_dump(plain["data"], sort_keys=False, allow_unicode=True).strip(),
        **sequence_views(run, data, batch, range(shown), range(shown)),
    }
    files = {"index.html": report.render("inspect.html", content, TEMPLATES, FILTERS), "statistics.json": plain}
    cells = text_table([["", *plain["modalities"]], *([label, *cells] for label, _, cells in rows)], {0})
    notes = ["", *(note for _, note, _ in rows)]
    table = [f"{line}  {note}".rstrip() for line, note in zip(cells, notes, strict=True)]
    return files, [*filter(None, [data.few_held_out()]), summary, "", *table]


def statistics_rows(plain: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Return the table of statistics: label, note, and one cell per modality."""
    table: list[tuple[str, str, Callable[[str, dict[str, Any]], str]]] = [
        ("targets", "predicted tokens that were read", lambda m, s: f"{plain['targets'][m]:,}"),
        ("share", "of all targets", lambda m, s: percent(s["share"], 3)),
        ("ids used", "of the block", lambda m, s: f"{s['used']:,} of {s['block']:,}"),
        ("uniform", "ln of the block size, nats per token", lambda m, s: nats(math.log(s["block"]))),
        ("sample", "tokens of the estimates below", lambda m, s: f"{s['tokens']:,}"),
        ("unigram entropy", "nats per token, Miller-Madow", lambda m, s: nats(s["unigram"])),
        ("loss weight", "0: no loss", lambda m, s: f"{plain['loss_weights'][m]:g}"),
    ]
    if dial := plain.get("dial"):
        table[-1:-1] = [
            ("true loss", "−log p of these targets, nats", lambda m, s: f"{dial['met'][m]:.3f}"),
            ("floor", "mean over all tokens, nats", lambda m, s: f"{dial['floors'][m]:.3f}"),
        ]
    return [(label, note, [cell(m, s) for m, s in plain["modalities"].items()]) for label, note, cell in table]


def sequence_views(
    run: RunConfig, data: TokenDataModule, batch: TokenBatch, numbers: Sequence[int], places: Sequence[int]
) -> dict[str, Any]:
    """Return the sequences of a page: those at ``places`` of a batch, whose numbers in the order are ``numbers``."""
    layout, order = data.builder.layout, data.order
    decoder = IdDecoder(run.data.tokenizers_folder) if "pair" in run.data.family else None
    widths = run.data.dial.grid if "dial" in run.data.family else {}
    viewer = Viewer(layout, loss_weights(run), decoder, widths)
    original = originals(find_file(run.data.pairs), decoder.image_size) if decoder and run.data.pairs else None
    sequences = []
    for index, place in zip(numbers, places, strict=True):
        contents = order.contents(index)
        pictured = [(n, c.item) for n, c in enumerate(contents) if c.kind in ("pair", "image")] if original else []
        view = viewer.view(batch, place, {n: original(item) for n, item in pictured if original is not None})
        heads = [_head(data, c) for c in contents]
        if len(heads) != len(view["documents"]):  # a text window, the dial, or rows that data.patch has changed
            heads = [""] * len(view["documents"])
        filled, length = view["filled"], run.data.seq_len
        packed = f" · {len(heads)} documents" if len(heads) > 1 else ""
        targets = listed(view["targets"]) or "none"
        view["facts"] = f"{filled:,} of {length:,} positions filled, {length - filled:,} padding{packed}"
        view["facts"] += f" · targets: {targets}"
        view["documents"] = list(zip(heads, view["documents"], strict=True))
        sequences.append({"index": index, "slot": SLOT_WORDS[order.mixture.draw(index).slot], **view})
    colors, specials = viewer.colors, bool(layout.specials)
    return {"seed": run.seed, "data": run.data, "sequences": sequences, "colors": colors, "specials": specials}


def loss_weights(run: RunConfig) -> dict[str, float]:
    """Return the loss weight of each modality."""
    return dict(zip(run.model.vocab_sizes, run.loss.weights_of(run.model.modalities), strict=True))


def _head(data: TokenDataModule, content: Content) -> str:
    """Return the label of a document with its index in the source and what of it is cut."""
    kind, item = content.kind, content.item
    if kind == "image":
        return f"Image of pair {item:,}"
    store = data.builder.stores[kind]
    if kind == "pair":
        words, room = len(store[item]) - store.image_tokens - 1, data.builder.caption_room
        return f"Pair {item:,}" + (f", caption cut: {room:,} of its {words:,} tokens fit" if words > room else "")
    length = int(store.lengths_N[item])
    whole = content.end - content.start >= length
    return f"Document {item:,}" + ("" if whole else f", tokens {content.start:,} to {content.end - 1:,} of {length:,}")


def read(run: RunConfig, data: TokenDataModule, tokens: int) -> dict[str, Any]:
    """Read the first sequences of a run, up to ``tokens`` tokens or to the end of the run.

    Args:
        run: configuration of the run.
        data: data module of the run, after its setup.
        tokens: number of tokens to read.

    Returns:
        The content of statistics.json. ``modalities`` has the statistics of each modality. Repeated documents would
        bias them, so they are computed only over the sequences in the first epoch of their source;
        ``fresh_sequences`` is the number of these sequences. ``share``, the share of the targets, is computed over
        all sequences. ``dial.met`` is the mean -log p of the targets under the synthetic source, in nats.
    """
    order, layout = data.order, data.builder.layout
    total = run.trainer.max_steps * run.data.batch_size
    rows, left = list[Row](), tokens
    while left > 0 and len(rows) < total:
        rows.append(order.row(len(rows)))
        left -= len(rows[-1].ids)
    fresh = [row for i, row in enumerate(rows) if order.is_fresh(i)]
    targets = {name: count for name, count in count_targets(rows, layout).items() if count}
    total_targets = max(1, sum(targets.values()))
    slots = Counter(order.mixture.draw(i).slot for i in range(len(rows)))
    filled = sum(len(row.ids) for row in rows)
    plain: dict[str, Any] = {
        "data": {k: v for k, v in asdict(run.data).items() if k != "dial" or "dial" in run.data.family},
        "seed": run.seed,
        "vocab_sizes": dict(run.model.vocab_sizes),
        "sequences": len(rows),
        "fresh_sequences": len(fresh),
        "run_sequences": total,
        "targets": targets,
        "loss_weights": loss_weights(run),
        "padding": 1 - filled / (len(rows) * data.builder.seq_len),
        "padding_of_packing": order.padding,
        "captions_cut": data.builder.captions_cut,
        "modalities": {
            name: {**asdict(s), "share": targets[name] / total_targets} for name, s in describe(fresh, layout).items()
        },
        "mixture": [
            {"slot": slot, "configured": places / CYCLE, "read": slots[slot] / len(rows)}
            for slot, places in order.mixture.counts.items()
            if places
        ],
        "sources": _sources(run, data, total),
        "dropped": {k: read_header(f).dropped for k, f in folders_of(run.data).items() if is_token_folder(f)},
    }
    if "dial" in run.data.family:
        dial = Dial(run.data.dial)
        table = dial.describe(filled * total // len(rows))
        plain["dial"] = {"floors": dial.floors(), "met": floors(rows, layout), "table": table}
    return plain


def _sources(run: RunConfig, data: TokenDataModule, total: int) -> list[dict[str, Any]]:
    """Return for each kind its documents and tokens by split, its sequences per epoch, and its epochs in the run.

    ``total`` is the number of sequences of the run.
    """
    if "dial" in run.data.family:
        return []
    share = {kind: weight / sum(run.data.mix.values()) for kind, weight in run.data.mix.items()}
    epoch_rows = data.order.rows_of_an_epoch
    rows = []
    for kind, stores in data.stores.items():
        entry: dict[str, Any] = {"kind": kind, "folder": str(folders_of(run.data)[kind])}
        for split in ("train", "val"):
            entry |= {f"{split}_documents": len(stores[split]), f"{split}_tokens": stores[split].tokens}
        # A folder of pairs serves two kinds: pairs, and images without captions.
        entry["read_as"] = {
            k: {"sequences_an_epoch": epoch_rows[k], "epochs": share[k] * total / epoch_rows[k]}
            for k in (("pair", "image") if kind == "pair" else (kind,))
            if share.get(k, 0) > 0
        }
        rows.append(entry)
    return rows


def folders_of(config: DataConfig) -> dict[str, Path]:
    """Return the folder of each kind of source."""
    return {"tokens": Path(config.tokens)} if "tokens" in config.family else config.sources
