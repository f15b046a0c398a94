"""Simulate false verdicts and power with and without the second test: `python docs/experiments/second_test.py`.

The treatment's arm has a spread of 1 over seeds, and the control and two further arms have a spread of 0.3. The true
effect is the smallest effect of interest, so every verdict is false. The script writes two tables of ../evidence.md
and prints a comparison with second tests of scipy. It takes ten minutes on one CPU core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from null_arms import _markdown, with_tables
from scipy import stats

from mmqk.lab.effects import Effect, Spread, paired_effect, quantile_t

HERE = Path(__file__).parent
SEEDS, DRAWS, OTHERS, SPREAD = (3, 4, 6, 10), 4000, 2, 0.3
Draw = Callable[[np.random.Generator, int], np.ndarray]


# The runs ----------------------------------------------------------------------------------------------------


def mixture(share: float, distance: float) -> Draw:
    """Return draws that lie ``distance`` standard deviations higher with probability ``share``."""
    return lambda rng, n: rng.normal(size=n) + distance * (rng.random(n) < share)


def cut(low: float, high: float, never: float) -> Draw:
    """Return times of failure, uniform from ``low`` to ``high``; a share ``never`` of runs has the time 1."""
    return lambda rng, n: np.where(rng.random(n) < never, 1.0, rng.uniform(low, high, n))


NORMAL: Draw = lambda rng, n: rng.normal(size=n)  # noqa: E731
ARMS: Mapping[str, Draw] = {
    "normal": NORMAL,
    "heavy tails (t, 3 degrees of freedom)": lambda rng, n: rng.standard_t(3, n),
    "skewed (exponential)": lambda rng, n: rng.exponential(size=n),
    "skewed (log-normal, sigma 1)": lambda rng, n: rng.lognormal(size=n),
    "bimodal, half of the runs in each mode": mixture(0.5, 6),
    "bimodal, 30 % of the runs 5 SD higher": mixture(0.3, 5),
    "bimodal, 20 % of the runs 5 SD higher": mixture(0.2, 5),
    "outliers, 10 % of the runs 5 SD higher": mixture(0.1, 5),
    "outliers, 5 % of the runs 8 SD higher": mixture(0.05, 8),
}
TIMES: Mapping[str, Draw] = {
    "times of failure, control never fails (exponential)": lambda rng, n: np.minimum(rng.exponential(0.4, n), 1),
    "times of failure, control never fails (30 % do not fail)": cut(0.2, 0.7, 0.3),
}


def moments(draw: Draw) -> tuple[float, float]:
    """Return the mean and standard deviation of an arm, from a million draws."""
    many = draw(np.random.default_rng(0), 1_000_000)
    return float(many.mean()), float(many.std())


def effects(draw: Draw, n: int, draws: int, shift: float = 0.0, spread: float = SPREAD, seed: int = 1) -> list[Effect]:
    """Return the effects of simulated claims, relative to the smallest effect of interest.

    Args:
        draw: the treatment's arm, which is scaled to a mean of ``shift`` and a standard deviation of 1.
        n: number of seeds per arm.
        draws: number of claims.
        shift: true effect beyond the smallest effect of interest.
        spread: standard deviation of the control and the other arms; 0 for a control that never fails, without other
            arms, as for `time_of_failure`.
        seed: seed of the simulation.
    """
    return [effect_of(arms, spread > 0) for arms in samples(draw, n, draws, shift, spread, seed)]


def samples(draw: Draw, n: int, draws: int, shift: float, spread: float, seed: int = 1) -> Iterator[np.ndarray]:
    """Yield the arms of each claim, [arm, seed]: the treatment, the control and the other arms (see `effects`)."""
    rng, (mean, sd) = np.random.default_rng(seed), moments(draw)
    for _ in range(draws):
        treatment = (draw(rng, n) - mean) / sd + shift
        yield np.vstack([treatment, spread * rng.normal(size=(1 + (OTHERS if spread else 0), n))])


def effect_of(arms: np.ndarray, pool: bool) -> Effect:
    """Return the effect of the first arm against the second, with the spread of all arms if ``pool`` is true."""
    # `pooled_spread` without Bartlett's test, which takes most of its time.
    sd = math.sqrt(arms.var(axis=1, ddof=1).mean())
    spread = Spread(sd, arms.shape[0] * (arms.shape[1] - 1), {}, math.nan) if pool else None
    effect = paired_effect(dict(enumerate(arms[0].tolist())), dict(enumerate(arms[1].tolist())), spread)
    assert effect is not None
    return effect


# The tests ---------------------------------------------------------------------------------------------------


def first(effect: Effect, alpha: float = 0.05) -> bool:
    """Return whether the first interval excludes the threshold."""
    low, high = effect.interval(alpha)
    return effect.error > 0 and not low <= 0 <= high


def both(effect: Effect, alpha: float = 0.05) -> bool:
    """Return whether both intervals exclude the threshold on the same side, as a verdict requires."""
    low, high = effect.shifted(alpha)
    return first(effect, alpha) and (low > 0 if effect.value > 0 else high < 0)


def shares(draw: Draw, n: int, draws: int = DRAWS, **more: float) -> tuple[float, float]:
    """Return the share of decided claims with the first test alone and with both tests."""
    made = effects(draw, n, draws, **more)
    return float(np.mean([first(e) for e in made])), float(np.mean([both(e) for e in made]))


def beyond(n: int, power: float) -> float:
    """Return the effect of two normal arms that a t-test of all arms, each with a spread of 1, detects with
    ``power``."""
    df = (n - 1) * (2 + OTHERS)
    return (quantile_t(0.975, df) + quantile_t(power, df)) * math.sqrt(2 / n)


def others(n: int = 6, draws: int = 1000) -> str:
    """Return a table of other second tests: false verdicts over all arms, and power for normal arms."""

    def permuted(a: np.ndarray, b: np.ndarray) -> float:
        test = stats.permutation_test((a, b), lambda x, y, axis: x.mean(axis) - y.mean(axis), vectorized=True)
        return float(test.pvalue)

    tests: Mapping[str, Callable[[Any, Any, Effect], bool]] = {
        "none": lambda a, b, effect: True,
        "interval shifted for skewness (used)": lambda a, b, effect: both(effect),
        "Welch": lambda a, b, effect: stats.ttest_ind(a, b, equal_var=False).pvalue <= 0.05,
        "permutation of the means": lambda a, b, effect: permuted(a, b) <= 0.05,
        "Mann-Whitney": lambda a, b, effect: stats.mannwhitneyu(a, b).pvalue <= 0.05,
        # Without an overlap of the arms its p-value is 0 or NaN.
        "Brunner-Munzel": lambda a, b, effect: not stats.brunnermunzel(a, b).pvalue > 0.05,
        "Mann-Whitney and the shifted interval": lambda a, b, effect: (
            both(effect) and stats.mannwhitneyu(a, b).pvalue <= 0.05
        ),
    }

    def decided(draw: Draw, spread: float, shift: float = 0.0) -> dict[str, float]:
        """Return the share of claims, in percent, that the first test and each second test decide."""
        counts = dict.fromkeys(tests, 0)
        for arms in samples(draw, n, draws, shift, spread, 2):
            effect = effect_of(arms, spread > 0)
            for name, test in tests.items() if first(effect) else ():
                counts[name] += test(arms[0], arms[1], effect)
        return {name: 100 * count / draws for name, count in counts.items()}

    false = [decided(draw, SPREAD) for name, draw in ARMS.items() if name != "normal"]
    false += [decided(draw, 0.0) for draw in TIMES.values()]
    power = decided(NORMAL, 1.0, beyond(n, 0.8))
    lines = [
        [name, f"{np.mean([f[name] for f in false]):.1f}", f"{max(f[name] for f in false):.1f}", f"{power[name]:.1f}"]
        for name in tests
    ]
    heads = [f"second test, {n} seeds", "false verdicts, mean %", "false verdicts, largest %", "power %"]
    return _markdown(heads, lines)


# The page ----------------------------------------------------------------------------------------------------


def _cells(pairs: list[tuple[float, float]]) -> list[str]:
    return [f"{100 * alone:.1f}/{100 * two:.1f}" for alone, two in pairs]


def tables() -> dict[str, str]:
    """Return the table of ../evidence.md and that of the power of both tests, in Markdown, by name."""
    heads = [f"{n} seeds" for n in SEEDS]
    false = [[name, *_cells([shares(draw, n) for n in SEEDS])] for name, draw in ARMS.items()]
    false += [[name, *_cells([shares(draw, n, spread=0) for n in SEEDS])] for name, draw in TIMES.items()]
    power = [
        [f"{100 * p:g} %", *_cells([shares(NORMAL, n, shift=beyond(n, p), spread=1) for n in SEEDS])]
        for p in (0.8, 0.95, 0.999)
    ]
    return {"second": _markdown(["one arm is", *heads], false), "power": _markdown(["nominal power", *heads], power)}


def main() -> None:
    """Simulate, write the tables and print the comparison."""
    page, made = HERE.parent / "evidence.md", tables()
    page.write_text(with_tables(page.read_text(), {"second": made["second"]}))
    print(made["power"])
    print(others())


if __name__ == "__main__":
    main()
