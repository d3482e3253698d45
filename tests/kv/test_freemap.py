"""Free slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.kv.freemap import FreeMap


@given(st.lists(st.one_of(st.integers(0, 6), st.just("give")), max_size=60))
def test_slots_are_taken_once_and_counted(deeds):
    """Whatever is taken and given, nobody gets a slot that somebody has."""
    free, taken = FreeMap(16), []
    for deed in deeds:
        if deed == "give":
            if taken:
                free.give(taken.pop())
        elif deed > len(free):
            with pytest.raises(ValueError, match="free"):
                free.take(deed)
        else:
            taken.append(free.take(deed))
        free.check()
        slots = [slot for group in taken for slot in group]
        assert len(slots) == len(set(slots))
        assert 16 - len(slots) == len(free)


def test_neighbours_are_preferred():
    """A run of neighbours is one copy, so a hole that is too small is passed over."""
    free = FreeMap(8)
    first = free.take(8)
    free.give([first[1], first[4], first[5], first[6]])
    assert [4, 5, 6] == free.take(3)


def test_giving_twice_is_a_bug():
    """It raises instead of handing one slot to two owners later."""
    free = FreeMap(2)
    (slot,) = free.take(1)
    free.give([slot])
    with pytest.raises(ValueError, match="already free"):
        free.give([slot])


def test_a_map_grows():
    """New slots come at the end."""
    free = FreeMap(1)
    free.take(1)
    free.grow(2)
    assert [1, 2] == free.take(2)
