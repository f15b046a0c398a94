"""A folder of runs with its grid: arms, claims and report settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mmqk.lab.grid.claims import Claim, as_list, claims_hash, read_claims
from mmqk.lab.grid.decidable import at, check_claims
from mmqk.lab.metrics.families import RATE
from mmqk.lab.runs import Run, read_runs
from mmqk.store.folder import ABLATION_NAME, read_ablation
from mmqk.store.pack import unpacked

RATE_METRIC = "final_excess"


@dataclass(frozen=True)
class StudyArm:
    """One arm: its name, label, block of the page, planned seeds and the fields that it sets.

    If the grid has axes, each of its arms becomes one `StudyArm` per point of the axes: ``family`` is the name of the
    arm in the grid, and ``point`` has the values of the axes. Without axes, ``family`` equals ``name``.
    """

    name: str
    label: str
    block: str = ""
    seeds: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Runs of one folder.

    Attributes:
        folder: path of the folder.
        name: name of the grid, or of the folder.
        title: title of the page.
        arms: arms by name in the order of the grid, one for each point of the axes.
        claims: claims in the order of the grid.
        report: the report settings of the grid (hero, shown, headline, cannot_tell, command).
        runs: all runs with a folder, of every role.
        missing: (arm, seed) of planned runs without a folder.
        registered: whether the folder has an ablation.json, which stores the grid.
        claims_changed: whether the claims differ from the claims that were first registered.
        registration_lost: whether the claims were registered after runs had begun; then none is confirmatory.
        families: arms of the grid without the values of the axes, in the order of the grid.
        rate_metrics: the metric that selects the learning rate, by arm.
    """

    folder: Path
    name: str
    title: str
    arms: Mapping[str, StudyArm]
    claims: tuple[Claim, ...]
    report: Mapping[str, Any]
    runs: tuple[Run, ...]
    missing: tuple[tuple[str, int], ...]
    registered: bool
    claims_changed: bool
    registration_lost: bool
    families: Mapping[str, StudyArm]
    rate_metrics: Mapping[str, str]

    @cached_property
    def modalities(self) -> tuple[str, ...]:
        """Modalities with a loss; for a monitored model without losses, modalities with a query norm."""
        return self.losses or self._modalities_of("q_norm")

    @cached_property
    def losses(self) -> tuple[str, ...]:
        """Modalities with a loss, text first."""
        return self._modalities_of("loss")

    def _modalities_of(self, statistic: str) -> tuple[str, ...]:
        tags = (tag for run in self.runs for tag in run.tags.values())
        names = {tag.modality for tag in tags if tag.statistic == statistic and tag.modality}
        return tuple(sorted(names, key=lambda name: (name != "text", name)))

    def named(self, key: str) -> list[str]:
        """Return the names or sentences that the grid gives for a key of the report, such as ``hero``."""
        return as_list(self.report.get(key))

    def arms_of(self, name: str, point: Mapping[str, Any] | None = None) -> tuple[StudyArm, ...]:
        """Return the arm with this name, or the arms of the family with this name at the given point."""
        if name in self.arms:
            return (self.arms[name],)
        return tuple(a for a in self.arms.values() if a.family == name and at(a.point, point or {}))

    def of_arm(self, arm: str) -> tuple[Run, ...]:
        """Return the verdict runs of an arm, sorted by seed, without selection runs."""
        of_arm = (run for run in self.runs if run.arm == arm and run.role == "verdict")
        return tuple(sorted(of_arm, key=lambda run: run.seed))

    def finished(self, arm: str) -> tuple[Run, ...]:
        """Return the verdict runs that completed or diverged; verdicts use only these."""
        return tuple(run for run in self.of_arm(arm) if run.status.finished)

    def ended(self, arm: str) -> tuple[Run, ...]:
        """Return the finished runs, or all verdict runs if none has finished."""
        return self.finished(arm) or self.of_arm(arm)

    def selection(self, arm: StudyArm) -> tuple[Run, ...]:
        """Return the selection runs for the learning rate of an arm; no verdict uses them."""
        of_family = (run for run in self.runs if run.role == "selection" and run.family == arm.family)
        return tuple(run for run in of_family if {**run.point, RATE: 0} == {**arm.point, RATE: 0})

    def label(self, arm: str) -> str:
        """Return the label of an arm or a family."""
        entry = self.arms.get(arm) or self.families.get(arm)
        return entry.label if entry else arm


@dataclass(frozen=True)
class Group:
    """The runs of an arm or family that a claim names.

    Attributes:
        label: the name on the page.
        arms: the arm, or the arms of the family.
        runs: finished verdict runs by seed; an arm has one run per seed.
        planned: number of planned runs.
    """

    label: str
    arms: tuple[StudyArm, ...]
    runs: Mapping[int, tuple[Run, ...]]
    planned: int

    @property
    def all(self) -> tuple[Run, ...]:
        """All runs of the group, sorted by seed."""
        return tuple(run for seed in sorted(self.runs) for run in self.runs[seed])

    @property
    def seeds(self) -> int:
        """The number of planned seeds per arm; the largest number if the arms differ."""
        return max((len(arm.seeds) for arm in self.arms), default=0)


def group(study: Study, claim: Claim, name: str) -> Group:
    """Return the group that a claim calls ``name``."""
    arms = study.arms_of(name, claim.at)
    by_seed: dict[int, tuple[Run, ...]] = {}
    for arm in arms:
        for run in study.finished(arm.name):
            by_seed[run.seed] = (*by_seed.get(run.seed, ()), run)
    return Group(study.label(name), arms, by_seed, sum(len(arm.seeds) for arm in arms))


