"""The bench of failures: runs whose fault is known, and how often alarms are right about them. ``mmqk bench``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from mmqk.store import OneSentenceParser, UserError, write_atomic


def main(argv: list[str] | None = None) -> int:
    """Score the rules, and one of your own, on runs of the bench; print a table.

    Raises:
        UserError: the folder has no runs, an arm has no label, or the rule does not exist.
    """
    parser = OneSentenceParser(prog="mmqk bench", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("runs", help="folder or pack of the runs of configs/failures/bench.yaml")
    add("--rule", action="append", default=[], metavar="module:function", help="score this rule too")
    add("--side", choices=("develop", "judge"), default="develop", help="side of the split (default: develop)")
    add("--labels", metavar="FILE", help="what is wrong in each arm (default: the labels of mmqk)")
    add("--json", type=Path, metavar="FILE", help="file for the scores as JSON")
    options = parser.parse_args(argv)

    from mmqk import load_runs
    from mmqk.bench.rules import BASELINES, CANDIDATES
    from mmqk.bench.score import markdown, table
    from mmqk.bench.traces import LABELS, labelled, split_hash
    from mmqk.model.patch import allow_patch, named_function

    labels = options.labels or LABELS
    try:
        for name in options.rule:
            allow_patch(name)
        own = [named_function(name) for name in options.rule]
    except ValueError as error:
        raise UserError(f"--rule: {error}") from error
    traces = labelled([*load_runs(options.runs)], labels)
    rows = table(traces, [*BASELINES, *CANDIDATES, *own], options.side)
    chosen = [trace for trace in traces if trace.side == options.side]
    print(f"{len(chosen)} runs of side {options.side}; split {split_hash(labels)}\n\n{markdown(rows)}")
    if options.json is not None:
        write_atomic(options.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0
