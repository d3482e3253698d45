"""Curve: survival on the logarithmic grid, and the Forecast that carries one."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.curve import BINS, EDGES_S, LEVELS, MAX_WAIT_S, POINTS, Curve, bin_of
from agentkv.core.forecast import Forecast, last_of

hazards = st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=BINS, max_size=BINS)
curves = hazards.map(lambda values: curve(*values))
times = st.floats(0, 1e7)


def curve(*values, **options):
    """The curve of these hazards, bin by bin; the rest of the bins end nobody."""
    survival = [1.0]
    for hazard in (*values, *[0.0] * (BINS - len(values))):
        survival.append(survival[-1] * (1 - hazard))
    return Curve(survival=tuple(survival), **options)


def ends_in(bin_index, share=1.0):
    """Ends in one bin, or with what is left of `share` never."""
    return curve(*[0.0] * bin_index, share)


def of(told):
    return Forecast.of_curve(told, n=9, source="history")


def test_the_grid_has_46_bins_from_2_ms_to_70_hours():
    """Each one and a half times as long as the one before."""
    assert (BINS + 1, 0.002) == (len(EDGES_S), EDGES_S[0])
    assert all(b / a == pytest.approx(1.5) for a, b in pairwise(EDGES_S))
    assert 69.9 < EDGES_S[-1] / 3600 < 70.1


@given(st.floats(0, 1e9))
def test_every_duration_has_its_bin(duration_s):
    """(edge, next edge]; what is shorter is in the first bin, what is longer in the last."""
    index = bin_of(duration_s)
    assert 0 <= index < BINS
    assert duration_s <= EDGES_S[index + 1] or index == BINS - 1
    assert EDGES_S[index] < duration_s or index == 0


@pytest.mark.parametrize("options", [{"elapsed_s": -1.0}, {"elapsed_s": math.nan}, {"end_s": -1.0}])
def test_a_curve_of_nonsense_is_refused(options):
    """Times are >= 0."""
    with pytest.raises(ValueError, match="must be >= 0"):
        curve(0.5, **options)


def test_a_curve_of_the_wrong_length_is_refused():
    """A grid of another version is not read by accident."""
    with pytest.raises(ValueError, match="47 values"):
        Curve(survival=(1.0, 0.0))


def test_mass_is_spread_evenly_in_log_time_within_a_bin():
    """Half of a bin's mass lies below its geometric middle."""
    told = ends_in(20)
    middle_s = math.sqrt(EDGES_S[20] * EDGES_S[21])
    assert 0.5 == pytest.approx(told.within(middle_s))
    assert middle_s == pytest.approx(told.quantile_s(0.5))


@given(curves, times, times)
def test_every_answer_is_finite_and_rises(told, elapsed_s, horizon_s):
    """Quantiles in [0, 30 days], probabilities in [0, 1], at any elapsed time."""
    left = of(told).after(elapsed_s)
    quantiles = [left.quantile_s(q / 10) for q in range(11)]
    assert all(0 <= a <= b * (1 + 1e-9) for a, b in pairwise(quantiles))
    assert quantiles[-1] <= MAX_WAIT_S
    assert 0 <= left.probability_within(horizon_s) <= left.probability_within(horizon_s * 2 + 1) + 1e-9 <= 1 + 1e-8
    assert 0 <= left.never <= 1
    assert POINTS >= len(left.remaining_s)


@given(curves, times, times)
def test_conditioning_twice_is_conditioning_once(told, first_s, second_s):
    """The same elapsed time in two steps gives the same curve."""
    once, twice = told.after(first_s + second_s), told.after(first_s).after(second_s)
    assert once.elapsed_s == pytest.approx(twice.elapsed_s)
    assert once.quantile_s(0.5) == pytest.approx(twice.quantile_s(0.5), rel=1e-3, abs=1e-6)


@given(curves)
def test_points_are_the_curves_quantiles(told):
    """The abbreviation agrees with what it abbreviates."""
    assert told.points() == pytest.approx([told.quantile_s(level) for level in LEVELS])


def test_what_outlives_the_grid_is_guessed_by_its_age():
    """Nothing is known beyond: P(twice as long) = 1/2."""
    late = of(ends_in(10)).after(1000.0)
    assert ("overdue", 1000.0) == (late.state, late.quantile_s(0.5))
    assert 0.5 == late.probability_within(1000.0)
    assert MAX_WAIT_S == late.quantile_s(1.0)


