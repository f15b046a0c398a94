"""The checks that a claim must pass before it is decided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmqk.config.training import AlarmConfig
from mmqk.lab.formatting import listed, number, plural
from mmqk.lab.grid.claims import CHECKS, Claim
from mmqk.lab.grid.decidable import FEWEST_SEEDS
from mmqk.lab.metrics import FamilyMetric, Metric, find_metric, metric_value
from mmqk.lab.metrics.families import RATE, learning_rate
from mmqk.lab.metrics.outcomes import is_trained, learned
from mmqk.lab.runs import Run, once_per_run
from mmqk.lab.study import Compared, Group, Study
from mmqk.lab.verdicts import say
from mmqk.lab.verdicts.measure import BestRate, chosen, distinguishable, value_of
from mmqk.store import differing_fields, flatten

BOUND_SLACK = 1.01
# Identity fields with the order of the modalities of the dial (the synthetic source), and with the vocabulary sizes.
ORDER, SIZES = "data.dial.modalities", "model.vocab_sizes"
# Data sources (the identity has "" for a source that the run does not read), and fields that only affect pairs.
SOURCES = ("data.pairs", "data.text", "data.interleaved", "data.tokens", "data.tokenizers")
OF_PAIRS = ("data.read", "data.val_fraction", "data.image_first_prob", "data.pairing")
# The defaults of what alarms do; the identity of a run without any action has none of these fields.
ACTIONS = flatten({"alarm": asdict(AlarmConfig())})


@dataclass(frozen=True)
class Check:
    """One check: its name, whether it passed, and the measured detail.

    Each of the ``controls`` in verdicts.json has these fields.
    """

    name: str
    passed: bool
    detail: str


def regime_reached(compared: Compared) -> Check:
    """Check that every compared run trains at least one modality and learned every modality that it trains.

    Otherwise the claim would compare a run that learned with one that did not. For a metric that measures the
    learning rates at which runs fail, the check is weaker: for every seed and point of the other axes, a run at one
    learning rate or more must have learned.
    """
    study, claim = compared.study, compared.claim
    metric, _ = find_metric(claim.metric)
    of_rates = isinstance(metric, FamilyMetric) and metric.of_rates
    noun = "seeds" if of_rates else "runs"
    unlearned, unknown, untrained = [], [], []
    for name, members in compared.groups.items():
        # In each unit at least one run must have learned: a single run, or the runs that differ only in their rate.
        units: dict[Any, list[Run]] = {}
        for place, run in enumerate(members.all):
            units.setdefault((run.seed, _place(run, RATE)) if of_rates else place, []).append(run)
        where = {"units": f"{len(units)} {noun}", "arm": study.label(name)}
        states = {m: [_learning(unit, m) for unit in units.values()] for m in study.modalities}
        missed = {m: of for m, of in states.items() if "not learned" in of}
        for modality, of in sorted(missed.items(), key=lambda item: item[1].index("not learned")):
            unlearned.append(say("unlearned", modality=modality, n=of.count("not learned"), **where))
        n = len(units) - sum(any(of[place] != "not trained" for of in states.values()) for place in range(len(units)))
        if n:
            unknown.append(say("no loss", n=n, **where))
        if n < len(units):
            modalities = [m for m, of in states.items() if "not trained" in of]
            untrained += [say("untrained modality", modality=m, **where) for m in modalities]
    failed = [*unlearned, *unknown]
    parts = [*(failed or [say(f"learned, {noun}")]), *untrained]
    return Check(claim.regime or CHECKS["learned"], not failed, "; ".join(parts))


def _learning(runs: Sequence[Run], modality: str) -> str:
    """Return whether one of the runs learned a modality, or none trains it."""
    trained = [run for run in runs if is_trained(run, modality)]
    if not trained:
        return "not trained"
    return "learned" if any(_learned(run, modality) for run in trained) else "not learned"


_learned = once_per_run(learned)


def only_declared_differences(compared: Compared, rates_chosen: bool) -> Check:
    """Check that the runs of a seed differ only in fields that the grid sets.

    A field that follows from these fields may differ too (`_follows`). Runs that do not differ at all fail the check.

    Args:
        compared: the runs of the arms.
        rates_chosen: whether selection runs chose a learning rate for each arm.
    """
    name = CHECKS["declared"]
    if unread := [run.name for run in compared.runs if not run.identity]:
        return Check(name, False, say("no identity", runs=plural(len(unread), "run"), run=unread[0]))
    first, second = compared.treatment, compared.control
    declared = [field for arm in compared.arms for field in arm.settings]
    declared += [RATE] if rates_chosen else []
    matched = _matched(first, second)
    differing = {
        field
        for run, other in matched
        for field in differing_fields(run.identity, other.identity)
        if not _follows(field, run.identity, other.identity)
    }
    if not first.runs.keys() & second.runs.keys():
        differing.discard("seed")
    # If a mapping is empty in one run, the whole mapping differs, and the grid may set a field inside it.
    covered = {f for f in differing for d in declared if f"{f}.".startswith(f"{d}.") or d.startswith(f"{f}.")}
    extra = sorted(differing - covered)
    if extra:
        return Check(name, False, say("also differ", fields=", ".join(extra)))
    named = sorted(f for f in differing if not any(other.startswith(f"{f}.") for other in differing))
    # A fork without changed fields still differs from its parent, because only the fork starts from a checkpoint.
    forked = any(run.fork != other.fork for run, other in matched)
    return Check(name, bool(named) or forked, say("differ", fields=", ".join(named) or "nothing"))


def _follows(field: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether the difference follows from another field of the data, which `only_declared_differences` checks.

    This is the case for:

    - the vocabulary sizes, if the data differs
    - the order of the modalities of the dial, if the sets of their names differ
    - a source that one of the runs does not read
    - a field that only affects pairs, if one of the runs reads no pairs
    - an action of alarms that neither run has
    """
    values = [flatten(identity) for identity in (first, second)]
    if field.startswith("alarm."):
        default = ACTIONS.get(field)
        return all(v.get(field, default) == default for v in values)
    if field.startswith(SIZES):
        return first.get("data") != second.get("data")
    if field == ORDER:
        return set(values[0].get(ORDER) or ()) != set(values[1].get(ORDER) or ())
    if field in OF_PAIRS:
        return any(v.get("data.pairs") == "" or not v.get("data.mix.pair") for v in values)
    return field in SOURCES and any(v.get(field) == "" for v in values)


