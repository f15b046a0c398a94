"""Write mmqk/bench/evidence.json from the packs of reports/: what the runs of the bench show about signs, alarms and
remedies.

    python -m docs.experiments.bench_evidence                # all parts
    python -m docs.experiments.bench_evidence zoo rescue     # some of them
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from mmqk import load_runs
from mmqk.bench.evidence import FILE, SPACINGS, evidence, nearest, shape
from mmqk.bench.kinds import findings
from mmqk.bench.rules import FACTS, SETTLED, compared, departures, facts, scaled, scores, together
from mmqk.bench.traces import Trace, alarms_in, labelled, metrics_table, outcomes, split_hash
from mmqk.lab.metrics.outcomes import final_loss
from mmqk.store import AlarmRules, parse_tag, write_atomic
from mmqk.store.rules import LOGITS, NORMS

# Arms of the bench whose fault is that of a failure of the zoo.
COUNTERPARTS = {
    "rate-start": "rate", "no-scale": "scale", "sigmoid": "sigmoid", "deep-narrow": "deep", "post-norm": "post_norm",
    "large-eps": "eps", "corrupted": "corrupted",
}  # fmt: skip
# What the rules of alarms read.
READ = ("loss", "grad_norm", LOGITS, *NORMS, "attn_entropy", "attn_rank", "val_unigram")


def logs_of(trace: Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the signs and alarms of a run: the first step of each sign, and for each alarm and statistic whether one
    begins after the fault."""
    whole = trace.metrics[[tag for tag in trace.metrics if not str(tag).startswith("loss/")]]
    off = {modality for modality, weight in (trace.run.setting("loss.weights") or {}).items() if not weight}
    trained = {tag[5:] for tag in map(str, trace.metrics) if tag.startswith("loss/")} - off
    for split, table in {"modality": trace.metrics, "whole": whole}.items():
        for every in SPACINGS:
            thin = table.loc[table.index % every == 0].dropna(how="all")
            names = trained if split == "modality" else None
            rules = AlarmRules(trace.run.warmup_steps, trace.run.planned_steps, names)
            alarms: dict[str, int] = {}
            for alarm in alarms_in(thin[[t for t in map(str, thin) if _is_read(t)]], rules):
                key = f"{alarm.name} {parse_tag(alarm.tag).statistic}"
                alarms[key] = max(alarms.get(key, 0), int(alarm.step > trace.label.begins))
            signs = {finding.sign.name: finding.step for finding in findings(thin)}
            yield f"{every} {split}", {"signs": signs, "alarms": alarms}


def _is_read(tag: str) -> bool:
    parsed = parse_tag(tag)
    return parsed.statistic in READ and not (parsed.statistic == "grad_norm" and parsed.modality)


def runs() -> list[dict[str, Any]]:
    """Return the record of each run of the bench."""
    return [
        {
            "run": trace.run.name, "side": trace.side, "kind": trace.label.kind, "begins": trace.label.begins,
            "logs": dict(logs_of(trace)),
        }
        for trace in bench()
    ]  # fmt: skip


@cache
def bench() -> list[Trace]:
    """Return the runs of the bench with their labels."""
    return labelled([*load_runs("reports/bench/bench.zip")])


def zoo() -> list[dict[str, Any]]:
    """Return the shape of each failing run of the zoo, and of its healthy ones."""
    runs = [run for run in load_runs("reports/bench/zoo.zip") if run.arm.split("-")[0] in ("healthy", "none")]
    names = [run.arm.removeprefix("none-") for run in runs]
    return [
        {"failure": name, "seed": run.seed, "shape": shape(metrics_table(run))}
        for name, run in zip(names, runs, strict=True)
    ]


def near() -> dict[str, Any]:
    """Return within which distance no healthy run of the side "develop" is near a failure of the zoo, and what is near
    then on the judged side: of runs whose fault is in the zoo, of runs with another fault, and of healthy runs."""
    of_zoo = zoo()
    found = [(trace, nearest(shape(trace.metrics) or {}, of_zoo)[0]) for trace in bench()]
    healthy = [far for trace, (name, far) in found if trace.healthy and trace.side == "develop" and name != "healthy"]
    limit = math.floor(1000 * min(healthy)) / 1000
    judged = [(trace, name if far <= limit else "") for trace, (name, far) in found if trace.side == "judge"]
    groups: dict[str, list[bool]] = {"right": [], "wrong": [], "other": [], "healthy": []}
    for trace, name in judged:
        true, named = COUNTERPARTS.get(trace.run.arm), name not in ("", "healthy")
        if true:
            groups["right"].append(name == true)
            groups["wrong"].append(named and name != true)
        else:
            groups["healthy" if trace.healthy else "other"].append(named)
    return {"limit": limit, **{group: [sum(of), len(of)] for group, of in groups.items()}}


