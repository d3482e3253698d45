"""The books: who waits until when, which blocks are due, what is forgotten, on a manual clock."""

from __future__ import annotations

import pytest
from agentkv_vllm import sessions as books
from agentkv_vllm.sessions import Sessions, forecast_of, session_of
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.clock import ManualClock
from agentkv.hints.wire import WireHint, WireWait, read


def blocks(*numbers):
    return [(0, 128 * (place + 1), bytes([number])) for place, number in enumerate(numbers)]


def begin(sessions, name, *numbers):
    sessions.begins(name)
    sessions.holds(name, blocks(*numbers))
    sessions.ends(name)


def due(sessions):
    return [one.name for one in sessions.due()]


def test_blocks_are_due_at_the_low_quantile_less_the_way_back(sessions, clock, wired):
    """One wait in ten may end earlier; loading and the margin are taken off."""
    sessions.s_per_block = 0.25
    begin(sessions, "ada", 1, 2)
    assert "applied" == sessions.hear(wired("tool_start", "ada", p10=10, p50=20, p90=40))[0]
    expected = 100 + 10 - 2 * 0.25 - books.MARGIN_S
    assert sessions.next_due_s() == pytest.approx(expected)
    clock.advance(9)
    assert [] == due(sessions)
    clock.advance(0.5)
    (one,) = sessions.due()
    assert ("ada", (b"\x01", b"\x02")) == (one.name, one.keys)
    assert [] == due(sessions)  # told once
    sessions.check()


def test_times_count_from_when_the_hint_was_made(sessions, clock, wired):
    """What it took to get here is taken off; a clock that is far off does not make everything overdue."""
    begin(sessions, "ada", 1)
    sessions.hear(wired("tool_start", "ada", p10=10, late_s=4))
    assert sessions.next_due_s() == pytest.approx(106, abs=0.2)
    sessions.hear(wired("tool_start", "ada", p10=100, late_s=10_000))
    assert sessions.next_due_s() == pytest.approx(140, abs=0.2)
    sessions.hear(wired("tool_start", "ada", p10=10, late_s=-10_000))
    assert sessions.next_due_s() == pytest.approx(110, abs=0.2)


def test_the_end_of_the_tool_is_due_at_once(sessions, wired):
    """Also before the forecast thought so, and also when nobody said that it began."""
    begin(sessions, "ada", 1)
    sessions.hear(wired("tool_start", "ada", p10=50))
    sessions.hear(wired("tool_end", "ada"))
    assert ["ada"] == due(sessions)
    begin(sessions, "bob", 2)
    sessions.hear(wired("tool_error", "bob"))
    assert ["bob"] == due(sessions)


def test_of_several_tools_the_last_one_counts(sessions, wired):
    """One that ends early brings nothing back."""
    begin(sessions, "ada", 1)
    sessions.hear(wired("tool_start", "ada", p10=5, call="a"))
    sessions.hear(wired("tool_start", "ada", p10=60, call="b"))
    assert sessions.next_due_s() == pytest.approx(160, abs=0.2)
    assert ("applied", "1 calls still run") == sessions.hear(wired("tool_end", "ada", call="a"))
    assert sessions.next_due_s() == pytest.approx(160, abs=0.2)
    sessions.hear(wired("tool_end", "ada", call="b"))
    assert ["ada"] == due(sessions)


def test_an_update_replaces_what_was_expected(sessions, clock, wired):
    """The same call, with another forecast."""
    begin(sessions, "ada", 1)
    sessions.hear(wired("tool_start", "ada", p10=5))
    clock.advance(3)
    sessions.hear(wired("tool_update", "ada", p10=40))
    assert sessions.next_due_s() == pytest.approx(143, abs=0.2)


def test_a_session_that_calls_again_waits_for_nothing(sessions, wired):
    """Its request does what a prefetch would."""
    begin(sessions, "ada", 1)
    sessions.hear(wired("tool_start", "ada", p10=5))
    sessions.begins("ada")
    assert sessions.next_due_s() is None
    sessions.hear(wired("tool_start", "ada", p10=5))
    sessions.hear(wired("turn_start", "ada"))
    assert sessions.next_due_s() is None


def test_sessions_that_never_called_here_are_not_noted(sessions, wired):
    """Any number of hints for made-up names takes no memory."""
    for number in range(5000):
        assert "advisory" == sessions.hear(wired("tool_start", f"s{number}", p10=5))[0]
    assert 0 == sessions.stats()["sessions"]


def test_a_wait_of_which_nothing_is_heard_is_forgotten(sessions, clock, wired):
    """Four times its p90, at least a minute, at most an hour; nothing is armed for ever."""
    for name, p90, life_s in (("short", 1, 60), ("middle", 100, 400), ("long", 10_000, 3600)):
        begin(sessions, name, ord(name[0]))
        sessions.hear(wired("tool_start", name, p10=p90, p50=p90, p90=p90))
        assert sessions.get(name).ends_s == pytest.approx(clock.now_s() + life_s)
    clock.advance(61)
    assert 2 == sum(session.forecast is not None for session in sessions.every())
    clock.advance(3600)
    assert [] == [one for one in sessions.every() if one.forecast is not None]


def test_a_silent_session_is_forgotten_after_an_hour(sessions, clock):
    """Its blocks then belong to nobody; one that computes is not forgotten."""
    begin(sessions, "ada", 1)
    clock.advance(10)
    sessions.begins("bob")
    clock.advance(books.IDLE_LIFE_S - 5)
    assert ["bob"] == [one.name for one in sessions.every()]
    assert frozenset() == sessions.owners(b"\x01")
    sessions.check()


