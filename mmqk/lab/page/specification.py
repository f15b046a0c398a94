"""The specification curve of a page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

import numpy as np

from mmqk.lab.formatting import plural
from mmqk.lab.page.figures.shapes import Figure, Key, Line, Panel
from mmqk.lab.page.figures.style import PALETTE
from mmqk.lab.verdicts.specification import SPECIFIED, Specification
from mmqk.lab.verdicts.study import Study

TICKS = dict(zip(SPECIFIED, ("largest logit", "‖q‖ ‖k‖", "‖q‖", "‖k‖", "‖residual‖", "last layer"), strict=True))
# Share of the width of a column that its points fill; the rest separates the columns.
COLUMN = 0.8


def specification_figure(study: Study, made: Sequence[Specification]) -> Figure | None:
    """Draw the effect for every choice with its 95 % interval: a column for each metric, a color for each claim."""
    if not made:
        return None
    claims = {claim.id: claim for claim in study.claims}
    ids = list(dict.fromkeys(one.claim for one in made))
    colors = {id: PALETTE[i % len(PALETTE)] for i, id in enumerate(ids)}
    metrics = [name for name in SPECIFIED if any(one.metric == name for one in made)]
    lines: list[Line] = []
    for column, name in enumerate(metrics):
        members = sorted((one for one in made if one.metric == name), key=lambda one: one.effect.value)
        for place, one in enumerate(members):
            x = column + COLUMN * ((place + 0.5) / len(members) - 0.5)
            arm, color = claims[one.claim].treatment, colors[one.claim]
            ends = np.exp([one.effect.low, one.effect.high])
            lines.append(Line(arm, "", None, np.array([x, x]), ends, "median", color=color))
            point = np.exp([one.effect.value])
            lines.append(Line(arm, "", None, np.array([x]), point, "median", color=color, marker="o"))
    size = min(claims[id].min_effect for id in ids)
    above = sum(one.effect.low > size for one in made)
    below = sum(one.effect.high < -size for one in made)
    within = sum(-size < one.effect.low and one.effect.high < size for one in made)
    ratio = f"{math.exp(size):.3g}"
    reading = (
        f"Of {plural(len(made), 'specification')}, the interval lies above a factor of {ratio} in {above}, between"
        f" 1/{ratio} and {ratio} in {within}, and below 1/{ratio} in {below}; it contains one of these limits in"
        f" {len(made) - above - within - below}."
    )
    caption = (
        "Ratio of treatment to control for every choice of claim (color), metric (column), window and excluded runs,"
        " with its 95 % interval, sorted within a column. The choices share runs, so they are not independent. A"
        " logit contains a query norm and a key norm: if both grow by a factor of 1.22, it grows by a factor of 1.5."
    )
    panel = Panel(
        "effect", "", "treatment / control", tuple(lines), log=True, xlabel="", x="metric", labeled=True,
        ticks=tuple(TICKS[name] for name in metrics),
    )  # fmt: skip
    keys = tuple(Key(claims[id].statement or id, colors[id], marker="o") for id in ids)
    return Figure("specification", reading, caption, ((panel,),), tuple(claims[id].treatment for id in ids), keys)


def specification_csv(made: Sequence[Specification]) -> str:
    """Return the choices and their effects (log ratios) with 6 digits, one row per specification."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["claim", "metric", "window", "runs", "seeds", "effect", "low", "high"])
    for one in made:
        effect = [f"{value:.6g}" for value in (one.effect.value, one.effect.low, one.effect.high)]
        writer.writerow([one.claim, one.metric, one.window, one.runs, one.effect.n, *effect])
    return out.getvalue()
