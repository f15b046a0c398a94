"""What the runs of the bench show about signs, alarms and remedies, for ``mmqk diagnose``: evidence.json.

    python -m mmqk.bench.evidence                   # reads the packs of reports/, writes mmqk/bench/evidence.json
    python -m mmqk.bench.evidence zoo rescue        # some of its parts

For each run, the file has the first step of each sign and alarm, as logged and thinned, with the losses by modality
and without. `Rates` counts them for the statistics and the spacing of one log.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mmqk.bench.departures import departures, thresholds
from mmqk.bench.facts import RULES, facts
from mmqk.bench.kinds import SIGNS, findings
from mmqk.bench.nearest import nearest, shape
from mmqk.bench.outcomes import outcomes
from mmqk.bench.traces import Trace, alarms_in, labelled, metrics_table, split_hash
from mmqk.lab.metrics.outcomes import final_loss
from mmqk.store import AlarmRules, parsed_tag, write_atomic
from mmqk.store.rules import LOGITS, NORMS

FILE = Path(__file__).with_name("evidence.json")
# Arms of the bench whose fault is that of a failure of the zoo.
COUNTERPARTS = {
    "rate-start": "rate", "no-scale": "scale", "sigmoid": "sigmoid", "deep-narrow": "deep", "post-norm": "post_norm",
    "large-eps": "eps", "corrupted": "corrupted",
}  # fmt: skip
# What the rules of alarms read.
READ = ("loss", "grad_norm", LOGITS, *NORMS, "attn_entropy", "attn_rank", "val_unigram")
SPACINGS = (1, 10, 50)  # steps between two rows of a log


class Rates:
    """How often signs and alarms are right on the runs of a side, when they read a log like the given one.

    Args:
        side: "develop" or "judge".
        statistics: the statistics of the log.
        every: the steps between two rows of the log; the next smaller one of `SPACINGS` is used.
        split: whether the log has the losses by modality.
    """

    def __init__(self, side: str, statistics: Set[str], every: float, split: bool) -> None:
        spacing = max(n for n in SPACINGS if n <= max(1, every))
        runs = [run for run in evidence()["runs"] if run["side"] == side]
        self.kinds = [run["kind"] for run in runs]
        logs = [run["logs"].get(f"{spacing} {'modality' if split else 'whole'}", {}) for run in runs]
        self.alarms = [{key for key in log.get("alarms", {}) if key.split()[1] in statistics} for log in logs]
        self.after_fault = [log.get("alarms", {}) for log in logs]
        self.first = [first_sign(log.get("signs", {}), statistics) for log in logs]
        self.faults, self.healthy = sum(map(bool, self.kinds)), sum(not kind for kind in self.kinds)

    def sign(self, name: str) -> dict[str, int]:
        """Return how often a sign comes first: ``named``, in runs with a fault; ``right``, in runs of its kind;
        ``runs`` of its kind; and ``accused`` of all ``healthy`` runs."""
        kind = name.split()[0]
        named = [true for true, first in zip(self.kinds, self.first, strict=True) if first == name]
        return {
            "right": named.count(kind), "named": sum(map(bool, named)), "runs": self.kinds.count(kind),
            "accused": named.count(""), "healthy": self.healthy,
        }  # fmt: skip

    def right(self) -> int:
        """Return the number of runs whose first sign names their kind."""
        return sum(first.split()[:1] == [kind] for kind, first in zip(self.kinds, self.first, strict=True) if kind)

    def accused(self) -> int:
        """Return the number of healthy runs with a sign."""
        return sum(bool(first) for kind, first in zip(self.kinds, self.first, strict=True) if not kind)

    def alarm(self, name: str) -> dict[str, int]:
        """Return in how many runs with a fault an alarm begins after the fault (``hits`` of ``faults``), and how many
        of the ``healthy`` runs have one (``accused``)."""
        hits = accused = 0
        for kind, keys, last in zip(self.kinds, self.alarms, self.after_fault, strict=True):
            mine = [key for key in keys if key.split()[0] == name]
            hits += bool(kind) and any(last[key] for key in mine)
            accused += not kind and bool(mine)
        return {"hits": hits, "faults": self.faults, "accused": accused, "healthy": self.healthy}


@cache
def evidence() -> dict[str, Any]:
    """Return the content of evidence.json."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def first_sign(steps: Mapping[str, int], statistics: Set[str]) -> str:
    """Return the name of the first of the signs that read these statistics; empty if there is none."""
    order = [sign.name for sign in SIGNS]
    readable = [name for name in steps if set(name.split()[1:]) <= statistics]
    return min(readable, key=lambda name: (steps[name], order.index(name)), default="")


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
                key = f"{alarm.name} {parsed_tag(alarm.tag).statistic}"
                alarms[key] = max(alarms.get(key, 0), int(alarm.step > trace.label.begins))
            signs = {finding.sign.name: finding.step for finding in findings(thin)}
            yield f"{every} {split}", {"signs": signs, "alarms": alarms}


def _is_read(tag: str) -> bool:
    parsed = parsed_tag(tag)
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
    from mmqk import load_runs

    return labelled([*load_runs("reports/bench/bench.zip")])


def zoo() -> list[dict[str, Any]]:
    """Return the shape of each failing run of the zoo, and of its healthy ones."""
    from mmqk import load_runs

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
    """Return for each plain fact of `mmqk.bench.facts` the judged runs with a fault that show it (``hits`` of
    ``faults``), and the healthy ones (``accused`` of ``healthy``)."""
    judged = [trace for trace in bench() if trace.side == "judge"]
    names = {trace.run.name: {fact.name for fact in facts(trace.metrics)} for trace in judged}
    healthy = sum(trace.healthy for trace in judged)
    counts = {}
    for rule in RULES:
        having = [trace for trace in judged if rule.name in names[trace.run.name]]
        accused = sum(trace.healthy for trace in having)
        counts[rule.name] = {
            "hits": len(having) - accused, "faults": len(judged) - healthy, "accused": accused, "healthy": healthy,
        }  # fmt: skip
    return counts


def departed() -> dict[str, list[int]]:
    """Return for each statistic, and for "any" of them, counts of the judged side: the runs with a fault in which it
    leaves its range after the fault began, all of these runs, the healthy runs in which it does, and all of them."""
    limits = evidence()["departures"]
    counts = {name: [0, 0, 0, 0] for name in [*limits, "any"]}
    for trace in [trace for trace in bench() if trace.side == "judge"]:
        left: dict[str, int] = {}
        for one in departures(trace.metrics, limits):
            for name in (parsed_tag(one.tag).statistic, "any"):
                left[name] = max(left.get(name, 0), one.step)
        place = 2 if trace.healthy else 0
        for name, count in counts.items():
            count[place] += left.get(name, -1) > (-1 if trace.healthy else trace.label.begins)
            count[place + 1] += 1
    return counts


def rescue() -> list[dict[str, Any]]:
    """Return a row for each change, failure and number of steps after its beginning: ``saved`` and ``delayed`` of
    ``runs``, and the mean final ``cost`` (nats above the healthy run)."""
    from mmqk import load_runs

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
    from mmqk import load_runs

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
    "departures": lambda: thresholds(bench()),
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
