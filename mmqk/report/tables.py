"""Rows of the tables of the page, as text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from mmqk.analysis.formatting import DASH, capital, listed, nats, plural, slug
from mmqk.analysis.metrics import (
    best_loss,
    final_loss,
    initial_loss,
    is_trained,
    learnt,
    unigram_entropy,
)
from mmqk.analysis.verdicts.study import Study
from mmqk.analysis.verdicts.verdicts import Verdict, middle
from mmqk.report.figures.claims import claim_arms, claim_runs, outcome_rows
from mmqk.report.findings import MARKS, effect_and_medians, finding, threshold_in_words
from mmqk.report.run_table import anchor

# A cell with more links to runs, or more arms, links to the section of the claim instead.
MOST_LINKS, MOST_ARMS = 24, 4


def verdict_rows(study: Study, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """One row per claim."""
    rows = []
    for verdict in verdicts:
        claim = verdict.claim
        effect, medians = effect_and_medians(study, verdict)
        used = claim_runs(study, verdict)
        runs: list[tuple[str, list[dict[str, Any]]]] = []
        for arm in claim_arms(study, verdict):
            links = [{"seed": run.seed, "anchor": anchor(run)} for run in used if run.arm == arm]
            runs.append((f"{study.label(arm)}, seed", links))
        if len(used) > MOST_LINKS or len(runs) > MOST_ARMS:
            runs = [(f"{len(used)} runs of {plural(len(runs), 'arm')}, listed in", [section_link(claim.id)])]
        rows.append(
            {
                "id": claim.id,
                "slug": slug(claim.id),
                "finding": finding(study, verdict) if claim.decided else "",
                "statement": f"{capital(claim.statement).rstrip('.')}.",
                "source": claim.source,
                "mark": claim.mark,
                "falsifier": claim.falsifier.rstrip("."),
                "number_there": claim.number_there or DASH,
                "effect": effect,
                "medians": medians,
                "threshold": threshold_in_words(verdict),
                "verdict": verdict.verdict,
                "css": verdict.verdict.replace(" ", "-"),
                "note": " ".join(verdict.notes),
                "controls": verdict.controls,
                "runs": runs,
            }
        )
    return rows


def section_link(claim: str) -> dict[str, Any]:
    """A link to the section of a claim, in the form of a link to a run."""
    return {"seed": claim, "anchor": f"claim-{slug(claim)}"}


def claim_sections(study: Study, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """One section per claim: what was registered, and the result of each run."""
    sections = []
    for verdict in verdicts:
        claim = verdict.claim
        seeds, rows = outcome_rows(study, verdict)
        for row in rows:
            for cell in row["cells"]:
                for result in cell:
                    run = result.pop("run")
                    result["anchor"] = anchor(run) if run else ""
        registered = [
            ("Registered as", claim.status),
            ("Metric", claim.metric),
            ("Estimand", getattr(claim, "estimand", "")),
            ("Smallest effect of interest", threshold_in_words(verdict)),
            ("Falsifier", claim.falsifier),
            ("Not checked", listed(claim.not_checked)),
            ("Exclusions", getattr(claim, "exclusions", "")),
        ]
        sections.append(
            {
                "metric": claim.metric,
                "seeds": seeds,
                "outcomes": rows,
                "registered": [(name, str(value).rstrip(".")) for name, value in registered if value],
            }
        )
    return sections


def used_marks(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """The marks in the table, with their meaning."""
    used = {v.claim.mark for v in verdicts}
    return [(mark, meaning) for mark, meaning in MARKS.items() if mark in used]


def arm_rows(study: Study, colors: dict[str, str]) -> list[dict[str, Any]]:
    """One row per arm and modality: the first and final loss, and whether the runs learned."""
    rows = []
    for arm in study.arms:
        runs = [run for run in study.ended(arm) if run.tags]
        for modality in study.modalities if runs else ():
            ends = [final_loss(run, modality) for run in runs]
            values = [end.value for end in ends if math.isfinite(end.value)]
            # A monitored model without recorded losses: whether it learned is unknown.
            losses = any(
                len(run.series(f"{name}/{modality}")[0]) for run in runs for name in ("loss", "val_loss")
            )
            star = "" if all(end.held_out for end in ends) else "*"
            rows.append(
                {
                    "first": modality == study.modalities[0],
                    "label": study.label(arm),
                    "anchor": f"arm-{slug(arm)}",
                    "color": colors[arm],
                    "modality": modality,
                    "initial": _nats(middle(initial_loss(run, modality) for run in runs)),
                    "unigram": _nats(middle(unigram_entropy(run, modality) for run in runs)),
                    "final": _nats(middle(values)) + (star if values else ""),
                    "excess": _nats(middle(final_loss(run, modality, "excess").value for run in runs)),
                    "range": f"{nats(min(values))} to {nats(max(values))}" if len(values) > 1 else DASH,
                    "learnt": f"{sum(learnt(run, modality) for run in runs)} of {len(runs)}"
                    if losses
                    else DASH,
                    "trained": ("yes" if all(is_trained(run, modality) for run in runs) else "no")
                    if losses
                    else DASH,
                }
            )
    return rows


def data_rows(study: Study) -> list[dict[str, Any]]:
    """How predictable the tokens are: one row per modality, or several if arms read different data."""
    rows: dict[str, dict[str, Any]] = {}
    for modality in study.modalities:
        for arm in study.arms:
            runs = [run for run in study.of_arm(arm) if isinstance(run.data.get(modality), dict)]
            if not runs:
                continue
            statistics = runs[0].data[modality]
            row: dict[str, Any] = {
                "modality": modality,
                "share": _share(statistics.get("share")),
                "used": f"{statistics.get('used', 0):,} of {statistics.get('block', 0):,}",
                "unigram": _entropy(statistics.get("unigram")),
                "compressed": _entropy(statistics.get("compressed")),
                "model": _entropy(statistics.get("model")),
                "floor": _entropy(statistics.get("floor")),
                "repeated": _share(statistics.get("repeated")),
            }
            key = json.dumps(row)
            rows.setdefault(key, row | {"arms": [], "best": math.inf})
            rows[key]["arms"].append(study.label(arm))
            losses = [best_loss(run, modality) for run in runs if is_trained(run, modality)]
            rows[key]["best"] = min([rows[key]["best"], *(loss for loss in losses if math.isfinite(loss))])
    for row in rows.values():
        row["arms"] = "all" if len(row["arms"]) == len(study.arms) else listed(row["arms"])
        row["best"] = nats(row["best"]) if math.isfinite(row["best"]) else DASH
    return list(rows.values())


def _entropy(value: Any) -> str:
    return nats(value) if isinstance(value, int | float) else DASH


def _share(value: Any) -> str:
    return f"{100 * value:.0f} %" if isinstance(value, int | float) else DASH


def environment(study: Study) -> list[tuple[str, str]]:
    """Versions, machine, precision and code of the runs; every value if the runs differ."""
    rows: list[tuple[str, str]] = []
    rows.append(("Versions", _distinct(study, lambda run: _pairs(run.details.get("versions")))))
    rows.append(("Machine", _distinct(study, lambda run: _pairs(run.details.get("machine")))))
    for name, field in (
        ("Precision", "trainer.precision"),
        ("Attention backend", "backend"),
        ("Threads per run", "threads"),
    ):
        rows.append((name, _distinct(study, lambda run, field=field: _text(run.setting(field)))))
    rows.append(("Code", _distinct(study, lambda run: run.code)))
    return [(name, value) for name, value in rows if value]


def _distinct(study: Study, of: Any) -> str:
    return " / ".join(dict.fromkeys(filter(None, (of(run) for run in study.runs))))


def _pairs(record: Any) -> str:
    if not isinstance(record, dict):
        return _text(record)
    return ", ".join(f"{name} {_text(value)}" for name, value in record.items())


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _nats(value: float) -> str:
    return DASH if math.isnan(value) else nats(value)
