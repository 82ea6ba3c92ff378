"""Binomial bounds: known values, and what a test may rely on."""

import pytest
from pocket.bounds import band, interval, least_successes, most_successes


def test_interval_is_wilsons() -> None:
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662.
    low, high = interval(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


@pytest.mark.parametrize(("successes", "count"), [(0, 20), (20, 20), (3.5, 7)])
def test_interval_holds_the_share_and_stays_a_rate(successes: float, count: int) -> None:
    low, high = interval(successes, count)
    assert 0 <= low <= successes / count <= high <= 1


def test_least_successes_leaves_no_more_than_the_risk_below() -> None:
    # Fair coin, 10 throws: P(X < 1) = 1/1024, P(X < 2) = 11/1024.
    assert least_successes(10, 0.5, risk=1 / 1024) == 1
    assert least_successes(10, 0.5, risk=0.9 / 1024) == 0


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (1.0, 10)])
def test_certain_outcomes_have_no_slack(rate: float, expected: int) -> None:
    assert least_successes(10, rate) == most_successes(10, rate) == expected


def test_large_counts_stay_finite() -> None:
    low, high = band((900, 1000), 1000)
    assert 800 < low < 900 < high < 1000


def test_band_widens_when_less_was_measured() -> None:
    assert band((10, 10), 20)[0] < band((100, 100), 20)[0] < 20