def _matched(first: Group, second: Group) -> list[tuple[Run, Run]]:
    """Return the runs of the two groups that have the same seed; if the groups share no seed, their first runs."""
    shared = first.runs.keys() & second.runs.keys()
    if not shared:
        return [(first.all[0], second.all[0])]
    matched = []
    for seed in shared:
        by_place = {_place(run): run for run in second.runs[seed]}
        for run in first.runs[seed]:
            # In families, match the runs that have the same values on the axes. If ``second`` has a single run at
            # this seed, match this run with each run of ``first``.
            other = by_place.get(_place(run)) or (second.runs[seed][0] if len(by_place) == 1 else None)
            if other is not None:
                matched.append((run, other))
    return matched


def enough_seeds(compared: Compared) -> Check:
    """Check that the arms share at least `FEWEST_SEEDS` seeds.

    If the claim counts runs, the seeds need not be shared: each arm must have at least `FEWEST_SEEDS`.
    """
    seeds = [members.runs.keys() for members in compared.groups.values()]
    n = min(map(len, seeds)) if compared.claim.test == "count" else len(set.intersection(*map(set, seeds)))
    enough = n >= FEWEST_SEEDS
    detail = say("shared seeds" if enough else "few shared seeds", seeds=plural(n, "seed"), needed=FEWEST_SEEDS)
    return Check(CHECKS["seeds"], enough, detail)


def _place(run: Run, without: str = "") -> tuple[tuple[str, str], ...]:
    return tuple(sorted((field, str(value)) for field, value in run.point.items() if field != without))


def within_bound(runs: Sequence[Run]) -> Check | None:
    """Return the check that no finite logit exceeds the QK-Norm bound of its layer; None if no layer has a bound.

    A failure means a bug in mmqk.
    """
    worst = 0.0
    for run in runs:
        for layer in {tag.layer for tag in run.tags.values() if tag.statistic == "attn_logit_bound"}:
            steps, bounds = run.combined("attn_logit_bound", np.max, layer=layer)
            at, logits = run.combined("attn_logit_absmax", np.max, layer=layer)
            _, i, j = np.intersect1d(steps, at, return_indices=True)
            finite = np.isfinite(logits[j]) & np.isfinite(bounds[i])
            worst = max([worst, *(logits[j][finite] / bounds[i][finite]).tolist()])
    if worst == 0:
        return None
    detail = say("percent of bound", percent=100 * worst)
    return Check("logits within the QK-Norm bound", worst <= BOUND_SLACK, detail)


