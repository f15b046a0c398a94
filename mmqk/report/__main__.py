"""Turn run folders into a page: ``python -m mmqk.report runs/demo --out reports/demo``. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mmqk.store import OneSentenceParser, run_main

DESCRIPTION = """\
Read the runs of some folders and write their report: verdicts on the claims that the runs were made for, figures
by modality, and a table of every run. Works on what mmqk.ablate or mmqk.train wrote, finished or not."""

EPILOG = """\
what is written into --out:
  index.html      the page, in one file that needs nothing else
  report.md       the same for GitHub
  figures/        each figure as PNG and SVG, and the plotted numbers as CSV
  verdicts.json   claim, verdict, effect, interval, threshold, runs, controls, note

examples:
  python -m mmqk.report runs/demo                    an ablation: verdicts and figures
  python -m mmqk.report runs/demo/mixed-0123456789   one arm of it: figures only
  python -m mmqk.report runs/demo runs/lr --out reports/both
                                                     several: each judged for itself, drawn together"""


def default_name(folders: Sequence[Path]) -> str:
    """The name of a report on these folders."""
    names = list(dict.fromkeys(folder.resolve().name for folder in folders))
    return "-".join(names) if len(names) <= 3 else f"{names[0]}-and-{len(names) - 1}-others"


def main(argv: list[str] | None = None) -> int:
    """Write a report and say where it is.

    Raises:
        UserError: a folder has no runs, or --out cannot be written.
    """
    parser = OneSentenceParser(
        prog="python -m mmqk.report",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="folders of ablations, of arms, of runs, or any folder that holds runs",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the report (default: reports/<names of the folders>)"
    )
    args = parser.parse_args(argv)

    from mmqk.report.findings import headline
    from mmqk.report.page import write_report

    out = args.out or Path("reports") / default_name(args.runs)
    study, verdicts = write_report(args.runs, out)
    print(headline(study, verdicts)[0])
    for verdict in verdicts:
        without = f" (not checked: {', '.join(verdict.claim.unchecked)})" if verdict.claim.unchecked else ""
        print(f"  {verdict.claim.id}: {verdict.verdict}{without}")
    print(out / "index.html")
    return 0


if __name__ == "__main__":
    run_main(main)
