"""Style of the figures: color shows the arm and line style the modality, in the same way in all figures of a page.

If the arms are points of a few families, each family has a color, and its arms have shades of this color, which
become darker along the axis. If there are more arms than colors, the arms that no figure or claim names are gray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb

from mmqk.lab.page.figures.shapes import Key
from mmqk.lab.verdicts.study import Study

# The Okabe-Ito palette for color-blind readers; yellow is last, because it is faint on white.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
# For the arms after the first eight: the muted palette of Paul Tol, also for color-blind readers, and then his light
# palette.
MORE = (
    *("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#117733", "#6699CC"),
    *("#EE8866", "#AAAA00", "#77AADD", "#FFAABB", "#BBCC33"),
)
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (6, 1.5, 1, 1.5)), (0, (1, 1)))
INK, FAINT = "#1b1f24", "#8b929b"

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    # Dollar signs are plain text in labels, not mathematics.
    "text.parse_math": False,
    "axes.labelsize": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.labelpad": 3,
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


GRAY = "#b3bac2"
PALEST = 0.62


def families(study: Study) -> dict[str, list[str]]:
    """Return the arms by family, sorted by their points."""
    groups: dict[str, list[str]] = {}
    for arm in study.arms.values():
        groups.setdefault(arm.family or arm.name, []).append(arm.name)
    for arms in groups.values():
        arms.sort(key=lambda name: [_order(value) for value in study.arms[name].point.values()])
    return groups


def _order(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def arm_colors(study: Study) -> dict[str, str]:
    """Return one color per arm, the same on the whole page."""
    groups = families(study)
    # The palette is small: the arms of the first figures and of the claims get its colors first.
    family_of = {arm: family for family, members in groups.items() for arm in members}
    few = len(groups) <= len(PALETTE)
    order = list(groups) if few else list(dict.fromkeys(family_of[arm] for arm in _first(study)))
    base = dict(zip(order, [*PALETTE, *MORE, *[GRAY] * len(order)], strict=False))
    colors: dict[str, str] = {}
    for family, arms in groups.items():
        for j, arm in enumerate(arms):
            pale = PALEST * (1 - j / (len(arms) - 1)) if len(arms) > 1 else 0.0
            colors[arm] = _blend(base[family], pale) if base[family] != GRAY else GRAY
    return colors


def _first(study: Study) -> list[str]:
    """Return all arms; those of the first figures and of the claims come first."""
    claimed = [arm.name for claim in study.claims for name in claim.compared for arm in study.arms_of(name)]
    return list(dict.fromkeys([*study.hero, *study.outcomes, *claimed, *study.shown, *study.arms]))


def _blend(color: str, white: float) -> str:
    red, green, blue = (channel + (1 - channel) * white for channel in to_rgb(color))
    return to_hex((red, green, blue)).upper()


def ramp(count: int) -> list[str]:
    """Return ``count`` colors for an ordered quantity, light to dark, readable on white."""
    return [to_hex(colormaps["viridis_r"](0.12 + 0.88 * i / max(count - 1, 1))) for i in range(count)]


def modality_styles(study: Study) -> dict[str, Any]:
    """Return the line style of each modality."""
    return {m: STYLES[i % len(STYLES)] for i, m in enumerate(study.modalities)}


def legend(study: Study, arms: Sequence[str], modalities: Sequence[str] = ()) -> tuple[Key, ...]:
    """Return the meaning of colors and dashes: one entry per arm, or per family if the arms are many."""
    colors = arm_colors(study)
    groups = {family: [arm for arm in members if arm in arms] for family, members in families(study).items()}
    of_family = {family: members for family, members in groups.items() if members}
    if len(arms) > len(PALETTE) and len(of_family) < len(arms):
        darker = ", darker: further along its axis"
        keys = [
            Key(study.label(family) + (darker if len(members) > 1 else ""), colors[members[-1]])
            for family, members in of_family.items()
        ]
    else:
        colored = [arm for arm in arms if colors.get(arm, INK) != GRAY]
        rest = [arm for arm in arms if arm not in colored]
        keys = [Key(study.label(arm), colors.get(arm, INK)) for arm in colored]
        if rest:
            others = f"{len(rest)} other arms" if colored else f"{len(rest)} arms"
            keys.append(Key(others if len(rest) > 1 else study.label(rest[0]), GRAY))
    if len(modalities) > 1:
        styles = modality_styles(study)
        keys += [Key(m, INK, styles[m]) for m in modalities]
    return tuple(keys)
