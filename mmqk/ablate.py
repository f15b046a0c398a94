"""Train a grid of runs with seeds: one YAML in, one folder of runs out. ``mmqk ablate --help``.

torch is imported only by the runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmqk.lab.grid import Grid, load_grids
from mmqk.lab.grid.claims import as_list, check_arms
from mmqk.lab.runner.executors import PRELOAD, TRAIN, Local, Ray, Slurm, cores, gpus, start_server
from mmqk.lab.runner.plan import Resolver
from mmqk.lab.runner.pool import LOG_NAME, Executor, Pool
from mmqk.lab.runner.session import Session, check_out, outcome_table, take_runs, time_left
from mmqk.store import GRIDS, OneSentenceParser, UserError, dashboards, relative, run_main, with_configs
from mmqk.store.errors import named_value, slice_of
from mmqk.store.folder import read_ablation
from mmqk.store.formatting import plural

CLUSTER_JOBS = 16

DESCRIPTION = """\
Train every run of a grid (arms x axes x seeds), several at a time, each in its own process.

A grid has a base configuration, arms that change fields of it, axes whose values are combined with
every arm, and seeds. docs/ablations.md describes the format. Runs go to OUT/<arm>-<id>/seed<k>/. Run
the same command again to resume; finished runs are not trained again. A failed run does not stop the others.
Ctrl-C makes the runs write a checkpoint and stop; a second Ctrl-C ends them at once."""
EPILOG = """\
example:
  mmqk ablate configs/ablations/demo.yaml --jobs 2
  mmqk report runs/demo --out reports/demo

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
    began = time.monotonic()
    options = _parse(argv)
    local = options.executor == "local"
    devices = gpus() if local else ()
    jobs = options.jobs or (len(devices) or min(2, cores()) if local else CLUSTER_JOBS)
    with _as_mistake(options):
        given = {name.replace("-", "_"): value for name, value in options.job.items()}
        cpus = int(float(given.get("cpus_per_task", given.get("num_cpus", 1))))
    threads = max(1, cores() // jobs if local else cpus)
    session = _session(options, threads)
    if options.pack is not None:
        new = take_runs(options.pack, session.out, session.grid)
        copied = plural(len(new), "finished run")
        print(f"{options.pack}: copied {copied} that {session.out} did not have", flush=True)
    if not options.dry_run and local:
        # Without this variable, every run with compiled blocks would compile on all cores. torch reads the variable
        # at its first compilation.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        # Start the server now, so that it imports torch while this process plans the runs.
        start_server(PRELOAD)
    session.look()
    from mmqk.lab.grid.decidable import check_modalities, decidable_claims, few_seeds  # slow to import

    claims = decidable_claims(session.grid)
    check_modalities(claims, session.resolver.modalities, session.grid.path)
    for sentence in few_seeds(claims, session.grid.jobs):
        print(sentence, flush=True)
    if options.dry_run:
        outcomes = session.outcomes()
        print("\n".join([outcome_table(outcomes), *session.remarks(), time_left(outcomes, jobs)]))
        return 0
    return _train(session, options, jobs, devices, until=began + options.max_minutes * 60)


def _train(session: Session, options: argparse.Namespace, jobs: int, devices: Sequence[str], until: float) -> int:
    """Train the runs of a session, print their outcomes, and return the exit code."""
    from mmqk.lab.runner.watch import PoolProgress  # imports rich

    tasks = session.begin()
    todo = sum(not o.finished and o.status != "never" for o in session.outcomes().values())
    part = f"slice {options.slice[0]} of {options.slice[1]}, " if options.slice != (1, 1) else ""
    runs = f"{part}{plural(len(session.tasks) + len(session.waiting), 'run')} in {session.out}"
    print(f"{session.grid.title}: {runs}, {todo} to train, {jobs} at a time", flush=True)
    with contextlib.closing(PoolProgress(session.to_come)) as progress:
        executor = _executor(options, session.out, devices)
        pool = Pool(tasks, jobs, executor, tick=progress, more=session.more, until=until)
        pool.run()
    session.more(ended=True)
    outcomes = session.outcomes(pool.outcomes)
    print("\n".join([outcome_table(outcomes), *session.remarks(), dashboards(session.out)]), flush=True)
    if pool.signal_received is None and session.error is not None:
        raise session.error
    statuses = {outcome.status for outcome in outcomes.values()} - {"never"}
    if signal := pool.signal_received:
        code, why = 128 + signal, "interrupted: run the same command again to resume"
    elif any(wait.mistake for wait in session.waiting.values()):
        code, why = 1, "a run cannot start: see the table for the reason"
    elif "failed" in statuses:
        code, why = 1, f"a run failed: see its {LOG_NAME}; run the same command to try again"
    elif statuses <= {"completed", "diverged"}:
        return 0
    else:
        over = f"{options.max_minutes:g} minutes are over: run the same command again to resume"
        code, why = 130, over if pool.stopping else ""
    if why:
        print(why, file=sys.stderr)
    return code


def _executor(options: argparse.Namespace, out: Path, devices: Sequence[str]) -> Executor:
    """Return what starts the runs.

    Raises:
        UserError: the extra of a cluster is not installed.
    """
    name = options.executor
    if name == "local":
        return Local(TRAIN, PRELOAD, devices)
    try:
        with _as_mistake(options):
            return Slurm(out, options.job) if name == "slurm" else Ray(options.job)
    except ModuleNotFoundError as error:
        raise UserError(f"--executor {name} needs {error.name}: pip install 'mmqk[{name}]'") from error


@contextlib.contextmanager
def _as_mistake(options: argparse.Namespace) -> Iterator[None]:
    """Raise an error of the cluster's library, or of a value of --job, as a UserError."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        given = " ".join(f"--job {name}={value}" for name, value in options.job.items())
        raise UserError(f"--executor {options.executor} {given}: {' '.join(str(error).split())}") from error


def _session(options: argparse.Namespace, threads: int) -> Session:
    """Read the grid and check the output folder."""
    grid = _grid(options)
    out = Path(options.out or f"runs/{grid.name}")
    check_out(out, grid)
    # The arms that earlier calls and this call add to the grid with --set.
    earlier = (read_ablation(out) or {}).get("grid") or {}
    added = {name: earlier["arms"][name] for name in earlier.get("added") or ()}
    if options.settings:
        if len(options.only) != 1 or len(options.config) != 1:
            raise UserError("--set adds one arm to one grid: give one --config, and the arm's name with --only NAME")
        added[options.only[0]] = {"set": dict(options.settings)}
    if added:
        grid = _grid(options, added)
    quick = as_list(grid.raw.get("quick"))
    if options.quick and not quick:
        raise UserError(f"{grid.path} has no list `quick` of arms: name arms with --only")
    only = [*options.only, *(quick if options.quick else [])]
    check_arms(only, {name for arm in grid.arms for name in (arm.name, *arm.points)}, "--only")
    return Session(grid, out, Resolver(threads), options.slice, frozenset(only))


def _grid(options: argparse.Namespace, added: Mapping[str, Any] | None = None) -> Grid:
    grid = load_grids(options.config, added)
    if metrics := {arm.lr.metric for arm in grid.arms if arm.lr}:
        from mmqk.lab.verdicts.measure import selection_metric  # slow to import

        for metric in metrics:
            selection_metric(metric)
    report = grid.raw.get("report") or {}
    command = " ".join(["mmqk ablate", *(f"--config {relative(path)}" for path in options.config)])
    return replace(grid, raw={**grid.raw, "report": {"command": command, **report}})


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneSentenceParser(prog="mmqk ablate", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    text = "the grid, or the name of a shipped one (demo); repeat the flag for several grids that share runs"
    add("--config", action="append", required=True, metavar="YAML", help=text)
    add("--out", metavar="DIR", help="folder of all runs (default: runs/NAME with the name of the grids)")
    text = "a pack of this grid (mmqk pack); finished runs that --out does not have are first copied from it"
    add("--from", dest="pack", type=Path, metavar="ZIP", help=text)
    text = "where runs train: local, slurm (mmqk[slurm]) or ray (mmqk[ray]); docs/cluster.md"
    add("--executor", choices=("local", "slurm", "ray"), default="local", help=text)
    text = "an option of the job of a run, by the name in sbatch or in Ray: partition=gpu, time=60, num_gpus=1"
    add("--job", type=named_value, action="append", default=[], metavar="OPTION=VALUE", help=text)
    text = f"runs at a time (default: one per GPU, or 2 without a GPU; {CLUSTER_JOBS} on a cluster)"
    add("--jobs", type=_count, metavar="N", help=text)
    add("--dry-run", action="store_true", help="list the runs and how long they will take; train nothing")
    text = "stop after M minutes; runs write a checkpoint"
    add("--max-minutes", type=_minutes, default=math.inf, metavar="M", help=text)
    text = "divide the runs into N parts and train only part K, from 1 to N"
    add("--slice", type=slice_of, default=(1, 1), metavar="K/N", help=text)
    add("--only", type=_names, default=[], metavar="ARM,ARM", help="train only these arms of the grid")
    add("--quick", action="store_true", help="train the arms that the grid lists under `quick`")
    text = "add an arm that sets this field, with the name given by --only; repeat the flag for several fields"
    add("--set", dest="settings", type=named_value, action="append", default=[], metavar="FIELD=VALUE", help=text)
    options = parser.parse_args(with_configs(sys.argv[1:] if argv is None else argv, GRIDS))
    options.job = dict(options.job)
    if options.job and options.executor == "local":
        raise UserError("--job is for --executor slurm or ray")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")


if __name__ == "__main__":
    run_main(main)
