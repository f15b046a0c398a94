"""Write run folders with a few planted series, without using mmqk's writers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqk.lab.runs import Run, read_runs

SPECIAL = {math.inf: "inf", -math.inf: "-inf"}


def small_run(
    folder: Path,
    series: Mapping[str, Mapping[int, float] | Sequence[float]],
    *,
    status: str = "completed",
    step: int | None = None,
    config: Mapping[str, Any] | None = None,
    point: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Run:
    """Return a run with these series: values by step, or one value per step from step 1."""
    folder.mkdir(parents=True)
    lines: dict[int, dict[str, Any]] = {}
    for tag, values in series.items():
        by_step = values if isinstance(values, Mapping) else dict(enumerate(values, start=1))
        for at, value in by_step.items():
            lines.setdefault(at, {})[tag] = "nan" if math.isnan(value) else SPECIAL.get(value, value)
    text = "".join(json.dumps({"step": at, **lines[at]}) + "\n" for at in sorted(lines))
    (folder / "metrics.jsonl").write_text(text)
    last = max(lines) if step is None else step
    (folder / "status.json").write_text(json.dumps({"status": status, "step": last, "reason": "", "seconds": 1}))
    identity = {"seed": seed, "data": (config or {}).get("data") or {}}
    record = {"id": folder.name, "code": "c", "identity": identity, "details": {"config": config or {}}}
    (folder / "run.json").write_text(json.dumps(record))
    (run,) = read_runs(folder)
    run.point, run.seed = point or {}, seed
    return run


def config(steps: int = 100, warmup: int = 0, lr: float = 0.01, **more: Any) -> dict[str, Any]:
    """Return a configuration with the fields that metrics read."""
    base = {"trainer": {"max_steps": steps}, "optim": {"lr": lr, "warmup_steps": warmup}}
    return base | more
