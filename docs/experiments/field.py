"""Write what mmqk, runmedic and runwise print about the logs of tests/diagnose/logs.

Run ``python -m docs.experiments.field`` in the repository; it needs ``pip install runmedic==0.1.1 runwise==0.4.0``.
runmedic gets each file as it is. runwise reads JSON lines and folders of W&B alone: it gets the table that mmqk read,
through the function that its commands ``run`` and ``tb`` call. The answers go to reports/diagnose/field.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mmqk.diagnose.logs import Log, read_log

LOGS = Path("tests/diagnose/logs")
KEPT = Path("reports/diagnose/field.json")


def ran(*command: str) -> Any:
    """Return what a command prints as JSON."""
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def of_mmqk(path: Path) -> list[str]:
    """Return the plain facts, the alarms and the signs of ``mmqk diagnose``."""
    with tempfile.TemporaryDirectory() as out:
        answer = ran(sys.executable, "-m", "mmqk", "diagnose", str(path), "--json", "--out", out)
    found = [f"fact {f['name']}: {f['series']} at step {f['step']}" for f in answer["facts"]]
    found += [f"alarm {a['name']}: {a['series']} at step {a['step']}" for a in answer["alarms"]]
    return found + [f"sign of {k['kind']}: {k['series']} at step {k['step']}" for k in answer["kinds"]]


def of_runmedic(path: Path) -> list[str]:
    """Return severity, title, evidence and likely causes of each finding of ``runmedic diagnose``."""
    (run,) = ran(sys.executable, "-m", "runmedic", "diagnose", str(path), "--json")
    return [
        f"{f['severity']}: {f['title']} ({'; '.join(f['evidence'])}); causes: {'; '.join(f['likely_causes'])}"
        for f in run["findings"]
    ]


def of_runwise(log: Log) -> list[str]:
    """Return the anomalies that runwise's rules find with their default thresholds."""
    from runwise import detect_anomalies

    table = log.metrics.replace(np.inf, np.nan).reset_index()
    logged = log.metrics.reset_index().notna()
    rows = [
        {tag: float(value) for tag, value in row.items() if logged.loc[at, tag]} for at, row in table.iterrows()
    ]  # a NaN that was logged stays a NaN
    return [f"{a.severity}: {a.message}" for a in detect_anomalies(rows)]


def main() -> None:
    """Write the answers of the three on every log."""
    answers = {}
    for path in sorted(p for p in LOGS.iterdir() if p.suffix != ".md"):
        answers[path.name] = {
            "mmqk": of_mmqk(path), "runmedic": of_runmedic(path), "runwise": of_runwise(read_log(path)),
        }  # fmt: skip
    KEPT.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