@dataclass(frozen=True)
class Compared:
    """The groups that a claim compares, by name."""

    study: Study
    claim: Claim
    groups: Mapping[str, Group]

    @property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for members in self.groups.values() for run in members.all]

    @property
    def arms(self) -> list[StudyArm]:
        """The arms of all groups."""
        return [arm for members in self.groups.values() for arm in members.arms]

    @property
    def treatment(self) -> Group:
        """The group whose metric should be greater or less."""
        return self.groups[self.claim.treatment]

    @property
    def control(self) -> Group:
        """The group that the treatment is compared with."""
        return self.groups[self.claim.control]


def compare(study: Study, claim: Claim) -> Compared:
    """Return the groups that a claim compares."""
    return Compared(study, claim, {name: group(study, claim, name) for name in claim.compared})


def share_history(treatment: Group, control: Group) -> bool:
    """Return whether the runs of each seed are equal until a fork: forks of one checkpoint, or a fork and its
    parent."""
    both = [(treatment.runs[seed], control.runs[seed]) for seed in treatment.runs.keys() & control.runs.keys()]
    return bool(both) and all(len(a) == len(b) == 1 and _forked(a[0], b[0]) for a, b in both)


def _forked(a: Run, b: Run) -> bool:
    if a.fork and b.fork:
        return a.fork == b.fork
    fork, parent = (a.fork or b.fork or {}), (b if a.fork else a)
    return fork.get("parent") == parent.name


def load_study(folder: str | Path) -> Study:
    """Return the study of a folder or pack. Without a grid, the study has runs and arms only.

    Raises:
        UserError: the folder has no runs, or its ablation.json cannot be read or is invalid.
    """
    folder = unpacked(Path(folder))
    runs = tuple(read_runs(folder))
    ablation = read_ablation(folder)
    if ablation is None:
        found = {"grid": {"arms": {run.arm: {} for run in runs}}, "runs": []}
        return replace(study_of(folder, found, runs), registered=False)
    return study_of(folder, ablation, runs)


def study_of(folder: Path, ablation: Mapping[str, Any], runs: Sequence[Run]) -> Study:
    """Return the study of these runs; ``ablation`` is the content of ablation.json.

    Raises:
        UserError: a claim is invalid.
    """
    grid, where = ablation["grid"], str(folder / ABLATION_NAME)
    name = str(ablation.get("name") or grid.get("name") or folder.resolve().name)
    families = _families(grid.get("arms") or {})
    planned = [(entry["arm"], entry["seed"], entry.get("role", "verdict")) for entry in ablation["runs"]]
    arms = _arms(families, [entry for entry in ablation["runs"] if entry.get("role", "verdict") == "verdict"])
    present = {(run.arm, run.seed, run.role) for run in runs}
    points = {n: [arm.point for arm in arms.values() if n in (arm.name, arm.family)] for n in (*families, *arms)}
    claims = read_claims(grid.get("claims"), points, name, where)
    check_claims(claims, points, where)
    lost = bool(ablation.get("lost"))
    if lost:
        claims = tuple(replace(c, status="exploratory") if c.status == "confirmatory" else c for c in claims)
    metric = (grid.get("lr") or {}).get("metric", RATE_METRIC)
    chosen = {choice["arm"]: choice["metric"] for choice in ablation.get("lr") or ()}
    return Study(
        folder=folder,
        name=name,
        title=str(grid.get("title") or name),
        arms=arms,
        claims=claims,
        report=grid.get("report") or {},
        runs=tuple(runs),
        missing=tuple((arm, seed) for arm, seed, role in planned if (arm, seed, role) not in present),
        registered=True,
        claims_changed=ablation.get("registered") not in (None, claims_hash(grid)),
        registration_lost=lost,
        families=families,
        rate_metrics=dict.fromkeys(arms, metric) | chosen,
    )


def _families(named: Mapping[str, Any]) -> dict[str, StudyArm]:
    """Return the arms of the grid without the values of the axes; a fork inherits the settings of its parent."""
    families: dict[str, StudyArm] = {}
    for name, value in named.items():
        value = value or {}
        settings, parent = dict(value.get("set") or {}), value
        for _ in named:
            fork = parent.get("fork")
            if not fork:
                break
            parent = named.get(fork.get("arm")) or {}
            settings = {"fork": fork, **(parent.get("set") or {}), **settings}
        label, block = str(value.get("label", name)), str(value.get("block", ""))
        families[name] = StudyArm(name, label, block, (), settings, name)
    return families


def _arms(families: Mapping[str, StudyArm], planned: Sequence[Mapping[str, Any]]) -> dict[str, StudyArm]:
    """Return the arms of the study, one for each point of a family, in the order of the families."""
    arms: dict[str, StudyArm] = {}
    for family in families.values():
        entries = [entry for entry in planned if (entry.get("family") or entry["arm"]) == family.name]
        crossed = {entry["arm"]: entry.get("point") or {} for entry in entries} or {family.name: {}}
        for name, point in crossed.items():
            values = [f"{field.rpartition('.')[2]} {value}" for field, value in point.items()]
            label, settings = ", ".join([family.label, *values]), {**family.settings, **point}
            seeds = tuple(entry["seed"] for entry in entries if entry["arm"] == name)
            arms[name] = StudyArm(name, label, family.block, seeds, settings, family.name, point)
    return arms
