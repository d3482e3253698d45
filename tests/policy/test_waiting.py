"""The arithmetic of a wait that goes on agrees with the Forecast it abbreviates."""

from bisect import bisect_right

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentkv.core.forecast import Forecast
from agentkv.policy.waiting import MEDIAN, ends_of, next_end, outlived_at, quantile

points_of = st.lists(st.floats(0.01, 1e4), min_size=1, max_size=21).map(lambda values: tuple(sorted(values)))
seconds = st.floats(0, 2e4)


def remaining(points, elapsed_s, q):
    return Forecast(remaining_s=points, n=1, source="history").after(elapsed_s).quantile_s(q)


@settings(deadline=None)
@given(points_of, seconds, st.floats(0, 1))
def test_quantiles_are_those_of_the_conditioned_forecast(points, elapsed_s, q):
    """The shortcut and the definition give the same number."""
    first = bisect_right(points, elapsed_s)
    assume(first < len(points))
    assert quantile(points, first, q) - elapsed_s == pytest.approx(remaining(points, elapsed_s, q), abs=1e-6)


@settings(deadline=None)
@given(points_of, seconds)
def test_the_next_end_is_never_behind_and_misses_at_most_a_tenth_of_the_points(points, elapsed_s):
    """Before the 10 % quantile that one; afterwards the very next point; after the last none."""
    ends = ends_of(points)
    end = next_end(ends, elapsed_s)
    assert (end is None) == (elapsed_s >= points[-1] and elapsed_s >= ends[0])
    if end is not None:
        assert end > elapsed_s
    if elapsed_s >= ends[0] and end is not None:
        assert end == next(point for point in points if point > elapsed_s)
    assert sum(point < ends[0] for point in points) <= 0.1 * (len(points) - 1) + 1


@settings(deadline=None)
@given(points_of, seconds, st.floats(0, 1000), st.floats(0.001, 100))
def test_a_long_wait_is_noticed_at_its_first_moment(points, elapsed_s, wait_s, gap_s):
    """Long at the moment named; at no point that passes before it."""
    ends = ends_of(points)
    first = outlived_at(points, ends, elapsed_s, wait_s, gap_s)

    def is_long(at_s):
        end = next_end(ends, at_s)
        return end is not None and end - at_s > gap_s and remaining(points, at_s, MEDIAN) >= wait_s - 1e-6

    if first is not None:
        assert first > elapsed_s
        assert is_long(first)
    for point in points[:-1]:
        if elapsed_s < point < (points[-1] if first is None else first):
            assert not is_long(point) or remaining(points, point, MEDIAN) < wait_s + 1e-6
