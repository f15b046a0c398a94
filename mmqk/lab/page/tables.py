"""Tables of a page as plain data: results by arm, data, forks, runs, the environment, and the fields that two runs
differ in. `templates` renders each table in the same way."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmqk.lab.formatting import DASH, capital, count, duration, listed, nats, number, plural, slug
from mmqk.lab.metrics import (
    METRICS,
    best_loss,
    final_loss,
    initial_loss,
    is_trained,
    learned,
    unigram_entropy,
)
from mmqk.lab.runs import Run
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import middle
from mmqk.store import flatten, without_roots

LOGIT = METRICS["largest_attention_logit"].measure
# Fields that do not change what a run computes.
PLACES = ("out", "data.cache", "quiet")
ROLES = {"verdict": "", "parent": "parent of forks", "selection": "selects a learning rate, not in a verdict"}


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        href: target of the link; empty for none.
        sort: the value by which the table is sorted; empty for the text.
        color: color of the arm, drawn before the text.
        css: class of the cell.
        code: name of a file or field, after the text.
    """

    text: str
    href: str = ""
    sort: float | str = ""
    color: str = ""
    css: str = ""
    code: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table; ``ids`` are targets of links into it, and the first is that of the row."""

    cells: Sequence[Cell]
    ids: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """A table with a caption; ``numbers`` are the columns that are aligned to the right, ``note`` stands below it."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Row]
    numbers: Sequence[str] = ()
    sortable: bool = False
    note: str = ""


def table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[Cell | str]], text: int = 1, note: str = ""
) -> Table | None:
    """Return a table whose columns after the first ``text`` ones are numbers; None without rows."""
    made = [Row([cell if isinstance(cell, Cell) else Cell(cell) for cell in row]) for row in rows]
    return Table(caption, heads, made, heads[text:], note=note) if rows else None


def anchor(run: Run) -> str:
    """Return the HTML id of the row of a run."""
    return f"run-{slug(run.name)}"


def as_text(value: Any, missing: str = DASH) -> str:
    """Return the value of a field as text for a table."""
    return missing if value is None else value if isinstance(value, str) else json.dumps(value)


def _nats(value: float) -> str:
    """Return a loss in nats; a dash if there is none."""
    return DASH if math.isnan(value) else nats(value)


def arm_table(study: Study, colors: Mapping[str, str]) -> Table | None:
    """Return a row per arm and modality: the first and final loss, and how many runs learned."""
    rows: list[list[Cell | str]] = []
    excess = any(tag.statistic == "excess" for run in study.runs for tag in run.tags.values())
    for arm in study.arms:
        runs = [run for run in study.ended(arm) if run.tags]
        for modality in study.losses if runs else ():
            ends = [final_loss(run, modality) for run in runs]
            values = [end.value for end in ends if math.isfinite(end.value)]
            # If a monitored model has no recorded losses, it is unknown whether it learned.
            losses = any(len(run.series(f"{name}/{modality}")[0]) for run in runs for name in ("loss", "val_loss"))
            star = "" if all(end.held_out for end in ends) or not values else "*"
            first = modality == study.losses[0]
            trained = all(is_trained(run, modality) for run in runs)
            rows.append(
                [
                    Cell(study.label(arm), f"#arm-{slug(arm)}", color=colors[arm]) if first else "",
                    modality,
                    _nats(middle(initial_loss(run, modality) for run in runs)),
                    _nats(middle(unigram_entropy(run, modality) for run in runs)),
                    _nats(middle(values)) + star,
                    *([_nats(middle(final_loss(r, modality, "excess").value for r in runs))] if excess else ()),
                    f"{nats(min(values))} to {nats(max(values))}" if len(values) > 1 else DASH,
                    f"{sum(learned(run, modality) for run in runs)} of {len(runs)}" if losses else DASH,
                    ("yes" if trained else "no") if losses else DASH,
                ]
            )
    heads = ["Arm", "Modality", "Loss at start", "Unigram loss", "Final loss", *(["Excess"] if excess else ())]
    return table("First and final losses by arm and modality", [*heads, "Range", "Learned", "Trained"], rows, 2)


