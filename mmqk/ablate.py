"""Train a grid of runs with seeds: one YAML in, one folder of runs out. ``python -m mmqk.ablate --help``.

Nothing here imports torch before there is something to resolve, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mmqk.ablation.grid import Grid, claims_hash, load_grid
from mmqk.ablation.pool import LOG_NAME, PRELOAD, TRAIN, Pool, Task, standing, start_server
from mmqk.ablation.progress import Progress, table
from mmqk.store import (
    OneSentenceParser,
    UserError,
    code_hash,
    dashboards,
    identity_hash,
    read_json,
    run_main,
    write_json,
)

ABLATION_NAME = "ablation.json"
STALE = "was made by other code than the present one (a fresh --out makes it again)"
DESCRIPTION = """\
Train every run of a grid (arms x seeds), several at a time, each in its own process.

The grid names a base configuration, arms that set fields of it, and seeds. Runs go to
OUT/<arm>-<id>/seed<k>/. The same command again goes on where it was interrupted and trains
nothing that is finished; a run that fails never stops the others. Ctrl-C lets the runs write
a checkpoint and stop; pressed again, it ends them at once."""
EPILOG = """\
example:
  python -m mmqk.ablate --config configs/ablations/demo.yaml --jobs 2
  python -m mmqk.report runs/demo --out reports/demo

exit code: 0 when every run completed or diverged, 1 when one failed, 2 for a mistake in the
grid or the command, 130 or 143 when interrupted."""


def main(argv: list[str] | None = None) -> int:
    """Train the grid that ``argv`` names; the exit code is in the epilog of ``--help``.

    Raises:
        UserError: a mistake in the grid, in a field that an arm sets, in the data, or in the output folder.
    """
    options = _parse(argv)
    grid = load_grid(options.config)
    out = Path(options.out) if options.out else Path("runs") / grid.name
    _check_out(out, grid)

    if not options.dry_run:
        # Two imports of torch side by side: the server's, and the resolver's here.
        start_server(PRELOAD)
    tasks, threads = _tasks(grid, out, options.jobs)
    code = code_hash()
    stale = {task: STALE for task in tasks if standing(task).finished and _code_of(task.folder) != code}
    if options.dry_run:
        print(table({task: standing(task) for task in tasks}, stale))
        return 0

    _write_record(out, grid, tasks, threads)
    todo = sum(not standing(task).finished for task in tasks)
    print(f"{grid.title}: {len(tasks)} runs in {out}, {todo} to train, {options.jobs} at a time", flush=True)
    progress = Progress()
    pool = Pool(tasks, options.jobs, entry=TRAIN, preload=PRELOAD, tick=progress)
    outcomes = pool.run()
    progress.close()
    print(table(outcomes, stale), flush=True)
    print(dashboards(out), flush=True)
    if pool.signal_received is not None:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 128 + pool.signal_received
    statuses = {outcome.status for outcome in outcomes.values()}
    if "failed" in statuses:
        print(f"a run failed: its {LOG_NAME} says more; the same command tries again", file=sys.stderr)
        return 1
    return 0 if statuses <= {"completed", "diverged"} else 130


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneSentenceParser(
        prog="python -m mmqk.ablate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="YAML", help="the grid: base, arms, seeds, claims")
    parser.add_argument(
        "--out", metavar="DIR", help="folder of all runs (default: runs/NAME, NAME from the grid)"
    )
    jobs = min(2, os.cpu_count() or 1)
    parser.add_argument(
        "--jobs", type=_count, default=jobs, metavar="N", help=f"runs at a time (default: {jobs})"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs and how they stand; train nothing"
    )
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of runs from 1 on")
    return int(text)


def _tasks(grid: Grid, out: Path, jobs: int) -> tuple[list[Task], int]:
    """Every job of the grid with its identity and folder, and the CPU threads of each."""
    from mmqk.config import resolve

    tasks, threads = [], 0
    arm_of: dict[str, str] = {}
    for job in grid.jobs:
        try:
            run = resolve(list(job.args))
        except UserError as error:
            raise UserError(f"{grid.path}, arm {job.arm}: {error}") from error
        # Without a word of the configuration, each run gets its share of the cores.
        threads = run.threads or max(1, (os.cpu_count() or 1) // jobs)
        args = job.args if run.threads else (*job.args, f"--threads={threads}")
        # Seeds of an arm share a folder, so its name leaves the seed out.
        variant = identity_hash({name: value for name, value in run.identity.items() if name != "seed"})
        if arm_of.setdefault(run.id, job.arm) != job.arm:
            raise UserError(
                f"{grid.path}: arms {arm_of[run.id]} and {job.arm} are the same run, as what sets them apart has no"
                " effect there: remove one of them."
            )
        folder = out / f"{job.arm}-{variant}" / f"seed{job.seed}"
        tasks.append(Task(job.arm, job.seed, args, folder, run.id, run.identity["trainer"]["max_steps"]))
    return tasks, threads


def _check_out(out: Path, grid: Grid) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give another --out")
    record = read_json(out / ABLATION_NAME)
    if record is not None and record.get("name") != grid.name:
        raise UserError(
            f"{out} holds the ablation {record.get('name')!r}, not {grid.name!r}: give another --out"
        )


def _write_record(out: Path, grid: Grid, tasks: list[Task], threads: int) -> None:
    runs = [
        {"arm": t.arm, "seed": t.seed, "folder": t.folder.relative_to(out).as_posix(), "id": t.id}
        for t in tasks
    ]
    first = read_json(out / ABLATION_NAME)
    if first is None:
        registered = claims_hash(grid.raw)
    else:
        # A record without the field still has the claims themselves.
        registered = first.get("registered") or claims_hash(first.get("grid") or {})
    record = {
        "name": grid.name,
        "registered": registered,
        "grid": grid.raw,
        "runs": runs,
        "threads": threads,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / ABLATION_NAME, record)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): give another --out") from error


def _code_of(folder: Path) -> object:
    return (read_json(folder / "run.json") or {}).get("code")


if __name__ == "__main__":
    run_main(main)
