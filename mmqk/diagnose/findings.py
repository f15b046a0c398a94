"""What a log shows: which series left its range first, which rules fired and how often they are right on the bench,
the nearest failure of the zoo, what would tell two kinds apart, remedies, and what the log cannot tell. And where two
logs part.

All rules are those of docs/alarms.md and mmqk/bench, with the thresholds that were chosen there. Nothing here is
called a cause: a sign names a kind of fault, with the share of runs of the bench in which that was right.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from mmqk.bench.evidence import Rates, evidence, nearest, shape
from mmqk.bench.kinds import SIGNS, Finding, findings, out_of_scope, show_failure
from mmqk.bench.rules import departures, facts
from mmqk.bench.traces import BENCH_STEPS, alarms_in, is_lasting, without_skips
from mmqk.diagnose.logs import Log
from mmqk.diagnose.names import TABLE as NAMES
from mmqk.store import Alarm, AlarmRules, UserError, find_file, parse_tag

ANY_LOG = ("loss", "lr", "grad_norm", "tokens_per_s")  # statistics that are not of the model
FEWEST_LOSSES = 100  # that the rules on the loss need
ALONE = "nothing else fired, and no healthy run of the bench lacks a warm-up: how often it accuses one is not known"
TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))


def diagnose(log: Log) -> dict[str, Any]:
    """Return what a log shows, the content of diagnosis.json.

    - source, format, columns, unused, notes: as in `mmqk.diagnose.logs.Log`.
    - first_step, last_step, every: the steps of the log, and the median distance of its losses.
    - warnings: why the rates may not hold for this log.
    - facts: the plain facts (`mmqk.bench.rules.Fact`), the first one first.
    - fact_rates: for each of them, the judged runs of the bench with a fault that show it, and the healthy ones.
    - departures: the series that left their range (`Departure`), the first one first.
    - departure_rates: for each of their statistics, and "any": the judged runs with a fault in which it left its range
      after the fault, all of these runs, the healthy runs in which it did, and all of these.
    - alarms: the first alarm of each rule that fired, the first one first; its ``count``; whether it is ``lasting``
      (`is_lasting`); its rates on the ``bench`` (`Rates.alarm`) and ``late``, on runs of 10,000 steps, None if it was
      not scored there.
    - kinds: signs that fired, the first one first; ``bench``: the rates (`Rates.sign`) where the sign comes first.
    - not_read: signs whose statistic the log has and that do not hold for it, and why.
    - nearest: the nearest ``failure`` of the zoo; ``limit``: the distance within which no healthy run of the side
      "develop" is, ``near``: whether the run is within; ``why`` it was not compared, else empty.
    - experiment: what would tell the two kinds of ``between`` apart; empty without a kind.
    - remedies: what was tried against the first kind, with what it did; a row each.
    - missing: statistics that the log lacks, the one to log next first; ``more`` is the number of judged runs that the
      signs would name right in addition.
    - found: whether there is a fact, or a sign or a lasting alarm fired.
    """
    notes = list(log.notes)
    metrics = without_skips(log.metrics, notes)
    statistics = {parse_tag(tag).statistic for tag in metrics}
    losses = metrics.filter(regex="^loss(/|$)").dropna(how="all")
    every = float(np.median(np.diff(losses.index))) if len(losses) > 1 else 1.0
    split = any(str(tag).startswith("loss/") for tag in metrics)
    rates = Rates("judge", statistics, every, split)
    left, plain = departures(metrics, evidence()["departures"]), facts(metrics)
    alarms, signs = _alarms(metrics, log.config, rates), findings(metrics)
    found = show_failure([one.sign.kind for one in signs], bool(plain) or any(alarm["lasting"] for alarm in alarms))
    kinds = [_kind(one, rates, statistics) for one in signs if found]
    named = list(dict.fromkeys(kind["kind"] for kind in kinds))
    skipped = [(sign, out_of_scope(sign, metrics)) for sign in SIGNS]
    skipped += [(one.sign, ALONE) for one in signs if not found]
    of_left = {"any", *(parse_tag(one.tag).statistic for one in left)}
    return {
        "source": log.source,
        "format": log.format,
        "first_step": int(metrics.index[0]),
        "last_step": int(metrics.index[-1]),
        "every": every,
        "columns": log.columns,
        "unused": log.unused,
        "notes": notes,
        "warnings": _warnings(log, every, statistics, split),
        "facts": [asdict(fact) for fact in plain],
        "fact_rates": {fact.name: evidence()["facts"][fact.name] for fact in plain},
        "departures": [asdict(departure) for departure in left],
        "departure_rates": {name: rate for name, rate in evidence()["departed"].items() if name in of_left},
        "alarms": alarms,
        "kinds": kinds,
        "not_read": [{"kind": s.kind, "statistic": s.statistic, "why": why} for s, why in skipped if why],
        "nearest": _nearest(metrics, found),
        "experiment": _experiment(named),
        "remedies": _remedies(named[0]) if named else [],
        "missing": _missing(statistics, every, split, rates),
        "found": found,
    }


def _kind(finding: Finding, rates: Rates, statistics: set[str]) -> dict[str, Any]:
    sign, meaning = finding.sign, finding.sign.meaning
    if sign.kind == "data" and statistics <= set(ANY_LOG):
        meaning = "a loss rose at once; this log has no statistic of the model that could have done so before it"
    return {
        "kind": sign.kind, "step": finding.step, "series": finding.series, "value": finding.value,
        "limit": sign.above, "meaning": meaning, "bench": rates.sign(sign.name),
    }  # fmt: skip


def _alarms(metrics: pd.DataFrame, config: Mapping[str, Any], rates: Rates) -> list[dict[str, Any]]:
    """Return the alarm rules that fire, each with its first alarm, the first one first."""
    planned, warmup = config.get("trainer.max_steps"), config.get("optim.warmup_steps")
    if not isinstance(warmup, int):
        warmup = _warmup(metrics["lr"].dropna()) if "lr" in metrics else 0
    length = planned if isinstance(planned, int) and planned > 0 else int(metrics.index[-1])
    found: dict[str, list[Alarm]] = {}
    for alarm in alarms_in(metrics, AlarmRules(warmup, length)):
        found.setdefault(alarm.name, []).append(alarm)
    scores = json.loads(find_file("reports/bench/late.json").read_text(encoding="utf-8"))
    counts = ("hits", "faults", "accused", "healthy")
    late = {row["rule"].removeprefix("alarm "): {name: row[name] for name in counts} for row in scores}
    return [
        {
            "name": name, "step": first.step, "series": first.tag, "value": first.value, "threshold": first.threshold,
            "sentence": first.sentence, "count": 1 + len(more),
            "lasting": any(is_lasting(alarm, metrics) for alarm in (first, *more)),
            "bench": rates.alarm(name), "late": late.get(name),
        }
        for name, (first, *more) in found.items()
    ]  # fmt: skip


def _warmup(lr: pd.Series) -> int:
    """Return the step up to which the learning rate rises from the first steps on; 0 if it does not."""
    rises = lr[lr > 0].diff().iloc[1:] > 0
    if not len(rises) or not rises.iloc[0]:
        return 0
    return int(rises.index[-1] if rises.all() else rises.index[rises][rises[rises].index < rises.idxmin()][-1])


def _warnings(log: Log, every: float, statistics: set[str], split: bool) -> list[str]:
    last, found = int(log.metrics.index[-1]), []
    if every > 1:
        full, thin = (Rates("develop", statistics, n, split) for n in (1, every))
        found.append(
            f"The log has a loss every {every:g} steps. Thinned like it, runs of the bench (side develop) get the right"
            f" kind in {thin.right()} of {thin.faults} instead of {full.right()}, and {thin.accused()} of"
            f" {thin.healthy} healthy ones get a kind instead of {full.accused()}."
        )
    if not 0.5 * BENCH_STEPS <= last <= 2 * BENCH_STEPS:
        found.append(
            f"The rates are from runs of {BENCH_STEPS} steps of a model of 0.4M parameters, this log ends at step"
            f' {last:,}: they may not hold. The column "10,000 steps" is from longer runs of 0.8M parameters.'
        )
    losses = max(log.metrics[tag].count() for tag in log.metrics if str(tag).partition("/")[0] == "loss")
    if losses < FEWEST_LOSSES:
        found.append(f"The log has {losses} losses, and the rules on it need {FEWEST_LOSSES}: they can miss a failure.")
    return found


def _nearest(metrics: pd.DataFrame, found: bool) -> dict[str, Any]:
    own = shape(metrics) if found else None
    if own is None:
        few = "it needs the loss, grad_norm and attn_logit_absmax at 20 steps or more" if found else "no rule fired"
        none = {"failure": "", "distance": None, "next": "", "next_distance": None, "limit": None, "near": False}
        return none | {"why": few}
    (first, distance), (second, other), *_ = nearest(own, evidence()["zoo"])
    limit = evidence()["near"]["limit"]
    return {
        "failure": first, "distance": round(distance, 3), "next": second, "next_distance": round(other, 3),
        "limit": limit, "near": distance <= limit and first != "healthy", "why": "",
    }  # fmt: skip


def _experiment(kinds: list[str]) -> dict[str, Any]:
    """Return the experiment that tells the two first kinds apart; of one kind, from data (or rate)."""
    if not kinds:
        return {}
    a, b = (*kinds, "rate" if kinds[0] == "data" else "data")[:2]
    for row, (one, other) in itertools.product(TABLES["experiments"], ((a, b), (b, a))):
        if one in row["gone"] and other in row["remains"]:
            return {"between": [a, b], **row, "gone": one, "remains": other}
    return {"between": [a, b], "what": "", "command": "", "gone": "", "remains": ""}


def _remedies(kind: str) -> list[dict[str, Any]]:
    """Return what is known of changes against a kind: a row for each change, failure and time."""
    table, names = TABLES["remedies"][kind], TABLES["changes"]
    rows = [{"change": table["fix"], "measured": "not measured"}] if table.get("fix") else []
    of_map = [r for r in evidence()["rescue"] if r["failure"] == table.get("rescue") and r["after"]]
    for change, cells in itertools.groupby(sorted(of_map, key=lambda r: r["change"]), lambda r: r["change"]):
        tried = sorted(cells, key=lambda r: r["after"])
        saved = ", ".join(str(r["saved"]) for r in tried) + f" of {tried[0]['runs']}"
        saved = saved if any(r["saved"] for r in tried) else "none"
        costs = ", ".join(f"{r['cost']:+.2f}" for r in tried)
        after = ", ".join(str(r["after"]) for r in tried)
        said = f"{after} steps after it began: saved {saved}; end {costs} nats from healthy"
        rows.append({"change": names[change], "measured": said})
    late = evidence()["late_rescue"] if table.get("late") else []
    for change, cells in itertools.groupby(sorted(late, key=lambda r: r["change"]), lambda r: r["change"]):
        tried = sorted(cells, key=lambda r: r["at"])
        steps = ", ".join(f"{r['at']:,}{'' if r['helped'] else ' (did not help)'}" for r in tried)
        gains = ", ".join(f"{r['gain']:+.2f}" for r in tried)
        said = f"late failure, from step {steps} of 10,000: held-out loss {gains} nats from noise"
        rows.append({"change": names[change], "measured": said})
    if start := table.get("start"):
        rows.append({"change": start, "measured": "from the start of a new run; it undoes this fault of the bench"})
    return rows or [{"change": "none known", "measured": f"no change was tried against the kind {kind}"}]


def _missing(statistics: set[str], every: float, split: bool, rates: Rates) -> list[dict[str, Any]]:
    """Return the statistics that the log lacks, those first with which the signs name more judged runs right."""
    rows = []
    for name, row in TABLES["missing"].items():
        splits = name == "loss/MODALITY"
        if not (split if splits else name in statistics):
            with_it = {s for sign in SIGNS if name in sign.statistic.split() for s in sign.statistic.split()}
            more = Rates("judge", statistics | with_it, every, split or splits).right() - rates.right()
            rows.append({"statistic": name, "decides": row["decides"], "how": row["how"], "more": more})
    return sorted(rows, key=lambda row: -row["more"])


# Two runs: where they part, and whose gradients grew ----------------------------------------------------------------

LIMIT = 6  # spreads
FEWEST = 8  # values before the first compared one
HOLD = 5  # values in a row beyond the limit
LOSS_NATS = 0.1  # smaller differences of a loss are no parting, nor are factors below
FACTOR = 1.25
NOT_COMPARED = re.compile(r"tokens_per_s|alarm/.*|probe_sequences|captions_cut|attn_layers_\w+|budget_window")
GROUPS: dict[str, str] = NAMES["groups"]
NATS = re.compile(r"(val_)?(loss|log_z|excess)(/.*)?|attn_entropy.*")


def _both(run: Log, reference: Log) -> dict[str, pd.DataFrame]:
    """Return the values of two logs at the steps that both have, for each series to compare."""
    tags = [tag for tag in map(str, run.metrics) if tag in reference.metrics and not NOT_COMPARED.fullmatch(tag)]
    tables = [pd.concat([log.metrics[t] for log in (run, reference)], axis=1, join="inner").dropna() for t in tags]
    return {tag: table for tag, table in zip(tags, tables, strict=True) if len(table)}


def part(run: Log, reference: Log) -> list[dict[str, Any]]:
    """Return the series in which a run leaves the spread around its reference and stays beyond it, the first one first.

    A row has ``tag``; the first ``step`` beyond the limit, and there the values ``run`` and ``reference``; ``spread``,
    the standard deviation that one value has by chance, in nats for a loss, a log z or an entropy, else of the
    logarithm; and ``spreads``, the difference in spreads, infinite if one of the values is not finite.

    The spread of a series is that of the difference before the step (1.48 times the median distance from its median),
    so a constant difference is no parting. A parting is at least `LIMIT` spreads and `LOSS_NATS` or `FACTOR`, for
    `HOLD` values in a row (or all that are left, if one is not finite). Series of heads are not compared.

    Raises:
        UserError: the logs have no series with a step in common.
    """
    tables = {tag: table for tag, table in _both(run, reference).items() if parse_tag(tag).head is None}
    if not tables:
        raise UserError(f"{run.source} and {reference.source} have no series with a step in common: check --step")
    partings = [parting for tag, table in tables.items() if (parting := _parting(tag, table)) is not None]
    return sorted(partings, key=lambda parting: (parting["step"], -parting["spreads"]))


def _parting(tag: str, table: pd.DataFrame) -> dict[str, Any] | None:
    """Return the first value from which the first column is apart from the second; None if it is not."""
    finite = table.abs() < np.inf
    values = table[finite.all(axis=1)]
    if not (is_nats := NATS.fullmatch(tag)) and (values.to_numpy() > 0).all():
        values = pd.DataFrame(np.log(values))
    difference = values.iloc[:, 0] - values.iloc[:, 1]
    difference -= difference.expanding(FEWEST).median().shift()
    spread = 1.4826 * difference.abs().expanding(FEWEST).median().shift()
    smallest = LOSS_NATS if is_nats else np.log(FACTOR)
    beyond = (difference.abs() > np.maximum(LIMIT * spread, smallest)) & spread.notna()
    one_sided = (finite.iloc[:, 0] != finite.iloc[:, 1])[~finite.all(axis=1)]
    apart = pd.concat([beyond, one_sided]).sort_index()
    # True where this value and the next HOLD - 1 are apart; fewer are enough at an end that is not finite.
    fewest = 1 if one_sided.any() and apart.iloc[-1] else HOLD
    held = apart[::-1].astype(int).rolling(HOLD, fewest).min()[::-1] > 0
    if not held.any():
        return None
    step = int(held.index.to_numpy()[held.to_numpy().argmax()])
    before = spread.loc[:step].dropna()
    width = float(before.iloc[-1]) if len(before) else np.nan
    size = abs(float(difference[step])) if step in difference.index else np.inf
    own, other = map(float, table.loc[step])
    spreads = size / width if width else np.inf
    return {"tag": tag, "step": step, "run": own, "reference": other, "spread": width, "spreads": spreads}


def apart(run: Log, reference: Log) -> list[dict[str, Any]]:
    """Return the losses that are apart to the end, the first one first; also of runs that differ from the first step.

    A row has ``tag``; ``step``, from which on the loss is apart; whether it is the ``first`` common one; ``run`` and
    ``reference``, the medians of the last values, in nats.

    A loss is apart where the median of the difference over a twentieth of the common steps (at least `HOLD`) stays
    above `LOSS_NATS` and above `LIMIT` of its standard errors. The noise is that of successive differences, so
    batches of different seeds are allowed; a slow series such as a norm has no such noise and is not compared.
    """
    found = []
    losses = {tag: table for tag, table in _both(run, reference).items() if re.fullmatch(r"loss(/.*)?", tag)}
    for tag, values in losses.items():
        table = values[(values.abs() < np.inf).all(axis=1)]
        width = max(HOLD, len(table) // 20)
        if len(table) < 2 * width:
            continue
        difference = table.iloc[:, 0] - table.iloc[:, 1]
        noise = 1.4826 * difference.diff().abs().median() / 2**0.5
        median = difference.rolling(width).median().dropna()
        beyond = median.abs() > max(LOSS_NATS, LIMIT * 1.25 * noise / width**0.5)  # 1.25: of a median
        if not beyond.iloc[-1]:
            continue
        since = int((~beyond).to_numpy().nonzero()[0].max(initial=-1)) + 1  # the place after the last that is not
        step = int(table.index[since])
        own, other = table.iloc[-width:].median().tolist()
        found.append({"tag": tag, "step": step, "first": since == 0, "run": own, "reference": other})
    return sorted(found, key=lambda one: one["step"])


def at_the_end(run: Log, reference: Log) -> pd.DataFrame:
    """Return the series at the last step that both logs have, those first whose values differ by the largest factor:
    ``series``, ``run``, ``reference``. Its ``attrs`` have that ``step`` and the number of common ``steps``."""
    common = run.metrics.index.intersection(reference.metrics.index)
    tags = [t for t in run.metrics if t in reference.metrics and not NOT_COMPARED.fullmatch(str(t))]
    ends = [log.metrics.loc[common, tags].ffill().iloc[-1] for log in (run, reference)]
    table = pd.concat(ends, axis=1, keys=["run", "reference"]).dropna().rename_axis("series").reset_index()
    sizes = np.log(table[["run", "reference"]].abs().clip(1e-30).to_numpy())
    table = table.iloc[np.argsort(-np.abs(sizes[:, 0] - sizes[:, 1]), kind="stable")]
    table.attrs |= {"step": int(common[-1]), "steps": len(common)}
    return table


def gradient_growth(log: Log) -> pd.DataFrame:
    """Return where the growth of grad_norm² came from, from the series ``grad_norm/PARAMETER``.

    A row per ``group`` of parameters (`GROUPS`), the largest share first: sums of the mean squared gradient norms
    ``before`` and ``after`` (in the second and the last tenth of the logged steps), ``growth``, and its ``share``.
    """
    parameters = [str(tag) for tag in log.metrics if str(tag).startswith("grad_norm/")]
    squares = log.metrics[parameters].replace(np.inf, np.nan).dropna(how="all") ** 2
    tenth = (len(squares) - 1) / 10
    ends = {"before": (round(tenth), round(2 * tenth)), "after": (round(9 * tenth), round(10 * tenth))}
    table = pd.DataFrame({name: squares.iloc[first : last + 1].mean() for name, (first, last) in ends.items()})
    of = [next((g for g, p in GROUPS.items() if re.search(p, tag[10:].lower())), "other") for tag in parameters]
    groups = table.groupby(pd.Index(of, name="group")).sum()
    groups["growth"] = groups["after"] - groups["before"]
    groups["share"] = groups["growth"] / groups["growth"].sum()
    return groups.sort_values("share", ascending=False).reset_index()