def data_table(study: Study) -> Table | None:
    """Return how predictable the tokens are: one row per modality and group of arms with the same data."""
    found: dict[tuple[str, ...], tuple[list[str], list[float]]] = {}
    older = [n for n in ("compressed", "model") if any(n in s for run in study.runs for s in run.data.values())]
    for modality, arm in itertools.product(study.modalities, study.arms):
        runs = [run for run in study.of_arm(arm) if modality in run.data]
        if runs:
            of = runs[0].data[modality]
            cells = (
                modality,
                _share(of.get("share")),
                f"{of.get('used', 0):,} of {of.get('block', 0):,}",
                f"{tokens:,}" if isinstance(tokens := of.get("tokens"), int) else DASH,
                *(_nats(of.get(name) or math.nan) for name in ("unigram", *older, "floor")),
                _share(of.get("repeated")),
            )
            arms, losses = found.setdefault(cells, ([], []))
            arms.append(study.label(arm))
            losses += [best_loss(run, modality) for run in runs if is_trained(run, modality)]
    rows = [
        [cells[0], "all" if len(arms) == len(study.arms) else "; ".join(arms), *cells[1:],
         _nats(min(filter(math.isfinite, losses), default=math.nan))]
        for cells, (arms, losses) in found.items()
    ]  # fmt: skip
    heads = ["Modality", "Arms", "Tokens", "Ids used", "Sample", "Unigram"]
    heads += [{"compressed": "Compressed", "model": "n-gram"}[name] for name in older]
    heads += ["Floor", "Repeated", "Best loss"]
    return table("How predictable the tokens are", heads, rows, 2)


def _share(value: Any) -> str:
    return f"{100 * value:.0f} %" if isinstance(value, int | float) else DASH


