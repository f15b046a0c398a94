"""A folder of runs with what the grid says about them: arms, claims, and what the page shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmqk.ablation.grid import claims_hash
from mmqk.analysis.metrics import find_metric
from mmqk.analysis.runs import Run, load_runs, read_ablation
from mmqk.store import UserError

HERO_ARMS_AT_MOST = 6
REGIMES = ("both modalities learnt", "all modalities learnt")
STATUSES = ("confirmatory", "exploratory", "shown", "control")


@dataclass(frozen=True)
class Arm:
    """One variant: its name, the words for it, its block of the page, planned seeds, the fields it sets."""

    name: str
    label: str
    block: str = ""
    seeds: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A claim as it was registered in the grid.

    Attributes:
        id: C2 and the like.
        statement: what is claimed, one sentence.
        source: where, with a figure.
        mark: how the source was read (V, S, A, M, I, X).
        number_there: the number in the source, as text.
        metric: the name of a metric of `mmqk.analysis.metrics`.
        treatment: the arm that should have more of it (or less, by direction) ...
        control: ... than this one.
        arms: of a claim that is shown and not decided, or of a control.
        delta: smallest effect of interest, on the metric's scale (0.69: a factor of 2), positive.
        direction: "greater" or "less".
        regime: what must be true of the compared runs for the claim to be about anything; empty for nothing.
        positive_control: id of the claim or control that must hold before this one can be contradicted.
        at_least: of a control: every arm's median must reach it.
        status: confirmatory, exploratory, shown (never decided) or control (a check, not a claim).
        falsifier: what would speak against it, as registered.
        note: anything to add to the verdict.
        finding: sentences by verdict, with {ratio} {low} {high} {n} {seeds} in them.
    """

    id: str
    statement: str
    source: str = ""
    mark: str = ""
    number_there: str = ""
    metric: str = "largest_attention_logit"
    treatment: str = ""
    control: str = ""
    arms: tuple[str, ...] = ()
    delta: float = math.nan
    direction: str = "greater"
    regime: str = ""
    positive_control: str = ""
    at_least: float = math.nan
    status: str = "confirmatory"
    falsifier: str = ""
    note: str = ""
    finding: Mapping[str, str] = field(default_factory=dict)

    @property
    def decided(self) -> bool:
        """Whether its runs can decide it."""
        return self.status in ("confirmatory", "exploratory")

    @property
    def compared(self) -> tuple[str, ...]:
        """Every arm that it needs."""
        return (self.treatment, self.control) if self.treatment and self.control else self.arms


