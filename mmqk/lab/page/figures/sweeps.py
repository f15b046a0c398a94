"""Group runs that differ only in learning rate and model size.

Groups come from the configurations of the runs, so they also exist without a grid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mmqk.lab.formatting import listed
from mmqk.lab.metrics import model_size
from mmqk.lab.metrics.rates import RATE, learning_rate
from mmqk.lab.runs.load import Run
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import middle
from mmqk.store import flatten

SIZE = ("model.d_model", "model.n_layers", "model.n_heads", "model.n_kv_heads", "model.d_head", "model.d_ff")
FEWEST_RATES = 3


@dataclass(frozen=True)
class Sweep:
    """Runs of one configuration at several learning rates, and perhaps several sizes.

    Attributes:
        label: text for the page.
        runs: all runs; each has a learning rate and a size.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms of the runs."""
        return tuple(dict.fromkeys(run.arm for run in self.runs))

    @property
    def rates(self) -> list[float]:
        """Learning rates, ascending."""
        return sorted(set(map(learning_rate, self.runs)))

    @property
    def sizes(self) -> list[float]:
        """Numbers of parameters without embeddings and head, ascending."""
        return sorted({model_size(run) for run in self.runs})

    def at(self, *, lr: float | None = None, size: float | None = None) -> list[Run]:
        """Return the runs with this learning rate and this size; None matches all."""
        return [
            run
            for run in self.runs
            if (lr is None or learning_rate(run) == lr) and (size is None or model_size(run) == size)
        ]


def alike(runs: Iterable[Run], apart_from: Sequence[str]) -> list[list[Run]]:
    """Return groups of runs whose identities are equal except for the seed and the fields (or blocks of fields) in
    ``apart_from``."""
    groups: dict[str, list[Run]] = {}
    fields, blocks = {"seed", *apart_from}, tuple(f"{field}." for field in apart_from)
    for run in runs:
        if run.identity and run.role in ("verdict", "selection") and not run.fork:
            left = {
                name: value
                for name, value in flatten(run.identity).items()
                if name not in fields and not name.startswith(blocks)
            }
            groups.setdefault(json.dumps(left, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def sweeps(study: Study, arms: Sequence[str] = ()) -> list[Sweep]:
    """Return the groups with at least three learning rates, the largest group first. If ``arms`` is given
    (names of arms or families), use only their runs."""
    runs = [
        run
        for run in study.runs
        if learning_rate(run) > 0
        and model_size(run) > 0
        and run.tags
        and (not arms or run.arm in arms or run.family in arms)
    ]
    runs = list({run.name: run for run in runs}.values())
    groups = [g for g in alike(runs, (RATE, *SIZE)) if len({learning_rate(run) for run in g}) >= FEWEST_RATES]
    groups.sort(key=lambda group: -len({(learning_rate(run), model_size(run)) for run in group}))
    return [Sweep(label, tuple(group)) for label, group in zip(_labels(study, groups), groups, strict=True)]


def _labels(study: Study, groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the label of each group: its only family, its only arm, or the fields in which it differs from the other
    groups."""
    labels = []
    settings = [flatten(group[0].identity) for group in groups]
    for group, fields in zip(groups, settings, strict=True):
        families = list(dict.fromkeys(run.family for run in group))
        if len(families) == 1 and families[0] != group[0].arm:
            labels.append(study.label(families[0]))
            continue
        if len({run.arm for run in group}) == 1:
            labels.append(study.label(group[0].arm))
            continue
        differ = [
            f"{name.removeprefix('model.')}={value}"
            for name, value in fields.items()
            if name not in ("seed", RATE, *SIZE) and any(other.get(name) != value for other in settings)
        ]
        labels.append(listed(differ[:3]) or study.title)
    return labels


def medians(
    runs: Iterable[Run], key: Callable[[Run], float], value: Callable[[Run], float]
) -> dict[float, float]:
    """Return the median of a value over the runs at each key, keys ascending."""
    by_key: dict[float, list[float]] = {}
    for run in runs:
        by_key.setdefault(key(run), []).append(value(run))
    return {at: middle(values) for at, values in sorted(by_key.items())}
