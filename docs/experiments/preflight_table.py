"""Print the table of planted violations: what `preflight` finds in each family, and guardtower in how many.

Run ``python -m docs.experiments.preflight_table`` in the repository. The last column needs guardtower 0.1
(``pip install --no-deps guardtower``) and is left out without it. guardtower finds a violation if it reports a
warning or an error that it does not report for the sound twin.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from mmqk.monitors import preflight
from tests.monitors.preflight.families import FAMILIES, Case, sound
from tests.monitors.preflight.violations import VIOLATIONS


def reports(guardtower: Any, case: Case) -> set[tuple[str, str]]:
    """Return guardtower's warnings and errors for one case."""
    report = guardtower.audit(case.model, lambda: case.loss(case.model, case.batch), optimizer=case.optimizer)
    return {(finding.check, finding.message) for finding in report.errors + report.warnings}


def main() -> None:
    """Print the table as Markdown."""
    warnings.simplefilter("ignore")
    try:
        guardtower = importlib.import_module("guardtower")
    except ModuleNotFoundError:
        guardtower = None
    print(f"| violation | check | {' | '.join(FAMILIES)} |{' guardtower 0.1 |' if guardtower else ''}")
    print(f"| --- | --- |{' --- |' * (len(FAMILIES) + bool(guardtower))}")
    complaints = [
        len(preflight(c.model, c.batch, c.loss, c.optimizer, c.modality).failed) for c in map(sound, FAMILIES)
    ]
    print(f"| none (complaints) | all | {' | '.join(map(str, complaints))} |{' |' if guardtower else ''}")
    for violation in VIOLATIONS:
        cells, others, applicable = [], 0, 0
        for family in FAMILIES:
            case = violation.plant(sound(family))
            if case is None:
                cells.append("n/a")
                continue
            applicable += 1
            table = preflight(case.model, case.batch, case.loss, case.optimizer, case.modality)
            cells.append("found" if violation.check in [f.check for f in table.failed] else "**missed**")
            if guardtower:
                others += bool(reports(guardtower, case) - reports(guardtower, sound(family)))
        column = f" {others} of {applicable} |" if guardtower else ""
        print(f"| {violation.kind} | {violation.check} | {' | '.join(cells)} |{column}", flush=True)


if __name__ == "__main__":
    main()
