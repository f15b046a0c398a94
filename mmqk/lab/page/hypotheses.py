"""The table of hypotheses of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mmqk.lab.formatting import listed, slug
from mmqk.lab.page.findings import effect_in_cell
from mmqk.lab.verdicts.hypotheses import patterns
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import Verdict

MARK = {"supported": "✓", "contradicted": "✗", "not told apart": "?"}
ABOUT = (
    "A hypothesis predicts for some claims whether the effect is above m, between -m and m (none) or below -m, where "
    "m is the smallest effect of interest. The 95 % interval leaves one or more of these states possible. ✓: the "
    "prediction allows every possible state. ✗: it allows no possible state. ?: every other case, and claims that "
    "have no interval or failed a check. A hypothesis is contradicted if one of its predictions is contradicted, "
    "supported if all are supported, and otherwise not told apart."
)


def hypothesis_table(study: Study, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the claims that hypotheses name, with their effects, and one row per hypothesis; empty if there is no
    hypothesis."""
    results = patterns(study, verdicts)
    if not results:
        return {}
    named = {claim: pattern.possible[claim] for pattern in results for claim in pattern.predictions}
    by_id = {verdict.claim.id: verdict for verdict in verdicts}
    claims = [id for id in by_id if id in named]
    return {
        "about": ABOUT,
        "claims": [
            {
                "id": id,
                "slug": slug(id),
                "statement": by_id[id].claim.statement,
                "effect": effect_in_cell(by_id[id]) or "–",
                "possible": listed(list(named[id]), "or") or "unknown",
            }
            for id in claims
        ],
        "rows": [
            {
                **asdict(pattern.hypothesis),
                "verdict": pattern.verdict,
                "css": pattern.verdict.replace(" ", "-"),
                "cells": [
                    f"{pattern.hypothesis.predicts[id]} {MARK[pattern.predictions[id]]}"
                    if id in pattern.predictions
                    else "–"
                    for id in claims
                ],
            }
            for pattern in results
        ],
    }
