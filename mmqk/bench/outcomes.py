"""What a change does to runs that fail: the zoo, and the rescue map. ``mmqk bench RUNS --outcomes``.

The grid has an arm ``healthy``; arms that fail, named ``none-FAILURE``; and arms with a change, named
``CHANGE-FAILURE``, or ``CHANGE-FAILURE-STEP`` if they are forks.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from mmqk.bench.kinds import findings
from mmqk.bench.score import LASTING
from mmqk.bench.traces import SMOOTH, Label, Trace, fails_from, metrics_table
from mmqk.lab.formatting import markdown_table
from mmqk.lab.runs import Run
from mmqk.store import UserError

HEALTHY, NONE = "healthy", "none"
DELAYED = 0.1  # of the run: how much later a delayed failure is


def outcomes(runs: Iterable[Run]) -> pd.DataFrame:
    """Return a row for each run of a change.

    Columns: ``change``; ``failure``; ``at``, the step of the fork, 0 for a run from the start; ``seed``;
    ``outcome``: saved (it does not fail), delayed (it fails, but later by a tenth of the run than without the
    change) or lost; empty if the run without the change does not fail either; ``cost``: final loss minus that of the
    healthy run, nats, mean of the modalities.

    Raises:
        UserError: a run of the arm ``healthy`` or ``none`` is missing.
    """
    found = [run for run in runs if run.status.finished]
    named = {(*_parts(run), run.seed): run for run in found}
    tables = {run.name: metrics_table(run) for run in found}
    rows = []
    for run in (run for run in found if run.arm != HEALTHY):
        change, failure, at = _parts(run)
        healthy, parent = named.get((HEALTHY, "", 0, run.seed)), named.get((NONE, failure, 0, run.seed))
        if healthy is None or parent is None:
            raise UserError(f"{run.name} has no finished run of the arms {HEALTHY} and {NONE} beside it: train them")
        twin = tables[healthy.name]
        fails, would = (fails_from(one, tables[one.name], twin) for one in (run, parent))
        late = fails is not None and would is not None and fails >= would + DELAYED * parent.planned_steps
        cost = (_final(tables[run.name]) - _final(twin)).mean()
        outcome = "" if would is None else "saved" if fails is None else "delayed" if late else "lost"
        rows.append((change, failure, at, run.seed, outcome, cost))
    return pd.DataFrame(rows, columns=["change", "failure", "at", "seed", "outcome", "cost"])


def _parts(run: Run) -> tuple[str, str, int]:
    """Return the change, the failure and the step of the fork that the name of an arm has."""
    name, _, last = run.arm.rpartition("-")
    at = int(last) if name and last.isdecimal() else 0
    change, _, failure = (name if at else run.arm).rpartition("-")
    return (change, failure, at) if change else (failure, "", 0)


def _final(metrics: pd.DataFrame) -> pd.Series:
    """Return the median of the last `SMOOTH` losses of each modality."""
    return metrics.filter(regex="^loss/").apply(lambda loss: loss.dropna().iloc[-SMOOTH:].median())


def markdown(table: pd.DataFrame) -> str:
    """Return a row per change and a column per failure and step: how many seeds were saved or delayed, and the mean
    cost."""
    columns = sorted({(f, at) for f, at in zip(table["failure"], table["at"], strict=True)})
    names = [f"{failure} @{at}" if at else failure for failure, at in columns]
    lines = []
    for change, rows in table.groupby("change", sort=False):
        cells = [str(change)]
        for failure, at in columns:
            cell = rows[(rows["failure"] == failure) & (rows["at"] == at)]
            judged, counts = cell[cell["outcome"] != ""], cell["outcome"].value_counts()
            said = ", ".join(f"{counts[name]} {name}" for name in ("saved", "delayed") if name in counts)
            said = said or ("lost" if len(judged) else "did not fail" if len(cell) else "")
            cells.append(f"{said} {cell['cost'].mean():+.2f}" if len(cell) else "")
        lines.append(cells)
    return markdown_table(["change", *names], lines)


def what_fails_first(runs: Iterable[Run]) -> str:
    """Return a row for each failing run without a change: the first sign of `mmqk.bench.kinds`, the first lasting
    alarm, and the step from which the run is worse than the healthy run of its seed, as a table in Markdown."""
    finished = [run for run in runs if run.status.finished]
    twins = {run.seed: Trace(run, Label(), "judge") for run in finished if run.arm == HEALTHY}
    lines = []
    for run in (run for run in finished if _parts(run)[0] == NONE):
        trace = Trace(run, Label(_parts(run)[1]), "judge", twins.get(run.seed))
        sign = next(([f"{one.sign.kind} @{one.step}", one.series] for one in findings(trace.metrics)), ["none", ""])
        alarms = [(at.index[at > 0][0], name) for name, at in trace.alarms.items() if name in LASTING and at.any()]
        alarm = next((f"{name} @{step}" for step, name in sorted(alarms)), "none")
        lines.append([trace.label.kind, str(run.seed), *sign, alarm, str(trace.failed_at or "")])
    heads = ["failure", "seed", "first sign", "its series", "first alarm", "fails from"]
    return markdown_table(heads, lines, "---")
