"""Compare the kept verdicts of the shipped packs with those that the packs give now.

``python -m tests.golden.verdicts`` judges the claims of every ``NAME.zip`` (or of the given NAMEs) in
``reports/examples`` and compares them with ``NAME/verdicts.json``. Verdicts and texts must be equal, and numbers
equal to 1e-9; notes and run names may differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqk.lab.study import load_study
from mmqk.lab.verdicts.judge import judge
from mmqk.store.pack import unpacked

PACKS = Path(__file__).parents[2] / "reports/examples"
COMPARED = ("verdict", "status", "test", "effect", "interval", "threshold", "p", "sign_flip", "detectable", "counts")
COMPARED_ADJUSTED = ("method", "claims", "level", "interval", "p")
TOLERANCE = 1e-9


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal, numbers up to a relative `TOLERANCE`."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=0)
    return bool(a == b)


def differences(kept: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line for each number or verdict that differs from the kept one."""
    before, after = ({claim["claim"]: claim for claim in claims} for claims in (kept, new))
    lines = [f"{name}: only in one of the two" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        a, b = before[name], after[name]
        lines += [f"{name}: {f} {a.get(f)} -> {b.get(f)}" for f in COMPARED if not equal(a.get(f), b.get(f))]
        a, b = a.get("adjusted") or {}, b.get("adjusted") or {}
        lines += [
            f"{name}: adjusted {f} {a.get(f)} -> {b.get(f)}" for f in COMPARED_ADJUSTED if not equal(a.get(f), b.get(f))
        ]
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print the differences of each pack; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.verdicts", description=__doc__)
    kept_packs = sorted(path.parent.name for path in PACKS.glob("*/verdicts.json"))
    parser.add_argument("packs", nargs="*", metavar="NAME", help=f"of {', '.join(kept_packs)}; default: all")
    found = 0
    for name in parser.parse_args(argv).packs or kept_packs:
        kept = json.loads((PACKS / name / "verdicts.json").read_text())
        # A record as the report writes it: through JSON, so that tuples are lists.
        new = json.loads(json.dumps([v.as_record() for v in judge(load_study(unpacked(PACKS / f"{name}.zip")))]))
        lines = differences(kept, new)
        found += len(lines)
        lines = [f"{name}: {line}" for line in lines] or [f"{name}: {len(kept)} claims, no difference"]
        print("\n".join(lines), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
