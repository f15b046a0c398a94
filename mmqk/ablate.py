"""Train a grid of runs with seeds: one YAML in, one folder of runs out. ``python -m mmqk.ablate --help``.

torch is imported only when a configuration is resolved, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmqk.lab.grid.claims import check_arms
from mmqk.lab.grid.grid import Grid, load_grids
from mmqk.lab.grid.record import read_ablation
from mmqk.lab.runner.plan import Resolver, plan
from mmqk.lab.runner.pool import LOG_NAME, PRELOAD, TRAIN, Pool, cores, gpus, start_server
from mmqk.lab.runner.session import Session, check_out, take_runs
from mmqk.store import GRIDS, OneSentenceParser, UserError, dashboards, relative, run_main, with_configs
from mmqk.store.formatting import plural

DESCRIPTION = """\
Train every run of a grid (arms x axes x seeds), several at a time, each in its own process.

A grid has a base configuration, arms that change fields of it, axes whose values are combined with
every arm, and seeds. docs/ablations.md describes the format. Runs go to OUT/<arm>-<id>/seed<k>/. Run
the same command again to resume; finished runs are not trained again. A failed run does not stop the others.
Ctrl-C makes the runs write a checkpoint and stop; a second Ctrl-C ends them at once."""
EPILOG = """\
example:
  python -m mmqk.ablate --config configs/ablations/demo.yaml --jobs 2
  python -m mmqk.report runs/demo --out reports/demo

exit code:
  0           every run completed or diverged
  1           a run failed or cannot start
  2           an error in the grid or the command
  130 or 143  the command was interrupted; 130 also after --max-minutes: run the same command again"""


def main(argv: list[str] | None = None) -> int:
    """Train the grid in ``argv``, and return an exit code that the epilog of ``--help`` describes.

    Raises:
        UserError: an error in the grid, in a field that an arm sets, in the data, or in the output folder.
    """
    until = time.monotonic()
    options = _parse(argv)
    until += options.max_minutes * 60
    devices = gpus()
    jobs = options.jobs or len(devices) or min(2, cores())
    grid = _grid(options)
    out = Path(options.out or f"runs/{grid.name}")
    check_out(out, grid)
    if added := _added(options, out):
        grid = _grid(options, added)
    only = _only(options, grid)
    if options.pack is not None:
        new = take_runs(options.pack, out, grid)
        print(f"{options.pack}: copied {plural(len(new), 'finished run')} that {out} did not have", flush=True)

    if not options.dry_run:
        # Without this variable, every run with compiled blocks would compile on all cores. torch reads the variable
        # at its first compilation.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores() // jobs)))
        # Start the server now, so that it imports torch at the same time as the resolver in this process.
        start_server(PRELOAD)
    resolver = Resolver(max(1, cores() // jobs))
    session = Session(grid, out, lambda: plan(grid, out, resolver), resolver.threads, options.slice, only)
    session.look()
    for sentence in _check_claims(grid, session):
        print(sentence, flush=True)
    from mmqk.lab.runner.table import PoolProgress, outcome_table, time_left  # imports rich

    if options.dry_run:
        outcomes = session.outcomes()
        print("\n".join([outcome_table(outcomes), *session.remarks(), time_left(outcomes, jobs)]))
        return 0

    tasks = session.begin()
    todo = sum(not o.finished and o.status != "never" for o in session.outcomes().values())
    slice_label = f"slice {options.slice[0]} of {options.slice[1]}, " if options.slice != (1, 1) else ""
    runs = plural(len(session.tasks) + len(session.waiting), "run")
    print(f"{grid.title}: {slice_label}{runs} in {out}, {todo} to train, {jobs} at a time", flush=True)
    with contextlib.closing(PoolProgress()) as progress:
        pool = Pool(
            tasks,
            jobs,
            entry=TRAIN,
            preload=PRELOAD,
            tick=progress,
            more=session.more,
            ready=session.ready,
            to_come=session.to_come,
            devices=devices,
            until=until,
        )
        pool.run()
    session.more()
    outcomes = session.outcomes(pool.outcomes)
    print("\n".join([outcome_table(outcomes), *session.remarks(), dashboards(out)]), flush=True)
    if pool.signal_received is not None:
        print("interrupted: run the same command again to resume", file=sys.stderr)
        return 128 + pool.signal_received
    if session.error is not None:
        raise session.error
    statuses = {outcome.status for outcome in outcomes.values()} - {"never"}
    if any(wait.mistake for wait in session.waiting):
        print("a run cannot start: see the table for the reason", file=sys.stderr)
        return 1
    if "failed" in statuses:
        print(f"a run failed: see its {LOG_NAME}; run the same command to try again", file=sys.stderr)
        return 1
    if statuses <= {"completed", "diverged"}:
        return 0
    if pool.stopping:
        print(f"{options.max_minutes:g} minutes are over: run the same command again to resume", file=sys.stderr)
    return 130


def _check_claims(grid: Grid, session: Session) -> list[str]:
    """Refuse claims that the analysis would refuse or could not decide; return warnings about few seeds."""
    from mmqk.lab.verdicts.claims import check_decidable, few_seeds
    from mmqk.lab.verdicts.study import study_of

    record = {"name": grid.name, "grid": grid.raw, "runs": session.plan.entries}
    study = study_of(session.out, record, (), grid.path)
    check_decidable(study.claims, grid.jobs, grid.path)
    return few_seeds(study.claims, grid.jobs)


def _added(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Return the arms that this call and earlier calls have added to the grid with --set."""
    grid = (read_ablation(out) or {}).get("grid") or {}
    added = {name: grid["arms"][name] for name in grid.get("added") or ()}
    if not options.settings:
        return added
    if len(options.only) != 1 or len(options.config) != 1:
        raise UserError("--set adds one arm to one grid: give one --config, and the arm's name with --only NAME")
    return {**added, options.only[0]: {"set": dict(options.settings)}}


