"""Many bills: cost per completed task of a type, and days of 23, 24 and 25 hours."""

import json
import time
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

import jsonschema
import pytest

from agentkv.budget.bill import Bill
from agentkv.budget.billjson import schema
from agentkv.budget.days import day_of, day_start_ms, days, zone_name
from agentkv.budget.facts import ModelCall, OutcomeFact, TaskFact
from agentkv.budget.money import format_cost, format_usd
from agentkv.budget.outcomes import ABANDONED_AFTER_S, outcomes
from agentkv.budget.overview import overview
from agentkv.core.usage import Usage

NOW_MS = 10_000_000_000


def bill(task, *, kind="fix", completed=None, finished=False, at_ms=NOW_MS, cost="1"):
    usage = Usage(input_tokens=100, calls=1)
    facts = [
        ModelCall(
            task=task, at_ms=at_ms, usage=usage, cost_usd=None if cost is None else Decimal(cost), outcome_type=kind
        )
    ]
    if completed is not None:
        facts.append(OutcomeFact(task=task, task_type=kind, completed=completed, at_ms=at_ms))
    if finished:
        facts.append(TaskFact(task=task, at_ms=at_ms, event="finished"))
    return Bill.from_facts(task, facts)


def test_failed_and_abandoned_tasks_are_charged_to_the_completed_ones():
    """Two of five were completed; the one that runs is not counted yet."""
    silent_ms = NOW_MS - round(ABANDONED_AFTER_S * 1000)
    bills = [
        bill("a", completed=True), bill("b", completed=True, cost="2"), bill("c", completed=False),
        bill("d", finished=True), bill("e", at_ms=silent_ms), bill("f", at_ms=silent_ms + 1000), bill("g", kind="chat"),
    ]  # fmt: skip
    chat, fix = outcomes(bills, now_ms=NOW_MS)
    assert (2, 1, 2, 1) == (fix.completed, fix.failed, fix.abandoned, fix.running)
    assert (Decimal(3), 250.0) == (fix.cost_per_completed_usd, fix.tokens_per_completed)
    assert ("chat", 1, None) == (chat.task_type, chat.running, chat.cost_per_completed_usd)


def test_a_missing_price_makes_no_cost_per_completed_task():
    """Tokens still tell."""
    (fix,) = outcomes([bill("a", completed=True), bill("b", completed=False, cost=None)], now_ms=NOW_MS)
    assert (None, 200.0, 1) == (fix.cost_per_completed_usd, fix.tokens_per_completed, fix.unpriced_calls)


def test_equal_shares_of_a_cost_keep_their_digits():
    """A third of a dollar has no end; twelve digits are enough."""
    bills = [bill("a", completed=True), *(bill(name, completed=True, cost="0") for name in "bc")]
    assert Decimal("0.333333333333") == outcomes(bills, now_ms=NOW_MS)[0].cost_per_completed_usd


def stamp(zone, *when):
    return round(datetime(*when, tzinfo=ZoneInfo(zone)).timestamp() * 1000)


@pytest.mark.parametrize(
    ("zone", "day"),
    [("Asia/Shanghai", (2026, 5, 29)), ("America/New_York", (2026, 3, 8)), ("America/New_York", (2026, 11, 1)),
     ("Pacific/Apia", (2026, 5, 29)), ("Asia/Kathmandu", (2026, 5, 29))],
)  # fmt: skip
def test_the_last_and_the_first_second_of_a_day_fall_on_their_days(zone, day):
    """Also where the clocks change on it."""
    where = ZoneInfo(zone)
    last = stamp(zone, *day, 23, 59, 59)
    assert date(*day) == day_of(last, where)
    assert date(*day).toordinal() + 1 == day_of(last + 1000, where).toordinal()
    assert last + 1000 == day_start_ms(date.fromordinal(date(*day).toordinal() + 1), where)


def test_days_have_23_and_25_hours_where_the_clocks_change():
    """New York in 2026."""
    zone = ZoneInfo("America/New_York")
    hours = [
        (day_start_ms(date(2026, month, day + 1), zone) - day_start_ms(date(2026, month, day), zone)) / 3_600_000
        for month, day in ((3, 8), (5, 29), (11, 1))
    ]
    assert [23, 24, 25] == hours


def test_a_day_that_a_zone_left_out_holds_nothing():
    """Samoa had no 30 December 2011."""
    zone = ZoneInfo("Pacific/Apia")
    before = stamp("Pacific/Apia", 2011, 12, 29, 23, 59, 59)
    found = days([ModelCall(task="t", at_ms=at) for at in (before, before + 1000)], zone)
    assert [date(2011, 12, 29), date(2011, 12, 31)] == list(found)


def test_stamps_beyond_the_calendar_have_a_day_too():
    """A clock that was wrong by ages breaks no report."""
    assert (date.min, date.max) == (day_of(-(2**62)), day_of(2**62))
    assert "1 task," in str(overview([bill("t", at_ms=2**62)], now_ms=NOW_MS))