def reaches(study: Study, control: Claim, name: str) -> Check:
    """Return the check that the median of the metric reaches ``at_least`` in every arm of a control, which is a claim
    of status "control"; ``name`` is "positive control" or "manipulation check"."""
    metric, modality = find_metric(control.metric)
    assert isinstance(metric, Metric)
    details, passed = [], True
    for arm in control.arms:
        runs = [run for a in study.arms_of(arm, control.at) for run in study.finished(a.name)]
        values = [metric_value(run, control.metric) for run in runs]
        # For a run whose last value is not finite, use the worst finite value before it.
        worst = [metric.worst_seen(run, modality) for run in runs]
        values = [seen if math.isinf(value) else value for value, seen in zip(values, worst, strict=True)]
        median = float(np.median(values)) if values else math.nan
        passed = passed and median >= control.at_least
        which = "median " if len(values) > 1 else ""
        result = f"{which}{number(median)} in" if values else "no finished run of"
        details.append(f"{result} “{study.label(arm)}”")
    condition = f"{metric.label} at least {control.at_least:g}"
    return Check(f"{name} {control.id}", passed, f"{condition}: {', '.join(details)}")


def rates(compared: Compared) -> tuple[list[Check], str]:
    """Return the checks that the runs used their own best learning rates, and a note with these learning rates.

    Both are empty for arms without selection runs.
    """
    study, name = compared.study, "own best learning rate"
    choices = {arm.name: choice for arm in compared.arms if (choice := chosen(study, arm)) is not None}
    if not choices:
        return [], ""
    words, wrong, edges = [], [], []
    for arm in compared.arms:
        label, choice = study.label(arm.name), choices.get(arm.name)
        if choice is None:
            wrong.append(say("no selection", arm=label))
            continue
        words.append(say("tried", rate=choice.rate, arm=label, rates=_rates_text(choice.means)))
        used = {learning_rate(run) for run in study.finished(arm.name)}
        if used - {choice.rate}:
            wrong.append(say("other rate", arm=label, rates=_rates_text(used), best=choice.rate))
        if choice.at_edge:
            edges.append(say("at edge", rate=choice.rate, arm=label))
    checks = [
        Check(name, not wrong, "; ".join(wrong or words)),
        Check(f"{name} inside the grid", not edges, "; ".join(edges or [say("inside")])),
    ]
    return [*checks, *([] if wrong else _apart(compared, choices))], say("rates", rates=listed(words))


def _rates_text(rates: Iterable[float]) -> str:
    return listed([f"{rate:g}" for rate in sorted(rates)])


def _apart(compared: Compared, choices: Mapping[str, BestRate]) -> list[Check]:
    """Return the check that the selection runs distinguish the learning rate of the treatment from that of the
    control at each point; an empty list if the two are equal at every point."""
    study = compared.study
    points = list(zip(compared.treatment.arms, compared.control.arms, strict=False))
    if all(choices[one.name].rate == choices[other.name].rate for one, other in points):
        return []
    close = []
    for arms in points:
        a, b = (choices[arm.name] for arm in arms)
        values = [[value_of(run, study.rate_metrics[arm.name]) for run in study.finished(arm.name)] for arm in arms]
        if not distinguishable(a, b, values):
            close.append(" from ".join(f"{choices[arm.name].rate:g} ({study.label(arm.name)})" for arm in arms))
    detail = say("not distinguished", rates=listed(close)) if close else say("distinguished")
    return [Check("learning rates differ by more than chance", not close, detail)]


def checks_of(compared: Compared) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Return the checks that the claim does not turn off, and a note with the learning rates if runs chose them."""
    rate_checks, note = rates(compared)
    checks = {
        "learned": regime_reached(compared),
        "declared": only_declared_differences(compared, bool(note)),
        "seeds": enough_seeds(compared),
        "bound": within_bound(compared.runs),
    }
    made = [check for name, check in checks.items() if check and name not in compared.claim.unchecked]
    return (*made, *rate_checks), (note,) if note else ()