@dataclass(frozen=True)
class Study:
    """Runs of one folder.

    Attributes:
        folder: where they lie.
        name: of the grid, or of the folder.
        title: in words.
        arms: by name, in the grid's order.
        claims: in the grid's order.
        report: the grid's block about the page (hero, shown, headline, cannot_tell, command).
        runs: those that have a folder.
        missing: (arm, seed) of those that have none.
        registered: whether there is a grid at all.
        claims_changed: whether its claims are other ones than those first registered.
    """

    folder: Path
    name: str
    title: str
    arms: Mapping[str, Arm]
    claims: tuple[Claim, ...]
    report: Mapping[str, Any]
    runs: tuple[Run, ...]
    missing: tuple[tuple[str, int], ...]
    registered: bool
    claims_changed: bool = False

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the modalities that have a loss, or, of a watched model without one, a query norm; text first."""
        tags = [tag for run in self.runs for tag in run.tags.values() if tag.modality is not None]
        names = {tag.modality for tag in tags if tag.statistic == "loss" and tag.modality}
        names = names or {tag.modality for tag in tags if tag.statistic == "q_norm" and tag.modality}
        return tuple(sorted(names, key=lambda name: (name != "text", name)))

    @property
    def hero(self) -> tuple[str, ...]:
        """Arms of the first figures: as the grid says, or those of its claims, or the first six."""
        named = tuple(self.report.get("hero") or ())
        claimed = tuple(dict.fromkeys(arm for c in self.claims if c.decided for arm in c.compared))
        shown = set(self.shown)
        rest = tuple(name for name in self.arms if name not in shown)[:HERO_ARMS_AT_MOST]
        return self._with_runs(named) or self._with_runs(claimed) or self._with_runs(rest)

    @property
    def shown(self) -> tuple[str, ...]:
        """Arms of the block that is shown and decides nothing."""
        named = tuple(self.report.get("shown") or ())
        return self._with_runs(named or tuple(a.name for a in self.arms.values() if a.block == "shown"))

    def _with_runs(self, names: tuple[str, ...]) -> tuple[str, ...]:
        have = {run.arm for run in self.runs if run.tags}
        return tuple(name for name in names if name in have)

    def of_arm(self, arm: str) -> tuple[Run, ...]:
        """The runs of an arm, by seed."""
        return tuple(sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed))

    def finished(self, arm: str) -> tuple[Run, ...]:
        """Those that completed or diverged: the ones that count."""
        return tuple(run for run in self.of_arm(arm) if run.status.finished)

    def label(self, arm: str) -> str:
        """The words for an arm."""
        return self.arms[arm].label if arm in self.arms else arm


def load_study(folder: str | Path) -> Study:
    """The study of a folder, with its grid if it has one, and as a plain set of runs if not.

    Raises:
        UserError: the folder holds no runs, or its ablation.json cannot be read or says what cannot be.
    """
    folder = Path(folder)
    runs = tuple(load_runs(folder))
    ablation = read_ablation(folder)
    if ablation is None:
        arms = {run.arm: Arm(run.arm, run.arm) for run in runs}
        name = folder.resolve().name
        return Study(folder, name, name, arms, (), {}, runs, (), False)
    grid = ablation["grid"]
    where = f"{folder / 'ablation.json'}"
    present = {(run.arm, run.seed) for run in runs}
    planned = [(entry["arm"], int(entry["seed"])) for entry in ablation["runs"]]
    arms = {
        name: Arm(
            name,
            str((value or {}).get("label", name)),
            str((value or {}).get("block", "")),
            tuple(seed for arm, seed in planned if arm == name),
            (value or {}).get("set") or {},
        )
        for name, value in (grid.get("arms") or {}).items()
    }
    claims = tuple(_claim(value, arms, where) for value in grid.get("claims") or ())
    return Study(
        folder=folder,
        name=str(ablation.get("name") or grid.get("name") or folder.resolve().name),
        title=str(grid.get("title") or ablation.get("name") or folder.resolve().name),
        arms=arms,
        claims=claims,
        report=grid.get("report") or {},
        runs=runs,
        missing=tuple(pair for pair in planned if pair not in present),
        registered=True,
        claims_changed=ablation.get("registered") not in (None, claims_hash(grid)),
    )


def _claim(value: Mapping[str, Any], arms: Mapping[str, Arm], where: str) -> Claim:
    if not isinstance(value, Mapping) or "id" not in value:
        raise UserError(f"{where}: a claim has no id")
    known = {name: value[name] for name in Claim.__dataclass_fields__ if value.get(name) is not None}
    for name in ("delta", "at_least"):
        if name in known:
            known[name] = _number(known[name], f"{where}: {name} of claim {value['id']}")
    if "arms" in known:
        known["arms"] = tuple(known["arms"])
    claim = Claim(**{"statement": "", **known, "id": str(value["id"])})
    _check(claim, arms, f"{where}: claim {claim.id}")
    return claim


def _check(claim: Claim, arms: Mapping[str, Arm], where: str) -> None:
    find_metric(claim.metric)
    if claim.status not in STATUSES:
        raise UserError(f"{where} has the status {claim.status!r}: use one of {', '.join(STATUSES)}")
    if claim.direction not in ("greater", "less"):
        raise UserError(f"{where} has the direction {claim.direction!r}: use greater or less")
    if claim.regime and claim.regime not in REGIMES:
        raise UserError(f"{where} has the regime {claim.regime!r}: use one of {', '.join(REGIMES)}")
    if claim.decided and not (claim.treatment and claim.control and claim.delta > 0):
        raise UserError(f"{where} needs treatment, control and a positive delta")
    if not claim.compared:
        raise UserError(f"{where} names no arms")
    if claim.status == "control" and math.isnan(claim.at_least):
        raise UserError(f"{where} is a control and needs at_least")
    for arm in claim.compared:
        if arm not in arms:
            raise UserError(f"{where} names the arm {arm!r}, which the grid does not have")


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{where} is {value!r}, not a number") from None
