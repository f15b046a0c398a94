"""Draw figures on the axes of published figures, for comparison.

A grid can name such figures: ``report.figures: [{kind: training_loss, arms: [...], like: "Chameleon Fig. 5b"}]``.
Figures that the grid does not name are drawn if the runs have the numbers for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmqk.lab.formatting import capital, listed, nats
from mmqk.lab.metrics import LOSS_WINDOW, is_trained, model_size
from mmqk.lab.metrics.rates import learning_rate
from mmqk.lab.page.figures.captions import of_medians, verb
from mmqk.lab.page.figures.curves import bin_width, binned, points_a_line
from mmqk.lab.page.figures.shapes import Figure, Key, Panel
from mmqk.lab.page.figures.standard import few_lines, final_norm, hero_arms, lines_caption
from mmqk.lab.page.figures.style import families, legend, ramp
from mmqk.lab.page.figures.sweep_figures import logit_by_size, loss_and_logit_by_lr, lr_sensitivity
from mmqk.lab.page.figures.sweeps import SIZE, alike
from mmqk.lab.runs.load import Run, Series
from mmqk.lab.verdicts.study import Study, as_list
from mmqk.lab.verdicts.verdicts import middle
from mmqk.store import UserError

DROPOUT = ("model.residual_dropout", "model.attn_dropout")
PLACEMENT = ("model.pre_norm", "model.post_norm")
MOST_ARMS = 8
Condition = Callable[[Study, list[Run]], bool]


def paper_figures(study: Study) -> list[Figure]:
    """Draw the figures that the grid names, then the other figures that the runs have the numbers for. While runs of
    the grid are missing or unfinished, a named figure without numbers is left out.

    Raises:
        UserError: the grid names a kind that is unknown, or arms that have no runs for it.
    """
    named = list(filter(None, (_named(study, entry) for entry in study.report.get("figures") or ())))
    taken = {figure.like for figure in named}
    others: list[Figure | None] = []
    for like, (fields, condition) in LOSSES.items():
        if like not in taken and len(arms := _differ(study, fields, condition)) > 1:
            others.append(training_loss(study, arms, like))
    for make, like in (KINDS[kind] for kind in SWEEPS):
        if like not in taken:
            others.append(make(study, (), like))
    return _with_names([*named, *filter(None, others)])


def _named(study: Study, entry: Mapping[str, Any]) -> Figure | None:
    kind = entry.get("kind")
    if kind not in KINDS:
        raise UserError(f"report.figures: kind {kind!r} is unknown: use one of {', '.join(KINDS)}")
    groups = families(study)
    names = as_list(entry.get("arms"))
    if unknown := [arm for arm in names if arm not in study.arms and arm not in groups]:
        raise UserError(f"report.figures: {kind} names the arm {unknown[0]!r}, which the grid does not have")
    arms = tuple(
        dict.fromkeys(arm for name in names for arm in ([name] if name in study.arms else groups[name]))
    )
    make, like = KINDS[kind]
    figure = make(
        study,
        arms or (() if kind in SWEEPS else hero_arms(study)[:MOST_ARMS]),
        str(entry.get("like") or like),
    )
    if figure is None and not study.missing and all(run.status.finished for run in study.runs):
        raise UserError(
            f"report.figures: the runs have no numbers for {kind}: name arms that measured it, or leave it out"
        )
    return figure


def _with_names(figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures with unique file names, made from the names of the corresponding published figures."""
    named: dict[str, Figure] = {}
    for figure in figures:
        base = re.sub(r"[^a-z0-9]+", "-", (figure.like or figure.name).lower()).strip("-") or figure.name
        number, name = 2, base
        while name in named:
            number, name = number + 1, f"{base}-{number}"
        named[name] = replace(figure, name=name)
    return list(named.values())