def environment(study: Study) -> list[tuple[str, str]]:
    """Return the versions, machine, precision and code of the runs; if the runs differ, list all values."""

    def pairs(record: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {as_text(value, '')}" for name, value in record.items())

    texts: dict[str, Callable[[Run], str]] = {
        "Versions": lambda run: pairs(run.details.get("versions", {})),
        "Machine": lambda run: pairs(run.details.get("machine", {})),
        "Precision": lambda run: as_text(run.setting("trainer.precision"), ""),
        "Attention backend": lambda run: as_text(run.setting("backend"), ""),
        "Threads per run": lambda run: as_text(run.setting("threads"), ""),
        "Code": lambda run: run.code,
    }
    rows = [(name, " / ".join(dict.fromkeys(filter(None, map(text, study.runs))))) for name, text in texts.items()]
    return [row for row in rows if row[1]]


def run_table(study: Study, colors: Mapping[str, str]) -> Table:
    """Return one row per run, also for runs that have not started; a run that two arms share has one row."""
    arms_of: defaultdict[str, list[str]] = defaultdict(list)
    by_arm: defaultdict[str, list[Run]] = defaultdict(list)
    for run in study.runs:
        if run.name not in arms_of:
            by_arm[run.arm].append(run)
        arms_of[run.name].append(run.arm)
    missing: defaultdict[str, list[int]] = defaultdict(list)
    for arm, seed in study.missing:
        missing[arm].append(seed)
    rows: list[Row] = []
    linked: set[str] = set()
    for arm in dict.fromkeys([*study.arms, *by_arm, *missing]):
        color = colors.get(arm, "#000000")
        order = list(ROLES)
        by_role = sorted(by_arm[arm], key=lambda r: (order.index(r.role) if r.role in order else 9, r.seed, r.name))
        for run in by_role:
            arms = list(dict.fromkeys(arms_of[run.name]))
            targets = [anchor(run), *(f"arm-{slug(a)}" for a in arms if a not in linked)]
            linked.update(arms)
            rows.append(Row(_run_cells(study, run, listed(list(map(study.label, arms))), color), targets))
        for i, seed in enumerate(missing[arm]):
            dashes = [Cell(DASH)] * (len(study.losses) + 3)
            cells = [Cell(study.label(arm), color=color), Cell(str(seed)), Cell("not started", css="not-started")]
            rows.append(Row([*cells, Cell(DASH), *dashes, Cell("", code=arm)], [f"missing-{slug(arm)}-{seed}-{i}"]))
    heads = ["Arm", "Seed", "Status", "Step", *(f"{capital(m)} loss" for m in study.losses)]
    heads += ["Largest logit", "Tokens", "Time", "Remarks"]
    numbers = [head for head in heads if head not in ("Arm", "Status", "Remarks")]
    return Table("All runs, one per row", heads, rows, numbers, sortable=True)


def _run_cells(study: Study, run: Run, label: str, color: str) -> list[Cell]:
    losses = [final_loss(run, m) for m in study.losses]
    logit, read, seconds = LOGIT(run, None), tokens(run), run.status.seconds
    texts = (ROLES.get(run.role, run.role), run.status.reason, *run.notes, _alarms(run))
    remarks = [capital(text).rstrip(".") + "." for text in dict.fromkeys(texts) if text]
    return [
        Cell(label, color=color),
        Cell(str(run.seed)),
        Cell(run.status.status or DASH, css=run.status.status),
        Cell(f"{max(run.status.step, run.last_step):,}"),
        *(Cell(_nats(loss.value) + "*" * (not loss.held_out and loss.value == loss.value)) for loss in losses),
        Cell(DASH if math.isnan(logit) else number(logit)),
        Cell(count(read) if read else DASH, sort=read),
        Cell(duration(seconds) if seconds else DASH, sort=round(seconds, 1)),
        Cell(" ".join(remarks), css="wrap", code=run.name),
    ]


def tokens(run: Run) -> int:
    """Return the number of tokens that the run itself processed, without those before a fork: steps × sequences per
    step × length of a sequence; 0 if unknown."""
    size, length = run.setting("data.batch_size", 0), run.setting("data.seq_len", 0)
    steps = max(run.status.step, run.last_step) - ((run.fork or {}).get("step") or 0)
    return max(0, steps) * size * length


def _alarms(run: Run) -> str:
    """Return the number of alarms by name, and the step of the first alarm."""
    counts = Counter(alarm.name.replace("_", " ") for alarm in run.alarms)
    by_name = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    return f"alarms: {by_name}; the first at step {min(a.step for a in run.alarms):,}" if run.alarms else ""


def totals(study: Study) -> str:
    """Return the number of runs by status, their time and tokens."""
    runs = list({run.name: run for run in study.runs}.values())
    by_status = Counter(run.status.status or "without a status" for run in runs)
    if study.missing:
        by_status["not started"] += len(study.missing)
    parts = [f"{plural(sum(by_status.values()), 'run')}", *(f"{n} {status}" for status, n in by_status.most_common())]
    parts.append(duration(sum(run.status.seconds for run in runs)))
    return " · ".join([*parts, f"{count(sum(map(tokens, runs)))} tokens"])


def compared(study: Study, runs: Table) -> str:
    """Return JSON for the script of the page: the fields that differ between any two runs, and their values and
    results in each run of `run_table`."""
    fields_of = {anchor(run): flatten(run.config) | {"code": run.code} for run in study.runs}
    names = sorted({name for fields in fields_of.values() for name in fields} - set(PLACES))
    differing = [n for n in names if len({json.dumps(fields.get(n)) for fields in fields_of.values()}) > 1]
    results = {
        row.ids[0]: {head: cell.text for head, cell in list(zip(runs.heads, row.cells, strict=True))[2:-1]}
        for row in runs.rows
    }
    content = {
        "fields": differing,
        "runs": {
            anchor(run): {
                "name": f"{study.label(run.arm)}, seed {run.seed}",
                "values": [as_text(fields_of[anchor(run)].get(name)) for name in differing],
                "results": results.get(anchor(run), {}),
            }
            for run in study.runs
        },
    }
    return json.dumps(without_roots(content), ensure_ascii=False).replace("</", "<\\/")


@dataclass
class Fork:
    """A run in a fork tree; ``run`` is None for a parent that is not among the runs."""

    name: str
    run: Run | None
    depth: int
    children: list[Fork] = field(default_factory=list)


def fork_tree(study: Study) -> list[Fork]:
    """Return all fork trees in one list: each run is followed by its forks, sorted by step."""
    runs = {run.path.resolve(): run for run in study.runs}
    by_name = {run.name: run for run in runs.values()}
    by_parent: dict[str, list[Run]] = {}
    for run in runs.values():
        if run.fork:
            by_parent.setdefault(_parent_name(run, runs), []).append(run)
    forked = {run.name for children in by_parent.values() for run in children}
    nodes: list[Fork] = []

    def add(name: str, depth: int) -> None:
        nodes.append(Fork(name, by_name.get(name), depth))
        for child in sorted(by_parent.get(name, ()), key=lambda run: (_fork_step(run), run.name)):
            add(child.name, depth + 1)

    roots = [name for name in by_name if name in by_parent and name not in forked]
    for name in [*roots, *(name for name in by_parent if name not in by_name)]:
        add(name, 0)
    return nodes


def fork_table(study: Study, colors: Mapping[str, str]) -> Table | None:
    """Return a row per run of the fork trees: where it began, what it changed, and how it ended."""
    rows: list[list[Cell | str]] = []
    for node in fork_tree(study):
        indent = "\u2003" * node.depth
        run = node.run
        if run is None:
            rows.append([f"{indent}{node.name}", "", "", "not among these runs", ""])
            continue
        changed, remarks = _changes(run) if node.depth else ("", "")
        label = f"{indent}{study.label(run.arm)}, seed {run.seed}"
        name = Cell(label, f"#{anchor(run)}", color=colors.get(run.arm, ""))
        step = f"{_fork_step(run):,}" if node.depth else ""
        end = f"{run.status.status} at step {max(run.last_step, run.status.step):,}"
        rows.append([name, step, Cell(changed, css="wrap"), end, Cell(remarks, css="wrap")])
    return table("A fork follows its parent", ["Run", "From step", "Changed", "End", "Remarks"], rows, text=5)


def _fork_step(run: Run) -> int:
    return (run.fork or {}).get("step") or 0


def _parent_name(run: Run, runs: Mapping[Path, Run]) -> str:
    """Return the name of a fork's parent. If the parent was not loaded with the fork, search ``runs`` for the id that
    the fork recorded. If no run matches, return this id, or the recorded folder."""
    recorded = [*filter(None, [run.forked.get("parent", {}).get("id"), (run.fork or {}).get("parent")])]
    loaded = runs.get(run.parent.path.resolve()) if run.parent else None
    found = loaded or next((one for one in runs.values() if one is not run and one.id in recorded), None)
    return found.name if found else without_roots(next(iter(recorded), "an unnamed run"))


def _changes(run: Run) -> tuple[str, str]:
    """Return (changed fields, remarks) of a fork."""

    def short(value: Any) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{value:,}"
        return f"{value:g}" if isinstance(value, float) else as_text(value, "none")

    record = run.forked
    changed = [f"{c.get('field')} {short(c.get('from'))} → {short(c.get('to'))}" for c in record.get("changed") or ()]
    fork = run.identity.get("fork")
    fork = fork if isinstance(fork, Mapping) else {}
    if fork.get("skip_batches"):
        changed.append(f"{fork['skip_batches']} batches left out")
    if fork.get("new_moments"):
        changed.append("new moments of the optimizer")
    if fork.get("noise"):
        changed.append(f"weights changed by {fork['noise']:g} times their RMS")
    remarks = [
        f"{plural(len(record[key]), 'parameter')} {key}" for key in ("added", "dropped") if record.get(key)
    ]
    shift = record.get("function", {}).get("logits_rms_relative")
    if isinstance(shift, int | float):
        remarks.append(f"change of the outputs before the first step: {number(shift)} times their RMS")
    if optimizer := record.get("optimizer"):
        remarks.append(f"optimizer state: {optimizer.rstrip('.')}")
    return listed(changed) or "nothing", "; ".join(remarks)
