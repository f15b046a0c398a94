"""One case of the soak in its own process, with a time limit."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import random
import signal
import tempfile
import time
import traceback
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SLOW = 4.0  # factor of the time limit, because a busy machine is slower


def rng(seed: int, part: str, number: int) -> random.Random:
    return random.Random(f"{seed} {part} {number}")


def run_case(part: str, number: int, seed: int, seconds: float, shared: Path, work: Path) -> None:
    """Run a case in this process, which was forked for it, and write the outcome to ``{work}.json``."""
    os.setpgid(0, 0)  # so that processes that the case leaves behind are killed with it
    output = os.open(f"{work}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(seconds)  # shows where a case hangs
    try:
        outcome = importlib.import_module(f"tests.soak.{part}").case(number, rng(seed, part, number), shared, work)
        result = {"outcome": outcome}
    except BaseException:
        result = {"fault": traceback.format_exc()}
    Path(f"{work}.json").write_text(json.dumps(result))


def attempt(part: str, number: int, seed: int, seconds: float, shared: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"soak-{part}-", ignore_cleanup_errors=True) as root:
        work = Path(root) / "case"
        work.mkdir()
        began = time.monotonic()
        limit = SLOW * seconds
        process = get_context("forkserver").Process(
            target=run_case, args=(part, number, seed, 0.9 * limit, shared, work)
        )
        process.start()
        process.join(limit)
        log = Path(f"{work}.log").read_text()[-2000:] if Path(f"{work}.log").exists() else "no output"
        if process.is_alive():
            result = {"fault": f"still running after {limit:.0f} s: {log}"}
        elif Path(f"{work}.json").exists():
            result = json.loads(Path(f"{work}.json").read_text())
        else:
            result = {"fault": f"the process ended with {process.exitcode}: {log}"}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return {"part": part, "case": number, "seconds": round(time.monotonic() - began, 2), **result}
