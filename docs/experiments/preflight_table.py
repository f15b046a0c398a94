"""Print the table of planted violations: which check finds each, and what `preflight` and guardtower miss.

Run ``python -m docs.experiments.preflight_table`` in the repository. The last line needs guardtower 0.1
(``pip install --no-deps guardtower``) and is left out without it. guardtower finds a violation if it reports a
warning or an error that it does not report for the sound twin.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter, defaultdict
from typing import Any

from mmqk.monitors import preflight
from tests.monitors.preflight.families import FAMILIES, Case, sound
from tests.monitors.preflight.violations import VIOLATIONS


def reports(guardtower: Any, case: Case) -> set[tuple[str, str]]:
    """Return guardtower's warnings and errors for one case."""
    report = guardtower.audit(case.model, lambda: case.loss(case.model, case.batch), optimizer=case.optimizer)
    return {(finding.check, finding.message) for finding in report.errors + report.warnings}


def listed(families: dict[str, list[str]]) -> str:
    """Return each violation with its families."""
    return "; ".join(f"{kind} ({', '.join(names)})" for kind, names in families.items()) or "none"


def main() -> None:
    """Print the table and the lists as Markdown."""
    warnings.simplefilter("ignore")
    try:
        guardtower = importlib.import_module("guardtower")
    except ModuleNotFoundError:
        guardtower = None
    twins = {family: sound(family) for family in FAMILIES}
    tables = {f: preflight(c.model, c.batch, c.loss, c.optimizer, c.modality) for f, c in twins.items()}
    complaints = [family for family, table in tables.items() if table.failed]
    planted, missed, impossible, others = defaultdict(list), defaultdict(list), defaultdict(list), Counter()
    for violation in VIOLATIONS:
        kind = violation.kind
        planted[violation.check].append(kind)
        for family in FAMILIES:
            case = violation.plant(sound(family))
            if case is None:
                impossible[kind].append(family)
                continue
            table = preflight(case.model, case.batch, case.loss, case.optimizer, case.modality)
            if violation.check not in [f.check for f in table.failed]:
                missed[kind].append(family)
            if guardtower:
                others[kind] += bool(reports(guardtower, case) - reports(guardtower, sound(family)))
    print("| check | violations |\n| --- | --- |")
    for check, kinds in planted.items():
        print(f"| {check} | {'; '.join(kinds)} |")
    print()
    if complaints:
        print(f"- Fails without a violation: {', '.join(complaints)}")
    print(f"- Not found: {listed(missed)}")
    print(f"- Impossible: {listed(impossible)}")
    if guardtower:
        print(f"- guardtower 0.1, families: {'; '.join(f'{kind} ({n})' for kind, n in others.items() if n)}")


if __name__ == "__main__":
    main()
