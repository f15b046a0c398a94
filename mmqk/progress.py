"""Shows the progress of a command on stderr: a line that rich redraws on a terminal, or a line every ten seconds."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from mmqk.store import clock

if TYPE_CHECKING:
    from rich.console import RenderableType

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 10.0

Item = TypeVar("Item")


class Progress:
    """Shows a line of text with the time left.

    The time left is estimated from the work done since `begin`. rich is imported at the first display on a terminal.
    """

    def __init__(self) -> None:
        self.stream = sys.stderr
        self.terminal = self.stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._shown = -math.inf if self.terminal else time.monotonic()
        self._began: tuple[float, float] | None = None
        self._live: Any = None

    def due(self) -> bool:
        """Return whether half a second has passed since the last `show`, or ten seconds in a log."""
        return time.monotonic() - self._shown >= (TERMINAL_SECONDS if self.terminal else LOG_SECONDS)

    def begin(self, done: float) -> None:
        """Start to measure the time per unit of work; ``done`` units are done already. Later calls do nothing."""
        self._began = self._began or (time.monotonic(), done)

    def show(
        self,
        text: str,
        done: float | None = None,
        total: float | None = None,
        above: Callable[[int], RenderableType] | None = None,
    ) -> None:
        """Show the text now, followed by the time left if that can be estimated.

        Args:
            text: one line.
            done: units of work that are done; None before the work begins.
            total: units of all work.
            above: function that returns what to show above the line, for a terminal of the given width in characters.
        """
        self._shown = time.monotonic()
        if done is not None:
            self.begin(done)
        if self._began is not None and done is not None and total is not None and done > self._began[1]:
            start, first = self._began
            text += f" · about {clock((self._shown - start) / (done - first) * (total - done))} left"
        if not self.terminal:
            print(text, file=self.stream, flush=True)
            return
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            console = Console(file=self.stream, force_terminal=True)
            self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start()
        parts = [] if above is None else [above(self._live.console.width)]
        self._live.update(Group(*parts, Text(text, no_wrap=True, overflow="ellipsis")), refresh=True)

    def close(self, last: str = "") -> None:
        """Remove the display from a terminal; then print the line ``last``, if given."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if last:
            print(last, file=self.stream, flush=True)


def track(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield the items, with their progress: ``1,200 of 20,000 samples read · about 1:45 left``."""
    progress = Progress()
    progress.begin(0)
    try:
        for done, item in enumerate(items):
            if progress.due():
                progress.show(f"{done:,} of {total:,} {what}", done, total)
            yield item
    finally:
        progress.close()