def test_a_zone_is_named():
    """The given one by its name, this machine's by its abbreviation."""
    assert "Asia/Shanghai" == zone_name(ZoneInfo("Asia/Shanghai"))
    assert zone_name(None)


@pytest.mark.parametrize(
    ("zone", "told"),
    [("UTC", "UTC"), ("Asia/Shanghai", "CST, UTC+08:00"), ("Europe/Berlin", "CET/CEST, UTC+01:00/+02:00"),
     ("America/St_Johns", "NST/NDT, UTC-03:30/-02:30")],
)  # fmt: skip
def test_this_machines_zone_is_told_with_its_offset(monkeypatch, zone, told):
    """An abbreviation alone may mean Shanghai, Chicago or Havana."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert told == zone_name(None)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_every_run_of_a_task_counts_and_one_that_was_gone_on_from_is_over():
    """Two runs that were given up and one that was completed are one line; the money of all is charged to it."""
    runs = [bill("a", kind="", cost="2"), bill("a", cost="3"), bill("a", completed=True)]
    seen = overview([*runs, bill("b")], now_ms=NOW_MS)
    (fix,) = seen.types
    assert (1, 2, 1, Decimal(6)) == (fix.completed, fix.abandoned, fix.running, fix.cost_per_completed_usd)
    line = seen.lines[0]
    assert ("a", 3, 3, Decimal(6), "completed", 300) == (
        line.task, line.runs, line.calls, line.cost_usd, line.outcome, line.total_tokens,
    )  # fmt: skip
    assert Decimal(7) == sum(day.cost_usd for day in seen.days.values())


def test_a_task_that_is_completed_again_and_again_is_completed_so_often():
    """A nightly job under one name."""
    (fix,) = outcomes([bill("a", completed=True), bill("a", completed=True)], now_ms=NOW_MS)
    assert (2, Decimal(1)) == (fix.completed, fix.cost_per_completed_usd)


def test_the_json_of_many_bills_is_what_its_schema_says():
    """Also of none, and of odd ones."""
    bills = [
        bill("a", completed=True),
        bill("a", cost=None),
        bill("b", completed=False, at_ms=2**62),
        bill("\ud800", kind="\0"),
    ]
    for some in ([], bills):
        told = overview(some, now_ms=NOW_MS, pruned=[bill("gone").to_json()]).to_json()
        jsonschema.validate(json.loads(json.dumps(told, allow_nan=False)), schema("bills"))


def test_whether_a_task_still_runs_is_told_by_the_databases_clock():
    """One machine is a week late, another one early."""
    week_ms = 7 * 86_400_000
    late = replace(bill("a", at_ms=NOW_MS - week_ms), saved_ms=NOW_MS - 1000)
    early = replace(bill("b", at_ms=NOW_MS + week_ms), saved_ms=NOW_MS - 2 * 86_400_000)
    (fix,) = outcomes([late, early], now_ms=NOW_MS)
    assert (1, 1) == (fix.running, fix.abandoned)


def test_pruned_tasks_are_told_beside_the_sums():
    """Only their totals are left."""
    totals = bill("gone", cost="0.5").to_json()
    seen = overview([bill("t")], now_ms=NOW_MS, pruned=[totals, {"task": "older"}])
    assert "Not in these sums: 2 tasks whose events were pruned, 100 tokens, $0.50" in str(seen)
    assert {"tasks": 2, "total_tokens": 100, "cost_usd": "0.5", "unpriced_calls": 0} == seen.to_json()["pruned"]


def test_a_long_overview_is_cut_and_says_so():
    """Fifty lines are enough for a console."""
    text = str(overview([bill(f"task {n}") for n in range(60)], now_ms=NOW_MS))
    assert "... 10 more tasks" in text
    assert "60 tasks, 60 model calls, 6,000 tokens, $60.00" in text


@pytest.mark.parametrize(
    ("amount", "shown"),
    [("0", "$0.00"), ("0E-12", "$0.00"), ("1", "$1.00"), ("1234.567", "$1,234.57"), ("0.5", "$0.50"), ("0.004", "$0.0040"),
     ("0.0000001", "$0.00000010"), ("0.999", "$1.00"), ("-0.25", "-$0.25"), ("0.0999", "$0.100")],
)  # fmt: skip
def test_money_is_never_shown_as_nothing(amount, shown):
    """At least two digits that count."""
    assert shown == format_usd(Decimal(amount))


def test_what_has_no_price_is_said():
    """Beside what has one."""
    assert "no price is known (2 calls without a price)" == format_cost(None, 2)
    assert "$1.00 and 1 call without a price" == format_cost(Decimal(1), 1)
    assert ("no price", "nothing") == (format_usd(None), format_cost(None, 0))
