"""Free slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.kv.freemap import FreeMap


def runs(slots):
    """How many runs of neighbours."""
    return sum(after != before + 1 for before, after in zip([-2, *slots], slots, strict=False))


@given(st.data())
def test_slots_are_taken_once_and_counted(data):
    """Whatever is taken, given in whatever order, and grown, nobody gets a slot that somebody has."""
    free, taken, size = FreeMap(24), set(), 24
    for deed in data.draw(st.lists(st.sampled_from(["take", "take", "give", "grow"]), max_size=40)):
        if deed == "grow":
            more = data.draw(st.integers(0, 5))
            free.grow(more)
            size += more
        elif deed == "give" and taken:
            given_back = data.draw(st.lists(st.sampled_from(sorted(taken)), unique=True))
            free.give(given_back)
            taken.difference_update(given_back)
        elif deed == "take":
            n = data.draw(st.integers(0, size + 1))
            if n > len(free):
                with pytest.raises(ValueError, match="free"):
                    free.take(n)
            else:
                slots = free.take(n)
                assert n == len(slots) == len(set(slots) - taken)
                taken.update(slots)
        free.check()
        assert [slot not in taken for slot in range(size)] == [free.is_free(slot) for slot in range(size)]
        assert (size - len(taken), size) == (len(free), free.size)


@given(holes=st.lists(st.integers(1, 40), min_size=1, max_size=12), n=st.integers(1, 200))
def test_few_long_runs_are_preferred_to_many_short_ones(holes, n):
    """At most twice as many runs as the longest ones would need; one, if a run is twice as long as what is asked."""
    free, at = FreeMap(sum(holes) + len(holes)), 0
    free.take(free.size)
    for hole in holes:
        free.give(range(at, at + hole))
        at += hole + 1
    n = min(n, len(free))
    fewest, left = 0, n
    for hole in sorted(holes, reverse=True):
        if left > 0:
            fewest, left = fewest + 1, left - hole
    got = runs(free.take(n))
    assert fewest <= got <= 2 * fewest
    if max(holes) >= 2 * n:
        assert 1 == got


def test_neighbours_are_preferred():
    """A run of neighbours is one copy, so a hole that is too small is passed over."""
    free = FreeMap(8)
    first = free.take(8)
    free.give([first[1], first[4], first[5], first[6]])
    assert [4, 5, 6] == free.take(3)


def test_the_smallest_hole_that_is_large_enough_is_taken():
    """A long run stays whole for whoever needs one."""
    free = FreeMap(64)
    free.take(64)
    free.give([*range(40), *range(50, 54), *range(60, 63)])
    assert [60, 61, 62] == free.take(3)
    assert [50, 51, 52] == free.take(3)


def test_a_large_map_in_small_holes_gives_no_more_runs_than_it_must():
    """2,048 slots out of a million, in scattered holes of 16 and some of 1,000: the long ones first."""
    free = FreeMap(1_000_000)
    free.take(1_000_000)
    for at in range(0, 900_000, 32):
        free.give(range(at, at + 16))
    for at in (910_000, 920_000):
        free.give(range(at, at + 1000))
    assert 2 + 3 == runs(free.take(2048))
    assert 128 == runs(free.take(2048))
    free.check()


def test_giving_twice_is_a_bug():
    """It raises instead of handing one slot to two owners later; so does giving a slot twice in one go."""
    free = FreeMap(4)
    slots = free.take(3)
    free.give(slots[:1])
    for twice in ([0], [0, 1], [1, 1]):
        with pytest.raises(ValueError, match="already free"):
            free.give(twice)
    with pytest.raises(ValueError, match="slot 1 is already free"):
        free.give([2, 1])
    free.check()


def test_a_map_grows():
    """New slots come at the end."""
    free = FreeMap(1)
    free.take(1)
    free.grow(2)
    assert [1, 2] == free.take(2)
