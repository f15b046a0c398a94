"""The fork tree: parent, step and changed fields of each fork. Replays are shown in another section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmqk.lab.formatting import listed, number, plural
from mmqk.lab.page.compared import as_text
from mmqk.lab.page.figures.shapes import Figure, Line, Panel
from mmqk.lab.page.figures.style import GRAY, legend
from mmqk.lab.runs.load import Run
from mmqk.lab.verdicts.study import Study
from mmqk.store import without_roots

MOST_ROWS = 60
CHARACTERS = 145  # of a note that fit into the width of the figure


@dataclass(frozen=True)
class Node:
    """A run in a fork tree.

    Attributes:
        run: the run; None for a parent that is not among the runs.
        name: name of the run; for a missing parent, the name that its forks record.
        parent: index of the parent in the list of nodes, -1 for a root.
        depth: 0 for a root.
        step: the first step of the run.
        changed: the changed fields, as text.
        remarks: added and dropped parameters, and by how much the outputs changed, as text.
    """

    run: Run | None
    name: str
    parent: int
    depth: int
    step: int
    changed: str = ""
    remarks: str = ""

    @property
    def end(self) -> int:
        """The last step."""
        return max(self.run.last_step, self.run.status.step) if self.run else self.step


def fork_tree(study: Study) -> list[Node]:
    """Return the nodes of all fork trees: each run follows its parent, and the forks of a run are sorted by step."""
    runs = {run.path.resolve(): run for run in study.runs if run.role != "replay"}
    by_parent: dict[str, list[Run]] = {}
    for run in runs.values():
        if run.fork:
            by_parent.setdefault(_parent_name(run, runs), []).append(run)
    by_name = {run.name: run for run in runs.values()}
    forked = {run.name for children in by_parent.values() for run in children}
    roots = [name for name in by_name if name in by_parent and name not in forked]
    roots += [name for name in by_parent if name not in by_name]
    nodes: list[Node] = []

    def add(name: str, parent: int, depth: int) -> None:
        run = by_name.get(name)
        step = _step(run) if run and parent >= 0 else 0
        changed, remarks = _changes(run) if run and parent >= 0 else ("", "")
        nodes.append(Node(run, name, parent, depth, step, changed, remarks))
        place = len(nodes) - 1
        for child in sorted(by_parent.get(name, ()), key=lambda run: (_step(run), run.name)):
            add(child.name, place, depth + 1)

    for name in roots:
        add(name, -1, 0)
    return nodes


def _step(run: Run) -> int:
    return (run.fork or {}).get("step") or 0


def _parent_name(run: Run, runs: Mapping[Path, Run]) -> str:
    """Return the name of a fork's parent. If the parent was not loaded with the fork, search ``runs`` for the id that
    the fork recorded. If no run matches, return this id, or the recorded folder.

    On a page of several folders, ``runs`` are copies with other names, so the loaded parent is found by its path.
    """
    recorded = [*filter(None, [run.forked.get("parent", {}).get("id"), (run.fork or {}).get("parent")])]
    loaded = runs.get(run.parent.path.resolve()) if run.parent else None
    found = loaded or next((one for one in runs.values() if one is not run and one.id in recorded), None)
    return found.name if found else without_roots(next(iter(recorded), "an unnamed run"))


def _changes(run: Run) -> tuple[str, str]:
    """Return (changed fields, remarks) of a fork."""
    record = run.forked
    changed = [
        f"{c.get('field')} {_short(c.get('from'))} → {_short(c.get('to'))}"
        for c in record.get("changed") or ()
    ]
    fork = run.identity.get("fork") if isinstance(run.identity.get("fork"), Mapping) else {}
    assert isinstance(fork, Mapping)
    if fork.get("skip_batches"):
        changed.append(plural(int(fork["skip_batches"]), "batch", "batches") + " left out")
    if fork.get("new_moments"):
        changed.append("new moments of the optimizer")
    if fork.get("noise"):
        changed.append(f"weights changed by {fork['noise']:g} times their RMS")
    remarks = []
    if record.get("added"):
        remarks.append(f"{plural(len(record['added']), 'parameter')} added")
    if record.get("dropped"):
        remarks.append(f"{plural(len(record['dropped']), 'parameter')} dropped")
    shift = record.get("function", {}).get("logits_rms_relative")
    if isinstance(shift, int | float):
        remarks.append(
            "the outputs did not change (in fp32, before the first step)"
            if shift == 0
            else f"the outputs changed by {number(shift)} times their RMS"
        )
    if optimizer := record.get("optimizer"):
        remarks.append(f"optimizer state: {optimizer.rstrip('.')}")
    return listed(changed) or "nothing changed", "; ".join(remarks)


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else as_text(value, "none")


def fork_figure(study: Study, nodes: Sequence[Node]) -> Figure | None:
    """Draw the fork trees over optimizer steps: one line per run, from its first to its last step."""
    if not nodes:
        return None
    drawn = nodes[:MOST_ROWS]
    longest = max(node.end for node in drawn) or 1
    lines, notes = [], []
    for row, node in enumerate(drawn):
        y = float(len(drawn) - row)
        arm, seed, run = (node.run.arm, node.run.seed, node.name) if node.run else ("", None, "")
        color = "" if node.run else GRAY
        start = node.step if node.parent >= 0 else 0
        end = node.end if node.run else max(n.step for n in nodes if n.parent == row)
        if node.parent >= 0:
            x, above = np.full(2, float(start)), np.array([float(len(drawn) - node.parent), y])
            lines.append(Line(arm, "", seed, x, above, run=run, color=color))
        diverged = node.run is not None and node.run.status.status == "diverged"
        x = np.array([start, end], dtype=float)
        lines.append(
            Line(arm, "", None, x, np.array([y, y]), "median", run=run, color=color, diverged=diverged)
        )
        words = f"{study.label(arm)}, seed {seed}" if node.run else f"{node.name}, not among these runs"
        words += f": {node.changed}" if node.changed else ""
        left = start > 0.55 * longest
        room = int(CHARACTERS * (end if left else longest - start) / longest)
        words = words if len(words) <= room else f"{words[: room - 1]}…"
        notes.append((float(end if left else start), y, words, "left" if left else "right"))
    height = 0.75 + 0.42 * len(drawn)
    panel = Panel("forks", "", "", tuple(lines), notes=tuple(notes), height=height, shared=False)
    forks = [node for node in nodes if node.parent >= 0]
    arms = tuple(dict.fromkeys(node.run.arm for node in nodes if node.run))
    failed = sum(node.run is not None and node.run.status.status == "diverged" for node in forks)
    reading = f"{plural(len(forks), 'fork')}; {failed or 'none'} of them diverged."
    caption = "One line per run, from its first to its last step; × marks a divergence."
    if len(drawn) < len(nodes):
        caption += f" The first {len(drawn)} of {len(nodes)} are drawn; all are listed below."
    return Figure("forks", reading, caption, ((panel,),), arms, legend(study, arms))
