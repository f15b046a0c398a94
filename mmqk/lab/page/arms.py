"""Which arms the figures of a page show, and their colors.

Each arm has a color. If the arms are points of a few families, each family has a color, and its arms have shades of
it, which become darker along the axis. Of more arms than colors, those that no figure or claim names are gray.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb

from mmqk.lab.study import Study

FEW_ARMS, FIRST_ARMS_AT_MOST = 8, 6
# The Okabe-Ito palette for color-blind readers; yellow is last, because it is faint on white.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
# For the arms after the first eight: the muted palette of Paul Tol, also for color-blind readers, and then his light
# palette.
MORE = (
    *("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#117733", "#6699CC"),
    *("#EE8866", "#AAAA00", "#77AADD", "#FFAABB", "#BBCC33"),
)
GRAY = "#b3bac2"
PALEST = 0.62


def first_arms(study: Study) -> tuple[str, ...]:
    """Return the arms of the first figures: those that the grid lists, else those of its claims, else its first six;
    without a grid, all arms."""
    named = _crossed(study, study.named("hero"))
    claimed = _crossed(study, (arm for c in study.claims if c.decided for arm in c.compared))
    shown = set(shown_arms(study))
    rest = [name for name in study.arms if name not in shown][: FIRST_ARMS_AT_MOST if study.registered else None]
    return next((arms for names in (named, claimed, rest, study.arms) if (arms := measured(study, names))), ())


def shown_arms(study: Study) -> tuple[str, ...]:
    """Return the arms that the page shows without a verdict."""
    named = _crossed(study, study.named("shown"))
    return measured(study, named or [arm.name for arm in study.arms.values() if arm.block == "shown"])


def outcome_arms(study: Study) -> tuple[str, ...]:
    """Return the arms whose outcomes the page draws: those that the grid lists, or those of the first figure."""
    return first_arms(study) if study.report.get("outcomes") is True else _crossed(study, study.named("outcomes"))


def later_arms(study: Study) -> tuple[str, ...]:
    """Return the arms of the later figures: those of the first figures if they are few; otherwise the two ends of
    each family's axis, or the arms that have a color."""
    arms = first_arms(study)
    if len(arms) <= FEW_ARMS:
        return arms
    members = [[arm for arm in family if arm in arms] for family in families(study).values()]
    ends = [arm for kept in members if kept for arm in dict.fromkeys((kept[0], kept[-1]))]
    if len(ends) < len(arms) and len(ends) <= FEW_ARMS:
        return tuple(ends)
    colors = arm_colors(study)
    return tuple(arm for arm in arms if colors.get(arm, GRAY) != GRAY)[:FEW_ARMS]


def measured(study: Study, names: Iterable[str]) -> tuple[str, ...]:
    """Return the arms that have runs with metrics."""
    have = {run.arm for run in study.runs if run.tags}
    return tuple(name for name in names if name in have)


def _crossed(study: Study, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(arm.name for name in names for arm in study.arms_of(name)))


def families(study: Study) -> dict[str, list[str]]:
    """Return the arms by family, sorted by their points."""

    def order(name: str) -> list[tuple[float, str]]:
        point = study.arms[name].point.values()
        return [(value, "") if isinstance(value, int | float) else (math.inf, str(value)) for value in point]

    groups: dict[str, list[str]] = {}
    for arm in study.arms.values():
        groups.setdefault(arm.family or arm.name, []).append(arm.name)
    return {family: sorted(arms, key=order) for family, arms in groups.items()}


def arm_colors(study: Study) -> dict[str, str]:
    """Return one color per arm, the same on the whole page."""
    groups = families(study)
    # The palette is small: the arms of the first figures and of the claims get its colors first.
    claimed = [arm.name for claim in study.claims for name in claim.compared for arm in study.arms_of(name)]
    first = dict.fromkeys([*first_arms(study), *outcome_arms(study), *claimed, *shown_arms(study), *study.arms])
    family_of = {arm: family for family, members in groups.items() for arm in members}
    few = len(groups) <= len(PALETTE)
    order = list(groups) if few else list(dict.fromkeys(family_of[arm] for arm in first))
    base = dict(zip(order, [*PALETTE, *MORE, *[GRAY] * len(order)], strict=False))
    colors: dict[str, str] = {}
    for family, arms in groups.items():
        for j, arm in enumerate(arms):
            pale = PALEST * (1 - j / (len(arms) - 1)) if len(arms) > 1 and base[family] != GRAY else 0.0
            red, green, blue = (c + (1 - c) * pale for c in to_rgb(base[family]))
            colors[arm] = GRAY if base[family] == GRAY else to_hex((red, green, blue)).upper()
    return colors


def ramp(count: int) -> list[str]:
    """Return ``count`` colors for an ordered quantity, light to dark, readable on white."""
    return [to_hex(colormaps["viridis_r"](0.12 + 0.88 * i / max(count - 1, 1))) for i in range(count)]
