"""Measure the rate of wrong verdicts on arms that do not differ: `python docs/experiments/null_arms.py`.

The script reads null_arms.csv (written by null_arms_train.py), assigns its runs to arms at random, lets
`mmqk.lab` choose learning rates and give verdicts, and writes the tables of ../evidence.md. It takes five
minutes on one CPU core.
"""

from __future__ import annotations

import copy
import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from mmqk.lab.counts import clopper_pearson
from mmqk.lab.runs import Run, series_of
from mmqk.lab.study import study_of
from mmqk.lab.verdicts.assess import Verdict
from mmqk.lab.verdicts.judge import judge
from mmqk.lab.verdicts.measure import choose
from mmqk.store import Status

HERE = Path(__file__).parent
RATES, SEEDS, STEPS = (0.01, 0.02, 0.04, 0.08), range(26), (200, 250, 300)
# Columns of the CSV with values of a probe: the tag of each value, and the function that combined the layers.
PROBED = {
    "attn_logit_absmax": ("attn_logit_absmax/text-text/layer00", np.max),
    "attn_entropy": ("attn_entropy/text/layer00", np.min),
    "final_norm/text": ("final_norm/text", np.mean),
    "final_norm/image": ("final_norm/image", np.mean),
}
AT_END = [f"{what}/{m}" for what in ("val_loss", "val_excess", "val_unigram") for m in ("text", "image")]
LOSSES = ["loss/text", "loss/image"]
DELTA_LOG, DELTA_NATS = 0.2231, 0.01


