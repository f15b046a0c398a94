"""The table of all runs: status, last step and cost of each."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from mmqk.lab.formatting import DASH, capital, count, duration, listed, nats, number, plural, slug
from mmqk.lab.metrics import METRICS, FinalLoss, final_loss
from mmqk.lab.runs.load import Run
from mmqk.lab.verdicts.study import Study

ROLES = {"verdict": 0, "parent": 1, "selection": 2, "replay": 3}
ROLE_WORDS = {
    "parent": "parent of forks",
    "selection": "selects a learning rate, not in a verdict",
}


def anchor(run: Run) -> str:
    """Return the HTML id of the row of a run."""
    return f"run-{slug(run.name)}"


def run_rows(study: Study, colors: dict[str, str]) -> list[dict[str, Any]]:
    """Return one row per run, also for runs that have not started; a run that two arms share has one row."""
    arms_of: defaultdict[str, list[str]] = defaultdict(list)
    by_arm: defaultdict[str, list[Run]] = defaultdict(list)
    for run in study.runs:
        if run.name not in arms_of:
            by_arm[run.arm].append(run)
        arms_of[run.name].append(run.arm)
    missing: defaultdict[str, list[int]] = defaultdict(list)
    for arm, seed in study.missing:
        missing[arm].append(seed)
    modalities = study.losses
    rows: list[dict[str, Any]] = []
    anchors: set[str] = set()
    for arm in dict.fromkeys([*study.arms, *by_arm, *missing]):
        order = sorted(by_arm[arm], key=lambda run: (ROLES.get(run.role, 9), run.seed, run.name))
        for run in order:
            texts = (_role(run), run.status.reason, *run.notes, _alarms(run))
            remarks = [capital(text).rstrip(".") + "." for text in dict.fromkeys(texts) if text]
            rows.append(
                {
                    "anchor": anchor(run),
                    "arms": [a for a in dict.fromkeys(arms_of[run.name]) if a not in anchors],
                    "label": listed(list(dict.fromkeys(map(study.label, arms_of[run.name])))),
                    "color": colors.get(arm, "#000000"),
                    "seed": run.seed,
                    "status": run.status.status or DASH,
                    "step": f"{max(run.status.step, run.last_step):,}",
                    "losses": [_final(final_loss(run, m)) for m in modalities],
                    "logit": _number(METRICS["largest_attention_logit"].measure(run, None)),
                    "tokens": count(tokens(run)) if tokens(run) else DASH,
                    "seconds": duration(run.status.seconds) if run.status.seconds else DASH,
                    "raw": {"tokens": tokens(run), "seconds": round(run.status.seconds, 1)},
                    "remarks": " ".join(remarks),
                    "name": run.name,
                }
            )
            anchors.update(arms_of[run.name])
        rows += [
            {
                "anchor": f"missing-{slug(arm)}-{seed}-{i}",
                "arms": [],
                "label": study.label(arm),
                "color": colors.get(arm, "#000000"),
                "seed": seed,
                "status": "not started",
                **dict.fromkeys(("step", "logit", "tokens", "seconds"), DASH),
                "losses": [DASH] * len(modalities),
                "raw": {"tokens": "", "seconds": ""},
                "remarks": "",
                "name": arm,
            }
            for i, seed in enumerate(missing[arm])
        ]
    return rows


def tokens(run: Run) -> int:
    """Return the number of tokens that the run itself processed, without those before a fork: steps × sequences per
    step × length of a sequence; 0 if unknown."""
    size, length = run.setting("data.batch_size", 0), run.setting("data.seq_len", 0)
    steps = max(run.status.step, run.last_step) - ((run.fork or run.replay or {}).get("step") or 0)
    return max(0, steps) * size * length


def totals(study: Study) -> str:
    """Return one sentence on all runs: how many ended with each status, time and tokens."""
    runs = list({run.name: run for run in study.runs}.values())
    by_status = Counter(run.status.status for run in runs if run.status.status)
    parts = [f"{n} {status}" for status, n in sorted(by_status.items(), key=lambda pair: (-pair[1], pair[0]))]
    if study.missing:
        parts.append(f"{len(study.missing)} not started")
    planned = f"{len(runs) + len(study.missing)} planned runs" if study.missing else plural(len(runs), "run")
    sentence = f"{planned}: {', '.join(parts)}." if parts else f"{planned}."
    seconds = sum(run.status.seconds for run in runs)
    read = sum(tokens(run) for run in runs)
    if seconds:
        sentence += f" {capital(duration(seconds))} of training" + (
            f", {count(read)} tokens." if read else "."
        )
    return sentence


def _role(run: Run) -> str:
    """Return the purpose of a run that no verdict uses; empty for a verdict run."""
    if run.role != "replay":
        return ROLE_WORDS.get(run.role, "")
    replay = run.replay or {}
    if replay.get("numerics") == "control":
        return f"control replay of {replay.get('of')}"
    return f"replay of {replay.get('of')} in {replay.get('numerics')} from step {replay.get('step')}"


def _alarms(run: Run) -> str:
    """Return the number of alarms by name, and the step of the first alarm."""
    if not run.alarms:
        return ""
    counts = Counter(alarm.name.replace("_", " ") for alarm in run.alarms)
    by_name = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    return f"alarms: {by_name}; the first at step {min(alarm.step for alarm in run.alarms):,}"


def _final(loss: FinalLoss) -> str:
    return DASH if math.isnan(loss.value) else nats(loss.value) + ("" if loss.held_out else "*")


def _number(value: float) -> str:
    return DASH if math.isnan(value) else number(value)
