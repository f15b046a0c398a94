"""Tables of runs: one that fits the width of the terminal, also while a grid trains, and one of outcomes as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmqk.lab.runner.pool import Pool
from mmqk.lab.runner.state import Extreme, Follow, Task, TaskOutcome, View, worst
from mmqk.progress import Progress
from mmqk.store import Alarm, clock, is_locked, parsed_tag
from mmqk.store.formatting import plural, text_table

ALARMS_SHOWN = 8
STYLES = {
    "running": "cyan",
    "completed": "green",
    "diverged": "bold red",
    "failed": "bold red",
    "interrupted": "yellow",
    "stopped": "yellow",
    "damaged": "bold red",
    "waiting": "dim",
    "never": "yellow",
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
    last = {"alarms": alarms, "left": ["" if view.left is None else clock(view.left) for view in views]}
    if _width(columns | last) > width:  # the alarms are listed below the table
        last["alarms"] = [str(len(view.alarms) or "") for view in views]
    last = {title: cells for title, cells in last.items() if any(cells)}
    # Each choice is a list of columns, in full and, if those do not fit, in short: one for all modalities.
    choices: list[tuple[Columns, ...]] = []
    for _, title, statistic, smallest in STATISTICS:
        if title:
            extremes = [[view.extreme(statistic, m, smallest) for m in modalities] for view in views]
            full = {f"{title} {m}": [_cell(row[i]) for row in extremes] for i, m in enumerate(modalities)}
            of_all = [worst([value for value in row if value], smallest) for row in extremes]
            choices.append((full, {title: [_cell(value) for value in of_all]}))
    choices.append(({"tok/s": _formatted(views, "tokens_per_s", ".0f")},))
    for choice in choices:
        fitting = (group for group in choice if _width(columns | group | last) <= width)
        more = next(fitting, {})
        columns |= more if any(map(any, more.values())) else {}
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
            parsed = parsed_tag(alarm.tag)
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


# A grid --------------------------------------------------------------------------------------------------


def outcome_table(outcomes: Mapping[Task, TaskOutcome]) -> str:
    """Return a table with one line per run, followed by one line for each outcome that has a reason. The last loss is
    in nats per token."""
    rows = [("arm", "seed", "status", "step", "last loss", "seconds")]
    for task, out in outcomes.items():
        loss = "" if out.loss is None else f"{out.loss:.3f}"
        step = f"{out.step}/{task.max_steps}" if task.max_steps else str(out.step)
        rows.append((task.arm, str(task.seed), out.status, step, loss, f"{out.seconds:.0f}"))
    reasons = [f"{task.name} {out.status}: {out.reason}" for task, out in outcomes.items() if out.reason]
    return "\n".join(line.rstrip() for line in [*text_table(rows, {0, 2}), *reasons])


def time_left(outcomes: Mapping[Task, TaskOutcome], jobs: int) -> str:
    """Return a sentence with the estimated time to train the unfinished runs, if ``jobs`` runs train at the same
    time.

    The time per step is the median over the finished runs of the arm. If the arm has no finished run, it is the
    median over the finished runs of the family, or else over all finished runs of the grid. The time includes
    probes and validation, but not the startup. For a fork, only the steps after the fork count.
    """
    left = [task for task, out in outcomes.items() if not out.finished and out.status != "never"]
    paces = [
        (task, out.seconds / (out.step - task.first))
        for task, out in outcomes.items()
        if out.finished and out.step > task.first and out.seconds > 0
    ]
    if not left:
        return "nothing to train"
    if not paces:
        return f"time to train {plural(len(left), 'run')}: unknown, because no run of this grid has finished"
    seconds, borrowed = 0.0, 0
    for task in left:
        of_arm = [pace for other, pace in paces if other.arm == task.arm]
        of_family = of_arm or [pace for other, pace in paces if other.family == task.family]
        of_step = median(of_family or [pace for _, pace in paces])
        seconds += of_step * max(0, task.max_steps - max(outcomes[task].step, task.first))
        borrowed += not of_family
    from_others = f" ({plural(borrowed, 'run')} estimated from the speed of other arms)" if borrowed else ""
    at_once = f", {jobs} at a time" if jobs > 1 else ""
    about = clock(seconds / min(jobs, len(left)))
    return f"time to train {plural(len(left), 'run')}{at_once}: about {about} (minutes:seconds){from_others}"


class PoolProgress:
    """Shows the progress of a pool: one line, and on a terminal also a table of the running runs.

    ``run 3 of 9 · mixed-qk seed 0 · step 210/500 · loss 3.21 · 2 running · about 1:45 left``

    The time left is estimated from the steps of all runs together, counted from the first logged loss of any run.

    Args:
        to_come: returns the number of runs that wait for other runs and can start later.
    """

    def __init__(self, stream: TextIO | None = None, to_come: Callable[[], int] = lambda: 0):
        self.progress, self.to_come = Progress(stream), to_come
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
            locked = [f"another process trains {t.name} in {t.folder}" for t in unfinished if is_locked(t.folder)]
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
