"""A table of runs that fits the width of the terminal, and the progress of a grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmqk.lab.runner.pool import Pool
from mmqk.lab.runner.state import Extreme, Follow, Task, TaskOutcome, View, worst
from mmqk.progress import Progress
from mmqk.store import Alarm, clock, is_locked, last_metrics, parsed_tag
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
# Title of the column, statistic, and whether to show the smallest value and not the largest. On a narrow terminal the
# last columns are left out first.
WORST = (
    ("logit", "attn_logit_absmax", False),
    ("|q|", "q_norm", False),
    ("|h|", "final_norm", False),
    ("entropy", "attn_entropy", True),
    ("|k|", "k_norm", False),
)
# Rows for a single run: title, statistic, and whether to show the smallest value and not the largest.
ROWS = (
    ("loss", "loss", False),
    ("validation loss", "val_loss", False),
    ("excess over the floor", "excess", False),
    ("log Z", "log_z", False),
    ("largest attention logit", "attn_logit_absmax", False),
    ("smallest attention entropy", "attn_entropy", True),
    ("largest query norm", "q_norm", False),
    ("largest key norm", "k_norm", False),
    ("largest value norm", "v_norm", False),
    ("largest residual norm", "resid_norm", False),
    ("last-layer output norm", "final_norm", False),
)


def runs_table(views: Sequence[View], width: int) -> RenderableType:
    """Return a table with one row per run, followed by the newest alarms. A single run also gets a table of its
    statistics by modality.

    Args:
        views: the runs, in the order of the rows.
        width: largest width of a row in characters.
    """
    parts: list[RenderableType] = [_table(views, width)] if views else []
    if len(views) == 1 and views[0].modalities:
        parts += [Text(), _details(views[0])]
    lines = _alarms(views) + [
        _line(f"{view.name} {view.status}: {view.reason}", STYLES.get(view.status, ""))
        for view in views
        if view.reason
    ]
    if lines:
        parts += [Text(), *lines]
    return Group(*parts)


def _table(views: Sequence[View], width: int) -> Table:
    modalities = list(dict.fromkeys(m for view in views for m in view.modalities))
    first = {
        "run": [_short(view.name, max(16, width // 3)) for view in views],
        "status": [view.status for view in views],
        "step": [f"{view.step}/{view.max_steps}" if view.max_steps else str(view.step) for view in views],
        **{
            f"loss {m}": [_formatted(view.values.get(f"loss/{m}"), ".2f") for view in views]
            for m in modalities
            if any(f"loss/{m}" in view.values for view in views)
        },
    }
    last = {
        "alarms": [_count(view) for view in views],
        "left": ["" if view.left is None else clock(view.left) for view in views],
    }
    if _width(first | last) > width:  # the alarms are listed below the table
        last["alarms"] = [str(len(view.alarms) or "") for view in views]
    last = {title: cells for title, cells in last.items() if any(cells)}
    columns = dict(first)
    for title, statistic, smallest in WORST:
        extremes = [[view.extreme(statistic, m, smallest) for m in modalities] for view in views]
        more = {f"{title} {m}": [_cell(row[place]) for row in extremes] for place, m in enumerate(modalities)}
        one = {title: [_cell(worst([one for one in row if one], smallest)) for row in extremes]}
        for group in (more, one):  # one column per modality, or one for all modalities if they do not fit
            if any(any(cells) for cells in group.values()) and _width(columns | group | last) <= width:
                columns |= group
                break
    speed = {"tok/s": [_formatted(view.values.get("tokens_per_s"), ".0f") for view in views]}
    if any(speed["tok/s"]) and _width(columns | speed | last) <= width:
        columns |= speed
    columns |= last
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for title in columns:
        left = title in ("run", "status", "alarms")
        table.add_column(title, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    for i, view in enumerate(views):
        cells = [Text(cells[i]) for cells in columns.values()]
        cells[1].stylize(STYLES.get(view.status, ""))
        table.add_row(*cells)
    return table


def _details(view: View) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    table.add_column("")
    for modality in view.modalities:
        table.add_column(modality, justify="right")
    for title, statistic, smallest in ROWS:
        values = [view.extreme(statistic, modality, smallest) for modality in view.modalities]
        if any(values):
            table.add_row(title, *(_cell(value) for value in values))
    return table


def _alarms(views: Sequence[View]) -> list[Text]:
    """Return the newest alarms as lines. Alarms that differ only in layer or step share one line, which shows the
    first of these alarms."""
    first: dict[tuple[str, ...], tuple[View, Alarm]] = {}
    count: Counter[tuple[str, ...]] = Counter()
    for view in views:
        for alarm in view.alarms:
            parsed = parsed_tag(alarm.tag)
            kind: tuple[str, ...] = (view.name, alarm.name, parsed.statistic, parsed.modality or "")
            first.setdefault(kind, (view, alarm))
            count[kind] += 1
    newest = sorted(first, key=lambda kind: first[kind][1].step)[-ALARMS_SHOWN:]
    lines = []
    for kind in newest:
        view, alarm = first[kind]
        who = f"{view.name} " if len(views) > 1 else ""
        more = f" (and {count[kind] - 1} more)" if count[kind] > 1 else ""
        lines.append(_line(f"{who}{alarm.line()}{more}", "yellow"))
    return lines


def _line(text: str, style: str = "") -> Text:
    """Return a line that is cut at the width of the terminal, because a live display needs a fixed number of
    lines."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _count(view: View) -> str:
    names = Counter(alarm.name for alarm in view.alarms)
    return " ".join(f"{name} {n}" if n > 1 else name for name, n in names.items())


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _cell(extreme: Extreme | None) -> str:
    if extreme is None:
        return ""
    value, layer = extreme
    return _number(value) + ("" if layer is None else f" L{layer}")


