"""Read the first sequences of a run and measure their mixture, sources, targets and statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmqk.data.datamodule import TokenDataModule, documents, targets_by_modality
from mmqk.data.mixture import CYCLE, SLOTS
from mmqk.data.statistics import describe
from mmqk.data.synthetic.dial import Dial
from mmqk.data.tokens.folder import is_token_folder, read_header

if TYPE_CHECKING:
    from mmqk.config import RunConfig

WINDOW = 300
"""Number of consecutive sequences over which the mixture is compared with its configured shares."""
LEAST_DRAWS = 4 * WINDOW


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
    total = int(run.trainer["max_steps"]) * run.data.batch_size
    rows, fresh, left = [], [], tokens
    for index in range(total):
        row = order.row(index)
        rows.append(row)
        if order.is_fresh(index):
            fresh.append(row)
        left -= len(row.ids)
        if left <= 0:
            break
    targets, known = targets_by_modality(rows, layout)
    statistics = describe(documents(fresh), documents(data.val_rows), layout.vocab_sizes)
    share = {name: count / max(1, sum(targets.values())) for name, count in targets.items()}
    draws = [order.mixture.draw(i).slot for i in range(max(len(rows), LEAST_DRAWS))]
    filled = sum(len(row.ids) for row in rows)
    dropped = {k: read_header(f)["dropped"] for k, f in _folders(run).items() if is_token_folder(f)}
    if data.skipped:  # samples skipped in the sequences read so far
        dropped["pair"] = dict(Counter(data.skipped.values()))
    plain: dict[str, Any] = {
        "data": {k: v for k, v in asdict(run.data).items() if k != "dial" or "dial" in run.data.family},
        "seed": run.seed,
        "vocab_sizes": dict(run.model.vocab_sizes),
        "sequences": len(rows),
        "fresh_sequences": len(fresh),
        "run_sequences": total,
        "targets": targets,
        "loss_weights": dict(zip(run.model.vocab_sizes, run.loss.weights_of(run.model.modalities), strict=True)),
        "padding": 1 - filled / (len(rows) * data.builder.seq_len),
        "padding_of_packing": order.padding,
        "captions_cut": data.builder.captions_cut,
        "modalities": {name: asdict(replace(s, share=share[name])) for name, s in statistics.items()},
        "mixture": _mixture(run, draws),
        "sources": _sources(run, data, total),
        "dropped": dropped,
    }
    if "dial" in run.data.family:
        dial = Dial(run.data.dial)
        table = dial.describe(filled * total // len(rows))
        plain["dial"] = {"floors": dial.floors(), "met": known, "table": table}
    return plain


def _mixture(run: RunConfig, draws: list[str]) -> list[dict[str, Any]]:
    """Return for each slot (kind of sequence) its configured share, its share in the first `CYCLE` sequences, and its
    lowest and highest share in any `WINDOW` sequences in a row."""
    mix, total = run.data.mix, sum(run.data.mix.values())
    pair = mix.get("pair", 0.0)
    weights = {SLOTS[0]: pair * run.data.image_first_prob, SLOTS[1]: pair * (1 - run.data.image_first_prob)}
    weights |= {kind: mix.get(kind, 0.0) for kind in SLOTS[2:]}
    rows = []
    for slot, weight in weights.items():
        if weight > 0:
            counts = np.cumsum([0, *(d == slot for d in draws)])
            windows = (counts[WINDOW:] - counts[:-WINDOW]) / WINDOW
            rows.append(
                {
                    "slot": slot,
                    "configured": weight / total,
                    f"first {CYCLE}": float(counts[CYCLE] / CYCLE),
                    "least": float(windows.min()),
                    "most": float(windows.max()),
                }
            )
    return rows


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
        entry: dict[str, Any] = {"kind": kind, "folder": str(_folders(run)[kind])}
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


def _folders(run: RunConfig) -> dict[str, Path]:
    return {"tokens": Path(run.data.tokens)} if "tokens" in run.data.family else run.data.sources
