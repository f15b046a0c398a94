"""Check registered claims against the metrics and the arms that they name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmqk.lab.grid.claims import CHECKS, NUMBERS, Claim
from mmqk.lab.metrics import FamilyMetric, Metric, find_metric
from mmqk.store import UserError

MOST_CONFIRMATORY = 6


def claim_metric(claim: Claim) -> Metric | FamilyMetric:
    """Return the metric of a claim; if the claim counts runs, the share of runs; for a prediction, the AUROC."""
    metric, _ = find_metric(claim.metric)
    metric = replace(metric, label=measured_label(claim))
    if not claim.decided or isinstance(metric, FamilyMetric):
        return metric
    if claim.test == "count":
        return replace(
            metric, label=f"share of runs {counted_label(claim)}", unit="of the runs", scale="linear", worst="high"
        )
    if claim.test == "prediction":
        return replace(metric, label=f"AUROC of the {metric.label}", unit="", scale="linear", worst="low")
    return metric


def measured_label(claim: Claim) -> str:
    """Return the label of the metric that is measured in each run, with its modality."""
    metric, modality = find_metric(claim.metric)
    return f"{metric.label} ({modality})" if modality else metric.label


def counted_label(claim: Claim) -> str:
    """Return which runs a claim counts, as the relative clause "that diverged or whose …"."""
    if math.isnan(claim.at_least):
        return "that diverged"
    metric, _ = find_metric(claim.metric)
    diverged = "" if isinstance(metric, Metric) and metric.counts_failures else "that diverged or "
    bound = "at least" if metric.worst == "high" else "at most"
    return f"{diverged}whose {measured_label(claim)} is {bound} {claim.at_least:g}"


def check_claims(
    claims: Sequence[Claim], arms: Mapping[str, Sequence[Mapping[str, Any]]], where: str
) -> None:
    """Check that the fields of each claim are consistent with each other, with its metric and with its arms.

    Args:
        claims: the claims of a grid.
        arms: the points of every arm and family by name; an arm has one point.
        where: name of the file for error messages.

    Raises:
        UserError: a claim is invalid, or a family has too many confirmatory claims.
    """
    for claim in claims:
        _check(claim, arms, f"{where}: claim {claim.id}")
    for family, members in by_family(claims, "confirmatory").items():
        if len(members) > MOST_CONFIRMATORY:
            raise UserError(
                f"{where} has {len(members)} confirmatory claims in the family {family!r}: keep at most "
                f"{MOST_CONFIRMATORY} and make the others exploratory"
            )


def by_family(claims: Iterable[Claim], status: str) -> dict[str, list[Claim]]:
    """Return the claims with this status, grouped by `Claim.alpha_family`."""
    families: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.status == status and not claim.not_run:
            families.setdefault(claim.alpha_family, []).append(claim)
    return families


def _check(claim: Claim, arms: Mapping[str, Sequence[Mapping[str, Any]]], where: str) -> None:
    metric, _ = find_metric(claim.metric)
    for verdict, sentence in claim.finding.items():
        try:
            sentence.format(**dict.fromkeys(NUMBERS, ""))
        except (KeyError, IndexError, ValueError):
            raise UserError(
                f"{where}: finding.{verdict} may contain {', '.join(f'{{{n}}}' for n in NUMBERS)} "
                "and no other braces"
            ) from None
    for name, reason in claim.unchecked.items():
        if name not in CHECKS or not reason.strip():
            raise UserError(
                f"{where}: unchecked has {name!r} with the reason {reason!r}: give one of "
                f"{', '.join(CHECKS)} and the reason"
            )
    if claim.regime and "learned" in claim.unchecked:
        raise UserError(f"{where} sets regime and turns off its check: remove regime or unchecked.learned")
    if claim.decided and claim.test == "prediction":
        _check_prediction(claim, metric, where)
    elif claim.decided and not (claim.treatment and claim.control and claim.min_effect > 0):
        raise UserError(f"{where} needs treatment, control and min_effect")
    if claim.decided and claim.test == "count" and claim.min_effect >= 1:
        raise UserError(f"{where} counts runs: give a min_effect below 1, as it is a difference of shares")
    if claim.not_run:
        if claim.compared or claim.status == "control":
            raise UserError(f"{where} has not_run: remove its treatment, control and arms, or remove not_run")
        return
    if not claim.compared:
        raise UserError(f"{where} names no arms: give treatment and control, or arms")
    if claim.treatment and claim.treatment == claim.control:
        raise UserError(
            f"{where} has {claim.treatment!r} as its treatment and as its control: name two arms that differ"
        )
    if claim.status == "control" and math.isnan(claim.at_least):
        raise UserError(f"{where} is a control and needs at_least")
    if claim.status == "control" and isinstance(metric, FamilyMetric):
        raise UserError(
            f"{where} is a control, and {claim.metric} needs several runs: give a metric of one run"
        )
    if set(claim.stopping) - {"max_seeds"}:
        raise UserError(f"{where}: give stopping as {{max_seeds: n}}")
    if claim.stopping and not 2 <= claim.seeds <= claim.max_seeds:
        raise UserError(
            f"{where} has stopping and needs seeds, the number of seeds at the first look, from 2 to max_seeds"
        )
    for name in claim.compared:
        points = [point for point in arms[name] if at(point, claim.at)]
        if not points:
            raise UserError(
                f"{where}: {name!r} has no point at {point_label(claim.at)}: give a point of its axes"
            )
        if isinstance(metric, FamilyMetric):
            if claim.test == "count":
                raise UserError(
                    f"{where} counts runs, but {claim.metric} is computed from several runs: name a metric of one run"
                )
        elif len(points) > 1 and claim.test != "prediction":
            raise UserError(
                f"{where} names {name!r}, which has {len(points)} points: choose one, for example "
                f"at: {{{point_label(points[0])}}}"
            )


def _check_prediction(claim: Claim, metric: Metric | FamilyMetric, where: str) -> None:
    if claim.treatment or claim.control or not claim.arms:
        raise UserError(
            f"{where} predicts failures within arms: give arms, and neither treatment nor control"
        )
    if not 0.5 < claim.min_effect < 1 or claim.direction != "greater":
        raise UserError(
            f"{where} predicts failures: give the smallest AUROC of interest as min_effect, between 0.5 and 1, and "
            "no direction"
        )
    if isinstance(metric, FamilyMetric):
        raise UserError(
            f"{where} predicts failures, but {claim.metric} needs several runs: name a metric of one run"
        )


def at(point: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether a point of the axes has these values."""
    return all(name in point and point[name] == value for name, value in values.items())


def point_label(point: Mapping[str, Any]) -> str:
    """Return a point as text: ``optim.lr: 0.01, model.n_layers: 2``."""
    return ", ".join(f"{name}: {value}" for name, value in point.items())
