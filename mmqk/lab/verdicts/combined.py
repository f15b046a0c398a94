"""Join several folders into one study, with unique names.

A verdict depends only on the runs of one folder, so the verdicts of each folder are computed before the folders are
joined.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmqk.lab.formatting import listed
from mmqk.lab.grid.hypotheses import Hypothesis
from mmqk.lab.metrics import METRICS
from mmqk.lab.runs.load import Run
from mmqk.lab.runs.replays import ReplayVerdict, replay_verdicts
from mmqk.lab.verdicts.study import Claim, Study, StudyArm, as_list, load_study
from mmqk.lab.verdicts.verdicts import Verdict, judge
from mmqk.store.pack import unpacked

# If there is no grid and there are more arms than colors, arms are sorted by their largest logit.
MANY_ARMS = 8


@dataclass(frozen=True)
class Findings:
    """The content of a page: the study, its verdicts and the verdicts of its replays."""

    study: Study
    verdicts: tuple[Verdict, ...]
    replays: tuple[ReplayVerdict, ...]
    folders: tuple[Path, ...]


def read(folders: Iterable[str | Path]) -> Findings:
    """Return the findings of several folders or packs; a run that is in more than one of them counts once.

    Raises:
        UserError: a folder has no runs, or a record cannot be read.
    """
    given = tuple(unpacked(Path(folder)) for folder in folders)
    distinct = tuple({folder.resolve(): folder for folder in given}.values())
    parts = []
    for folder in distinct:
        study = load_study(folder)
        parts.append((study, tuple(judge(study))))
    study, verdicts = parts[0] if len(parts) == 1 else _join(parts)
    return Findings(_by_logit(study), verdicts, tuple(replay_verdicts(study.runs)), distinct)


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


class _Names(dict[str, str]):
    """New names by old name; a name without an entry is unchanged."""

    def __missing__(self, name: str) -> str:
        return name


def _join(parts: Sequence[tuple[Study, tuple[Verdict, ...]]]) -> tuple[Study, tuple[Verdict, ...]]:
    names = _distinct([study.name for study, *_ in parts])
    runs: list[Run] = []
    name_of: dict[Path, str] = {}
    arms: dict[str, StudyArm] = {}
    families: dict[str, StudyArm] = {}
    claims: list[Claim] = []
    verdicts: list[Verdict] = []
    report: defaultdict[str, list[Any]] = defaultdict(list)
    missing: list[tuple[str, int]] = []
    members: defaultdict[str, set[Path]] = defaultdict(set)
    ids: set[str] = set()
    hypotheses: list[Hypothesis] = []
    for name, (study, judged) in zip(names, parts, strict=True):
        paths_of_arm: defaultdict[str, set[Path]] = defaultdict(set)
        for run in study.runs:
            paths_of_arm[run.arm].add(run.path.resolve())
        # An arm with the name of an earlier arm is the same arm if all its runs are also runs of the earlier arm.
        new_arms = _Names(
            (old, f"{name}/{old}")
            for old in (*study.arms, *study.families)
            if (old in arms or old in families)
            and not (paths_of_arm[old] and paths_of_arm[old] <= members[old])
        )
        new_runs = _Names()
        for run in study.runs:
            new = run.name if run.name == name else f"{name}/{run.name}"
            new_runs[run.name] = name_of.setdefault(run.path.resolve(), new)
        for run in study.runs:
            where, arm = run.path.resolve(), new_arms[run.arm]
            if where not in members[arm]:
                members[arm].add(where)
                twin = copy.copy(run)  # keeps the columns that are already read
                twin.name, twin.arm, twin.family = name_of[where], arm, new_arms[run.family]
                twin.replay = run.replay and {**run.replay, "of": new_runs[str(run.replay.get("of"))]}
                runs.append(twin)
        for joined, of_study in ((arms, study.arms), (families, study.families)):
            for old, arm_or_family in of_study.items():
                new = new_arms[old]
                label = arm_or_family.label if new == old else f"{arm_or_family.label} ({study.title})"
                family = new_arms[arm_or_family.family]
                joined.setdefault(new, replace(arm_or_family, name=new, label=label, family=family))
        missing += [(new_arms[arm], seed) for arm, seed in study.missing]
        new_ids = _Names((claim.id, f"{name}:{claim.id}") for claim in study.claims if claim.id in ids)
        renamed = {claim.id: _renamed(claim, new_ids, new_arms) for claim in study.claims}
        ids |= {claim.id for claim in renamed.values()}
        claims += renamed.values()
        verdicts += [
            replace(
                verdict,
                claim=renamed[verdict.claim.id],
                medians={new_arms[arm]: value for arm, value in verdict.medians.items()},
                counts={new_arms[arm]: value for arm, value in verdict.counts.items()},
                runs=tuple(new_runs[run] for run in verdict.runs),
            )
            for verdict in judged
        ]
        hypotheses += [
            replace(h, predicts={new_ids[claim]: predicted for claim, predicted in h.predicts.items()})
            for h in study.hypotheses
        ]
        _add_report(report, study, new_arms, new_ids)
    study = replace(
        parts[0][0],
        name="-".join(names),
        title=listed(_distinct([study.title for study, *_ in parts])),
        arms=arms,
        families=families,
        hypotheses=tuple(hypotheses),
        claims=tuple(claims),
        report={name: value for name, value in report.items() if value},
        runs=tuple(runs),
        missing=tuple(missing),
        registered=any(study.registered for study, *_ in parts),
        claims_changed=any(study.claims_changed for study, *_ in parts),
        registration_lost=any(study.registration_lost for study, *_ in parts),
    )
    return study, tuple(verdicts)


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names, with a number appended to repeated ones."""
    distinct: list[str] = []
    for name in names:
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        distinct.append(next(new for new in itertools.chain([name], numbered) if new not in distinct))
    return distinct


def _renamed(claim: Claim, ids: _Names, arms: _Names) -> Claim:
    return replace(
        claim,
        id=ids[claim.id],
        treatment=arms[claim.treatment],
        control=arms[claim.control],
        arms=tuple(arms[arm] for arm in claim.arms),
        positive_control=ids[claim.positive_control],
        negative_control=ids[claim.negative_control],
        manipulation_check=ids[claim.manipulation_check],
    )


def _add_report(report: defaultdict[str, list[Any]], study: Study, arms: _Names, ids: _Names) -> None:
    joined: dict[str, list[Any]] = {
        "hero": [arms[arm] for arm in study.named("hero")],
        "shown": [arms[arm] for arm in study.named("shown")],
        "headline": [ids[claim] for claim in study.named("headline")],
        "cannot_tell": study.named("cannot_tell"),
        "figures": [
            {**entry, "arms": [arms[arm] for arm in as_list(entry.get("arms"))]}
            for entry in study.report.get("figures") or ()
        ],
    }
    for name, items in joined.items():
        report[name] += [item for item in items if item not in report[name]]
    report["commands"] += study.named("command")
