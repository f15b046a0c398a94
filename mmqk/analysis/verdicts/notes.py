"""Sentences beside a verdict, made from its numbers."""

from __future__ import annotations

import math

from mmqk.analysis.formatting import decimals, fixed, number, plural
from mmqk.analysis.stats.effects import Effect, Spread
from mmqk.analysis.stats.exact import Counts, clopper_pearson
from mmqk.analysis.stats.multiple import Adjusted
from mmqk.analysis.verdicts.claims import Claim
from mmqk.store.formatting import percent, plain

ENOUGH_SEEDS = 6


def about_family(claim: Claim, effect: Effect | Counts | None, adjusted: Adjusted, p: float) -> list[str]:
    """The level at which it was decided, and the interval there; nothing for a claim alone that is looked at once."""
    # The claim's own note may have said so.
    leads = claim.status == "exploratory" and not claim.note.lower().startswith("exploratory")
    said = ["Exploratory: a lead, not a result."] if leads else []
    if effect is None or not effect.has_interval or math.isnan(p):
        return said
    looks = f", and {claim.seeds} to {claim.max_seeds} seeds" if claim.stopping else ""
    if adjusted.claims > 1 or looks:
        low, high = _on_paper(claim, *effect.interval(adjusted.alpha))
        said.append(
            f"p {_p(p)} against the smallest effect of interest, adjusted p {_p(adjusted.p)} by "
            f"{adjusted.method} over {plural(adjusted.claims, f'{claim.status} claim')}{looks}; decided by the "
            f"{percent(1 - adjusted.alpha, 3)} interval, {low} to {high}."
        )
    else:
        said.append(f"p {_p(p)} against the smallest effect of interest.")
    return said


def about_spread(spread: Spread | None, effect: Effect | Counts | None) -> list[str]:
    """Seed spread and the interval that was made of it; of counts, the exact intervals."""
    if isinstance(effect, Counts):
        arms = [(effect.a, effect.n_treatment), (effect.b, effect.m)]
        shares = [f"{count} of {n} ({100 * low:.0f} to {100 * high:.0f} %)"
                  for count, n in arms for low, high in [clopper_pearson(count, n)]]  # fmt: skip
        return [
            f"{shares[0]} against {shares[1]}, Clopper-Pearson; equal shares: Fisher's p {_p(effect.fisher)}."
        ]
    if spread is None or effect is None or not effect.has_interval:
        return []
    if effect.of == "differences":
        sd = effect.error * math.sqrt(effect.n)
        return [
            f"The interval is that of the differences by seed, whose spread is {plain(sd, 2)}, as the runs of a seed "
            f"are one until the fork ({plain(effect.df)} degrees of freedom)."
        ]
    sds = ", ".join(f"{plain(sd, 2)}" for sd in spread.by_arm.values())
    method = {
        "pooled": "the pooled one",
        "two arms": "Welch's, of the two arms alone, whose standard error is larger",
    }[effect.of]
    return [
        f"Seed spread by arm {sds}, pooled {plain(spread.sd, 2)} (equal spread p = {spread.p_equal:.2g}); the "
        f"interval is {method} ({plain(effect.df)} degrees of freedom)."
    ]


def about_seeds(claim: Claim, effect: Effect | Counts | None, sign_flip: float) -> list[str]:
    """The exact test beside the interval, or that there are too few seeds for one."""
    if not isinstance(effect, Effect) or not effect.has_interval:
        return []
    if math.isfinite(sign_flip):
        return [f"Exact sign-flip test of the same: p {_p(sign_flip)}."]
    if claim.status == "confirmatory" and effect.n < ENOUGH_SEEDS:
        return [
            f"{plural(effect.n, 'seed')}: too few for an exact test beside it, which takes {ENOUGH_SEEDS}."
        ]
    return []


def about_power(claim: Claim, size: str) -> str:
    """What these seeds could have found."""
    if not size:
        return ""
    if claim.test == "equivalence":
        return f"With 80 % power these seeds find no difference only against a delta of {size}."
    return f"To reproduce the claim with 80 % power these seeds need a true effect of {size}."


def _on_paper(claim: Claim, low: float, high: float) -> tuple[str, str]:
    """The ends of an interval as a reader has them: ratios, or differences with their unit."""
    metric = claim.measured
    if metric.scale == "log":
        return number(math.exp(low)), number(math.exp(high))
    places = decimals((high - low) / 2)
    return fixed(low, places, "+"), f"{fixed(high, places, '+')} {metric.unit}".strip()


def _p(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-4 else "< 0.0001"
