"""The state of runs while they train, read from their folders, and its tables: `mmqk watch` and `mmqk ablate`."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmqk import store
from mmqk.lab.runner.pool import Pool, Task
from mmqk.progress import Progress
from mmqk.store import Alarm, DamagedFile
from mmqk.store.folder import STATUS_NAME, read_ablation
from mmqk.store.metrics import METRICS_NAME, parse_lines, with_floats

TAIL_BYTES = 4 * 2**20
# A run that wrote metrics within this time counts as running, even if its lock cannot be checked.
FRESH_SECONDS = 60.0
# The same for the folder of `attach`, which has no lock, no run.json, and metrics of probes only.
FRESH_ATTACHED_SECONDS = 3600.0

ALARMS_SHOWN = 8
STYLES = {
    **{"running": "cyan", "completed": "green", "waiting": "dim"},
    **dict.fromkeys(("interrupted", "stopped", "never"), "yellow"),
    **dict.fromkeys(("diverged", "failed", "damaged"), "bold red"),
}
# The rows of a single run, and the column in the table of runs ("" for none): title, title of the column, statistic,
# and whether to show the smallest value and not the largest. A narrow terminal shows the first columns only.
STATISTICS = (
    ("loss", "", "loss", False),
    ("validation loss", "", "val_loss", False),
    ("excess over the floor", "", "excess", False),
    ("log Z", "", "log_z", False),
    ("largest attention logit", "logit", "attn_logit_absmax", False),
    ("largest query norm", "|q|", "q_norm", False),
    ("last-layer output norm", "|h|", "final_norm", False),
    ("smallest attention entropy", "entropy", "attn_entropy", True),
    ("largest key norm", "|k|", "k_norm", False),
    ("largest value norm", "", "v_norm", False),
    ("largest residual norm", "", "resid_norm", False),
)

Columns = dict[str, list[str]]  # the cells of each column by its title

Extreme = tuple[float, int | None]  # a value and its layer


@dataclass
class View:
    """The current state of one run.

    Attributes:
        status: the status of status.json, or "waiting" before the start, "never" if the run cannot start, "stopped"
            if the process ended without a final status, or "damaged" if run.json or status.json cannot be read.
        step: the newest recorded step.
        max_steps: 0 if unknown.
        left: seconds to the end of the run at its present speed; None if unknown.
        values: the newest value of each series.
        alarms: all alarms in the order of their steps.
    """

    name: str
    status: str = "waiting"
    step: int = 0
    max_steps: int = 0
    left: float | None = None
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.status not in ("waiting", "running")

    @property
    def modalities(self) -> list[str]:
        """Modalities with a loss; for a monitored model without losses, modalities with a query norm."""
        losses = [name.partition("/")[2] for name in self.values if name.startswith("loss/")]
        norms = [name.split("/")[1] for name in self.values if name.startswith("q_norm/")]
        return losses or list(dict.fromkeys(norms))

    def extreme(self, statistic: str, modality: str | None = None, smallest: bool = False) -> Extreme | None:
        """Return the largest (or smallest) newest value of a statistic over all layers and, without a modality, over
        all modalities, and its layer; a NaN if there is one. For a statistic of modality pairs, ``modality`` is that
        of the queries."""
        values = [
            (value, parsed.layer)
            for name, value in self.values.items()
            if name.startswith(f"{statistic}/")
            and (parsed := store.parse_tag(name)).head is None
            and modality in (None, parsed.pair[0] if parsed.pair else parsed.modality)
        ]
        nans = [pair for pair in values if math.isnan(pair[0])]
        return nans[0] if nans else (min if smallest else max)(values, key=lambda pair: pair[0], default=None)


class Follow:
    """Follows one run folder; each `look` reads the end of metrics.jsonl if the file has changed. ``never`` is the
    reason why the run cannot start."""

    def __init__(self, name: str, folder: Path, never: str = ""):
        self.name, self.folder, self.never = name, folder, never
        self._stamp: tuple[int, int] | None = None
        self._newest: tuple[int, dict[str, float], bool] = (0, {}, False)

    def look(self) -> View:
        """Return the current view of the run."""
        step, values, damaged = self._read()
        view = View(self.name, step=step, values=dict(values), alarms=store.read_alarms(self.folder))
        try:
            run = store.read_run(self.folder)
            view.max_steps = (((run or {}).get("identity") or {}).get("trainer") or {}).get("max_steps", 0)
            status = store.read_status(self.folder)
        except DamagedFile as error:
            view.status, view.reason = "running" if store.is_locked(self.folder) else "damaged", str(error)
            return view
        if status is None:
            other = "never" if self.never else "waiting"
            view.status, view.reason = "running" if store.is_locked(self.folder) else other, self.never
            return view
        view.status, view.reason, view.step = status.status, status.reason, max(step, status.step)
        if damaged or (status.finished and not values):
            what = "a line of {} cannot be read" if values else "{} has no readable line"
            view.reason = f"{view.reason}; {what.format(METRICS_NAME)}".removeprefix("; ")
        if status.status == "running":
            self._judge_speed(view, step - status.step, FRESH_SECONDS if run else FRESH_ATTACHED_SECONDS)
        return view

    def _judge_speed(self, view: View, done: int, fresh: float) -> None:
        """Set the time left of a running run that has done this many steps since its start; without a lock and new
        files for ``fresh`` seconds it has stopped."""
        paths = (self.folder / METRICS_NAME, self.folder / STATUS_NAME)
        written, started = (path.stat().st_mtime if path.exists() else 0.0 for path in paths)
        took = written - started
        if not store.is_locked(self.folder) and time.time() - max(written, started) > fresh:
            view.status = "stopped"
        elif done > 0 and took > 0 and view.max_steps:
            view.left = took / done * (view.max_steps - view.step)

    def _read(self) -> tuple[int, dict[str, float], bool]:
        """Return `newest` of the metrics; read them only if they have changed."""
        path = self.folder / METRICS_NAME
        try:
            stat = path.stat()
            if (stat.st_size, stat.st_mtime_ns) != self._stamp:
                self._newest = newest(path)
                self._stamp = stat.st_size, stat.st_mtime_ns
        except OSError as error:
            self._stamp, self._newest = None, (0, {}, not isinstance(error, FileNotFoundError))
        return self._newest


def newest(path: Path) -> tuple[int, dict[str, float], bool]:
    """Return the last step of a metrics file, the newest value of each series in its last `TAIL_BYTES`, and whether a
    line there cannot be read."""
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        content = file.read().rpartition(b"\n")[0]  # the last line may still be incomplete
    records, damaged = parse_lines(content.partition(b"\n")[2] if start else content)
    read = [with_floats(record) for record in records]
    step = max((record.pop("step") for record in read), default=0)
    values = {tag: value for record in read for tag, value in record.items() if isinstance(value, int | float)}
    return step, values, damaged


def follow(folders: Iterable[Path]) -> list[Follow]:
    """Return a `Follow` for each run of these folders. Each is the folder of a run, of an arm with its seeds, or of
    a grid. The runs of a grid that have not started are included.

    Raises:
        NoRun: a folder does not exist or has no run.
        UserError: a path is not a folder, or an ablation.json cannot be read.
    """
    follows: list[Follow] = []
    for folder in folders:
        if entries := (read_ablation(folder) or {}).get("runs"):
            follows += [
                Follow(f"{e['arm']} seed {e['seed']}", folder / e["folder"], e.get("never", "")) for e in entries
            ]
        else:
            for path in store.find_runs(folder):
                name = path.resolve().name if path == folder else path.relative_to(folder).as_posix()
                follows.append(Follow(name, path))
    return follows


# Tables ---------------------------------------------------------------------------------------------------


def runs_table(views: Sequence[View], width: int) -> RenderableType:
    """Return a table with one row per run, followed by the newest alarms. A single run also gets a table of its
    statistics by modality.

    Args:
        views: the runs, in the order of the rows.
        width: largest width of a row in characters.
    """
    parts: list[RenderableType] = []
    if views:
        columns = _columns(views, width)
        rows = [[Text(cell) for cell in row] for row in zip(*columns.values(), strict=True)]
        for view, row in zip(views, rows, strict=True):
            row[1].stylize(STYLES.get(view.status, ""))
        parts.append(_table(columns, ("run", "status", "alarms"), rows))
    if len(views) == 1 and (modalities := views[0].modalities):
        of_one = [
            [title, *map(_cell, values)]
            for title, _, statistic, smallest in STATISTICS
            if any(values := [views[0].extreme(statistic, m, smallest) for m in modalities])
        ]
        parts += [Text(), _table(["", *modalities], ("",), of_one)]
    reasons = [(f"{view.name} {view.status}: {view.reason}", view.status) for view in views if view.reason]
    lines = _alarms(views) + [_line(text, STYLES.get(status, "")) for text, status in reasons]
    return Group(*parts, *([Text(), *lines] if lines else []))


def _columns(views: Sequence[View], width: int) -> Columns:
    """Return the columns of the table of runs that fit the width."""
    modalities = list(dict.fromkeys(m for view in views for m in view.modalities))
    longest = max(16, width // 3)
    columns = {
        "run": [view.name if len(view.name) <= longest else f"{view.name[: longest - 1]}…" for view in views],
        "status": [view.status for view in views],
        "step": [f"{view.step}/{view.max_steps}" if view.max_steps else str(view.step) for view in views],
    }
    for m in modalities:
        if any(f"loss/{m}" in view.values for view in views):
            columns[f"loss {m}"] = _formatted(views, f"loss/{m}", ".2f")
    names = [Counter(alarm.name for alarm in view.alarms) for view in views]
    alarms = [" ".join(f"{name} {n}" if n > 1 else name for name, n in each.items()) for each in names]
    last = {"alarms": alarms, "left": ["" if view.left is None else store.clock(view.left) for view in views]}
    if _width(columns | last) > width:  # the alarms are listed below the table
        last["alarms"] = [str(len(view.alarms) or "") for view in views]
    last = {title: cells for title, cells in last.items() if any(cells)}
    more = {
        title: [_cell(view.extreme(statistic, None, smallest)) for view in views]
        for _, title, statistic, smallest in STATISTICS
        if title
    }
    more["tok/s"] = _formatted(views, "tokens_per_s", ".0f")
    for title, cells in more.items():
        if any(cells) and _width(columns | {title: cells} | last) <= width:
            columns[title] = cells
    return columns | last


def _table(titles: Collection[str], left: Collection[str], rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Return a table without lines; the columns ``left`` are aligned to the left, the others to the right."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def _alarms(views: Sequence[View]) -> list[Text]:
    """Return the newest alarms as lines. Alarms that differ only in layer or step share one line, which shows the
    first of these alarms."""
    kinds: dict[tuple[str, ...], list[Alarm]] = {}
    for view in views:
        for alarm in view.alarms:
            parsed = store.parse_tag(alarm.tag)
            kinds.setdefault((view.name, alarm.name, parsed.statistic, parsed.modality or ""), []).append(alarm)
    lines = []
    for (name, *_), alarms in sorted(kinds.items(), key=lambda kind: kind[1][0].step)[-ALARMS_SHOWN:]:
        run = f"{name} " if len(views) > 1 else ""
        more = f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else ""
        lines.append(_line(f"{run}{alarms[0].line()}{more}", "yellow"))
    return lines


def _line(text: str, style: str = "") -> Text:
    """Return a line that is cut at the width of the terminal, because a live display needs a fixed number of
    lines."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _cell(extreme: Extreme | None) -> str:
    if extreme is None:
        return ""
    value, layer = extreme
    number = f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return number if layer is None else f"{number} L{layer}"


