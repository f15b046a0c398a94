"""Write a report on run folders: ``python -m mmqk.report runs/demo --out reports/demo``. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmqk.store import OneSentenceParser, run_main

DESCRIPTION = """\
Write a report on the runs of some folders: verdicts on their registered claims, figures by modality, and a table
of all runs. Reads the folders of mmqk.ablate and mmqk.train, finished or not."""

EPILOG = """\
files in --out:
  index.html      the page, in one file without external resources
  report.md       the page as Markdown, for GitHub
  figures/        each figure as PNG and SVG, and the plotted numbers as CSV
  verdicts.json   claim, verdict, effect, interval, threshold, runs, controls, note
  ranking.csv, specification.csv
                  the ranking of arms and the specification curve, if the grid defines them

examples:
  python -m mmqk.report runs/demo                    a grid: verdicts and figures
  python -m mmqk.report runs/demo/mixed-0123456789   one arm: figures only
  python -m mmqk.report runs/demo runs/lr --out reports/both
                                                     several: verdicts by grid, shared figures"""


def default_name(folders: Sequence[Path]) -> str:
    """Return the default name of a report on these folders."""
    names = list(dict.fromkeys(folder.resolve().name.removesuffix(".zip") for folder in folders))
    return "-".join(names) if len(names) <= 3 else f"{names[0]}-and-{len(names) - 1}-others"


def main(argv: list[str] | None = None) -> int:
    """Write a report and print its verdicts and path.

    Raises:
        UserError: a folder has no runs, or --out cannot be written.
    """
    parser = OneSentenceParser(
        prog="python -m mmqk.report",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="folders of grids, arms or runs, any folder that contains runs, or packs of them",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the report (default: reports/<names of the folders>)"
    )
    args = parser.parse_args(argv)

    from mmqk.lab.page.findings import headline
    from mmqk.lab.page.page import write_report
    from mmqk.lab.verdicts.verdicts import effect_tested

    out = args.out or Path("reports") / default_name(args.runs)
    study, verdicts = write_report(args.runs, out)
    print(headline(study, verdicts))
    for verdict in verdicts:
        unchecked = f" (not checked: {', '.join(verdict.claim.unchecked)})" if verdict.claim.unchecked else ""
        tested = f"; tested: {words}" if (words := effect_tested(verdict.claim)) else ""
        print(f"  {verdict.claim.id}: {verdict.badge}{unchecked}{tested}")
    print(out / "index.html")
    return 0


if __name__ == "__main__":
    run_main(main)
