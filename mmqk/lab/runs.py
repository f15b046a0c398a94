"""Load run folders.

An interrupted or damaged run is not left out, because the omission would go unnoticed. It is loaded as far as
possible, with a note that names what is missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mmqk import store
from mmqk.store import Alarm, DamagedFile, Status, Tag
from mmqk.store.alarms import ALARMS_NAME
from mmqk.store.folder import ABLATION_NAME, RUN_NAME, read_ablation
from mmqk.store.metrics import METRICS_NAME, parse_lines, with_floats

Series = tuple[NDArray[Any], NDArray[np.float64]]

EMPTY: Series = (np.zeros(0, dtype=np.int64), np.zeros(0))


def series_of(records: Iterable[dict[str, Any]]) -> dict[str, Series]:
    """Return (steps, values) by tag; steps ascend.

    Args:
        records: lines of a metrics file, each ``{"step": int, tag: number or "nan", "inf", "-inf"}``; other values are
            ignored. If a step was written twice, the later value is used.
    """
    found: dict[str, dict[int, float]] = {}
    for record in map(with_floats, records):
        step = record.pop("step")
        for tag, value in record.items():
            if isinstance(value, int | float):
                found.setdefault(tag, {})[step] = float(value)
    steps = {tag: np.array(sorted(by_step), dtype=np.int64) for tag, by_step in found.items()}
    return {tag: (steps[tag], np.array([found[tag][step] for step in steps[tag].tolist()])) for tag in found}


# `mmqk.monitors.attach` writes metrics.jsonl and status.json alone; a run of mmqk.train has more of these.
OWN = (RUN_NAME, "fork.json", "data.json", "checkpoints", ALARMS_NAME)
CUT = "a line of metrics.jsonl cannot be read"
NO_METRICS = "metrics.jsonl is missing or has no readable line"
NO_GRID = "its grid has no ablation.json, so its labels and claims are unknown"
_T = TypeVar("_T")
_SEED = re.compile(r"seed(\d+)")
_ARM = re.compile(r"(?P<arm>.+)-[0-9a-f]{10}")


@dataclass
class Run:
    """One run folder.

    Attributes:
        path: the folder.
        name: path of the run inside the folder of the study, e.g. ``mixed-0123456789/seed0``.
        arm: name of the arm.
        seed: the seed.
        id: hash of the identity; empty if run.json is missing or cannot be read.
        code: git commit of mmqk, or the version of its package.
        identity: the fields that define the run.
        details: versions, command, machine and resolved configuration.
        status: content of status.json; "failed" with a reason if the file cannot be read; empty if a monitored model
            has none.
        remarks: sentences about what is missing or unusual in the records; `notes` also covers the metrics.
        family: name of the arm in the grid, without the values of the axes.
        point: the values of the axes by dotted field; empty if the grid has no axes.
        role: "verdict", "selection" (a run that selects a learning rate; no verdict uses it) or "parent" (of forks).
        fork: ``{"parent": folder or id, "step": n}`` for a fork, else None.
        forked: content of fork.json; empty if there is none.
        data: statistics of the data by modality, from data.json; empty if there is no such file.
        parent: the parent of a fork, if it was loaded with the fork; else None.
        cache: results of the functions with the decorator `once_per_run`.
    """

    path: Path
    name: str
    arm: str
    seed: int
    id: str = ""
    code: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    status: Status = field(default_factory=lambda: Status("failed"))
    remarks: tuple[str, ...] = ()
    family: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)
    role: str = "verdict"
    fork: Mapping[str, Any] | None = None
    forked: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    parent: Run | None = field(default=None, init=False, repr=False, compare=False)
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.family = self.family or self.arm

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration, nested; the identity if no configuration was recorded."""
        config = self.details.get("config")
        return config if isinstance(config, Mapping) else self.identity

    def setting(self, name: str, default: Any = None) -> Any:
        """Return the value of a dotted field of the configuration, e.g. ``loss.weights.image``."""
        value: Any = self.config
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    @cached_property
    def _metrics(self) -> tuple[dict[str, Series], bool]:
        """The series by tag, and whether a line, usually the last line of a killed run, cannot be read."""
        path = self.path / METRICS_NAME
        try:
            records, cut = parse_lines(path.read_bytes())
        except OSError:
            return {}, os.path.lexists(path)
        return series_of(records), cut

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what is missing or unusual in the run."""
        series, cut = self._metrics
        lacks = CUT if cut else NO_METRICS if self.status.step and not series else ""
        return (*self.remarks, lacks) if lacks else self.remarks

    @cached_property
    def tags(self) -> dict[str, Tag]:
        """The parsed tag of each series, by its name; a name that is not a tag becomes the statistic."""
        return {name: store.parse_tag(name) for name in self._metrics[0]}

    @cached_property
    def _by_statistic(self) -> dict[str, list[tuple[str, Tag]]]:
        named: dict[str, list[tuple[str, Tag]]] = {}
        for name, tag in self.tags.items():
            named.setdefault(tag.statistic, []).append((name, tag))
        return named

    @cached_property
    def alarms(self) -> list[Alarm]:
        """The recorded alarms, in order. In a folder without run.json and alarms.jsonl, those that the rules find in
        the metrics."""
        if self.identity or self.fork or (self.path / ALARMS_NAME).exists():
            return store.read_alarms(self.path)
        return store.alarms_of(store.read_metrics(self.path / METRICS_NAME))

    @cached_property
    def last_step(self) -> int:
        """The last step of all series; 0 without series."""
        return max((int(steps[-1]) for steps, _ in self._metrics[0].values()), default=0)

    @property
    def start(self) -> int:
        """The step at which a fork begins; 0 for another run."""
        step = (self.fork or {}).get("step")
        return step if isinstance(step, int) else 0

    @property
    def warmup_steps(self) -> int:
        """The number of warm-up steps of the learning rate; 0 if not recorded."""
        return self.setting("optim.warmup_steps", 0)

    @property
    def planned_steps(self) -> int:
        """The configured length of the run in optimizer steps; if not recorded, its last step."""
        return self.setting("trainer.max_steps", 0) or self.last_step

    def series(self, tag: str) -> Series:
        """Return (steps, values) of one series; both empty if the run does not have it."""
        return self._metrics[0].get(tag, EMPTY)

    def history(self, tag: str) -> Series:
        """Return (steps, values) of one series from step 0: for a fork with a loaded parent, the series of the parent
        up to the step of the fork, and then that of the fork."""
        steps, values = self.series(tag)
        if self.parent is None:
            return steps, values
        before, earlier = self.parent.history(tag)
        inherited, own = before <= self.start, steps > self.start
        return np.concatenate([before[inherited], steps[own]]), np.concatenate([earlier[inherited], values[own]])

    def combined(
        self, statistic: str, reduce: Callable[..., Any], modality: str | None = None, layer: int | None = None
    ) -> Series:
        """Return a statistic at each step, reduced over layers (and over key modalities).

        Args:
            statistic: e.g. ``attn_logit_absmax``.
            reduce: ``np.max``, ``np.min`` or ``np.mean``. ``np.max`` treats NaN as infinite, because NaN
                ranks worst.
            modality: modality of the tokens, or of the queries for a pair; None for all.
            layer: one layer; None for all.
        """
        names = [
            name
            for name, tag in self._by_statistic.get(statistic, ())
            if tag.head is None
            and (modality is None or modality == (tag.pair[0] if tag.pair else tag.modality))
            and layer in (None, tag.layer)
        ]
        if not names:
            return EMPTY
        steps = np.unique(np.concatenate([self.series(name)[0] for name in names]))
        table = np.ma.masked_all((len(names), len(steps)))
        for row, name in enumerate(names):
            at, values = self.series(name)
            if reduce is np.max:
                values = np.where(np.isnan(values), np.inf, values)
            table[row, np.searchsorted(steps, at)] = values
        return steps, np.asarray(reduce(table, axis=0), dtype=np.float64)


def once_per_run(measure: Callable[[Run, str], _T]) -> Callable[[Run, str], _T]:
    """Cache the result for each run and name, because several claims use the same number."""

    @wraps(measure)
    def cached(run: Run, name: str) -> _T:
        if (measure, name) not in run.cache:
            run.cache[measure, name] = measure(run, name)
        return run.cache[measure, name]

    return cached


def read_runs(folder: str | Path) -> list[Run]:
    """Return all runs under ``folder``, which is the folder of a grid, an arm or a run.

    If the folder has an ``ablation.json``, return the runs that it lists and that have a folder, in the listed order.
    Otherwise, every folder with a ``run.json`` or ``metrics.jsonl``, up to three levels down, is a run.

    Raises:
        UserError: the folder does not exist or has no run.
    """
    folder = Path(folder)
    ablation = read_ablation(folder)
    if ablation is not None:
        entries = [entry for entry in ablation["runs"] if os.path.isdir(folder / entry["folder"])]
        runs = [_load(folder / e["folder"], e["folder"], e["arm"], e["seed"], e) for e in entries]
    else:
        runs = [_load(path, *_names(path, folder)) for path in store.find_runs(folder)]
    _link_parents(runs)
    return runs


def _link_parents(runs: list[Run]) -> None:
    """Set the parent of each fork, found by the name in the records of the grid or by the id that the fork
    recorded. A parent that is a fork itself must begin earlier: damaged records cannot make a cycle."""
    by_name, by_id = {run.name: run for run in runs}, {run.id: run for run in runs if run.id}
    for run in runs:
        if run.fork:
            recorded = (run.forked.get("parent") or {}).get("id")
            found = by_name.get(str(run.fork.get("parent"))) or by_id.get(str(recorded))
            if found is not None and found is not run and (not found.fork or (found.start or -1) < run.start):
                run.parent = found


def _names(path: Path, root: Path) -> tuple[str, str, int | None]:
    """Return (name, arm, seed) of a run that no ablation.json lists; the seed is None if the name of the folder has
    none."""
    path, root = path.resolve(), root.resolve()
    parts = path.relative_to(root).parts or (path.name,)
    match = _SEED.fullmatch(path.name)
    # The folder above seed<k> is the arm, even if it is ``root``.
    arm = path.parent.name if match else path.name
    named = _ARM.fullmatch(arm)
    return "/".join(parts), named["arm"] if named else arm, int(match[1]) if match else None


def _noted(read: Callable[[], _T | None], notes: list[str], missing: str = "") -> _T | None:
    """Return the result of ``read``; None if the file is missing or damaged. Add a note if it is damaged, or if it is
    missing and ``missing`` is given."""
    try:
        record = read()
    except DamagedFile as damaged:
        record, missing = None, f"its {damaged.path.name} cannot be read: {damaged.why}"
    if record is None and missing:
        notes.append(missing)
    return record


def _load(path: Path, name: str, arm: str, seed: int | None, entry: Mapping[str, Any] | None = None) -> Run:
    entry = entry or {}
    notes: list[str] = []
    arm_folder = path.resolve().parent
    of_grid = not entry and _SEED.fullmatch(path.name) and _ARM.fullmatch(arm_folder.name)
    own = entry or of_grid or any((path / file).exists() for file in OWN)
    record = _noted(lambda: store.read_run(path), notes, "its run.json is missing" if own else "") or {}
    status = _noted(lambda: store.read_status(path), notes, "its status.json is missing" if own else "")
    if status is None:
        status = Status("failed", reason=notes[-1]) if notes else Status("")
    if of_grid and not (arm_folder.parent / ABLATION_NAME).exists():
        notes.append(NO_GRID)
    if status.status == "running":
        notes.append("still running, or cut off")
    forked = _noted(lambda: store.read_json(path / "fork.json"), notes) or {}
    data = _noted(lambda: store.read_json(path / "data.json"), notes) or {}
    fork = entry.get("fork")
    if not fork and (parent := forked.get("parent")) is not None:
        fork = {"parent": parent.get("folder") or parent.get("id"), "step": parent.get("step")}
    seed = record.get("identity", {}).get("seed", 0) if seed is None else seed
    known: dict[str, Any] = {key: record[key] for key in ("id", "code", "identity", "details") if key in record}
    known |= {key: entry[key] for key in ("family", "point", "role") if entry.get(key)}
    known |= {"status": status, "remarks": tuple(notes), "fork": fork, "forked": forked, "data": data}
    return Run(path, name, arm, seed, **known)
