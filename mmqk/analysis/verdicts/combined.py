"""Several folders as one study, with unique names.

A verdict depends only on the runs of its own folder, so the claims of each folder are judged before the folders are
joined.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmqk.analysis.formatting import listed
from mmqk.analysis.metrics import METRICS
from mmqk.analysis.runs.load import Run
from mmqk.analysis.runs.replays import ReplayVerdict, replay_verdicts
from mmqk.analysis.verdicts.study import Arm, Claim, Study, load_study
from mmqk.analysis.verdicts.verdicts import Verdict, judge

# With more arms than colors and no grid, arms are sorted by their largest logit.
MANY_ARMS = 8
_LEANS = ("positive_control", "negative_control", "manipulation_check")
_LISTS = ("hero", "shown", "cannot_tell", "figures", "headline")


@dataclass(frozen=True)
class Findings:
    """The content of a page: the study, its verdicts and the verdicts of its replays."""

    study: Study
    verdicts: tuple[Verdict, ...]
    replays: tuple[ReplayVerdict, ...]
    folders: tuple[Path, ...]


def read(folders: Iterable[str | Path]) -> Findings:
    """The findings of some folders; a run that lies in several of them counts once.

    Raises:
        UserError: a folder has no runs, or a record cannot be read.
    """
    given = tuple(Path(folder) for folder in folders)
    kept = tuple({folder.resolve(): folder for folder in given}.values())
    parts = []
    for folder in kept:
        study = load_study(folder)
        parts.append((study, tuple(judge(study)), tuple(replay_verdicts(study.runs))))
    if len(parts) == 1:
        study, verdicts, replays = parts[0]
    else:
        study, verdicts, replays = _join(parts)
    return Findings(_by_logit(study), verdicts, replays, kept)


def _by_logit(study: Study) -> Study:
    if study.registered or len(study.arms) <= MANY_ARMS:
        return study
    measure = METRICS["largest_attention_logit"].measure
    highest: dict[str, float] = {}
    for run in study.runs:
        value = measure(run, None)
        highest[run.arm] = max(highest.get(run.arm, -1.0), -1.0 if value != value else value)
    order = sorted(study.arms, key=lambda arm: (-highest.get(arm, -1.0), arm))
    return replace(study, arms={arm: study.arms[arm] for arm in order})


def _join(parts: Sequence[tuple[Study, tuple[Verdict, ...], tuple[ReplayVerdict, ...]]]) -> Any:
    names = _distinct([study.name for study, *_ in parts])
    runs: list[Run] = []
    name_of: dict[Path, str] = {}
    arms: dict[str, Arm] = {}
    families: dict[str, Arm] = {}
    claims: list[Claim] = []
    verdicts: list[Verdict] = []
    replays: list[ReplayVerdict] = []
    report: dict[str, Any] = {name: [] for name in _LISTS} | {"commands": []}
    missing: list[tuple[str, int]] = []
    members: dict[str, set[Path]] = {}
    ids: set[str] = set()
    for name, (study, judged, replayed) in zip(names, parts, strict=True):
        new_runs: dict[str, str] = {}
        paths_of_arm: dict[str, set[Path]] = {}
        for run in study.runs:
            paths_of_arm.setdefault(run.arm, set()).add(run.path.resolve())
        taken = {*arms, *families}
        arm_names = {
            old: f"{name}/{old}"
            if old in taken and not _same(paths_of_arm.get(old), members.get(old))
            else old
            for old in (*study.arms, *study.families)
        }
        for run in study.runs:
            where = run.path.resolve()
            if where not in name_of:
                name_of[where] = run.name if run.name == name else f"{name}/{run.name}"
            new_runs[run.name] = name_of[where]
            arm = arm_names.get(run.arm, run.arm)
            if where not in members.setdefault(arm, set()):
                members[arm].add(where)
                twin = copy.copy(run)  # keeps the columns that are already read
                twin.name, twin.arm, twin.family = name_of[where], arm, arm_names.get(run.family, run.family)
                runs.append(twin)
        for old, old_arm in (*study.arms.items(), *study.families.items()):
            new, family = (arm_names.get(each, each) for each in (old, old_arm.family))
            label = old_arm.label if new == old else f"{old_arm.label} ({study.title})"
            target = arms if old in study.arms else families
            target.setdefault(new, replace(old_arm, name=new, label=label, family=family))
        families |= {
            arm_names.get(old, old): arms[arm_names.get(old, old)]
            for old in study.families
            if old in study.arms
        }
        missing += [(arm_names.get(arm, arm), seed) for arm, seed in study.missing]
        claim_ids = {c.id: c.id if c.id not in ids else f"{name}:{c.id}" for c in study.claims}
        ids |= set(claim_ids.values())
        renamed = {c.id: _renamed(c, claim_ids, arm_names) for c in study.claims}
        claims += renamed.values()
        verdicts += [
            replace(
                verdict,
                claim=renamed[verdict.claim.id],
                medians={arm_names.get(arm, arm): value for arm, value in verdict.medians.items()},
                counts={arm_names.get(arm, arm): value for arm, value in verdict.counts.items()},
                runs=tuple(new_runs.get(run, run) for run in verdict.runs),
            )
            for verdict in judged
        ]
        replays += [
            replace(
                replay,
                of=new_runs.get(replay.of, replay.of),
                rows=tuple(
                    replace(row, runs=tuple(new_runs.get(run, run) for run in row.runs))
                    for row in replay.rows
                ),
            )
            for replay in replayed
        ]
        _add_report(report, study, arm_names, claim_ids)
    first = parts[0][0]
    study = replace(
        first,
        name="-".join(names),
        title=listed(_distinct([study.title for study, *_ in parts])),
        arms=arms,
        families=families,
        claims=tuple(claims),
        report={name: value for name, value in report.items() if value},
        runs=tuple(runs),
        missing=tuple(missing),
        registered=any(study.registered for study, *_ in parts),
        claims_changed=any(study.claims_changed for study, *_ in parts),
        registration_lost=any(study.registration_lost for study, *_ in parts),
    )
    return study, tuple(verdicts), tuple(replays)


def _same(new: set[Path] | None, present: set[Path] | None) -> bool:
    """Whether all runs of a new arm are already runs of the present arm."""
    return bool(new) and bool(present) and new <= present  # type: ignore[operator]


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number appended to repeated ones."""
    distinct: list[str] = []
    for name in names:
        number, new = 2, name
        while new in distinct:
            number, new = number + 1, f"{name}-{number}"
        distinct.append(new)
    return distinct


def _renamed(claim: Claim, ids: Mapping[str, str], arms: Mapping[str, str]) -> Claim:
    return replace(
        claim,
        id=ids[claim.id],
        treatment=arms.get(claim.treatment, claim.treatment),
        control=arms.get(claim.control, claim.control),
        arms=tuple(arms.get(arm, arm) for arm in claim.arms),
        **{name: ids.get(getattr(claim, name), getattr(claim, name)) for name in _LEANS},
    )


def _add_report(
    report: dict[str, Any], study: Study, arms: Mapping[str, str], ids: Mapping[str, str]
) -> None:
    for name in _LISTS:
        value = study.report.get(name) or ()
        value = [value] if isinstance(value, str) else list(value)
        if name in ("hero", "shown"):
            value = [arms.get(arm, arm) for arm in value]
        elif name == "headline":
            value = [ids.get(claim, claim) for claim in value]
        elif name == "figures":
            value = [
                {**entry, "arms": [arms.get(arm, arm) for arm in entry.get("arms") or ()]}
                for entry in value
                if isinstance(entry, Mapping)
            ]
        report[name] += [item for item in value if item not in report[name]]
    if study.report.get("command"):
        report["commands"].append(str(study.report["command"]))