def _formatted(views: Sequence[View], series: str, form: str) -> list[str]:
    return [f"{view.values[series]:{form}}" if series in view.values else "" for view in views]


def _width(columns: Columns) -> int:
    return sum(max(len(title), *map(len, cells)) + 2 for title, cells in columns.items())


class PoolProgress:
    """Shows the progress of a pool: one line, and on a terminal also a table of the running runs.

    ``run 3 of 9 · mixed-qk seed 0 · step 210/500 · loss 3.21 · 2 running · about 1:45 left``

    The time left is estimated from the steps of all runs together, counted from the first logged loss of any run.

    Args:
        to_come: returns the number of runs that wait for other runs and can start later.
    """

    def __init__(self, to_come: Callable[[], int]):
        self.progress, self.to_come = Progress(), to_come
        self._follows: dict[Task, Follow] = {}

    def __call__(self, pool: Pool) -> None:
        """Show the progress if the display interval has passed."""
        if self.progress.due():
            views = self.views(pool)
            table = list(views.values())
            self.progress.show(*self.state(pool, views), above=lambda width: runs_table(table, width))

    def close(self) -> None:
        """Clear the display."""
        self.progress.close()

    def views(self, pool: Pool) -> dict[Task, View]:
        """Return the views of the running runs."""
        views = {task: self._follows.setdefault(task, Follow(task.name, task.folder)).look() for task in pool.running}
        for task, view in views.items():
            # The status file may still be from an earlier start of the run.
            view.status, view.max_steps = "running", task.max_steps
        return views

    def state(self, pool: Pool, views: Mapping[Task, View]) -> tuple[str, float | None, float | None]:
        """Return the progress line, the number of steps done and the total number of steps. The numbers are None if
        unknown."""
        unfinished = [task for task, out in pool.outcomes.items() if not out.ended]
        if not views:
            locked = [f"another process trains {t.name} in {t.folder}" for t in unfinished if store.is_locked(t.folder)]
            starting = f"about to start {unfinished[0].name}" if unfinished else "all runs have ended"
            return f"waiting: {locked[0]}" if locked else starting, None, None
        task, view = next(iter(views.items()))
        number = list(pool.outcomes).index(task) + 1
        parts = [f"run {number} of {len(pool.outcomes) + self.to_come()}", task.name]
        if "loss" in view.values:
            length = f"/{task.max_steps}" if task.max_steps else ""
            parts += [f"step {view.step}{length}", f"loss {view.values['loss']:.2f}"]
        else:
            parts.append("starting")
        parts.append(f"{len(views)} running")
        if pool.stopping:
            parts.append("stopping (press Ctrl-C again to kill the runs)")
        if pool.stopping or not any("loss" in view.values for view in views.values()):
            return " · ".join(parts), None, None
        steps = {
            task: max(task.first, views[task].step if task in views else out.step)
            for task, out in pool.outcomes.items()
        }
        done = sum(steps.values())
        return " · ".join(parts), done, done + sum(t.max_steps - steps[t] for t in unfinished)
