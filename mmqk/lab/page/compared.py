"""Find the fields in which the runs of a page differ, so that the page can compare two runs."""

from __future__ import annotations

import json
from typing import Any

from mmqk.lab.formatting import DASH
from mmqk.lab.page.run_table import anchor
from mmqk.lab.verdicts.study import Study
from mmqk.store import flatten, without_roots

# Fields that do not change what a run computes.
PLACES = ("out", "data.cache", "quiet")


def compared(study: Study, rows: list[dict[str, Any]]) -> str:
    """Return JSON for the page's script: the fields that differ between any two runs, and their values in each run.

    Args:
        study: the runs.
        rows: result of `run_rows` for the study; it contains the results of each run.
    """
    runs = {anchor(run): run for run in study.runs}
    fields_of = {id: flatten(run.config) | {"code": run.code} for id, run in runs.items()}
    names = sorted({name for fields in fields_of.values() for name in fields} - set(PLACES))
    differing = [n for n in names if len({json.dumps(fields.get(n)) for fields in fields_of.values()}) > 1]
    results = {
        row["anchor"]: {
            "status": row["status"],
            "step": row["step"],
            **{f"{m} loss": loss for m, loss in zip(study.losses, row["losses"], strict=True)},
            "largest logit": row["logit"],
            "time": row["seconds"],
        }
        for row in rows
    }
    content = {
        "fields": differing,
        "runs": {
            id: {
                "name": f"{study.label(run.arm)}, seed {run.seed}",
                "values": [as_text(fields_of[id].get(name)) for name in differing],
                "results": results.get(id, {}),
            }
            for id, run in runs.items()
        },
    }
    return json.dumps(without_roots(content), ensure_ascii=False).replace("</", "<\\/")


def as_text(value: Any, missing: str = DASH) -> str:
    """Return the value of a field as text for a table."""
    return missing if value is None else value if isinstance(value, str) else json.dumps(value)
