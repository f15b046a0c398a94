"""Rules of a grid that add runs: selection of learning rates, and replays of diverged runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmqk.grid import language as read
from mmqk.ranges import BELOW_ONE, LARGEST, MOST_SEED, SMALLEST, check_numbers, number, ranged
from mmqk.store import UserError

# Same value as in `mmqk.config.fork`.
SMALLEST_PERTURBATION = 1e-7
DEPTHS = (0.01, 0.05, 0.2)


@dataclass(frozen=True)
class LrRule:
    """Each arm has its best learning rate, selected on seeds that are not in the verdicts.

    Attributes:
        grid: learning rates to try, ascending.
        seeds: seeds of the selection runs.
        metric: a metric of `mmqk.analysis.metrics`; the learning rate with the best mean over seeds is selected.
    """

    grid: tuple[float, ...] = field(metadata=ranged(SMALLEST, LARGEST))
    seeds: tuple[int, ...] = field(metadata=ranged(0, MOST_SEED))
    metric: str

    def __post_init__(self) -> None:
        check_numbers(self, "")


@dataclass(frozen=True)
class ReplayRule:
    """How a diverged run is replayed.

    Attributes:
        depths: how long before the divergence replays begin, as shares of the run until then.
        replays: number of replays per numerics and depth.
        noise: change of the weights at the start, as a fraction of their RMS.
        horizon: length of a replay, as a multiple of the distance from its start to the divergence.
    """

    depths: tuple[float, ...] = number(DEPTHS, 1e-6, BELOW_ONE)
    replays: int = number(3, 1, 1000)
    noise: float = number(1e-6, SMALLEST_PERTURBATION, 1.0)
    horizon: float = number(3.0, 1.001, 1000.0)

    def __post_init__(self) -> None:
        check_numbers(self, "")


def read_lr(value: Any, where: str) -> LrRule | None:
    """The rule for learning rates; None if the arms set them.

    Raises:
        UserError: an unknown rule or key, invalid learning rates or seeds.
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
    """The rule for replays, with defaults for missing keys.

    Raises:
        UserError: an unknown key, a depth outside 0 to 1, a number of replays that is not a whole number, a
            perturbation outside the range of forks, a horizon of 1 or less.
    """
    record = read.mapping({} if value is None else value, where)
    read.known(record, tuple(ReplayRule.__dataclass_fields__), where)
    default = ReplayRule()
    depths = read.numbers(record.get("depths", list(DEPTHS)), f"{where}.depths")
    horizon = read.number(record.get("horizon", default.horizon), f"{where}.horizon")
    noise = read.number(record.get("noise", default.noise), f"{where}.noise")
    return read.in_range(
        ReplayRule,
        where,
        tuple(sorted(depths)),
        read.whole(record.get("replays", default.replays), f"{where}.replays"),
        noise,
        horizon,
    )
