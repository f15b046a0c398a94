"""How figures look: colour is arm, line style is modality, on every figure of a page."""

from __future__ import annotations

from typing import Any

from mmqk.analysis.study import Study

# Okabe and Ito's palette, which keeps apart for colour-blind eyes; its yellow is last, being faint on white.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (6, 1.5, 1, 1.5)), (0, (1, 1)))
DASHES = ("", "7 3", "9 2.5 2 2.5", "2 2")
INK, FAINT = "#1b1f24", "#8b929b"

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ec",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "svg.fonttype": "none",
    "svg.hashsalt": "mmqk",
    "path.simplify": True,
}


def arm_colours(study: Study) -> dict[str, str]:
    """A colour an arm, the same on the whole page."""
    return {arm: PALETTE[i % len(PALETTE)] for i, arm in enumerate(study.arms)}


def modality_dashes(study: Study) -> dict[str, str]:
    """The line style of a modality as an SVG dash array, for legends."""
    return {m: DASHES[i % len(DASHES)] for i, m in enumerate(study.modalities)}
