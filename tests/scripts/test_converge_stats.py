"""The statistics of the verdict on a convergence experiment."""

import itertools

import numpy as np
import pytest
from converge_stats import drift, mann_kendall, noise, noise_factor


def test_mann_kendall_counts_orders():
    for n in range(2, 7):
        for values in itertools.islice(itertools.permutations(range(n)), 0, None, 7):
            falling = sum(b <= a for a, b in itertools.combinations(values, 2))
            orders = [
                sum(b <= a for a, b in itertools.combinations(order, 2))
                for order in itertools.permutations(range(n))
            ]
            expected = np.mean([other <= falling for other in orders])
            assert mann_kendall(np.array(values)) == pytest.approx(expected)


def test_mann_kendall_at_its_ends():
    assert mann_kendall(np.arange(4.0)) == pytest.approx(1 / 24)
    assert mann_kendall(np.arange(4.0)[::-1]) == mann_kendall(np.zeros(4)) == pytest.approx(1)


def test_drift_is_the_median_slope_times_the_span():
    steps = np.array([100, 200, 300, 400, 500])
    assert drift(steps, steps / 1000) == pytest.approx(0.4)
    outlier = np.array([0.1, 0.2, 0.3, 0.4, 9.0])
    assert drift(steps, outlier) == pytest.approx(0.4)
    assert drift(steps[:1], outlier[:1]) == 0


def test_noise_is_the_deviation_of_a_difference():
    """Over all pairs of arms, and the two evaluations on either side."""
    arms = np.random.default_rng(1).standard_normal((4, 9))
    pairs = [a - b for a, b in itertools.combinations(arms, 2)]
    variances = 2 * arms.var(0, ddof=1)
    expected = [variances[max(0, at - 2) : at + 3].mean() for at in range(9)]
    assert noise(pairs) == pytest.approx(np.sqrt(expected))


@pytest.mark.parametrize("correlation", [0.0, 0.7])
@pytest.mark.parametrize(("arms", "count"), [(3, 11), (4, 11), (4, 1), (6, 25)])
def test_equal_arms_fail_as_often_as_the_level_says(arms, count, correlation):
    """Twice as often at most if successive evaluations depend on each other."""
    random, factor = np.random.default_rng(2), noise_factor(arms, count, 0.05)
    runs = random.standard_normal((2000, arms + 1, count))
    for at in range(1, count):
        runs[..., at] *= np.sqrt(1 - correlation**2)
        runs[..., at] += correlation * runs[..., at - 1]
    fails = 0
    for *bf16, other in runs:
        pairs = [a - b for a, b in itertools.combinations(bf16, 2)]
        fails += bool((abs(other - bf16[0]) > factor * noise(pairs)).any())
    assert 0.035 < fails / len(runs) < (0.10 if correlation else 0.065)
