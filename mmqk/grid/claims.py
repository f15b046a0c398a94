"""Check the keys and names in the claims and the report of a grid; `mmqk.analysis` checks their meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mmqk.grid.language import known, mapping, strings
from mmqk.store import UserError, identity_hash

CLAIM_KEYS = (
    *("id", "statement", "source", "mark", "number_there", "metric", "treatment", "control", "arms"),
    *("delta", "direction", "regime", "positive_control", "at_least", "status", "falsifier", "note"),
    *("finding", "estimand", "negative_control", "alpha_family", "test", "seeds", "exclusions"),
    *("stopping", "lr_rule", "at", "manipulation_check", "unchecked"),
)
REPORT_KEYS = ("hero", "shown", "headline", "cannot_tell", "command", "figures")


def claims_hash(grid: Mapping[str, Any]) -> str:
    """Hash of the claims of a grid; it does not depend on the rest of the grid or on the name of the grid."""
    claims = grid.get("claims") or []
    return identity_hash({"claims": [{k: v for k, v in c.items() if k != "grid"} for c in claims]})


def check_claims(raw: Mapping[str, Any], names: Iterable[str], path: object) -> None:
    """Refuse an unknown key, a claim without a unique id, and the name of an arm or claim that does not exist.

    Args:
        raw: content of the grid.
        names: names of arms, before and after crossing with axes.
        path: path of the grid, for the message.
    """
    arms = set(names)
    claims = raw.get("claims") or []
    if not isinstance(claims, list):
        raise UserError(f"{path}: claims must be a list")
    ids: list[str] = []
    for number, value in enumerate(claims):
        claim = mapping(value, f"{path}: claims[{number}]")
        known(claim, CLAIM_KEYS, f"{path}: claims[{number}]")
        if not isinstance(claim.get("id"), str) or claim["id"] in ids:
            raise UserError(f"{path}: claims[{number}] has no unique id: give it one, as text")
        ids.append(claim["id"])
    for claim in claims:
        where = f"{path}: claim {claim['id']}"
        named = [claim[key] for key in ("treatment", "control") if claim.get(key) is not None]
        _exist([*named, *strings(claim.get("arms") or [], f"{where}: arms")], arms, where)
        control = claim.get("positive_control")
        if control is not None and control not in ids:
            raise UserError(f"{where}: its positive control {control!r} is not a claim of this grid")
    report = mapping(raw.get("report") or {}, f"{path}: report")
    known(report, REPORT_KEYS, f"{path}: report")
    for key in ("hero", "shown"):
        where = f"{path}: report.{key}"
        _exist(strings(report.get(key) or [], where), arms, where)


def _exist(names: Iterable[Any], arms: set[str], where: str) -> None:
    for name in names:
        if not isinstance(name, str) or name not in arms:
            raise UserError(f"{where}: there is no arm {name!r} (arms: {', '.join(sorted(arms))})")
