"""Who gives way in a tier: the policy's own order, from the end of each prompt, and never for somebody less urgent."""

from __future__ import annotations

import itertools

import pytest
from agentkv_vllm.order import Order
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.clock import ManualClock
from agentkv.policy.evict import least_recently_used
from agentkv.policy.hazard import stall_rate


class Copy:
    def __init__(self, ref_cnt=0):
        self.ref_cnt = ref_cnt


@pytest.fixture
def order(sessions):
    return Order(sessions)


@pytest.fixture
def hold(sessions, order):
    """`hold("ada", 1, 2)`: a request of that session with those blocks, all of them in the tier."""

    def held(name, *numbers):
        keys = [bytes([number]) for number in numbers]
        if name:
            sessions.begins(name)
            sessions.holds(name, [(0, place, key) for place, key in enumerate(keys)])
            sessions.ends(name)
        for key in keys:
            if key not in order.copies:
                order.add(key, Copy())
        order.use(keys)

    return held


def numbers(keys):
    return None if keys is None else [key[0] for key in keys]


def test_whoever_is_back_last_gives_way_first_from_its_end(sessions, order, hold, wired):
    """The beginning of a prompt is of use without its end, not the other way round."""
    hold("soon", 1, 2)
    hold("late", 3, 4)
    sessions.hear(wired("tool_start", "soon", p10=5))
    sessions.hear(wired("tool_start", "late", p10=500))
    assert [4, 3, 2] == numbers(order.victims(3, ()))
    sessions.hear(wired("tool_update", "soon", p10=5000))
    assert [2, 1, 4] == numbers(order.victims(3, ()))


def test_it_is_the_policys_own_key(sessions, order):
    """The hazard rule's by default, another one if given."""
    assert stall_rate is order._key
    assert least_recently_used is Order(sessions, key=least_recently_used)._key


def test_blocks_that_nobody_has_count_by_their_last_use(sessions, order, hold, clock, wired):
    """Unused for x, expected in about x: the same sentence for sessions of which nothing is known."""
    hold("", 1)
    clock.advance(100)
    hold("", 2)
    hold("ada", 3)
    sessions.hear(wired("tool_start", "ada", p10=50))
    clock.advance(10)
    assert [1, 3, 2] == numbers(order.victims(3, ()))


def test_ended_sessions_go_before_all_others(sessions, order, hold, clock, wired):
    """Before blocks that were not used for hours."""
    hold("", 1)
    clock.advance(5000)
    hold("ada", 2, 3)
    hold("bob", 2)
    sessions.hear(wired("session_end", "ada"))
    assert [3, 1, 2] == numbers(order.victims(3, ()))


def test_a_shared_block_counts_as_that_of_the_most_urgent(sessions, order, hold, wired):
    """However late the others are."""
    hold("soon", 1, 2)
    hold("late", 1, 3)
    sessions.hear(wired("tool_start", "soon", p10=5))
    sessions.hear(wired("tool_start", "late", p10=500))
    assert [3, 2, 1] == numbers(order.victims(3, ()))


def test_a_prefetch_takes_only_from_those_that_are_back_later(sessions, order, hold, wired):
    """Neither its own blocks, nor those of a session that computes, nor more than there are."""
    hold("mine", 1)
    hold("later", 2)
    hold("sooner", 3)
    hold("running", 4)
    for name, p10 in (("mine", 50), ("later", 500), ("sooner", 5)):
        sessions.hear(wired("tool_start", name, p10=p10))
    sessions.begins("running")
    assert [2] == numbers(order.victims(1, (), asker="mine"))
    assert order.victims(2, (), asker="mine") is None
    assert order.victims(1, (b"\x02",), asker="mine") is None
    assert [2, 1, 3] == numbers(order.victims(3, ()))


def test_a_prefetch_for_a_session_that_is_gone_takes_nothing_from_the_living(sessions, order, hold, wired):
    """It may have been forgotten meanwhile."""
    hold("later", 2)
    sessions.hear(wired("tool_start", "later", p10=0.001))
    sessions.begins("later")
    assert order.victims(1, (), asker="gone") is None


def test_a_session_whose_tool_has_ended_is_not_pushed_out_by_the_next_one(sessions, order, hold, clock, wired):
    """Its call is due any moment, and waits for the other one's: else the two push each other out in turn."""
    hold("first", 1)
    hold("second", 2)
    for name in ("first", "second"):
        sessions.hear(wired("tool_start", name, p10=5))
    sessions.hear(wired("tool_end", "first"))
    clock.advance(20)
    sessions.hear(wired("tool_end", "second"))
    assert order.victims(1, (), asker="second") is None
    clock.advance(61)
    sessions.hear(wired("tool_update", "second", p10=5))
    assert [1] == numbers(order.victims(1, (), asker="second"))  # it never came


def test_a_session_that_computes_was_used_just_now(sessions, order, hold, clock):
    """However long its answer gets."""
    hold("busy", 1)
    sessions.begins("busy")
    clock.advance(100)
    hold("", 2)
    clock.advance(10)
    assert [2, 1] == numbers(order.victims(2, ()))


