"""Rules of a grid that add runs: selection of learning rates, and replays of diverged runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from mmqk.lab.grid import language as read
from mmqk.ranges import BELOW_ONE, LARGEST, MOST_SEED, SMALLEST, SMALLEST_PERTURBATION, check_fields, number

# With the rule "matched", each arm sets its learning rate itself.
LrChoice = Literal["matched", "own_best"]


@dataclass(frozen=True)
class LrRule:
    """How arms get their learning rates: each arm sets its own learning rate, or selection runs with other seeds
    choose it.

    Attributes:
        grid: learning rates to try, ascending.
        seeds: seeds of the selection runs.
        metric: a metric of `mmqk.lab.metrics`; the learning rate with the best mean over seeds is selected.
    """

    rule: LrChoice = "matched"
    grid: tuple[float, ...] = number((), SMALLEST, LARGEST)
    seeds: tuple[int, ...] = number((0,), 0, MOST_SEED)
    metric: str = "final_excess"

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.rule == "own_best":
            _check_different("grid", self.grid)
            _check_different("seeds", self.seeds)


@dataclass(frozen=True)
class ReplayRule:
    """How a diverged run is replayed.

    Attributes:
        depths: distances from the start of a replay to the divergence, as fractions of the step of the divergence;
            ascending.
        replays: number of replays per depth and kind (`mmqk.lab.runner.replays.numerics_of`).
        noise: RMS of the random change of each weight matrix at the start of a replay, as a fraction of the matrix's
            RMS.
        horizon: length of a replay, as a multiple of the distance from its start to the divergence.
    """

    depths: tuple[float, ...] = number((0.01, 0.05, 0.2), 1e-6, BELOW_ONE)
    replays: int = number(3, 1, 1000)
    noise: float = number(1e-6, SMALLEST_PERTURBATION, 1.0)
    horizon: float = number(3.0, 1.001, 1000.0)

    def __post_init__(self) -> None:
        check_fields(self, "")
        _check_different("depths", self.depths)


def _check_different(name: str, values: tuple[float, ...]) -> None:
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must be a list of different numbers, not {list(values)}")


def read_lr(value: Any, where: str) -> LrRule | None:
    """Return the rule for learning rates; None if the arms set their learning rates.

    Raises:
        UserError: an unknown rule or key, or invalid learning rates or seeds.
    """
    record = read.mapping({} if value is None else value, where)
    rule = read.build(LrRule, record, where)
    if rule.rule == "matched":
        read.known(record, ("rule",), f"{where} with rule 'matched'")
        return None
    return replace(rule, grid=tuple(sorted(rule.grid)))


def read_replay(value: Any, where: str) -> ReplayRule:
    """Return the rule for replays.

    Raises:
        UserError: an unknown key, a wrong type, or a number outside its range.
    """
    rule = read.build(ReplayRule, read.mapping({} if value is None else value, where), where)
    return replace(rule, depths=tuple(sorted(rule.depths)))
