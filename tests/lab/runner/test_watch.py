"""`mmqk watch` shows runs and grids, even if files are damaged, and ends when the runs have ended."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from mmqk.lab.runner.watch import Follow, follow
from mmqk.store import Alarm, MetricsWriter, append_alarms, write_json
from mmqk.store.folder import lock_folder
from mmqk.watch import main

ROOT = Path(__file__).parents[3]


def write_run(folder: Path, status="running", steps=range(0, 41, 10), max_steps=200, alarms=(), reason=""):
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"id": "x", "identity": {"trainer": {"max_steps": max_steps}}})
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step in steps:
        writer.write(
            step,
            {
                "loss": 9.0,
                "loss/text": 5.0 - step / 100,
                "loss/image": 6.0,
                "tokens_per_s": 1234.5,
                "attn_logit_absmax/text-text/layer00": 3.0,
                "attn_logit_absmax/text-image/layer01": 10.0 + step,
                "attn_logit_absmax/image-text/layer01": 7.0,
                "q_norm/text/layer00": 4.5,
                "attn_entropy/image/layer00": 0.25,
                "attn_entropy/image/layer01": 3.25,
            },
        )
    writer.close()
    if status is not None:
        write_json(folder / "status.json", {"status": status, "step": 0, "reason": reason, "seconds": 1.0})
    append_alarms(folder, alarms)


GROWTH = Alarm("growth", 30, "attn_logit_absmax/text-image/layer01", 40.0, 20.0, "[logits] have doubled")


def shown(capsys, *argv) -> str:
    assert main([str(word) for word in argv]) == 0
    return capsys.readouterr().out


def test_one_run_shows_its_worst_by_modality_with_the_layer(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with_lock = tmp_path / "run"
    write_run(with_lock, alarms=[GROWTH])
    with open(with_lock / "metrics.jsonl", "ab") as file:
        file.write(b'{"step":50,"loss/te')  # a line that is still being written
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    os.utime(with_lock / "status.json", (now - 100, now - 100))
    os.utime(with_lock / "metrics.jsonl", (now - 20, now - 20))
    said = shown(capsys, "--once", with_lock)
    row = next(line for line in said.splitlines() if line.startswith("run ") and "running" in line)
    # 40 of 200 steps took 80 s, so the remaining 160 steps take 320 s.
    for part in ("40/200", "4.60", "6.00", "50 L1", "1234", "growth", "5:20"):
        assert part in row, part
    assert re.search(r"smallest attention entropy +0\.25 L0", said)
    assert re.search(r"largest attention logit +50 L1 +7 L1", said)
    assert "step 30: growth: [logits] have doubled" in said


def test_a_follower_reads_what_is_new_and_starts_again_after_a_resume(tmp_path):
    write_run(tmp_path / "r", "running", steps=range(3))
    run = follow([tmp_path / "r"])[0]
    assert run.look().step == 2
    writer = MetricsWriter(tmp_path / "r/metrics.jsonl")
    writer.write(3, {"loss/text": 1.0})
    writer.flush()
    view = run.look()
    assert (view.step, view.values["loss/text"], view.values["loss/image"]) == (3, 1.0, 6.0)
    writer.truncate_after(1)
    writer.close()
    assert run.look().step == 1
    assert run.look().values == Follow("again", tmp_path / "r").look().values


def test_a_run_whose_process_is_gone_is_not_called_running(tmp_path):
    write_run(tmp_path / "r")
    long_ago = time.time() - 1000
    for name in ("status.json", "metrics.jsonl"):
        os.utime(tmp_path / "r" / name, (long_ago, long_ago))
    assert follow([tmp_path / "r"])[0].look().status == "stopped"
    lock = lock_folder(tmp_path / "r")
    assert follow([tmp_path / "r"])[0].look().status == "running"
    lock.release()


def test_the_folder_of_attach_runs_on_between_its_probes(tmp_path, monkeypatch):
    """`attach` writes no run.json and no lock, and its probes are minutes apart."""
    for name in ("attached", "trained"):
        write_run(tmp_path / name)
    (tmp_path / "attached/run.json").unlink()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)

    def statuses(age):
        for path in tmp_path.glob("*/*.json*"):
            os.utime(path, (now - age, now - age))
        return {run.folder.name: run.look().status for run in follow([tmp_path])}

    assert statuses(10) == {"attached": "running", "trained": "running"}
    assert statuses(120) == {"attached": "running", "trained": "stopped"}
    assert statuses(2 * 3600) == {"attached": "stopped", "trained": "stopped"}


def watch_in_terminal(folder, terminal="xterm"):
    """Start `mmqk watch` in a terminal; return the process and the end of the terminal to read from."""
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": terminal, "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-m", "mmqk", "watch", str(folder)]
    # Tests that run in the background inherit an ignored SIGINT.
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=there, stderr=there, cwd=ROOT, env=environment, preexec_fn=listens)
    os.close(there)
    return process, here


def read_terminal(process, here, until, then):
    """Return the output of a process on a terminal. Call ``then`` once ``until`` holds for the output so far."""
    said, guard = b"", threading.Timer(1800, process.kill)  # ends a process that shows nothing
    guard.start()
    try:
        while not until(said):
            said += os.read(here, 65536)
        then(said)
        while True:
            said += os.read(here, 65536)
    except OSError:  # the process has closed its end of the terminal
        pass
    finally:
        guard.cancel()
        process.kill()
        os.close(here)
    return said


@pytest.mark.parametrize(("terminal", "redrawn"), [("xterm", True), ("dumb", False)])
def test_ctrl_c_ends_it_in_order_and_a_dumb_terminal_gets_one_frame(tmp_path, terminal, redrawn):
    write_run(tmp_path / "r")
    lock = lock_folder(tmp_path / "r")  # a run without a lock has stopped after a minute
    process, here = watch_in_terminal(tmp_path / "r", terminal)

    def interrupt(said):
        if redrawn:
            assert process.poll() is None
            process.send_signal(signal.SIGINT)

    frames = 3 if redrawn else 1
    said = read_terminal(process, here, lambda said: said.count(b"4.60") >= frames, interrupt)
    lock.release()
    assert process.wait() == 0 and b"Traceback" not in said
    assert (b"\x1b[?25h" in said) is redrawn  # the cursor is shown again
