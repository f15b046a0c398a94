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
    print(f"| violation | check | found in | impossible in |{' guardtower 0.1 |' if guardtower else ''}")
    print(f"| --- | --- | --- | --- |{' --- |' * bool(guardtower)}")
    twins = {family: sound(family) for family in FAMILIES}
    tables = {f: preflight(c.model, c.batch, c.loss, c.optimizer, c.modality) for f, c in twins.items()}
    complaints = [family for family, table in tables.items() if table.failed]
    print(f"| no violation | all | {', '.join(complaints) or 'none'} | |{' |' if guardtower else ''}")
    for violation in VIOLATIONS:
        found, missed, impossible, others = [], [], [], 0
        for family in FAMILIES:
            case = violation.plant(sound(family))
            if case is None:
                impossible.append(family)
                continue
            table = preflight(case.model, case.batch, case.loss, case.optimizer, case.modality)
            (found if violation.check in [f.check for f in table.failed] else missed).append(family)
            if guardtower:
                others += bool(reports(guardtower, case) - reports(guardtower, sound(family)))
        column = f" {others} |" if guardtower else ""
        cells = f"{', '.join(found) if missed else 'all'} | {', '.join(impossible)}".rstrip()
        print(f"| {violation.kind} | {violation.check} | {cells} |{column}", flush=True)


if __name__ == "__main__":
    main()
