"""Compute the rows of the tables of the page, as text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from mmqk.lab.formatting import DASH, capital, listed, nats, number, plural, slug
from mmqk.lab.metrics import (
    FamilyMetric,
    Metric,
    best_loss,
    final_loss,
    find_metric,
    initial_loss,
    is_trained,
    learned,
    unigram_entropy,
)
from mmqk.lab.page.compared import as_text
from mmqk.lab.page.figures.claims import claim_arms, claim_runs, of_family
from mmqk.lab.page.findings import MARKS, effect_in_cell, finding, medians, p_values
from mmqk.lab.page.run_table import anchor
from mmqk.lab.runs.load import Run
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import Verdict, effect_tested, middle

# A cell with more links to runs than MOST_LINKS, or with more arms than MOST_ARMS, has one link to the section of the
# claim instead.
MOST_LINKS, MOST_ARMS = 24, 4


def verdict_rows(study: Study, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return one row per claim, with the values of its section: what was registered, and the result of each run."""
    rows = []
    for verdict in verdicts:
        claim = verdict.claim
        measured, by_arm = medians(study, verdict)
        seeds, outcomes = outcome_rows(study, verdict)
        registered = [
            ("Registered as", claim.status),
            ("Metric", claim.metric),
            ("Estimand", claim.estimand),
            ("Would contradict", claim.would_contradict),
            ("Not checked", listed(claim.not_checked)),
            ("Exclusions", claim.exclusions),
        ]
        rows.append(
            {
                "id": claim.id,
                "slug": slug(claim.id),
                "finding": finding(study, verdict) if claim.decided else "",
                "statement": f"{capital(claim.statement).rstrip('.')}.",
                "source": claim.source,
                "source_access": claim.source_access,
                "reference_value": claim.reference_value or DASH,
                "effect": effect_in_cell(verdict),
                "tested": effect_tested(claim),
                "treatment": study.label(claim.treatment),
                "control": study.label(claim.control),
                "p": p_values(verdict),
                "measured": measured,
                "medians": by_arm,
                "verdict": verdict.badge,
                "css": verdict.badge.replace(" ", "-"),
                "unchecked": listed(claim.not_checked) if claim.decided else "",
                "why": verdict.why.rstrip("."),
                "note": " ".join(note for note in verdict.notes if note != verdict.why),
                "controls": verdict.controls,
                "runs": _run_links(study, verdict),
                "metric": claim.metric,
                "seeds": seeds,
                "outcomes": outcomes,
                "registered": [(name, str(value).rstrip(".")) for name, value in registered if value],
            }
        )
    return rows


def outcome_rows(study: Study, verdict: Verdict) -> tuple[list[int], list[dict[str, Any]]]:
    """Return (seeds, one row per arm): the result of each run of a claim, by seed.

    For a family metric: one row per family with its number, then one row per arm with its final losses.
    """
    metric, modality = find_metric(verdict.claim.metric)
    runs = claim_runs(study, verdict)
    seeds = sorted({run.seed for run in runs})
    by_arm: dict[str, dict[int, list[Run]]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, {}).setdefault(run.seed, []).append(run)
    rows: list[dict[str, Any]] = []
    family = ""
    for arm, by_seed in by_arm.items():
        if isinstance(metric, FamilyMetric) and study.arms[arm].family != family:
            family = study.arms[arm].family
            members = [run for run in runs if run.family == family]
            values = [of_family(study, verdict, members, seed) for seed in seeds]
            cells = [[{"anchor": "", "text": number(value), "diverged": False}] for value in values]
            rows.append({"label": f"{study.label(family)}: {metric.label}", "arm": arm, "cells": cells})
        rows.append(
            {
                "label": study.label(arm),
                "arm": arm,
                "cells": [
                    [
                        {
                            "anchor": anchor(run),
                            "text": _outcome(run, metric, modality),
                            "diverged": run.status.status == "diverged",
                        }
                        for run in by_seed.get(seed, ())
                    ]
                    for seed in seeds
                ],
            }
        )
    return seeds, rows


def _outcome(run: Run, metric: Metric | FamilyMetric, modality: str | None) -> str:
    if not isinstance(metric, FamilyMetric):
        return number(metric.measure(run, modality))
    value = final_loss(run, modality).value if modality else math.nan
    return f"{nats(value)} nats" if math.isfinite(value) else run.status.status


def _run_links(study: Study, verdict: Verdict) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the links to the runs of a claim by arm; if there are too many, one link to the section of the claim."""
    runs, arms = claim_runs(study, verdict), claim_arms(study, verdict)
    if len(runs) > MOST_LINKS or len(arms) > MOST_ARMS:
        section = {"seed": verdict.claim.id, "anchor": f"claim-{slug(verdict.claim.id)}"}
        return [(f"{len(runs)} runs of {plural(len(arms), 'arm')}, listed in section", [section])]
    return [
        (f"{study.label(arm)}, seed", [{"seed": r.seed, "anchor": anchor(r)} for r in runs if r.arm == arm])
        for arm in arms
    ]


def used_marks(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Return the marks in the table that show how a source was read, with their meanings."""
    used = {v.claim.source_access for v in verdicts}
    return [(mark, meaning) for mark, meaning in MARKS.items() if mark in used]