def _number(value: float) -> str:
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _formatted(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _width(columns: dict[str, list[str]]) -> int:
    return sum(max(len(title), *map(len, cells)) + 2 for title, cells in columns.items())


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
        of_family = of_arm or [pace for other, pace in paces if _family(other) == _family(task)]
        of_step = median(of_family or [pace for _, pace in paces])
        seconds += of_step * max(0, task.max_steps - max(outcomes[task].step, task.first))
        borrowed += not of_family
    from_others = f" ({plural(borrowed, 'run')} estimated from the speed of other arms)" if borrowed else ""
    at_once = f", {jobs} at a time" if jobs > 1 else ""
    about = clock(seconds / min(jobs, len(left)))
    return f"time to train {plural(len(left), 'run')}{at_once}: about {about} (minutes:seconds){from_others}"


def _family(task: Task) -> str:
    return task.entry.get("family", task.arm)


class PoolProgress:
    """Shows the progress of a pool: one line, and on a terminal also a table of the running runs.

    ``run 3 of 9 · mixed-qk seed 0 · step 210/500 · loss 3.21 · 2 running · about 1:45 left``

    The time left is estimated from the steps of all runs together, counted from the first logged loss of any run.
    """

    def __init__(self, stream: TextIO | None = None):
        self.progress = Progress(stream)
        self._follows: dict[Task, Follow] = {}

    def __call__(self, pool: Pool) -> None:
        """Show the progress if the display interval has passed."""
        if self.progress.due():
            self.progress.show(*self.state(pool), above=lambda width: self._table(pool, width))

    def close(self) -> None:
        """Clear the display."""
        self.progress.close()

    def state(self, pool: Pool) -> tuple[str, float | None, float | None]:
        """Return the progress line, the number of steps done and the total number of steps. The numbers are None if
        unknown."""
        last = {task: last_metrics(task.folder / "metrics.jsonl", having="loss") for task in pool.running}
        steps = {
            task: max(task.first, last[task].get("step", 0) if task in last else out.step)
            for task, out in pool.outcomes.items()
        }
        unfinished = [task for task, out in pool.outcomes.items() if not out.ended]
        if not pool.running:
            locked = [f"another process trains {t.name} in {t.folder}" for t in unfinished if is_locked(t.folder)]
            starting = f"about to start {unfinished[0].name}" if unfinished else "all runs have ended"
            return f"waiting: {locked[0]}" if locked else starting, None, None
        task = next(iter(pool.running))
        number = list(pool.outcomes).index(task) + 1
        parts = [f"run {number} of {len(pool.outcomes) + pool.to_come()}", task.name]
        if record := last[task]:
            length = f"/{task.max_steps}" if task.max_steps else ""
            parts += [f"step {record['step']}{length}", f"loss {record['loss']:.2f}"]
        else:
            parts.append("starting")
        parts.append(f"{len(pool.running)} running")
        if pool.stopping:
            parts.append("stopping (press Ctrl-C again to kill the runs)")
        if pool.stopping or not any(last.values()):
            return " · ".join(parts), None, None
        done = sum(steps.values())
        return " · ".join(parts), done, done + sum(t.max_steps - steps[t] for t in unfinished)

    def _table(self, pool: Pool, width: int) -> RenderableType:
        views = []
        for task in pool.running:
            view = self._follows.setdefault(task, Follow(task.name, task.folder)).look()
            # The status file may still be from an earlier start of the run.
            view.status, view.max_steps = "running", task.max_steps
            views.append(view)
        return runs_table(views, width)
