"""Pack runs into one file: ``mmqk pack runs/demo --out demo.zip``. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from mmqk.lab.grid.record import read_ablation
from mmqk.store import OneSentenceParser, UserError, find_runs
from mmqk.store.files import read_regular
from mmqk.store.pack import FEW_DIGITS, FILES, write_pack

REQUIRED = ("run.json", "status.json", "metrics.jsonl")  # each run of a grid has these files

DESCRIPTION = """\
Write the files that a report needs from a folder of runs into one small zip file: configurations, status, metrics,
alarms and the registration of the claims; no checkpoints and no TensorBoard events. mmqk.report and mmqk.load_runs
read the file like the folder, and mmqk.ablate --from continues the grid from it.

The report of a pack with the name of its folder equals the report of the folder byte for byte, unless --small rounds
its numbers."""


def main(argv: list[str] | None = None) -> int:
    """Write a pack and print its path.

    Raises:
        UserError: the folder has no runs, its ablation.json is damaged, or --out is not a file name that ends in
            .zip.
    """
    parser = OneSentenceParser(
        prog="mmqk pack",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, help="folder of a grid, an arm or a run")
    parser.add_argument("--out", type=Path, help="the output file (default: the folder's name and .zip)")
    parser.add_argument(
        "--small",
        action="store_true",
        help=f"a smaller file for hundreds of runs: only the series that a report reads, with {FEW_DIGITS} digits",
    )
    options = parser.parse_args(argv)
    out = options.out or Path(f"{options.runs.resolve().name}.zip")
    if out.suffix != ".zip" or out.is_dir():
        raise UserError(f"--out {out} is not the name of a zip file: let it end in .zip")
    grid = read_ablation(options.runs)  # no command can read a pack with a damaged registration
    write_pack(options.runs, out, options.small)
    if damaged := _damaged(options.runs, required=REQUIRED if grid else ()):
        print(f"the runs are packed as they are, with these damaged files: {', '.join(damaged)}")
    size = out.stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB" if size >= 1e5 else f"{out}: {size / 1e3:.0f} kB")
    return 0


def _damaged(folder: Path, required: Sequence[str]) -> list[str]:
    """Return the files of the packed runs that cannot be read, and the required files that are missing."""
    names = []
    for path in (run / file for run in find_runs(folder) for file in FILES):
        if not path.exists():
            names += [f"{path.relative_to(folder).as_posix()} (missing)"] if path.name in required else []
            continue
        try:
            text = read_regular(path).decode()
            for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
                yaml.safe_load(part) if path.suffix == ".yaml" else json.loads(part)
        except (ValueError, RecursionError, yaml.YAMLError):
            names.append(path.relative_to(folder).as_posix())
    return names
