"""Tables of a page: results by arm, data, forks, all runs, what grew first in a single run, and the environment.
`templates` renders each table in the same way."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from mmqk.lab.formatting import DASH, capital, duration, listed, nats, number, short, slug
from mmqk.lab.metrics import METRICS
from mmqk.lab.metrics.outcomes import best_loss, final_loss, initial_loss, is_trained, learned, unigram_entropy
from mmqk.lab.metrics.probes import FALLING, GROWING, growth_order
from mmqk.lab.runs import Run
from mmqk.lab.study import Study
from mmqk.lab.verdicts.measure import middle
from mmqk.store import flatten, without_roots
from mmqk.store.formatting import inspect_command

LOGIT = METRICS["largest_attention_logit"].measure
# Fields that do not change what a run computes.
PLACES = ("out", "data.cache", "quiet")
# Fields of a fork that change its run, besides those of its parent.
OWN_CHANGES = ("skip_batches", "skip", "new_moments", "noise")
ROLES = {"verdict": "", "parent": "parent of forks", "selection": "selects a learning rate, not in a verdict"}


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        href: target of the link; empty for none.
        color: color of the arm, drawn before the text.
        code: whether the text is the name of a folder or a field.
        ids: targets of links to the row; the first cell of a row has them.
    """

    text: str
    href: str = ""
    color: str = ""
    code: bool = False
    ids: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """A table with a caption; ``numbers`` are the columns that are aligned to the right, ``note`` stands below it."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: Sequence[str]
    note: str = ""
    sortable: bool = False


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell | str]],
    text: int = 1,
    last: int = 0,
    note: str = "",
    sortable: bool = False,
) -> Table | None:
    """Return a table whose first ``text`` and last ``last`` columns are text and the others numbers; None without
    rows."""
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    return Table(caption, heads, made, heads[text : len(heads) - last], note, sortable) if made else None


def anchor(run: Run) -> str:
    """Return the HTML id of the row of a run."""
    return f"run-{slug(run.name)}"


def as_text(value: Any, missing: str = DASH) -> str:
    """Return the value of a field as text for a table."""
    return missing if value is None else value if isinstance(value, str) else json.dumps(value)


def _nats(value: float) -> str:
    """Return a loss in nats; a dash if there is none."""
    return DASH if math.isnan(value) else nats(value)


def _share(value: Any) -> str:
    return f"{100 * value:.0f} %" if isinstance(value, int | float) else DASH


def arm_table(study: Study, colors: Mapping[str, str]) -> Table | None:
    """Return a row per arm and modality: the first and final loss, and how many runs learned."""
    rows: list[list[Cell | str]] = []
    excess = any(tag.statistic == "excess" for run in study.runs for tag in run.tags.values())
    measured = {arm: runs for arm in study.arms if (runs := [run for run in study.ended(arm) if run.tags])}
    for (arm, runs), modality in itertools.product(measured.items(), study.losses):
        ends = [final_loss(run, modality) for run in runs]
        values = [end.value for end in ends if math.isfinite(end.value)]
        # If a monitored model has no recorded losses, it is unknown whether it learned.
        losses = any(len(run.series(f"{name}/{modality}")[0]) for run in runs for name in ("loss", "val_loss"))
        first, held_out = modality == study.losses[0], all(end.held_out for end in ends)
        trained = "yes" if all(is_trained(run, modality) for run in runs) else "no"
        cells: list[Cell | str] = [
            Cell(study.label(arm), f"#arm-{slug(arm)}", colors[arm]) if first else "",
            modality,
            _nats(middle(initial_loss(run, modality) for run in runs)),
            _nats(middle(unigram_entropy(run, modality) for run in runs)),
            _nats(middle(values)) + ("" if held_out or not values else "*"),
        ]
        cells += [_nats(middle(final_loss(run, modality, "excess").value for run in runs))] if excess else []
        cells.append(f"{nats(min(values))} to {nats(max(values))}" if len(values) > 1 else DASH)
        cells.append(f"{sum(learned(run, modality) for run in runs)} of {len(runs)}" if losses else DASH)
        rows.append([*cells, trained if losses else DASH])
    heads = ["Arm", "Modality", "Loss at start", "Unigram loss", "Final loss", *(["Excess"] if excess else ())]
    return table("First and final losses by arm and modality", [*heads, "Range", "Learned", "Trained"], rows, 2)


def data_table(study: Study) -> Table | None:
    """Return how predictable the tokens are: one row per modality and group of arms with the same data."""
    found: dict[tuple[str, ...], tuple[list[str], list[float]]] = {}
    for modality, arm in itertools.product(study.modalities, study.arms):
        runs = [run for run in study.of_arm(arm) if modality in run.data]
        if runs:
            of = runs[0].data[modality]
            tokens = f"{of['tokens']:,}" if isinstance(of.get("tokens"), int) else DASH
            unigram, floor = (_nats(of.get(name) or math.nan) for name in ("unigram", "floor"))
            used = f"{of.get('used', 0):,} of {of.get('block', 0):,}"
            cells = (modality, _share(of.get("share")), used, tokens, unigram, floor)
            arms, losses = found.setdefault(cells, ([], []))
            arms.append(study.label(arm))
            losses += [best_loss(run, modality) for run in runs if is_trained(run, modality)]
    rows = []
    for (modality, *rest), (arms, losses) in found.items():
        best = min(filter(math.isfinite, losses), default=math.nan)
        rows.append([modality, "all" if len(arms) == len(study.arms) else "; ".join(arms), *rest, _nats(best)])
    heads = ["Modality", "Arms", "Tokens", "Ids used", "Sample", "Unigram", "Floor", "Best loss"]
    return table("How predictable the tokens are", heads, rows, 2)


def environment(study: Study) -> list[tuple[str, str]]:
    """Return the versions, machine, precision and code of the runs; if the runs differ, list all values."""

    def texts(run: Run) -> dict[str, str]:
        found = {}
        for name in ("versions", "machine"):
            record = run.details.get(name) or {}
            found[capital(name)] = ", ".join(f"{key} {as_text(value, '')}" for key, value in record.items())
        fields = {"Precision": "trainer.precision", "Attention backend": "backend", "Threads per run": "threads"}
        return found | {name: as_text(run.setting(field), "") for name, field in fields.items()} | {"Code": run.code}

    of_runs = [texts(run) for run in study.runs]
    names = dict.fromkeys(name for of in of_runs for name in of)
    rows = [(name, " / ".join(dict.fromkeys(of[name] for of in of_runs if of[name]))) for name in names]
    return [row for row in rows if row[1]]


# Runs ---------------------------------------------------------------------------------------------------------------


def run_table(study: Study, colors: Mapping[str, str]) -> Table | None:
    """Return one row per run, also for runs that have not started; a run that two arms share has one row."""
    rows: list[list[Cell | str]] = []
    linked: set[str] = set()
    order = [*study.arms, *(run.arm for run in study.runs)]
    for run in sorted(once(study), key=lambda run: (order.index(run.arm), run.role != "verdict", run.seed)):
        arms = list(dict.fromkeys(one.arm for one in study.runs if one.name == run.name))
        targets = [anchor(run), *(f"arm-{slug(arm)}" for arm in arms if arm not in linked)]
        linked.update(arms)
        name = Cell(listed(list(map(study.label, arms))), color=colors.get(run.arm, ""), ids=targets)
        rows.append([name, *_run_cells(study, run)])
    dashes = [DASH] * (len(study.losses) + 5)
    for arm, seed in study.missing:
        name = Cell(study.label(arm), color=colors.get(arm, ""))
        rows.append([name, "not started", str(seed), *dashes, Cell(arm, code=True), "", ""])
    heads = ["Arm", "Status", "Seed", "Step", *(f"{capital(m)} loss" for m in study.losses), "Largest logit"]
    heads += ["Tokens", "Time (s)", "First alarm", "Folder", "Alarms", "Remarks"]
    return table("All runs, one per row", heads, rows, 2, 3, totals(study), sortable=True)


def once(study: Study) -> list[Run]:
    """Return each run once, also if arms share it."""
    return list({run.name: run for run in reversed(study.runs)}.values())[::-1]


def _run_cells(study: Study, run: Run) -> list[Cell | str]:
    losses = [final_loss(run, m) for m in study.losses]
    logit, read, seconds = LOGIT(run, None), tokens(run), run.status.seconds
    alarms = Counter(alarm.name.replace("_", " ") for alarm in run.alarms)
    remarks = (ROLES.get(run.role, run.role), run.status.reason, *run.notes)
    return [
        run.status.status or DASH,
        str(run.seed),
        f"{max(run.status.step, run.last_step):,}",
        *(_nats(loss.value) + ("" if loss.held_out or math.isnan(loss.value) else "*") for loss in losses),
        DASH if math.isnan(logit) else number(logit),
        f"{read:,}" if read else DASH,
        f"{seconds:,.0f}" if seconds else DASH,
        f"{min(alarm.step for alarm in run.alarms):,}" if run.alarms else DASH,
        Cell(run.name, code=True),
        ", ".join(f"{name} {n}" for name, n in sorted(alarms.items())),
        "; ".join(text.rstrip(".") for text in dict.fromkeys(remarks) if text),
    ]


def tokens(run: Run) -> int:
    """Return the number of tokens that the run itself processed, without those before a fork: steps × sequences per
    step × length of a sequence; 0 if unknown."""
    size, length = run.setting("data.batch_size", 0), run.setting("data.seq_len", 0)
    return max(0, max(run.status.step, run.last_step) - run.start) * size * length


def totals(study: Study) -> str:
    """Return the number of runs by status, their time and tokens."""
    runs = once(study)
    by_status = Counter(run.status.status or "without a status" for run in runs)
    by_status["not started"] += len(study.missing)
    parts = [f"{n} {status}" for status, n in by_status.most_common() if n]
    time = duration(sum(run.status.seconds for run in runs))
    return " · ".join([*parts, time, f"{short(sum(map(tokens, runs)))} tokens"])


def compared(study: Study) -> str:
    """Return JSON for the script of the page: the fields that differ between any two runs, and their values in each
    run of `run_table`."""
    fields_of = {anchor(run): flatten(run.config) | {"code": run.code} for run in study.runs}
    names = sorted({name for fields in fields_of.values() for name in fields} - set(PLACES))
    differing = [n for n in names if len({json.dumps(fields.get(n)) for fields in fields_of.values()}) > 1]
    runs = {}
    for run in study.runs:
        values = [as_text(fields_of[anchor(run)].get(name)) for name in differing]
        runs[anchor(run)] = {"name": f"{study.label(run.arm)}, seed {run.seed}", "values": values}
    content = without_roots({"fields": differing, "runs": runs})
    return json.dumps(content, ensure_ascii=False).replace("</", "<\\/")


def fork_table(study: Study) -> Table | None:
    """Return a row per fork: its parent, the step at which it began, what it changed, and how it ended."""
    rows: list[list[Cell | str]] = []
    forks = [(_parent(study, run), run.start, run.name, run) for run in once(study) if run.fork]
    for parent, start, _, run in sorted(forks, key=itemgetter(0, 1, 2)):
        shift = run.forked.get("function", {}).get("logits_rms_relative")
        cells: list[Cell | str] = [
            Cell(f"{study.label(run.arm)}, seed {run.seed}", f"#{anchor(run)}"),
            Cell(parent, code=True),
            _changes(run),
            str(run.forked.get("optimizer") or "").rstrip("."),
            f"{start:,}",
            *(str(len(run.forked.get(key) or ())) for key in ("added", "dropped")),
            number(shift) if isinstance(shift, int | float) else DASH,
            f"{max(run.last_step, run.status.step):,}",
            run.status.status,
        ]
        rows.append(cells)
    heads = ["Fork", "Parent", "Changed", "Optimizer state", "From step", "Parameters added", "Dropped"]
    heads += ["Change of outputs", "Last step", "Status"]
    return table("Forks, by parent", heads, rows, 4, 1)


def _parent(study: Study, run: Run) -> str:
    """Return the name of a fork's parent; if it is not among the runs, the id or folder that the fork recorded."""
    recorded = [*filter(None, [run.forked.get("parent", {}).get("id"), (run.fork or {}).get("parent")])]
    found = run.parent or next((one for one in study.runs if one is not run and one.id in recorded), None)
    return found.name if found else without_roots(next(iter(recorded), "an unnamed run"))


