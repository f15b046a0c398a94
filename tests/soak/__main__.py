"""The soak test: plant thousands of faults, each in its own process, and count the outcomes.

``python -m tests.soak --out runs/soak`` runs every part. ``--quick`` runs a few cases of each part, ``--part NAME``
runs one part, and ``--case N`` repeats one case of it. A second call continues the first one. A part is a module of
this folder with

    CASES, QUICK   number of cases of a full soak and of a quick soak
    SECONDS        time limit of a case; a case that takes longer counts as a hang
    prepare(folder)                   creates, once, the files that the cases copy
    case(number, rng, shared, work)   plants fault `number` in the empty folder `work` and returns the name of the
                                      outcome; an exception counts as a fault of mmqk. `rng` depends on the
                                      seed, the part and the number.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mmqk.lab.runner.executors import PRELOAD, start_server
from tests.soak.cases import attempt

# Modules of this folder.
PARTS: tuple[str, ...] = ("file_layer", "kills", "long_runs", "numbers")


def commit() -> str:
    return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()


def soak(part: str, seed: int, count: int, out: Path, jobs: int) -> list[dict[str, Any]]:
    """Return the results of cases 0 to count - 1 of one part; results of an earlier call with this commit are
    reused."""
    module = importlib.import_module(f"tests.soak.{part}")
    records = out / f"{part}.jsonl"
    if "-dirty" in out.name:  # the code may have changed since the earlier call
        records.unlink(missing_ok=True)
    lines = records.read_text().splitlines() if records.exists() else []
    done = {line["case"]: line for line in map(json.loads, lines) if line["case"] < count}
    shared = Path(tempfile.mkdtemp(prefix=f"soak-{part}-shared-"))
    try:
        module.prepare(shared)
        start_server([*PRELOAD, *(f"tests.soak.{name}" for name in PARTS)])
        with ThreadPoolExecutor(jobs) as pool, records.open("a") as file:
            todo = [n for n in range(count) if n not in done]
            for line in pool.map(lambda n: attempt(part, n, seed, module.SECONDS, shared), todo):
                done[line["case"]] = line
                file.write(json.dumps(line) + "\n")
                file.flush()
                if "fault" in line:
                    print(f"{part} case {line['case']}: {line['fault']}", flush=True)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    return [done[n] for n in sorted(done)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument("--part", choices=PARTS, action="append", help="this part only; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a few cases of each part")
    parser.add_argument("--cases", type=int, help="this many cases of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this case of the part")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    args.out = args.out.resolve()  # a part may change the working directory
    parts = args.part or PARTS
    if args.case is not None:
        (part,) = parts
        module = importlib.import_module(f"tests.soak.{part}")
        with tempfile.TemporaryDirectory() as root:
            module.prepare(Path(root))
            start_server([*PRELOAD, f"tests.soak.{part}"])
            line = attempt(part, args.case, args.seed, module.SECONDS, Path(root))
        print(line.get("outcome") or line["fault"])
        return int("fault" in line)
    if len(parts) > 1:
        # A process can have only one fork server, and each part needs its own.
        command = [sys.executable, "-m", "tests.soak", f"--out={args.out}", f"--seed={args.seed}"]
        command += [f"--jobs={args.jobs}", *(["--quick"] if args.quick else [])]
        command += [f"--cases={args.cases}"] if args.cases else []
        return max(subprocess.run([*command, f"--part={part}"]).returncode for part in parts)
    out = args.out / f"{commit()}-seed{args.seed}"
    out.mkdir(parents=True, exist_ok=True)
    faults = 0
    for part in parts:
        module = importlib.import_module(f"tests.soak.{part}")
        count = args.cases or (module.QUICK if args.quick else module.CASES)
        if not count:  # too long for a quick soak
            continue
        results = soak(part, args.seed, count, out, args.jobs)
        outcomes = Counter(line.get("outcome", "FAULT") for line in results)
        faults += outcomes["FAULT"]
        minutes = sum(line["seconds"] for line in results) / 60 / args.jobs
        counts = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
        print(f"{part}: {len(results)} cases in {minutes:.1f} min: {counts}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