def _only(options: argparse.Namespace, grid: Grid) -> frozenset[str]:
    """Return the names of the arms to train; an empty set means all arms."""
    quick: list[str] = grid.raw.get("quick") or []
    if options.quick and not quick:
        raise UserError(f"{grid.path} has no list `quick` of arms: name arms with --only")
    names = [*options.only, *(quick if options.quick else [])]
    check_arms(names, {name for arm in grid.arms for name in (arm.name, *arm.points)}, "--only")
    return frozenset(names)


def _grid(options: argparse.Namespace, added: Mapping[str, Any] | None = None) -> Grid:
    grid = load_grids(options.config, added)
    if metrics := {arm.lr.metric for arm in grid.arms if arm.lr}:
        from mmqk.lab.verdicts.ranking import selection_metric  # slow to import

        for metric in metrics:
            selection_metric(metric)
    report = grid.raw.get("report") or {}
    if "command" in report:
        return grid
    command = " ".join(["python -m mmqk.ablate", *(f"--config {relative(path)}" for path in options.config)])
    return replace(grid, raw={**grid.raw, "report": {**report, "command": command}})


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneSentenceParser(
        prog="mmqk ablate",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="YAML",
        help="the grid, or the name of a shipped one (demo); repeat the flag for several grids that share runs",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder of all runs (default: runs/NAME with the name of the grids)",
    )
    parser.add_argument(
        "--from",
        dest="pack",
        type=Path,
        metavar="ZIP",
        help="a pack of this grid (mmqk pack); finished runs that --out does not have are first copied from it",
    )
    parser.add_argument(
        "--jobs", type=_count, metavar="N", help="runs at a time (default: one per GPU, or 2 without a GPU)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs and how long they will take; train nothing"
    )
    parser.add_argument(
        "--max-minutes",
        type=_minutes,
        default=math.inf,
        metavar="M",
        help="stop after M minutes; runs write a checkpoint",
    )
    parser.add_argument(
        "--slice",
        type=_slice,
        default=(1, 1),
        metavar="K/N",
        help="divide the runs into N parts and train only part K, from 1 to N",
    )
    parser.add_argument(
        "--only",
        type=_names,
        default=[],
        metavar="ARM,ARM",
        help="train only these arms of the grid",
    )
    parser.add_argument("--quick", action="store_true", help="train the arms that the grid lists under `quick`")
    parser.add_argument(
        "--set",
        dest="settings",
        type=_setting,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="add an arm that sets this field, with the name given by --only; repeat the flag for several fields",
    )
    return parser.parse_args(with_configs(sys.argv[1:] if argv is None else argv, GRIDS))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _setting(text: str) -> tuple[str, str]:
    """Split FIELD=VALUE into the name of the field and its value, as text that the parser of mmqk.train reads."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE, as in model.qk_norm.kind=rms")
    return name, value


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return minutes


def _slice(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, as in 2/8")
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    run_main(main)