def test_busy_and_protected_copies_stay(sessions, order, hold):
    """All or nothing: where there are not so many to give, nothing changes."""
    hold("ada", 1, 2, 3)
    order.copies[b"\x03"].ref_cnt = 1
    assert [1] == numbers(order.victims(1, {b"\x02"}))
    assert order.victims(2, {b"\x02"}) is None
    assert 3 == len(order.copies)


DEEDS = st.lists(
    st.tuples(st.sampled_from(["hold", "wait", "evict", "end", "pass", "busy"]), st.integers(0, 5), st.integers(0, 40)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(DEEDS)
def test_victims_are_what_a_slow_count_says(deeds):
    """Against the specification: sort every candidate by its most urgent owner's key, then by place; nothing else gives way."""
    from agentkv_vllm.sessions import Session, Sessions

    from agentkv.hints.wire import read

    clock = ManualClock(start_s=10.0)
    sessions = Sessions(clock=clock)
    order = Order(sessions)
    for kind, who, number in deeds:
        name = f"s{who}"
        if kind == "hold":
            keys = [bytes([place, (who + number) % 3 if place < 2 else who]) for place in range(1 + number % 4)]
            sessions.begins(name)
            sessions.holds(name, [(0, place, key) for place, key in enumerate(keys)])
            sessions.ends(name)
            for key in keys:
                if key not in order.copies:
                    order.add(key, Copy())
        elif kind == "wait":
            wait = {"p10_ms": 100 * number, "p50_ms": 200 * number, "p90_ms": 400 * number}
            hint = {"v": "agentkv.hint/1", "id": "h", "kind": "tool_start", "ts_ms": 0, "session": name, "wait": wait}
            sessions.hear(read(hint))
        elif kind == "end":
            sessions.hear(read({"v": "agentkv.hint/1", "id": "h", "kind": "session_end", "ts_ms": 0, "session": name}))
        elif kind == "pass":
            clock.advance(number)
        elif kind == "busy" and order.copies:
            copy = order.copies[sorted(order.copies)[number % len(order.copies)]]
            copy.ref_cnt = 1 - copy.ref_cnt
        else:
            found = order.victims(1 + number % 5, ())
            now_s = clock.now_s()
            ranks = {session.name: stall_rate(session, now_s) for session in sessions.every()}
            free = {key for key, copy in order.copies.items() if copy.ref_cnt == 0}
            if found is None:
                assert len(free) < 1 + number % 5
                continue
            assert len(set(found)) == len(found) == 1 + number % 5
            assert set(found) <= free

            def rank(key, ranks=ranks, now_s=now_s):
                owners = sessions.owners(key)
                loose = Session(name="", order=0, used_s=order.used_s(key))
                return min(ranks[owner] for owner in owners) if owners else stall_rate(loose, now_s)

            kept = free - set(found)
            assert all(rank(one) >= rank(other) for one, other in itertools.product(found, kept))
            for key in found:
                order.remove(key)
        order.check()
    sessions.check()


def test_among_many_sessions_ranks_are_a_moment_old_and_newcomers_lose_nothing(sessions, order, hold, clock, wired):
    """Asking each of a thousand at every eviction would cost the scheduler milliseconds."""
    for number in range(100):
        hold(f"s{number}", number)
        sessions.hear(wired("tool_start", f"s{number}", p10=100 + number))
    assert [99] == numbers(order.victims(1, ()))
    sessions.hear(wired("tool_update", "s0", p10=5000))
    hold("new", 99, 200)
    clock.advance(0.01)
    assert [98] == numbers(order.victims(1, ()))
    clock.advance(0.1)
    assert [0] == numbers(order.victims(1, ()))


def test_blocks_whose_owner_went_unheard_are_found_when_room_is_short(sessions, order, hold, wired):
    """The queue of what was let go is bounded; nothing stays for ever because of that."""
    hold("ada", 1, 2)
    assert [2] == numbers(order.victims(1, ()))
    assert {b"\x01", b"\x02"} == {*order._loose, *order._held}
    order.victims(3, ())
    sessions.hear(wired("session_end", "ada"))
    order._let_go.clear()
    assert {1, 2} == set(numbers(order.victims(2, ())))
    order.check()


def test_what_an_ended_session_left_goes_before_the_longest_wait(sessions, order, hold, wired):
    """However recently it was used."""
    hold("late", 1)
    sessions.hear(wired("tool_start", "late", p10=50_000))
    hold("ada", 2)
    sessions.hear(wired("session_end", "ada"))
    assert [2, 1] == numbers(order.victims(2, ()))


def test_a_prefetch_takes_no_block_that_was_used_more_recently_than_its_session_is_away(
    sessions, order, hold, clock, wired
):
    """Also of those that no session has."""
    hold("mine", 1)
    sessions.hear(wired("tool_start", "mine", p10=50))
    hold("", 2)
    assert order.victims(1, (), asker="mine") is None
    clock.advance(40)
    assert [2] == numbers(order.victims(1, (), asker="mine"))