def arm_rows(study: Study, colors: dict[str, str]) -> list[dict[str, Any]]:
    """Return one row per arm and modality: the first and final loss, and whether the runs learned."""
    rows = []
    for arm in study.arms:
        runs = [run for run in study.ended(arm) if run.tags]
        for modality in study.losses if runs else ():
            ends = [final_loss(run, modality) for run in runs]
            values = [end.value for end in ends if math.isfinite(end.value)]
            # If a monitored model has no recorded losses, it is unknown whether it learned.
            losses = any(
                len(run.series(f"{name}/{modality}")[0]) for run in runs for name in ("loss", "val_loss")
            )
            star = "" if all(end.held_out for end in ends) else "*"
            rows.append(
                {
                    "first": modality == study.losses[0],
                    "label": study.label(arm),
                    "anchor": f"arm-{slug(arm)}",
                    "color": colors[arm],
                    "modality": modality,
                    "initial": _nats(middle(initial_loss(run, modality) for run in runs)),
                    "unigram": _nats(middle(unigram_entropy(run, modality) for run in runs)),
                    "final": _nats(middle(values)) + (star if values else ""),
                    "excess": _nats(middle(final_loss(run, modality, "excess").value for run in runs)),
                    "range": f"{nats(min(values))} to {nats(max(values))}" if len(values) > 1 else DASH,
                    "learned": f"{sum(learned(run, modality) for run in runs)} of {len(runs)}"
                    if losses
                    else DASH,
                    "trained": ("yes" if all(is_trained(run, modality) for run in runs) else "no")
                    if losses
                    else DASH,
                }
            )
    return rows


def data_rows(study: Study, sample: bool = False) -> list[dict[str, Any]]:
    """Return how predictable the tokens are: one row per modality and group of arms with the same data.

    With ``sample``, a row also has the number of tokens from which the estimates were made.
    """
    import pandas as pd  # slow to import

    rows = []
    # Newer runs do not store these estimates.
    older = [n for n in ("compressed", "model") if any(n in s for run in study.runs for s in run.data.values())]
    for modality, arm in itertools.product(study.modalities, study.arms):
        runs = [run for run in study.of_arm(arm) if modality in run.data]
        if not runs:
            continue
        statistics = runs[0].data[modality]
        losses = [best_loss(run, modality) for run in runs if is_trained(run, modality)]
        rows.append(
            {
                "modality": modality,
                "share": _share(statistics.get("share")),
                "used": f"{statistics.get('used', 0):,} of {statistics.get('block', 0):,}",
                **{name: _entropy(statistics.get(name)) for name in ("unigram", *older, "floor")},
                "repeated": _share(statistics.get("repeated")),
                **({"sample": _tokens(statistics.get("tokens"))} if sample else {}),
                "arms": study.label(arm),
                "best": min(filter(math.isfinite, losses), default=math.nan),
            }
        )
    if not rows:
        return []
    same = [name for name in rows[0] if name not in ("arms", "best")]
    table = pd.DataFrame(rows).groupby(same, sort=False).agg({"arms": list, "best": "min"}).reset_index()
    quoted = (listed([f"“{arm}”" for arm in arms]) for arms in table["arms"])
    table["arms"] = [
        "all" if len(arms) == len(study.arms) else words for arms, words in zip(table["arms"], quoted, strict=True)
    ]
    table["best"] = [_nats(best) for best in table["best"]]
    return [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False)]


def _entropy(value: Any) -> str:
    return nats(value) if isinstance(value, int | float) else DASH


def _tokens(value: Any) -> str:
    return f"{value:,} tokens" if isinstance(value, int) else DASH


def _share(value: Any) -> str:
    return f"{100 * value:.0f} %" if isinstance(value, int | float) else DASH


def environment(study: Study) -> list[tuple[str, str]]:
    """Return the versions, machine, precision and code of the runs; if the runs differ, list all values."""
    texts: dict[str, Callable[[Run], str]] = {
        "Versions": lambda run: _pairs(run.details.get("versions", {})),
        "Machine": lambda run: _pairs(run.details.get("machine", {})),
        "Precision": lambda run: as_text(run.setting("trainer.precision"), ""),
        "Attention backend": lambda run: as_text(run.setting("backend"), ""),
        "Threads per run": lambda run: as_text(run.setting("threads"), ""),
        "Code": lambda run: run.code,
    }
    rows = [
        (name, " / ".join(dict.fromkeys(filter(None, map(text, study.runs))))) for name, text in texts.items()
    ]
    return [row for row in rows if row[1]]


def _pairs(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {as_text(value, '')}" for name, value in record.items())


def _nats(value: float) -> str:
    return DASH if math.isnan(value) else nats(value)