@pytest.mark.parametrize("elapsed_s", [math.inf, 1e300, math.nan, -5.0])
def test_an_absurd_elapsed_time_is_survived(elapsed_s):
    """A clock that went mad gives a finite answer."""
    for forecast in (of(ends_in(10, 0.5)), Forecast(remaining_s=(1.0, 2.0), n=2, source="history")):
        assert 0 <= forecast.after(elapsed_s).quantile_s(0.5) <= MAX_WAIT_S


def test_what_never_ends_is_mass_at_infinity_and_grows_while_nothing_happens():
    """30 % never end: the 60 % quantile is known, the 80 % quantile is thirty days."""
    forecast = of(ends_in(20, 0.7))
    assert 0.3 == pytest.approx(forecast.never)
    assert forecast.quantile_s(0.6) <= EDGES_S[21]
    assert MAX_WAIT_S == forecast.quantile_s(0.8)
    assert 1.0 == pytest.approx(forecast.after(EDGES_S[21]).never)


def test_a_time_out_cuts_the_tail_off():
    """Probability 1 at the time-out, no quantile beyond, nothing never ends; afterwards it was none."""
    told = ends_in(20, 0.7)
    bounded = of(Curve(survival=told.survival, end_s=5.0))
    assert (5.0, 5.0, 0.0) == (bounded.quantile_s(0.9), bounded.quantile_s(1.0), bounded.never)
    assert (3.0, 1.0) == (bounded.after(2.0).quantile_s(0.9), bounded.after(2.0).probability_within(3.0))
    assert bounded.after(6.0).quantile_s(1.0) > 6.0


def test_points_that_passed_are_dropped_and_renewed_when_few_are_left():
    """The abbreviation keeps up with the tail."""
    forecast = of(curve(*[0.1] * 40, 1.0))
    assert POINTS == len(forecast.remaining_s)
    early = forecast.after(forecast.remaining_s[5])
    assert POINTS - 6 == len(early.remaining_s)
    late = forecast.after(forecast.remaining_s[-3])
    assert (POINTS, False) == (len(late.remaining_s), late.overdue)
    beyond = forecast.after(forecast.remaining_s[-1] * 1.01)
    assert (POINTS, True) == (len(beyond.remaining_s), beyond.overdue)


@given(st.lists(curves, min_size=2, max_size=4), times)
def test_the_last_of_several_is_the_product_at_the_edges(several, elapsed_s):
    """P(all ended within an edge) = product, conditioned calls among them."""
    forecasts = [of(several[0]).after(elapsed_s), *map(of, several[1:])]
    combined = last_of(forecasts)
    for edge_s in EDGES_S[1::5]:
        expected = math.prod(f.probability_within(edge_s) for f in forecasts)
        assert combined.probability_within(edge_s) == pytest.approx(expected, abs=1e-9)


@given(curves, st.sampled_from([0.0, 0.001, 3.0, EDGES_S[20], 1e5, 1e7]), st.none() | st.floats(0, 1e6))
def test_all_edges_at_once_are_the_edges_one_by_one(told, elapsed_s, end_s):
    """Fresh, conditioned, spent, and with a time-out."""
    told = replace(told, elapsed_s=elapsed_s, end_s=end_s if end_s is not None and end_s > elapsed_s else None)
    assert [told.within(edge_s) for edge_s in EDGES_S[1:]] == pytest.approx(told.within_edges(), abs=1e-12)


def test_the_last_of_several_ends_by_the_last_time_out():
    """Two calls with time-outs in 3 and in 7 s: by 7 s all is over; one without: nobody knows."""
    survival = ends_in(30).survival
    three, ten = (of(Curve(survival=survival, end_s=end_s)) for end_s in (3.0, 10.0))
    declared = Forecast(remaining_s=(1.0, 4.0), n=0, source="declared")
    assert 7.0 == last_of([three, ten.after(3.0), declared]).quantile_s(1.0)
    assert EDGES_S[30] < last_of([three, of(ends_in(30))]).quantile_s(0.5)
    assert "declared" == last_of([three, declared]).source
