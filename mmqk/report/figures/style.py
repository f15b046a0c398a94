"""How figures look: colour is arm, line style is modality, on every figure of a page.

Where arms are points of a few families, the family has the colour and the point its shade: the further along the
axis the darker. More arms than there are colours are grey, but for the few that a figure is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb

from mmqk.analysis.verdicts.study import Study
from mmqk.report.figures.shapes import Key

# Okabe and Ito's palette, which keeps apart for colour-blind eyes; its yellow is last, being faint on white.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (6, 1.5, 1, 1.5)), (0, (1, 1)))
DASHES = ("", "7 3", "9 2.5 2 2.5", "2 2")
INK, FAINT = "#1b1f24", "#8b929b"

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    # A dollar in a label is a dollar; ticks are written out.
    "text.parse_math": False,
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


GREY = "#b3bac2"
PALEST = 0.62


def families(study: Study) -> dict[str, list[str]]:
    """The arms by family, each family's in the order of their points."""
    found: dict[str, list[str]] = {}
    for arm in study.arms.values():
        found.setdefault(arm.family or arm.name, []).append(arm.name)
    for arms in found.values():
        arms.sort(key=lambda name: [_order(value) for value in study.arms[name].point.values()])
    return found


def _order(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def arm_colours(study: Study) -> dict[str, str]:
    """A colour an arm, the same on the whole page."""
    groups = families(study)
    # Colours are few: what the first figure and the claims are about has them before the others.
    family_of = {arm: family for family, members in groups.items() for arm in members}
    few = len(groups) <= len(PALETTE)
    order = list(groups) if few else list(dict.fromkeys(family_of[arm] for arm in _first(study)))
    base = dict(zip(order, [*PALETTE, *[GREY] * len(order)], strict=False))
    colours: dict[str, str] = {}
    for family, arms in groups.items():
        for j, arm in enumerate(arms):
            pale = PALEST * (1 - j / (len(arms) - 1)) if len(arms) > 1 else 0.0
            colours[arm] = _blend(base[family], pale) if base[family] != GREY else GREY
    return colours


def _first(study: Study) -> list[str]:
    """The arms, those of the first figure and of claims before the others."""
    claimed = [arm.name for claim in study.claims for name in claim.compared for arm in study.arms_of(name)]
    return list(dict.fromkeys([*study.hero, *claimed, *study.shown, *study.arms]))


def _blend(colour: str, white: float) -> str:
    red, green, blue = (channel + (1 - channel) * white for channel in to_rgb(colour))
    return to_hex((red, green, blue)).upper()


def ramp(count: int) -> list[str]:
    """So many colours for an ordered quantity, light to dark, none too faint on white."""
    return [to_hex(colormaps["viridis_r"](0.12 + 0.88 * i / max(count - 1, 1))) for i in range(count)]


def modality_dashes(study: Study) -> dict[str, str]:
    """The line style of a modality as an SVG dash array, for legends."""
    return {m: DASHES[i % len(DASHES)] for i, m in enumerate(study.modalities)}


def legend(study: Study, arms: Sequence[str], modalities: Sequence[str] = ()) -> tuple[Key, ...]:
    """What colours and dashes mean: an entry an arm, or a family where arms are points of one."""
    colours = arm_colours(study)
    groups = {family: [arm for arm in members if arm in arms] for family, members in families(study).items()}
    of_family = {family: members for family, members in groups.items() if members}
    if len(arms) > len(PALETTE) and len(of_family) < len(arms):
        keys = [
            Key(
                study.label(family) + (", darker: further along its axis" if len(members) > 1 else ""),
                colours[members[-1]],
                arms=tuple(members),
            )
            for family, members in of_family.items()
        ]
    else:
        own = [arm for arm in arms if colours.get(arm, INK) != GREY]
        rest = tuple(arm for arm in arms if arm not in own)
        keys = [Key(study.label(arm), colours.get(arm, INK), arms=(arm,)) for arm in own]
        if rest:
            others = f"{len(rest)} other arms" if own else f"{len(rest)} arms"
            keys.append(Key(others if len(rest) > 1 else study.label(rest[0]), GREY, arms=rest))
    if len(modalities) > 1:
        dashes = modality_dashes(study)
        keys += [Key(m, INK, dashes[m], 2) for m in modalities]
    return tuple(keys)
