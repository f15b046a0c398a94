"""Show runs while they train: ``mmqk watch runs/demo``. Needs no torch."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mmqk.lab.runner.watch import Follow, follow, runs_table
from mmqk.store import NoRun, OneSentenceParser

DESCRIPTION = """\
Show runs while they train: losses by modality, the largest attention logits and norms with their layers, alarms,
speed and time left. Waits for the first run of a folder. Ends when every run has ended, or on Ctrl-C."""

EPILOG = """\
examples:
  mmqk watch runs/demo                     every run of a grid
  mmqk watch runs/demo/mixed-0123456789    one arm
  mmqk watch --once runs/cpu/0123456789    print one run once"""

SECONDS = 1.0  # between updates
NARROWEST = 60


def main(argv: list[str] | None = None) -> int:
    """Show runs until all of them have ended, or show them once.

    Raises:
        UserError: a path is not a folder; or, if the runs are shown once, a folder does not exist or has no run.
    """
    parser = OneSentenceParser(prog="mmqk watch", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of grids, of arms or of runs")
    text = "print one frame and end (the default without a terminal or on a dumb terminal)"
    parser.add_argument("--once", action="store_true", help=text)
    options = parser.parse_args(argv)
    console = Console()
    if options.once or not sys.stdout.isatty() or console.is_dumb_terminal:  # cannot redraw
        views = [run.look() for run in follow(options.runs)]
        console.print(runs_table(views, max(NARROWEST, console.width)), soft_wrap=True)
        return 0
    followed: dict[tuple[Path, str, str], Follow] = {}
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                # A grid adds runs, and changes the folder of a run when it selects its learning rate.
                now = {(run.folder, run.name, run.never): run for run in follow(options.runs)}
                followed = {key: followed.get(key, run) for key, run in now.items()}
            except NoRun as none:
                live.update(Text(f"{none}: waiting for one to start (Ctrl-C ends)"), refresh=True)
            else:
                views = [run.look() for run in followed.values()]
                live.update(runs_table(views, max(NARROWEST, console.width)), refresh=True)
                if all(view.ended for view in views):
                    break
            time.sleep(SECONDS)
    return 0
