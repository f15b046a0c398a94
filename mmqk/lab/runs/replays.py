"""The verdict of the replays of a diverged run: dynamics, numerics, or undecided.

A diverged run is replayed from several steps before its divergence; the distance to the divergence is the depth. The
replays run in bf16 with fused attention, in bf16 with dense attention, and in fp32. Each replay starts with weights
changed by one part in a million, because the divergence step of a single replay is chaotic: only several replays of
each kind show whether the precision matters.

dynamics    at every depth all replays diverge, and the fp32 divergence steps lie among the bf16 divergence steps
numerics    at every depth all bf16 replays diverge and all fp32 replays reach the end of their horizon
undecided   every other case

"Among" means that the fp32 steps are neither all before the earliest bf16 step nor all after the latest, with a
tolerance of `SLACK` times the mean distance of the bf16 steps from the start of the replays. If 3 fp32 and 6 bf16
steps come from one distribution, 2 of their 84 possible orders fail this condition at each depth. Soft-capped and
sigmoid attention have no fused kernel; with 3 fp32 and 3 bf16 steps, 2 of 20 orders fail the condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmqk.lab.formatting import plural
from mmqk.lab.runs.load import Run
from mmqk.store import FINISHED

SLACK = 0.05
AT_LEAST = 3
CONTROL = "control"
FUSED = "bf16-fused"  # only for attention that a fused kernel can compute
BF16 = (FUSED, "bf16-math")
FP32 = "fp32"

Label = Literal["dynamics", "numerics", "undecided"]


@dataclass(frozen=True)
class Times:
    """The divergence steps of the replays with one depth and one kind of numerics.

    Attributes:
        depth: distance from the first step of the replays to the divergence of the original run, as a share of the
            steps up to that divergence.
        step: first step of the replays.
        numerics: bf16-fused, bf16-math or fp32.
        diverged: steps of the divergences of the replays, sorted.
        survived: number of replays that reached the step ``horizon``.
        horizon: the step at which a replay that does not diverge ends.
        runs: names of the replays.
    """

    depth: float
    step: int
    numerics: str
    diverged: tuple[int, ...]
    survived: int
    horizon: int
    runs: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of finished replays."""
        return len(self.diverged) + self.survived


@dataclass(frozen=True)
class ReplayVerdict:
    """The verdict of the replays of one run.

    Attributes:
        of: name of the diverged run.
        label: dynamics, numerics or undecided.
        sentence: the reason, in one or two sentences.
        rows: one `Times` for each depth and numerics, smallest depth first.
    """

    of: str
    label: Label
    sentence: str
    rows: tuple[Times, ...]


def replay_verdicts(runs: Iterable[Run]) -> list[ReplayVerdict]:
    """Return one verdict for each run that has replays among ``runs``, in the order of the replays."""
    by_name = {run.name: run for run in runs}
    replays: dict[str, list[Run]] = {}
    for run in by_name.values():
        if run.replay:
            replays.setdefault(str(run.replay.get("of")), []).append(run)
    return [_verdict(name, by_name.get(name), members) for name, members in replays.items()]


def _verdict(name: str, original: Run | None, replays: Sequence[Run]) -> ReplayVerdict:
    unfinished = [run for run in replays if run.status.status not in FINISHED]
    rows = tuple(_times(run for run in replays if run not in unfinished))
    sentence = _not_judged(original, replays, rows, unfinished)
    if sentence:
        return ReplayVerdict(name, "undecided", sentence, rows)
    depths: dict[float, dict[str, Times]] = {}
    for row in rows:
        depths.setdefault(row.depth, {})[row.numerics] = row
    if all(_shows_numerics(row) for row in depths.values()):
        words = "At every depth all bf16 replays diverged and all fp32 replays reached the end of their horizon."
        return ReplayVerdict(name, "numerics", words, rows)
    against = [f"{100 * depth:g} %: {why}" for depth, row in depths.items() if (why := _not_dynamics(row))]
    if not against:
        words = "At every depth all replays diverged, and the fp32 divergence steps lie among the bf16 ones."
        return ReplayVerdict(name, "dynamics", words, rows)
    sentence = f"From a depth of {'; from a depth of '.join(against)}."
    if not any(row.survived for row in rows if row.numerics == FP32):
        sentence += " All fp32 replays diverged: the divergence does not need bf16."
    return ReplayVerdict(name, "undecided", sentence, rows)


