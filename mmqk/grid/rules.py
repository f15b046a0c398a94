"""Rules of a grid that make runs of their own: how learning rates are chosen, and how divergences are replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmqk.grid import language as read
from mmqk.ranges import BELOW_ONE, LARGEST, MOST_SEED, SMALLEST, check_numbers, number, ranged
from mmqk.store import UserError

# As `mmqk.config.fork` has it.
SMALLEST_PERTURBATION = 1e-7
DEPTHS = (0.01, 0.05, 0.2)


@dataclass(frozen=True)
class LrRule:
    """Each arm at the learning rate that is best for it on seeds that decide nothing.

    Attributes:
        grid: learning rates to try, ascending.
        seeds: that are tried.
        metric: of `mmqk.analysis.metrics`; its good end is best, the mean over seeds counts.
    """

    grid: tuple[float, ...] = field(metadata=ranged(SMALLEST, LARGEST))
    seeds: tuple[int, ...] = field(metadata=ranged(0, MOST_SEED))
    metric: str

    def __post_init__(self) -> None:
        check_numbers(self, "")


@dataclass(frozen=True)
class ReplayRule:
    """How a run that diverged is replayed.

    Attributes:
        depths: how long before the divergence replays begin, as shares of the run until then.
        replays: of each numerics from each depth.
        perturb: change of the weights at the start, in their RMS.
        horizon: length of a replay, in distances from its start to the divergence.
    """

    depths: tuple[float, ...] = number(DEPTHS, 1e-6, BELOW_ONE)
    replays: int = number(3, 1, 1000)
    perturb: float = number(1e-6, SMALLEST_PERTURBATION, 1.0)
    horizon: float = number(3.0, 1.001, 1000.0)

    def __post_init__(self) -> None:
        check_numbers(self, "")


def read_lr(value: Any, where: str) -> LrRule | None:
    """The rule for learning rates; None when the arms set them themselves.

    Raises:
        UserError: an unknown rule or key, learning rates or seeds that are none.
    """
    record = read.mapping({} if value is None else value, where)
    rule = record.get("rule", "matched")
    if rule == "matched":
        read.known(record, ("rule",), f"{where} with rule matched")
        return None
    if rule != "own_best":
        raise UserError(f"{where}: the rule is {rule!r}: use matched or own_best")
    read.known(record, ("rule", "grid", "seeds", "metric"), where)
    if "grid" not in record:
        raise UserError(f"{where}: own_best needs a grid of learning rates")
    return read.in_range(
        LrRule,
        where,
        tuple(sorted(read.numbers(record["grid"], f"{where}.grid"))),
        read.seeds(record.get("seeds", [0]), f"{where}.seeds"),
        str(record.get("metric", "final_excess")),
    )


def read_replay(value: Any, where: str) -> ReplayRule:
    """The rule for replays, with the defaults of what is left out.

    Raises:
        UserError: an unknown key, a depth outside 0 to 1, no whole number of replays, a perturbation
            that no fork takes, a horizon of 1 or less.
    """
    record = read.mapping({} if value is None else value, where)
    read.known(record, tuple(ReplayRule.__dataclass_fields__), where)
    default = ReplayRule()
    depths = read.numbers(record.get("depths", list(DEPTHS)), f"{where}.depths")
    horizon = read.number(record.get("horizon", default.horizon), f"{where}.horizon")
    perturb = read.number(record.get("perturb", default.perturb), f"{where}.perturb")
    return read.in_range(
        ReplayRule,
        where,
        tuple(sorted(depths)),
        read.whole(record.get("replays", default.replays), f"{where}.replays"),
        perturb,
        horizon,
    )
