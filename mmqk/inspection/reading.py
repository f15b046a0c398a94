"""Read the first sequences of a run and count: mixture, sources, targets and statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmqk.data.datamodule import TokenDataModule
from mmqk.data.mixture import CYCLE, SLOTS
from mmqk.data.order.sequences import Row
from mmqk.data.statistics import CONTEXT, ModalityStatistics, describe
from mmqk.data.synthetic.dial import Dial
from mmqk.data.tokens.folder import is_token_folder, read_header

if TYPE_CHECKING:
    from mmqk.config import RunConfig

WINDOW = 300
"""Sequences over which the mixture is compared with its configured shares."""
LEAST_DRAWS = 4 * WINDOW


@dataclass(frozen=True)
class Reading:
    """The first sequences of a run and their counts.

    Attributes:
        rows: the sequences, from the first of the run.
        run_sequences: sequences of the whole run.
        fresh: number of rows from the first epoch of their source; the statistics use these rows only, because
            repeated documents bias them.
        statistics: of the fresh rows by modality; ``share`` is the share of the targets of all rows.
        targets: number of targets of all rows by modality.
        padding: share of the positions that are padding.
        mixture: by slot: the configured share, the share in the first cycle, the least and the most of any window.
        sources: by kind: documents and tokens by split, sequences per epoch, and epochs of the run.
        dropped: number of samples that are missing from a source, by kind and reason.
        known: mean -log p of the targets under the source by modality, nats; empty if the source has no p.
    """

    rows: list[Row]
    run_sequences: int
    fresh: int
    statistics: dict[str, ModalityStatistics]
    targets: dict[str, int]
    padding: float
    mixture: list[dict[str, Any]]
    sources: list[dict[str, Any]]
    dropped: dict[str, dict[str, int]]
    known: dict[str, float]


def read(run: RunConfig, data: TokenDataModule, tokens: int, grid: int = 0) -> Reading:
    """Read the first sequences of a run, up to ``tokens`` tokens or to the end of the run.

    Args:
        run: configuration of the run.
        data: its data module, set up.
        tokens: number of tokens.
        grid: columns of the codes of an image; 0 without images.
    """
    order, layout = data.order, data.builder.layout
    total = int(run.trainer["max_steps"]) * run.data.batch_size
    epoch_rows = order.rows_of_an_epoch
    rows, fresh, left = [], [], tokens
    for index in range(total):
        row = order.row(index)
        rows.append(row)
        if order.is_fresh(index):
            fresh.append(row)
        left -= len(row.ids)
        if left <= 0:
            break
    targets = _by_modality(rows, layout.modality, list(layout.vocab_sizes))
    statistics = describe(documents(fresh), documents(data.val_rows), layout.vocab_sizes, contexts(run, grid))
    share = {name: count / max(1, sum(targets.values())) for name, count in targets.items()}
    draws = [order.mixture.draw(i).slot for i in range(max(len(rows), LEAST_DRAWS))]
    return Reading(
        rows=rows,
        run_sequences=total,
        fresh=len(fresh),
        statistics={name: replace(s, share=share[name]) for name, s in statistics.items()},
        targets=targets,
        padding=1 - sum(len(row.ids) for row in rows) / (len(rows) * data.builder.seq_len),
        mixture=_mixture(run, draws),
        sources=_sources(run, data, epoch_rows, total),
        dropped=_dropped(run, data),
        known=_known(rows, layout.modality, list(layout.vocab_sizes)),
    )


def documents(rows: list[Row]) -> Iterator[np.ndarray]:
    """The ids of every document in these rows."""
    for row in rows:
        yield from np.split(row.ids, row.starts[1:])


def contexts(run: RunConfig, grid: int) -> list[tuple[int, ...]]:
    """Contexts of the n-gram model: the tokens before; also the parent (dial) or the token above (images)."""
    if "dial" in run.data.family:
        dial = run.data.dial
        return [CONTEXT, *{(dial.lag[m] * (dial.grid.get(m, 0) or 1),): None for m in dial.names}]
    return [CONTEXT, (1, grid)] if grid > max(CONTEXT) else [CONTEXT]


def _by_modality(rows: list[Row], modality, names: list[str]) -> dict[str, int]:
    counts = np.zeros(len(names), dtype=int)
    for row in rows:
        counts += np.bincount(modality(np.delete(row.ids, row.starts)), minlength=len(names))
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count}


def _known(rows: list[Row], modality, names: list[str]) -> dict[str, float]:
    if any(row.surprise is None for row in rows):
        return {}
    ids = np.concatenate([np.delete(row.ids, row.starts) for row in rows])
    nats = np.concatenate([np.delete(row.surprise, row.starts) for row in rows if row.surprise is not None])
    block = modality(ids)
    return {name: float(nats[block == m].mean()) for m, name in enumerate(names) if (block == m).any()}


def _mixture(run: RunConfig, draws: list[str]) -> list[dict[str, Any]]:
    mix, total = run.data.mix, sum(run.data.mix.values())
    pair = mix.get("pair", 0.0)
    wanted = {SLOTS[0]: pair * run.data.image_first_prob, SLOTS[1]: pair * (1 - run.data.image_first_prob)}
    wanted |= {kind: mix.get(kind, 0.0) for kind in SLOTS[2:]}
    rows = []
    for slot, weight in wanted.items():
        if weight > 0:
            here = np.cumsum([0, *(d == slot for d in draws)])
            windows = (here[WINDOW:] - here[:-WINDOW]) / WINDOW
            first = here[CYCLE] / CYCLE
            rows.append(
                {
                    "slot": slot,
                    "configured": weight / total,
                    f"first {CYCLE}": float(first),
                    "least": float(windows.min()),
                    "most": float(windows.max()),
                }
            )
    return rows


def _sources(
    run: RunConfig, data: TokenDataModule, epoch_rows: dict[str, int], total: int
) -> list[dict[str, Any]]:
    if "dial" in run.data.family:
        return []
    share = {kind: weight / sum(run.data.mix.values()) for kind, weight in run.data.mix.items()}
    rows = []
    folders = run.data.sources or {"tokens": Path(run.data.tokens)}
    for kind, stores in data.stores.items():
        entry: dict[str, Any] = {"kind": kind, "folder": str(folders[kind])}
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


def _dropped(run: RunConfig, data: TokenDataModule) -> dict[str, dict[str, int]]:
    folders = run.data.sources
    if "tokens" in run.data.family:
        folders = {"tokens": Path(run.data.tokens)}
    dropped = {k: read_header(folder)["dropped"] for k, folder in folders.items() if is_token_folder(folder)}
    if data.skipped:  # of the sequences read
        dropped["pair"] = dict(Counter(data.skipped.values()))
    return dropped


def record(reading: Reading, run: RunConfig, data: TokenDataModule) -> dict[str, Any]:
    """A reading as plain data, the content of statistics.json."""
    weights = dict(zip(run.model.vocab_sizes, run.loss.weights_of(run.model.modalities), strict=True))
    config = {k: v for k, v in asdict(run.data).items() if k != "dial" or "dial" in run.data.family}
    plain: dict[str, Any] = {
        "data": config,
        "seed": run.seed,
        "vocab_sizes": dict(run.model.vocab_sizes),
        "sequences": len(reading.rows),
        "fresh_sequences": reading.fresh,
        "run_sequences": reading.run_sequences,
        "targets": reading.targets,
        "loss_weights": weights,
        "padding": reading.padding,
        "padding_of_packing": data.order.padding,
        "captions_cut": data.builder.captions_cut,
        "modalities": {name: asdict(s) for name, s in reading.statistics.items()},
        "mixture": reading.mixture,
        "sources": reading.sources,
        "dropped": reading.dropped,
    }
    if "dial" in run.data.family:
        dial = Dial(run.data.dial)
        tokens = sum(len(row.ids) for row in reading.rows) * reading.run_sequences // len(reading.rows)
        plain["dial"] = {"floors": dial.floors(), "met": reading.known, "table": dial.describe(tokens)}
    return plain
