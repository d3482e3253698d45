"""Forecast: arithmetic on a distribution of waits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.forecast import Forecast, last_of

waits = st.lists(st.floats(0, 1e6), min_size=1, max_size=21).map(lambda values: tuple(sorted(values)))


def forecast(*points, n=3):
    return Forecast(remaining_s=points, n=n, source="history")


def test_quantiles_interpolate_between_points():
    """Type 7: the median of an even number of points lies between the middle two."""
    assert forecast(1.0, 2.0, 4.0, 8.0).quantile_s(0.5) == 3.0


@pytest.mark.parametrize("points", [(), (2.0, 1.0), (-1.0,), (math.nan,), (math.inf,)])
def test_a_forecast_of_no_points_or_of_nonsense_is_refused(points):
    """Waits are finite, sorted and not negative, so that no policy has to ask."""
    with pytest.raises(ValueError):
        Forecast(remaining_s=points, n=0, source="prior")


@pytest.mark.parametrize("q", [-0.1, 1.1])
def test_a_quantile_outside_of_0_to_1_is_refused(q):
    """A percentage is a mistake, not a request for the last point."""
    with pytest.raises(ValueError, match="not in"):
        forecast(1.0).quantile_s(q)


def test_elapsed_time_drops_what_has_passed_and_shortens_the_rest():
    """Given that it still runs after 2 s, a call that takes 1, 3 or 10 s has 1 or 8 s to go."""
    assert forecast(1.0, 3.0, 10.0).after(2.0).remaining_s == (1.0, 8.0)


def test_a_call_that_outlived_every_point_is_overdue_and_guessed_by_its_age():
    """Nothing known fits any more: about as long again as it ran."""
    late = forecast(1.0, 3.0).after(4.0)
    assert late.overdue
    assert late.remaining_s == (2.0, 4.0, 8.0)


@given(waits, st.floats(0, 1e6), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise_and_stay_inside_the_points(points, elapsed_s, a, b):
    """A higher quantile is never a shorter wait, conditioned or not."""
    left = forecast(*points).after(elapsed_s)
    low, high = sorted((a, b))
    assert left.quantile_s(low) <= left.quantile_s(high) * (1 + 1e-9)
    assert left.remaining_s[0] <= left.quantile_s(low)
    assert left.quantile_s(high) <= left.remaining_s[-1] * (1 + 1e-9)


@given(waits, st.floats(0, 1e3), st.floats(0, 1e3))
def test_conditioning_twice_is_conditioning_once_until_overdue(points, first_s, second_s):
    """The same elapsed time in two steps gives the same distribution, up to rounding."""
    once = forecast(*points).after(first_s + second_s)
    twice = forecast(*points).after(first_s).after(second_s)
    if once.overdue or twice.overdue or len(once.remaining_s) != len(twice.remaining_s):
        return
    assert twice.remaining_s == pytest.approx(once.remaining_s, abs=1e-6)


def test_probability_within_counts_the_points():
    """Two of four points lie within three seconds."""
    assert forecast(1.0, 2.0, 4.0, 8.0).probability_within(3.0) == 0.5


@given(st.lists(waits, min_size=2, max_size=4))
def test_the_last_of_several_calls_is_never_expected_before_any_of_them(several):
    """A session waits for its slowest tool, so no quantile may lie before that of a single one's earliest point."""
    combined = last_of([forecast(*points) for points in several])
    assert combined.remaining_s[0] >= max(points[0] for points in several)
    assert combined.remaining_s[-1] == max(points[-1] for points in several)