def _not_judged(
    original: Run | None, replays: Sequence[Run], rows: Sequence[Times], unfinished: Sequence[Run]
) -> str:
    """Return why the replays cannot be judged; empty if they can."""
    if unfinished:
        return f"{len(unfinished)} of {plural(len(replays), 'replay')} have not finished."
    control = next((run for run in replays if _replay(run)["numerics"] == CONTROL), None)
    if control is None or original is None:
        return "There is no control replay (a rerun without changes)."
    if (control.status.status, control.status.step) != (original.status.status, original.status.step):
        return (
            f"The control replay (a rerun without changes) {control.status.status} at step"
            f" {control.status.step}, the run {original.status.status} at step {original.status.step}: the run is not"
            " reproducible."
        )
    depths = {row.depth for row in rows}
    required = [n for n in BF16 if n != FUSED or any(row.numerics == FUSED for row in rows)]
    for depth in sorted(depths):
        counts = {row.numerics: row.count for row in rows if row.depth == depth}
        for numerics in (*required, FP32):
            if counts.get(numerics, 0) < AT_LEAST:
                done = plural(counts.get(numerics, 0), "replay")
                return f"{done} in {numerics} from a depth of {100 * depth:g} %: {AT_LEAST} of each kind are needed."
    return "" if depths else "There is no replay except the control."


def _times(replays: Iterable[Run]) -> list[Times]:
    groups: dict[tuple[float, str], list[Run]] = {}
    for run in replays:
        record = _replay(run)
        if record["numerics"] != CONTROL:
            groups.setdefault((float(record["depth"]), str(record["numerics"])), []).append(run)
    order = {numerics: place for place, numerics in enumerate((*BF16, FP32))}
    rows = []
    for (depth, numerics), runs in sorted(groups.items(), key=lambda g: (g[0][0], order.get(g[0][1], 9))):
        diverged = sorted(run.status.step for run in runs if run.status.status == "diverged")
        horizon = max(int(run.setting("trainer.max_steps", run.last_step)) for run in runs)
        step = int(_replay(runs[0])["step"])
        names = tuple(run.name for run in runs)
        rows.append(Times(depth, step, numerics, tuple(diverged), len(runs) - len(diverged), horizon, names))
    return rows


def _shows_numerics(row: Mapping[str, Times]) -> bool:
    return not row[FP32].diverged and not any(row[n].survived for n in BF16 if n in row)


def _not_dynamics(row: Mapping[str, Times]) -> str:
    """Return why the replays of one depth contradict dynamics; empty if they do not."""
    survived = [
        f"{times.survived} of {times.count} {name} replays survived"
        for name, times in row.items()
        if times.survived
    ]
    if survived:
        return ", ".join(survived)
    bf16 = [time for numerics in BF16 if numerics in row for time in row[numerics].diverged]
    fp32 = row[FP32].diverged
    slack = SLACK * (sum(bf16) / len(bf16) - row[FP32].step)
    when = "before" if fp32[-1] < min(bf16) - slack else "after" if fp32[0] > max(bf16) + slack else ""
    return when and (
        f"all fp32 replays diverged {when} every bf16 replay (steps {_span(fp32)} against {_span(bf16)})"
    )


def _span(times: Sequence[int]) -> str:
    return f"{min(times)} to {max(times)}"


def _replay(run: Run) -> Mapping[str, Any]:
    assert run.replay is not None
    return run.replay
