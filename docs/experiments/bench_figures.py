"""Draw the figures of docs/bench.md and docs/which_remedy.md.

python -m docs.experiments.bench_figures rules reports/bench/judge.json reports/bench/rules.png
python -m docs.experiments.bench_figures rescue reports/bench/rescue.zip reports/bench/rescue.png
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from mmqk import load_runs
from mmqk.bench.score import Score
from mmqk.bench.traces import WORSE_NATS, outcomes

COLORS = {"saved": "#009E73", "delayed": "#E69F00", "lost": "#D55E00", "": "#b3bac2"}  # Okabe and Ito; gray


def rules(rows: Sequence[Score]) -> Figure:
    """Draw a row per rule and a column per kind of fault, darker for more hits."""
    rows = sorted(rows, key=lambda row: -row.hits)
    kinds = sorted({kind for row in rows for kind in row.kinds})
    shares = np.array([[hits / runs for hits, runs in (row.kinds[kind] for kind in kinds)] for row in rows])
    canvas = Figure(figsize=(3.2 + 0.5 * len(kinds), 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = canvas.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.2, aspect="auto")
    for y, row in enumerate(rows):
        for x, kind in enumerate(kinds):
            hits, runs = row.kinds[kind]
            color = "white" if hits > 0.6 * runs else "#1b1f24"
            axes.text(x, y, f"{hits}/{runs}", ha="center", va="center", fontsize=7, color=color)
    names = [f"{row.rule}  {row.hits / row.faults:.0%}, false {row.accused}/{row.healthy}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_xticks(range(len(kinds)), kinds, fontsize=8, rotation=45, ha="left")
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    return canvas


def rescue(table: pd.DataFrame) -> Figure:
    """Draw a cell for each change, failure and step, split by seed and colored by outcome."""
    columns = sorted({(f, at) for f, at in zip(table["failure"], table["at"], strict=True)})
    changes, seeds = list(dict.fromkeys(table["change"])), sorted(set(table["seed"]))
    canvas = Figure(figsize=(2.2 + 0.75 * len(columns), 1.3 + 0.36 * len(changes)), layout="constrained")
    axes = canvas.subplots()
    for row in table.to_dict("records"):
        x = columns.index((row["failure"], row["at"])) + seeds.index(row["seed"]) / len(seeds)
        y = changes.index(row["change"])
        axes.add_patch(Rectangle((x, y), 1 / len(seeds), 1, fc=COLORS[row["outcome"]], ec="white", lw=1.5))
        text = f"{row['cost']:+.1f}" if math.isfinite(row["cost"]) else "∞"
        axes.text(x + 0.5 / len(seeds), y + 0.5, text, ha="center", va="center", color="white", fontsize=7)
    names = [f"{failure}\n@{at}" if at else failure for failure, at in columns]
    axes.set(xlim=(0, len(columns)), ylim=(len(changes), 0))
    axes.set_xticks(np.arange(len(columns)) + 0.5, names, fontsize=8)
    axes.set_yticks(np.arange(len(changes)) + 0.5, changes, fontsize=8)
    axes.tick_params(length=0)
    keys = [Patch(color=color, label=name or "does not fail without a change") for name, color in COLORS.items()]
    canvas.legend(handles=keys, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    axes.set_xlabel(f"final loss minus that of the healthy run (nats); a run fails if it ends {WORSE_NATS} above it")
    return canvas


def main(kind: str, source: str, png: str) -> None:
    """Draw the scores of ``mmqk bench --json``, or the outcomes of a pack."""
    if kind == "rules":
        canvas = rules([Score(**row) for row in json.loads(Path(source).read_text(encoding="utf-8"))])
    else:
        canvas = rescue(outcomes(load_runs(source)))
    canvas.savefig(png, metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
