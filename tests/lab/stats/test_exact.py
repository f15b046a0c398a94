"""Compare the exact tests with their definitions, by enumerating all outcomes."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from mmqk.lab.stats.exact import Counts, clopper_pearson, fisher, sign_flip


def test_fisher_sums_the_tables_that_are_at_most_as_likely():
    for n, m in ((5, 7), (6, 6)):
        for a, b in itertools.product(range(n + 1), range(m + 1)):
            tables = range(max(0, a + b - m), min(n, a + b) + 1)
            ways = [math.comb(n, i) * math.comb(m, a + b - i) for i in tables]
            observed = math.comb(n, a) * math.comb(m, b)
            assert fisher(a, n, b, m) == pytest.approx(sum(w for w in ways if w <= observed) / sum(ways))
    assert fisher(6, 6, 0, 6) != pytest.approx(stats.chi2_contingency([[6, 0], [0, 6]])[1])


def test_clopper_pearson_leaves_half_of_5_percent_in_each_tail():
    for count, n in ((0, 6), (3, 6), (6, 6), (50, 1000)):
        low, high = clopper_pearson(count, n)
        assert low == 0 if count == 0 else stats.binom.sf(count - 1, n, low) == pytest.approx(0.025)
        assert high == 1 if count == n else stats.binom.cdf(count, n, high) == pytest.approx(0.025)
    assert clopper_pearson(3, 6, 0.99)[1] > clopper_pearson(3, 6)[1]


def flipped_one_by_one(values):
    sums = [abs(np.dot(signs, values)) for signs in itertools.product((1, -1), repeat=len(values))]
    return np.mean([s >= abs(sum(values)) - 1e-12 for s in sums])


@pytest.mark.parametrize("n", [2, 3, 6, 7, 9])
def test_sign_flip_counts_every_pattern(n):
    values = np.random.default_rng(n).normal(0.6, 1, n)
    assert sign_flip(values) == pytest.approx(flipped_one_by_one(values))
    assert sign_flip([1.0] * n) == pytest.approx(2 / 2**n)


def test_three_seeds_cannot_say_much_by_signs_alone():
    assert sign_flip([5.0, 5.1, 4.9]) == 0.25
    assert sign_flip([5.0] * 6) == 0.03125
    assert math.isnan(sign_flip([])) and math.isnan(sign_flip([1.0] * 17))


def coverage(n, m, first, second, interval):
    """Return the probability, over all outcomes, that the interval contains the true difference of shares."""
    found = 0.0
    for a, b in itertools.product(range(n + 1), range(m + 1)):
        low, high = interval(a, n, b, m)
        if low - 1e-9 <= first - second <= high + 1e-9:
            found += stats.binom.pmf(a, n, first) * stats.binom.pmf(b, m, second)
    return found


def wald(a, n, b, m):
    p, q = a / n, b / m
    half = 1.96 * math.sqrt(p * (1 - p) / n + q * (1 - q) / m)
    return p - q - half, p - q + half


def exactly(a, n, b, m):
    return Counts(a, n, b, m).interval(0.05)


def test_the_interval_of_two_shares_holds_whatever_they_are():
    shares = (0.03, 0.2, 0.5, 0.77, 0.97)
    pairs = list(itertools.product(shares, shares))
    assert min(coverage(6, 5, p, q, exactly) for p, q in pairs) >= 0.95
    assert min(coverage(6, 5, p, q, wald) for p, q in pairs) < 0.7


def test_its_p_value_is_the_worst_over_all_shares():
    counts, delta = Counts(5, 6, 1, 6), 0.2
    worst = 0.0
    for q in np.linspace(0, 1 - delta, 161):
        first, second = stats.binom(6, q + delta), stats.binom(6, q)
        seen = (
            first.pmf(a) * second.pmf(b)
            for a, b in itertools.product(range(7), range(7))
            if a / 6 - b / 6 >= counts.value - 1e-9
        )
        worst = max(worst, sum(seen))
    assert counts.p_at(delta) == pytest.approx(2 * worst, rel=2e-3)
    low, high = counts.interval(0.05)
    assert counts.p_at(low - 0.01) < 0.05 < counts.p_at(low + 0.01)
    assert counts.p_at(high - 0.01) > 0.05 or high == 1


def test_turned_round_everything_turns_round():
    one, other = Counts(5, 6, 1, 7), Counts(1, 7, 5, 6)
    low, high = one.interval(0.05)
    assert other.interval(0.05) == pytest.approx((-high, -low))
    assert one.p_at(0.3) == pytest.approx(other.p_at(-0.3))


def test_detectable_share_is_found_four_times_in_five():
    found = Counts(0, 8, 0, 8).detectable(0.1, 0.05, 0.8)

    def power(share):
        seen = [
            stats.binom.pmf(a, 8, share)
            for a in range(9)
            if Counts(a, 8, 0, 8).interval(0.05)[0] > 0.1 and fisher(a, 8, 0, 8) <= 0.05
        ]
        return sum(seen)

    assert power(found) >= 0.8 > power(found - 0.02)
    assert math.isnan(Counts(0, 2, 0, 2).detectable(0.1, 0.05, 0.8))
