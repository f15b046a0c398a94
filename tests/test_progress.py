"""The progress display: plain lines in a log, one redrawn line on a terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest

from mmqk.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch):
    """Replace the monotonic clock by the first element of the returned list, in seconds."""
    seconds = [100.0]
    monkeypatch.setattr("mmqk.progress.time.monotonic", lambda: seconds[0])
    return seconds


def test_a_log_gets_a_line_every_ten_seconds(now):
    out = io.StringIO()
    progress = Progress(out)
    progress.begin(20)
    for step in range(20, 45):
        if progress.due():
            progress.show(f"step {step}/100", step, 100)
        now[0] += 1.0
    progress.close("done")
    assert out.getvalue() == "step 30/100 · about 1:10 left\nstep 40/100 · about 1:00 left\ndone\n"


def test_a_terminal_shows_one_line_with_a_bar_and_keeps_the_last(now, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    progress = Progress(out)
    assert progress.due()
    progress.show("starting")
    assert not progress.due()
    now[0] += 1.0
    progress.show("[bold] " + "x" * 60, 1, 2)
    progress.close("step 2/2")
    text = out.getvalue()
    assert text.endswith("\x1b[2Kstep 2/2\n") and text.count("\n") == 2
    assert text.index("\x1b[?25h") < text.index("starting"), "a killed process leaves no hidden cursor"
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    assert any(frame.startswith("starting ━") for frame in frames)
    assert any("[bold] xxx" in frame and "…" in frame for frame in frames)
    assert max(map(len, frames)) <= 40


def test_lines_on_stderr_are_printed_above_the_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    progress = Progress()
    progress.show("step 1/2")
    print("alarm at [step] 1", file=sys.stderr)
    progress.close("step 2/2")
    assert sys.stderr is out
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").splitlines()
    assert "alarm at [step] 1" in frames and frames[-1] == "step 2/2"
