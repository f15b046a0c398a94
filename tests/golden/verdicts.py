"""Compare two ``verdicts.json`` of one grid: ``python -m tests.golden.verdicts KEPT NEW [--except CLAIM ...]``.

Claims, verdicts, effects, intervals, thresholds, p and tests must be equal; run ids, notes and prose may differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

COMPARED = (
    "verdict",
    "status",
    "test",
    "effect",
    "interval",
    "threshold",
    "p",
    "sign_flip",
    "detectable",
    "counts",
)
COMPARED_ADJUSTED = ("method", "claims", "level", "interval", "p")


def differences(kept: list[dict[str, Any]], new: list[dict[str, Any]], but: set[str]) -> list[str]:
    """Return one line for each number or verdict that differs from the stored one; claims in ``but`` are left out."""
    before, after = ({claim["claim"]: claim for claim in claims} for claims in (kept, new))
    lines = [f"{name}: only in one of the two files" for name in sorted((before.keys() ^ after.keys()) - but)]
    for name in sorted((before.keys() & after.keys()) - but):
        a, b = before[name], after[name]
        lines += [f"{name}: {f} {a.get(f)} -> {b.get(f)}" for f in COMPARED if a.get(f) != b.get(f)]
        a, b = a.get("adjusted") or {}, b.get("adjusted") or {}
        lines += [
            f"{name}: adjusted {f} {a.get(f)} -> {b.get(f)}"
            for f in COMPARED_ADJUSTED
            if a.get(f) != b.get(f)
        ]
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print the differences; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.verdicts", description=__doc__)
    parser.add_argument("kept", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--except", dest="but", nargs="*", default=[], metavar="CLAIM")
    args = parser.parse_args(argv)
    kept, new = (json.loads(path.read_text()) for path in (args.kept, args.new))
    lines = differences(kept, new, set(args.but))
    print("\n".join(lines) or f"{len(kept)} claims: the same verdicts and numbers")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