def shown() -> dict[str, dict[str, int]]:
    """Return for each plain fact of `mmqk.bench.rules` the judged runs with a fault that show it (``hits`` of
    ``faults``), and the healthy ones (``accused`` of ``healthy``)."""
    judged = [trace for trace in bench() if trace.side == "judge"]
    names = {trace.run.name: {fact.name for fact in facts(trace.metrics)} for trace in judged}
    healthy = sum(trace.healthy for trace in judged)
    counts = {}
    for name in FACTS:
        having = [trace for trace in judged if name in names[trace.run.name]]
        accused = sum(trace.healthy for trace in having)
        counts[name] = {
            "hits": len(having) - accused, "faults": len(judged) - healthy, "accused": accused, "healthy": healthy,
        }  # fmt: skip
    return counts


def thresholds() -> dict[str, float]:
    """Return for each statistic the largest score of the healthy runs of the side "develop"."""
    found: dict[str, float] = {}
    for trace in bench():
        if trace.healthy and trace.side == "develop":
            for tag in compared(trace.metrics):
                score = together(scores(scaled(trace.metrics, tag)[0])[0]).loc[SETTLED:].max()
                name = parse_tag(tag).statistic
                found[name] = max(found.get(name, 0.0), round(float(score), 3))
    return found


def departed() -> dict[str, list[int]]:
    """Return for each statistic, and for "any" of them, counts of the judged side: the runs with a fault in which it
    leaves its range after the fault began, all of these runs, the healthy runs in which it does, and all of them."""
    limits = evidence()["departures"]
    counts = {name: [0, 0, 0, 0] for name in [*limits, "any"]}
    for trace in [trace for trace in bench() if trace.side == "judge"]:
        left: dict[str, int] = {}
        for one in departures(trace.metrics, limits):
            for name in (parse_tag(one.tag).statistic, "any"):
                left[name] = max(left.get(name, 0), one.step)
        place = 2 if trace.healthy else 0
        for name, count in counts.items():
            count[place] += left.get(name, -1) > (-1 if trace.healthy else trace.label.begins)
            count[place + 1] += 1
    return counts


def rescue() -> list[dict[str, Any]]:
    """Return a row for each change, failure and number of steps after its beginning: ``saved`` and ``delayed`` of
    ``runs``, and the mean final ``cost`` (nats above the healthy run)."""
    table = outcomes(load_runs("reports/bench/rescue.zip"))
    rows = []
    for (change, failure, at), cell in table.groupby(["change", "failure", "at"], sort=False):
        counts = cell["outcome"].value_counts()
        rows.append({
            "change": change, "failure": failure, "after": int(str(at)) - 300 if at else None, "runs": len(cell),
            "saved": int(counts.get("saved", 0)), "delayed": int(counts.get("delayed", 0)),
            "cost": round(float(cell["cost"].mean()), 2),
        })  # fmt: skip
    return rows


def late_rescue() -> list[dict[str, Any]]:
    """Return a row for each change and step of late_rescue.yaml: its held-out text loss minus that of the runs with
    noise from the same step (``gain``, nats, mean), and whether each run ends below each of them (``helped``)."""
    found: dict[str, list[float]] = {}
    for run in load_runs("reports/examples/late_rescue.zip"):
        if run.status.finished:
            found.setdefault(run.arm, []).append(final_loss(run, "text").value)
    rows = []
    for arm, losses in found.items():
        change, _, at = arm.rpartition("-")
        noise = found.get(f"noise-{at}")
        if noise is not None and change != "noise":
            gain = round(float(np.mean(losses) - np.mean(noise)), 2)
            helped = max(losses) < min(noise)
            rows.append({"change": change, "at": int(at), "runs": len(losses), "gain": gain, "helped": helped})
    return rows


PARTS: dict[str, Callable[[], Any]] = {
    "split": split_hash,
    "zoo": zoo,
    "near": near,
    "rescue": rescue,
    "departures": thresholds,
    "departed": departed,
    "facts": shown,
    "runs": runs,
    "late_rescue": late_rescue,
}


def main(parts: list[str]) -> None:
    """Write the parts; the others stay as they are."""
    content = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for part in parts or PARTS:
        content[part] = PARTS[part]()
        evidence.cache_clear()
        write_atomic(FILE, json.dumps(content, separators=(",", ":")).replace('},{"', '},\n{"') + "\n")
        print(f"{part}: {FILE.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