def test_a_request_whose_end_nobody_told_does_not_hold_its_session_for_ever(sessions, clock):
    """An hour later it counts as over."""
    sessions.begins("ada")
    clock.advance(books.LONGEST_LIFE_S + 1)
    assert [] == sessions.every()


def test_the_end_gives_up_what_nobody_else_has(sessions, wired):
    """A shared beginning stays; whoever asked is told of the rest, and a later call is a new session."""
    told, other = sessions.let_go(), sessions.let_go()
    begin(sessions, "ada", 1, 2, 3)
    begin(sessions, "bob", 1, 9)
    assert ("applied", "2 of 3 blocks are given up") == sessions.hear(wired("session_end", "ada"))
    assert [(b"\x02", True), (b"\x03", True)] == list(told) == list(other)
    assert frozenset({"bob"}) == sessions.owners(b"\x01")
    assert "advisory" == sessions.hear(wired("session_end", "ada"))[0]
    begin(sessions, "ada", 4)
    assert ("applied", "1 of 1 blocks are given up") == sessions.hear(wired("turn_end", "ada", final=True))
    sessions.check()


def test_a_place_in_the_prompt_has_one_block(sessions):
    """A conversation that was folded has other blocks from there on."""
    begin(sessions, "ada", 1, 2, 3)
    begin(sessions, "ada", 1, 7, 8)
    assert [b"\x01", b"\x07", b"\x08"] == sessions.get("ada").keys()
    assert frozenset() == sessions.owners(b"\x02")
    sessions.check()


def test_books_are_bounded(clock, monkeypatch, wired):
    """In sessions (the longest unused that computes nothing goes), blocks and calls."""
    monkeypatch.setattr(books, "MOST_BLOCKS", 3)
    monkeypatch.setattr(books, "MOST_CALLS", 2)
    sessions = Sessions(clock=clock, most=2)
    sessions.begins("old")
    begin(sessions, "idle", 1)
    begin(sessions, "new", 1, 2, 3, 4)
    assert ["old", "new"] == [one.name for one in sessions.every()]
    assert 3 == len(sessions.get("new").keys())
    outcomes = [sessions.hear(wired("tool_start", "new", p10=1, call=f"c{n}"))[0] for n in range(3)]
    assert ["applied", "applied", "failed"] == outcomes
    sessions.check()


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"agentkv": {"session": "ada"}}, "ada"),
        ({"agentkv": {"session": "../x"}}, "x-"),
        ({"agentkv": {"session": "a" * 10_000}}, "x-"),
        (None, ""), ({}, ""), ([], ""), ({"agentkv": "ada"}, ""), ({"agentkv": {"session": 7}}, ""),
        ({"agentkv": {"session": None}}, ""), ({"agentkv": {"session": ""}}, ""),
    ],
)  # fmt: skip
def test_whose_request_it_is(params, name):
    """Whatever stands in a request's kv_transfer_params, no error and no hostile name."""
    found = session_of(params)
    assert found == name or (name == "x-" and found.startswith("x-"))


@given(st.lists(st.integers(0, 2_592_000_000), min_size=3, max_size=3).map(sorted))
def test_the_forecast_has_the_quantiles_that_were_sent(quantiles):
    """Exactly those three, and it never shrinks in between."""
    forecast = forecast_of(WireWait(p10_ms=quantiles[0], p50_ms=quantiles[1], p90_ms=quantiles[2]))
    for level, value in zip((0.1, 0.5, 0.9), quantiles, strict=True):
        assert forecast.quantile_s(level) == pytest.approx(value / 1000)


HINTS = st.builds(
    lambda kind, session, p10, call, final: {
        "v": "agentkv.hint/1", "id": "h", "kind": kind, "ts_ms": 0, "session": session, "final": final,
        "call": {"id": call, "tool": "t"},
        "wait": None if p10 is None else {"p10_ms": p10, "p50_ms": 2 * p10, "p90_ms": 9 * p10},
    },
    st.sampled_from(["turn_start", "turn_end", "tool_start", "tool_update", "tool_end", "tool_error", "session_end"]),
    st.sampled_from(["a", "b", "c", "d"]),
    st.none() | st.integers(0, 100_000),
    st.sampled_from(["x", "y"]),
    st.sampled_from([False, False, False, True]),
)  # fmt: skip
DEEDS = st.lists(
    st.tuples(st.just("hint"), HINTS)
    | st.tuples(st.sampled_from(["begin", "end"]), st.sampled_from(["a", "b", "c", "d"]))
    | st.tuples(st.just("hold"), st.tuples(st.sampled_from(["a", "b", "c"]), st.lists(st.integers(0, 9), max_size=4)))
    | st.tuples(st.just("pass"), st.floats(0, 4000)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(DEEDS)
def test_whatever_comes_in_whatever_order_the_books_are_right(deeds):
    """Counts hold after every step, nobody is due twice for a hint, and time alone ends every wait."""
    clock = ManualClock(start_s=1.0)
    sessions = Sessions(clock=clock, most=3)
    for kind, what in deeds:
        if kind == "hint":
            hint = read(what)
            assert isinstance(hint, WireHint)
            assert sessions.hear(hint)[0] in ("applied", "advisory", "failed")
        elif kind == "begin":
            sessions.begins(what)
        elif kind == "end":
            sessions.ends(what)
        elif kind == "hold":
            name, numbers = what
            sessions.holds(name, [(0, place, bytes([10 * place + number])) for place, number in enumerate(numbers)])
        else:
            clock.advance(what)
        sessions.check()
        sessions.due()
        assert [] == sessions.due()
    clock.advance(books.LONGEST_LIFE_S + 1)
    assert all(session.forecast is None for session in sessions.every())
    sessions.check()
