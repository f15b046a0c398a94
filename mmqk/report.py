"""Write a report on run folders: ``mmqk report runs/demo --out reports/demo``. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from mmqk.store import OneSentenceParser, run_main

DESCRIPTION = """\
Write a report on the runs of a folder: verdicts on their registered claims, figures by modality, and a table of all
runs. Reads the folders of mmqk ablate and mmqk train, finished or not."""

EPILOG = """\
files in --out:
  index.html      the page, in one file without external resources
  report.md       the page as Markdown, for GitHub
  figures/        each figure as PNG, and the plotted numbers as CSV
  verdicts.json   the verdict of each claim; docs/reports.md lists its keys
  ranking.csv     the ranking of arms, if the grid defines one

examples:
  mmqk report runs/demo                    a grid: verdicts and figures
  mmqk report runs/demo/mixed-0123456789   one arm: figures only"""


def main(argv: list[str] | None = None) -> int:
    """Write a report and print its verdicts and path.

    Raises:
        UserError: the folder has no runs, or --out cannot be written.
    """
    parser = OneSentenceParser(prog="mmqk report", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    text = "folder of a grid, an arm or a run, any folder that contains runs, or a pack of them"
    parser.add_argument("runs", type=Path, help=text)
    parser.add_argument("--out", type=Path, help="folder for the report (default: reports/<name of the folder>)")
    args = parser.parse_args(argv)

    from mmqk.lab.page import write_report
    from mmqk.lab.verdicts import effect_in_cell

    out = args.out or Path("reports") / args.runs.resolve().name.removesuffix(".zip")
    study, verdicts = write_report(args.runs, out)
    print(study.title)
    for verdict in verdicts:
        unchecked = f" (not checked: {', '.join(verdict.claim.unchecked)})" if verdict.claim.unchecked else ""
        cell = effect_in_cell(verdict.claim, verdict.effect, verdict.bounds)
        effect = f"; {cell}" if cell else ""
        print(f"  {verdict.claim.id}: {verdict.badge}{unchecked}{effect}")
    print(out / "index.html")
    return 0


if __name__ == "__main__":
    run_main(main)
