"""The bench of failures: runs whose fault is known, and how often alarms are right about them. ``mmqk bench``.

faults    what is planted
traces    runs with their labels, when they fail, and what a change does to failing runs
rules     candidate rules, plain facts, and series that leave their range; score: how often the rules are right
kinds     signs of a kind of fault
evidence  the rates of all these for ``mmqk diagnose``, and the nearest failure
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmqk.store import OneSentenceParser, UserError, write_atomic


def main(argv: list[str] | None = None) -> int:
    """Score the rules, and one of your own, on runs of the bench; print tables.

    Raises:
        UserError: the folder has no runs, an arm has no label, or the rule does not exist.
    """
    parser = OneSentenceParser(prog="mmqk bench", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("runs", help="folder or pack of the runs of configs/failures/bench.yaml, or of zoo.yaml or rescue.yaml")
    add("--rule", action="append", default=[], metavar="module:function", help="score this rule too")
    add("--side", choices=("develop", "judge"), default="develop", help="side of the split (default: develop)")
    text = "what is wrong in each arm (default: the labels of mmqk)"
    add("--labels", metavar="FILE", default="configs/failures/bench/labels.yaml", help=text)
    add("--thresholds", type=Path, metavar="FILE", help="scores of another call (--json) whose thresholds to use")
    add("--json", type=Path, metavar="FILE", help="file for the scores as JSON")
    add("--outcomes", action="store_true", help="show instead what changes do to failing runs (zoo, rescue)")
    options = parser.parse_args(argv)

    from mmqk import load_runs
    from mmqk.bench import kinds, score, traces
    from mmqk.bench.rules import BASELINES, CANDIDATES
    from mmqk.model.patch import allow_patch, named_function

    runs = [*load_runs(options.runs)]
    if options.outcomes:
        table = traces.outcomes(runs)
        scores: list[Any] = table.to_dict("records")
        text = f"{traces.outcomes_table(table)}\n\n{kinds.what_fails_first(runs)}"
    else:
        try:
            own = [named_function(name) for name in options.rule if allow_patch(name)]
        except ValueError as error:
            raise UserError(f"--rule: {error}") from error
        labelled = traces.labelled(runs, options.labels)
        known = {} if options.thresholds is None else score.thresholds(options.thresholds)
        rows = score.table(labelled, [*BASELINES, *CANDIDATES, *own], options.side, known)
        chosen = [trace for trace in labelled if trace.side == options.side]
        head = f"{len(chosen)} runs of side {options.side}; split {traces.split_hash(options.labels)}"
        alarmed = [any(trace.alarms[name].any() for name in traces.LASTING) for trace in chosen]
        which = [kinds.confusion(chosen, alarmed), kinds.places(chosen)]
        text = "\n\n".join([head, score.markdown(rows), score.by_kind(rows), *which])
        scores = [asdict(row) for row in rows]
    print(text)
    if options.json is not None:
        write_atomic(options.json, json.dumps(scores, indent=1) + "\n")
    return 0
