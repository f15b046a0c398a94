"""The progress display: plain lines in a log, one redrawn line on a terminal."""

from __future__ import annotations

import io

from mmqk.progress import Progress


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("mmqk.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    progress = Progress(out)
    progress.begin(20)
    for step in range(20, 45):
        if progress.due():
            progress.show(f"step {step}/100", step, 100)
        now[0] += 1.0
    progress.close("done")
    assert out.getvalue() == "step 30/100 · about 1:10 left\nstep 40/100 · about 1:00 left\ndone\n"