def _changes(run: Run) -> str:
    """Return the fields that a fork changed, and its own fields."""

    def text(value: Any) -> str:
        return f"{value:g}" if isinstance(value, float) else as_text(value, "none")

    changes, own = run.forked.get("changed") or (), run.identity.get("fork")
    changed = [f"{one.get('field')} {text(one.get('from'))} → {text(one.get('to'))}" for one in changes]
    if isinstance(own, Mapping):
        changed += [f"fork.{name} {text(own[name])}" for name in OWN_CHANGES if own.get(name)]
    return ", ".join(changed) or "nothing"


# A single run -------------------------------------------------------------------------------------------------------


def single(study: Study) -> dict[str, Any] | None:
    """Return the content for a study of one run without claims: how it ended, what grew first, its alarms and its
    settings; None for any other study."""
    runs = once(study)
    if len(runs) != 1 or study.claims or study.missing:
        return None
    (run,) = runs
    probed, statistics = {*GROWING, *FALLING}, {tag.statistic for tag in run.tags.values()}
    grown = []
    for g in growth_order(run):
        ratio = f"{'÷' if g.statistic in FALLING else '×'}{number(g.ratio)}"
        place = [g.statistic, g.modality or DASH, DASH if g.layer is None else str(g.layer)]
        grown.append([*place, f"{g.step:,}", number(g.start), number(g.end), ratio])
    heads = ["Statistic", "Modality", "Layer", "From step", "Before", "At the end", "Ratio"]
    alarms = [[f"{a.step:,}", a.name.replace("_", " "), a.where, a.sentence] for a in run.alarms]
    ended = [run.status.status and f"{run.status.status} at step {run.status.step:,}", run.status.reason.rstrip(".")]
    return {
        "ended": ": ".join(filter(None, ended)),
        "probed": bool(statistics & probed),
        "grown": table("Sorted by step", heads, grown, 2),
        "watched": bool(statistics & {*probed, "loss", "grad_norm"} or alarms),
        "alarms": table("Alarms of the run", ["Step", "Alarm", "Where", "Message"], alarms, 4),
        # A pack has no checkpoints, and its folder is a temporary one.
        "inspect": inspect_command(run.path, run.alarms[0].step)
        if run.alarms and (run.path / "checkpoints").is_dir()
        else "",
        "settings": settings(run),
    }


def settings(run: Run) -> Table | None:
    """Return the fields that differ from their defaults."""
    from mmqk.config import defaults  # imports pydantic, which other pages do not need

    default = defaults()
    rows: list[list[Cell | str]] = [
        [Cell(name, code=True), as_text(value), as_text(default[name])]
        for name, value in flatten(run.config).items()
        if name in default and name not in PLACES and value != default[name]
    ]
    return table("Fields that differ from their defaults", ["Field", "Value", "Default"], rows, 3)