# The runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """An effect added to the treatment's runs: ``log`` is added to the logarithms of logits and norms, ``nats`` to
    losses."""

    log: float = 0.0
    nats: float = 0.0


Pool = Mapping[tuple[float, int], Run]


def pool(planted: Planted = Planted()) -> Pool:
    """Return every stored run by (learning rate, seed). The runs have no folder."""
    with open(HERE / "null_arms.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    found: dict[tuple[float, int], Run] = {}
    for place in dict.fromkeys((line["rate"], line["seed"]) for line in lines):
        mine = [line for line in lines if (line["rate"], line["seed"]) == place]
        rate, seed = float(place[0]), int(place[1])
        run = Run(HERE, f"lr{rate}/seed{seed}", "", seed, status=Status("completed", STEPS[-1]))
        records = [{"step": 0, **{tag: float(mine[-1][tag]) for tag in AT_END if "unigram" in tag}}]
        for line in mine:
            record: dict[str, Any] = {"step": int(line["step"])}
            for name, (tag, _) in PROBED.items():
                record[tag] = float(line[name]) * (1 if "entropy" in name else np.exp(planted.log))
            for tag in (*LOSSES, *AT_END):
                if line[tag] and "unigram" not in tag:
                    record[tag] = float(line[tag]) + planted.nats
            records.append(record)
        # Copies of the run, in any arm, share its columns and its computed values.
        run.__dict__["_metrics"] = series_of(records), False
        _ = run.tags
        found[rate, seed] = run
    return found


# A split -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Design:
    """A grid whose arms have equal configurations.

    Attributes:
        claims: the claims, without ids.
        arms: names of the arms; the first is the control of every claim.
        seeds: number of seeds per arm.
        selection: number of seeds that choose the learning rate of an arm; if 0, every arm uses ``rate``.
        rate: learning rate of every arm if ``selection`` is 0.
    """

    claims: tuple[Mapping[str, Any], ...]
    arms: tuple[str, ...]
    seeds: int
    selection: int = 2
    rate: float = 0.04


def claim(metric: str, treatment: str = "a", **more: Any) -> dict[str, Any]:
    """Return a confirmatory claim whose control is the first arm. Its positive control passes, so it can be
    contradicted."""
    log = metric in ("largest_attention_logit", "final_norm")
    return {
        **{
            "metric": metric,
            "treatment": treatment,
            "control": "plain",
            "min_effect": DELTA_LOG if log else DELTA_NATS,
        },
        **{"regime": "both modalities learned", "positive_control": "P"},
        "unchecked": {"declared": "the arms have equal configurations on purpose"},
    } | more


SIX = Design(
    (
        claim("largest_attention_logit"),
        claim("final_norm"),
        claim("final_excess/text", test="equivalence"),
        claim("largest_attention_logit", "b"),
        claim("final_norm", "b"),
        claim("final_excess/image", "b"),
    ),
    ("plain", "a", "b"),
    seeds=6,
)


THREE = Design(
    tuple(map(claim, ("largest_attention_logit", "final_norm", "final_excess/text"))), ("plain", "a"), 10, selection=0
)


def split(design: Design, rng: np.random.Generator) -> dict[str, list[int]]:
    """Return the stored seeds of each arm; the seeds that choose its learning rate come first."""
    each = design.seeds + design.selection
    order = rng.permutation(len(SEEDS))
    return {arm: [int(s) for s in order[i * each : (i + 1) * each]] for i, arm in enumerate(design.arms)}


def verdicts(
    design: Design, seeds: Mapping[str, Sequence[int]], runs: Mapping[str, Pool], count: int | None = None
) -> list[Verdict]:
    """Choose learning rates, take the runs at these learning rates, and return the verdicts, for one split.

    Args:
        design: the grid.
        seeds: stored seeds of each arm, from `split`.
        runs: the pool of each arm.
        count: number of seeds per arm that the verdicts use; None for all seeds.
    """
    placed: list[Run] = []
    for arm in design.arms:
        chose, decides = seeds[arm][: design.selection], seeds[arm][design.selection :][:count]
        rate = design.rate
        if design.selection:
            tried = [
                _placed(runs[arm][r, s], f"{arm}-lr{r:g}", arm, 100 + i, r, "selection")
                for r in RATES
                for i, s in enumerate(chose)
            ]
            placed += tried
            best = choose(tried)
            assert best is not None
            rate = best.rate
        placed += [_placed(runs[arm][rate, s], arm, arm, i, rate, "verdict") for i, s in enumerate(decides)]
    claims: list[Mapping[str, Any]] = [{"id": f"N{i}", **c} for i, c in enumerate(design.claims)]
    claims.append({"id": "P", "metric": "final_norm", "arms": ["plain"], "at_least": 1, "status": "control"})
    grid = {"arms": {arm: {} for arm in design.arms}, "claims": claims}
    entries = [{"arm": r.arm, "seed": r.seed, "family": r.family, "point": r.point, "role": r.role} for r in placed]
    return judge(study_of(HERE, {"name": "null", "grid": grid, "runs": entries}, placed))


def _placed(run: Run, arm: str, family: str, seed: int, rate: float, role: str) -> Run:
    made = copy.copy(run)
    made.arm, made.family, made.seed, made.role = arm, family, seed, role
    made.point = {"optim.lr": rate} if role == "selection" else {}
    made.identity = {"optim": {"lr": rate}, "seed": seed}
    return made


# Many splits -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """The share of draws with some property, as a count out of all draws."""

    count: int
    draws: int

    @property
    def value(self) -> float:
        return self.count / self.draws

    @property
    def upper(self) -> float:
        """Upper end of the 95 % Clopper-Pearson interval."""
        return clopper_pearson(self.count, self.draws)[1]

    def __str__(self) -> str:
        low, high = clopper_pearson(self.count, self.draws)
        return f"{100 * self.value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def is_wrong(verdict: Verdict, planted: Planted) -> bool:
    """Return whether a verdict is false. If the true effect is exactly min_effect, both reproduced and contradicted
    count as false."""
    if planted != Planted():
        return verdict.verdict in ("reproduced", "contradicted")
    return verdict.verdict == ("contradicted" if verdict.claim.test == "equivalence" else "reproduced")


AT_DELTA = Planted(DELTA_LOG, DELTA_NATS)


def false_verdicts(
    design: Design, planted: Planted = AT_DELTA, draws: int = 1000, first: int | None = None, seed: int = 0
) -> Rate:
    """Return the rate of splits with a false verdict. If ``first`` is given, each split is judged after ``first``
    seeds and after each further seed, and one false verdict is enough."""
    rng = np.random.default_rng(seed)
    plain, treated = pool(), pool(planted)
    runs = {arm: plain if arm == "plain" else treated for arm in design.arms}
    wrong = 0
    for _ in range(draws):
        seeds = split(design, rng)
        stages = range(first, design.seeds + 1) if first else (design.seeds,)
        wrong += any(is_wrong(v, planted) for n in stages for v in verdicts(design, seeds, runs, n))
    return Rate(wrong, draws)


def found(design: Design, planted: Planted, draws: int = 500, seed: int = 1) -> Rate:
    """Return the rate of splits in which the first claim is reproduced."""
    rng = np.random.default_rng(seed)
    plain, treated = pool(), pool(planted)
    runs = {arm: plain if arm == "plain" else treated for arm in design.arms}
    return Rate(sum(verdicts(design, split(design, rng), runs)[0].verdict == "reproduced" for _ in range(draws)), draws)


MATCHED = replace(SIX, selection=0)
TWELVE = replace(THREE, seeds=12)
WITHOUT_HOLM = replace(MATCHED, claims=tuple({**c, "alpha_family": str(i)} for i, c in enumerate(SIX.claims)))


def by_chance(draws: int, planted: Planted = AT_DELTA) -> Rate:
    """Return `false_verdicts` of six claims without the check that the chosen learning rates differ by more than
    chance."""
    with mock.patch("mmqk.lab.verdicts.checks.distinguishable", lambda *_: True):
        return false_verdicts(SIX, planted, draws)


# The page ----------------------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """Return the tables of ../evidence.md in Markdown, by name."""
    own, one = "6 claims, own best learning rates", "6 claims, one learning rate for all"
    wrong = [
        (own, false_verdicts(SIX, draws=2000)),
        (f"{own}, no check that the chosen learning rates differ", by_chance(500)),
        (one, false_verdicts(MATCHED, draws=2000)),
        (f"{one}, without the Holm correction", false_verdicts(WITHOUT_HOLM, draws=500)),
        ("3 claims without registered seeds, judged after 6 to 10 seeds", false_verdicts(THREE, first=6, draws=500)),
    ]
    lines = [(what, rate.draws, rate) for what, rate in wrong]
    power = [
        [f"×{factor:g}", *(found(design, Planted(float(np.log(factor)))) for design in (SIX, MATCHED, TWELVE))]
        for factor in (1.5, 2, 3)
    ]
    heads = [
        "true ratio",
        "6 seeds, 6 claims, own best learning rates",
        "6 seeds, 6 claims, one learning rate",
        "12 seeds, 3 claims, one learning rate",
    ]
    return {
        "false": _markdown(["splits into identical arms", "draws", "at least one false verdict"], lines),
        "power": _markdown(heads, power),
    }


def _markdown(heads: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    table = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in table)


def with_tables(page: str, made: Mapping[str, str]) -> str:
    """Return the page with new tables. Each table is between two comments with its name."""
    for name, table in made.items():
        part = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page, n = part.subn(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", page)
        assert n == 1, name
    return page


def main() -> None:
    """Judge the random splits, and write the tables."""
    page = HERE.parent / "evidence.md"
    page.write_text(with_tables(page.read_text(), tables()))


if __name__ == "__main__":
    main()
