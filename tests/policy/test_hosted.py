"""Marks and keep-alives for prompt caches that one pays for, against prices and waits that can be reckoned by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.forecast import Forecast
from agentkv.errors import ConfigError
from agentkv.policy.hosted import CachePrices, choose_mark, keep_alive, keeps_alive, wait_cost

PRICES = CachePrices(input=3.0, read=0.3, write_short=3.75, write_long=6.0)
REWRITES = replace(PRICES, rewrites=True)


def waits(*seconds, n=100):
    return Forecast(remaining_s=tuple(sorted(float(s) for s in seconds)), n=n, source="history")


def mark(*forecasts, live=0, new=50_000, live_mark="none", growth=1000.0, calls=20.0, prices=PRICES):
    return choose_mark(
        [(1.0, forecast) for forecast in forecasts], prices, live_tokens=live, new_tokens=new, live_mark=live_mark,
        growth_tokens=growth, calls_left=calls,
    ).mark  # fmt: skip


def test_waits_of_seconds_are_worth_the_short_mark():
    """It is the cheapest to write, and nothing expires."""
    assert "short" == mark(waits(1, 5, 20))


def test_waits_of_half_an_hour_are_worth_the_long_mark():
    """Six keep-alives, or writing again, are dearer than the premium on what is new."""
    assert "long" == mark(waits(1500, 1800, 2100), live=49_000, new=1000)
    assert "long" == mark(waits(1500, 1800, 2100), prices=REWRITES)


def test_a_first_prompt_is_written_for_as_long_as_its_calls_pay_for():
    """For one call more, six reads are cheaper than the premium on all of it; over twenty they are not."""
    assert "short" == mark(waits(1500, 1800, 2100), calls=1.0)
    assert "long" == mark(waits(1500, 1800, 2100), calls=20.0)


def test_without_keep_alives_the_hour_is_paid_instead():
    """Nobody reads it in time: what a keep-alive would have saved is worth the long mark."""
    about = {"live_tokens": 30_000, "new_tokens": 20_000}
    assert "short" == choose_mark([(1.0, waits(400, 500))], PRICES, **about).mark
    assert "long" == choose_mark([(1.0, waits(400, 500))], PRICES, keeps=False, **about).mark


def test_another_mark_costs_nothing_for_what_is_live():
    """By the published rule the hit is read whatever the mark is: from one call to the next it may change."""
    for live_mark in ("short", "long"):
        assert "long" == mark(waits(1500, 1800), live=99_500, new=500, live_mark=live_mark)
        assert "short" == mark(waits(5, 20), live=99_500, new=500, live_mark=live_mark)


def test_waits_of_a_day_are_worth_no_mark():
    """Nothing is ever read again, so nothing is paid for writing it."""
    assert "none" == mark(waits(80_000, 90_000))


def test_a_live_prefix_is_not_written_anew_for_one_call():
    """Where a switch writes everything, it must come in again over the calls that are left."""
    there = {"live": 100_000, "new": 500, "live_mark": "short", "prices": REWRITES}
    assert "short" == mark(waits(350, 700), calls=1.0, **there)
    assert "long" == mark(waits(1500, 1800, 2100), calls=50.0, **there)


def test_a_rare_person_does_not_change_the_mark_of_a_busy_agent():
    """What may follow is weighed; the person's wait is kept alive when it is there."""
    likely = choose_mark(
        [(0.97, waits(2, 8, 20)), (0.03, waits(60, 400, 900))], PRICES, live_tokens=0, new_tokens=50_000,
        growth_tokens=1500, calls_left=10,
    )  # fmt: skip
    assert "short" == likely.mark
    assert "900" in likely.reason or "s: none" in likely.reason


@pytest.mark.parametrize(("chance", "pays"), [(0.05, False), (0.07, False), (0.12, True), (0.5, True)])
def test_a_keep_alive_pays_where_the_prefix_is_likely_enough_to_be_used(chance, pays):
    """A read costs 0.3, writing again 3.75 and then no read: from 0.3 / (3.75 - 0.3) = 8.7 % on."""
    soon = round(chance * 1000)
    forecast = waits(*[400.0] * soon, *[90_000.0] * (1000 - soon))
    assert pays is keeps_alive(forecast, PRICES, "short", elapsed_s=300.0)


def test_two_keep_alives_are_made_where_the_second_one_pays_for_the_first():
    """Nothing ends in the next window but all in the one after: 0.6 and a read against 3.75."""
    assert keeps_alive(waits(700, 800), PRICES, "short", elapsed_s=300.0)


def test_a_prefix_is_given_up_when_its_wait_has_outlived_what_pays():
    """What is known for certain to take an hour more is written again then: twelve reads cost about as much."""
    assert not keeps_alive(waits(300 + 13 * 300), PRICES, "short", elapsed_s=300.0)


def test_one_longer_keep_alive_replaces_many():
    """Half an hour more: six reads, or one with a little written for an hour. Five minutes more: a plain read."""
    long, short = waits(2000, 2200), waits(400, 500)
    assert "lengthen" == keep_alive(long, PRICES, "short", elapsed_s=300.0, lengthens=True)
    assert "renew" == keep_alive(short, PRICES, "short", elapsed_s=300.0, lengthens=True)
    assert "renew" == keep_alive(long, PRICES, "short", elapsed_s=300.0)
    assert wait_cost(long, PRICES, "short", lengthens=True) < wait_cost(long, PRICES, "short")


def test_nothing_is_kept_alive_that_was_never_written():
    """Without a mark there is nothing to read."""
    assert not keeps_alive(waits(10), PRICES, "none", elapsed_s=1.0)


@given(st.lists(st.floats(0, 20_000), min_size=1, max_size=12), st.sampled_from(["short", "long"]))
def test_the_expected_cost_is_the_best_stopping_time(seconds, which):
    """Reckoned the slow way: for every number of keep-alives in a row, the mean over all waits; the least of them."""
    lasts_s = PRICES.lasts_s(which)

    def cost(wait_s, pings):
        needed = max(0, math.ceil(wait_s / lasts_s) - 1)
        return min(needed, pings) * PRICES.read + (PRICES.read if needed <= pings else PRICES.write_short)

    best = min(sum(cost(s, pings) for s in seconds) / len(seconds) for pings in range(25))
    assert best == pytest.approx(wait_cost(waits(*seconds), PRICES, which), rel=1e-6, abs=1e-9)


def test_no_choice_is_dearer_than_the_fixed_marks():
    """The mark chosen is the one with the least expected cost, whatever is live."""
    for live_mark, live in itertools.product(("short", "long"), (0, 80_000)):
        choice = choose_mark(
            [(1.0, waits(30, 200, 1000))], PRICES, live_tokens=live, new_tokens=1000, live_mark=live_mark, calls_left=3
        )
        told = [float(word) for word in choice.reason.replace(",", "").split() if word.replace(".", "").isdigit()]
        assert choice.expected_cost <= min(told[-3:]) * 1.001


@pytest.mark.parametrize("bad", [{"read": -1.0}, {"input": math.nan}, {"long_s": 10.0}, {"write_long": math.inf}])
def test_prices_that_cannot_be_are_refused(bad):
    """A typo in a price list must not decide anything."""
    with pytest.raises(ConfigError):
        CachePrices(**{"input": 3.0, "read": 0.3, "write_short": 3.75, "write_long": 6.0} | bad)


def test_waits_without_weight_are_refused():
    """There is nothing to decide by."""
    with pytest.raises(ConfigError):
        choose_mark([], PRICES, live_tokens=0, new_tokens=1)
