"""Pack runs into one file: ``python -m mmqk.pack runs/demo --out demo.zip``. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from mmqk.store import OneSentenceParser, UserError, relative, run_main
from mmqk.store.pack import FEW_DIGITS, MOST_VALUES, write_pack

DESCRIPTION = f"""\
Write the files that a report needs from a folder of runs into one small zip file: configurations, status, metrics,
alarms and the registration of the claims; no checkpoints and no TensorBoard events. mmqk.report and mmqk.load_runs
read the file like the folder, and mmqk.ablate --from continues the grid from it.

The report of a pack equals the report of the folder byte for byte. A pack has all values of the losses, the gradient
norm and the other series that a report reads. Of any other series with more than {MOST_VALUES:,} values, such as the
learning rate, it has every n-th value."""


def main(argv: list[str] | None = None) -> int:
    """Write a pack and print its path.

    Raises:
        UserError: the folder has no runs, or --out is not a file name that ends in .zip.
    """
    parser = OneSentenceParser(
        prog="python -m mmqk.pack",
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
    thinned = write_pack(options.runs, out, options.small)
    if thinned and not options.small:
        print(f"thinned the metrics of {', '.join(map(relative, thinned))}")
    size = out.stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB" if size >= 1e5 else f"{out}: {size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    run_main(main)