def output_norm(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Draw the output norm of the last layer by step: Chameleon Fig. 5a."""
    figure = final_norm(study, tuple(arms))
    return figure and replace(figure, like=like)


def training_loss(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Draw the training loss by step, over all tokens and by modality: Chameleon Fig. 5b to 6c."""
    arms = tuple(arm for arm in arms if any(len(run.series("loss")[0]) for run in study.of_arm(arm)))
    runs = [run for arm in arms for run in study.of_arm(arm)]
    if not arms:
        return None
    points = points_a_line(len(runs))
    width = bin_width(study, points)

    def line(tag: str) -> Callable[[Run], Series]:
        return lambda run: binned(run.series(tag), width)

    panels = [
        Panel(
            "loss",
            "All tokens",
            "training loss (nats per token)",
            few_lines(study, arms, "", line("loss")),
        )
    ]
    if len(study.modalities) > 1:
        panels += [
            Panel(
                f"loss/{m}",
                f"{capital(m)} tokens",
                "training loss (nats per token)",
                few_lines(study, _training(study, arms, m), "", line(f"loss/{m}")),
            )
            for m in study.modalities
        ]
    keys = legend(study, arms)
    if len(arms) > 1 and len({study.arms[arm].family for arm in arms}) == 1:
        # If all arms belong to one family, they get a color scale instead of shades of one color.
        colors = dict(zip(arms, ramp(len(arms)), strict=True))
        panels = [
            replace(p, lines=tuple(replace(line, color=colors[line.arm]) for line in p.lines)) for p in panels
        ]
        keys = tuple(Key(study.label(arm), colors[arm]) for arm in arms)
    start = max((p.lines[0].values[0] for p in panels if p.lines), default=math.nan)
    panels = [replace(panel, top=1.15 * start) for panel in panels]
    same = [m for m in study.modalities if _training(study, arms, m) == arms]
    weights = {str(run.setting("loss.weights")) for run in runs}
    mixes = {str(run.setting("data.mix")) for run in runs}
    unlike = len(weights) > 1 or len(mixes) > 1
    tag, which = (f"loss/{same[0]}", f"{same[0]} tokens") if unlike and same else ("loss", "all tokens")
    ends = listed([_end(study, arm, tag) for arm in arms])
    reading = f"The training loss of {which} {verb(study, arms)} at {ends}{of_medians(study, arms)}."
    caption = [lines_caption(study, arms)]
    if width > 1:
        caption.append(f"A point is the mean of {width} steps.")
    if unlike:
        caption.append(
            "“All tokens” are the trained targets of each arm, which differ between arms: compare by modality."
        )
    if any(run.status.status == "diverged" for run in runs):
        caption.append("× marks where a run was stopped as diverged.")
    return Figure("training_loss", reading, " ".join(caption), (tuple(panels),), arms, keys, like)


def _training(study: Study, arms: Sequence[str], modality: str) -> tuple[str, ...]:
    """Return the arms that train on a modality."""
    return tuple(arm for arm in arms if all(is_trained(run, modality) for run in study.of_arm(arm)))


def _end(study: Study, arm: str, tag: str) -> str:
    runs = [run for run in study.ended(arm) if len(run.series(tag)[0])]
    value = middle(float(run.series(tag)[1][-LOSS_WINDOW:].mean()) for run in runs)
    failed = sum(run.status.status == "diverged" for run in runs)
    diverged = f"; {failed} of {len(runs)} diverged" if failed else ""
    return f"{nats(value)} ({study.label(arm)}{diverged})"


def _differ(study: Study, fields: Sequence[str], condition: Condition) -> tuple[str, ...]:
    """Return the arms whose runs differ only in these fields; if there are several such groups of arms, the group
    with the most arms of the first figure."""
    first = set(hero_arms(study))
    best: list[Run] = []
    rank: tuple[float, ...] = (-1,)
    drawn = (run for run in study.runs if run.role == "verdict" and len(run.series("loss")[0]))
    for group in alike(drawn, fields):
        if not condition(study, group):
            continue
        # Among equal groups, take that with the largest model, then the highest learning rate, as in the papers.
        at = [
            max((v for run in group if (v := of(run)) > 0), default=0.0) for of in (model_size, learning_rate)
        ]
        if (score := (len({run.arm for run in group} & first), len(group), *at)) > rank:
            best, rank = group, score
    arms = {run.arm for run in best}
    return tuple(arm for arm in study.arms if arm in arms)[:MOST_ARMS]


def _vary(*blocks: Sequence[str]) -> Condition:
    """Return the condition that the runs differ in each of these blocks of fields."""

    def condition(_study: Study, runs: list[Run]) -> bool:
        values = [{tuple(str(run.setting(f, "")) for f in fields) for run in runs} for fields in blocks]
        return all(len(of_block) > 1 for of_block in values)

    return condition


def _qk_norm(_study: Study, runs: list[Run]) -> bool:
    kinds = {run.setting("model.qk_norm.kind", "none") for run in runs}
    return len(kinds) > 1 and "none" in kinds


def _image_off(study: Study, runs: list[Run]) -> bool:
    others = [m for m in study.modalities if m != "text"]
    return any(len({is_trained(run, m) for run in runs}) > 1 for m in others)


Maker = Callable[[Study, Sequence[str], str], Figure | None]
KINDS: dict[str, tuple[Maker, str]] = {
    "output_norm": (output_norm, "Chameleon Fig. 5a"),
    "training_loss": (training_loss, ""),
    "lr_sensitivity": (lr_sensitivity, "Wortsman Fig. 1"),
    "loss_and_logit_by_lr": (loss_and_logit_by_lr, "Wortsman Fig. 2"),
    "logit_by_size": (logit_by_size, "Wortsman Fig. 9"),
}
SWEEPS = ("lr_sensitivity", "loss_and_logit_by_lr", "logit_by_size")
# Figures of the training loss: (the only fields in which the arms may differ, condition for drawing the figure).
LOSSES: dict[str, tuple[Sequence[str], Condition]] = {
    "Chameleon Fig. 5b": (("model.qk_norm",), _qk_norm),
    "Chameleon Fig. 5c": (DROPOUT, _vary(DROPOUT)),
    "Chameleon Fig. 6a": (SIZE, _vary(SIZE)),
    "Chameleon Fig. 6b": (("loss.weights", "data"), _image_off),
    "Chameleon Fig. 6c": ((*DROPOUT, *PLACEMENT), _vary(DROPOUT, PLACEMENT)),
}
