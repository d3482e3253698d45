"""Windows in the data plane: what a context needs, which contexts can be gone on with, and who remembers what was passed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.core.residency import Tier
from agentkv.kv.book import Book
from agentkv.kv.window import Window

windows = st.integers(0, 70)
lengths = st.integers(0, 200)


def seen(window, computed, later=40):
    """By definition: the blocks before `computed` that a token there or later attends to."""
    return {
        place // 16
        for query in range(computed, computed + later)
        for place in range(max(0, query - window + 1) if window else 0, query)
        if place < computed
    }


@given(window=windows, computed=lengths)
def test_the_first_block_in_sight_is_that_of_the_definition(window, computed):
    """Every token to come is asked what it attends to; nothing before the first block is among it."""
    one = Window(tokens=window)
    wanted = seen(window, computed)
    last = -(-computed // 16)
    assert wanted <= set(range(one.first_seen(computed), last))
    if wanted:
        assert one.first_seen(computed) == min(wanted)
    assert one.live_blocks(computed) == last - one.first_seen(computed)
    if window:
        assert one.live_blocks(computed) <= one.reach_blocks + 1


@given(window=st.integers(1, 70))
def test_the_least_pool_holds_what_any_step_needs(window):
    """Blocks in sight, one to write, and one for a copy of a partial block; with one block less some step lacks one."""
    one = Window(tokens=window)
    in_hand = [place // 16 + 1 - one.first_seen(place) for place in range(300)]
    assert max(in_hand) == one.reach_blocks + 1 == one.least_blocks - 1
    assert one.longest(one.least_blocks) > 10**9
    assert one.longest(one.least_blocks - 1) == 16 * (one.least_blocks - 1)
    assert Window().longest(5) == 80


@given(window=windows, there=st.lists(st.booleans(), max_size=12), rest=st.integers(0, 15))
def test_a_context_can_be_gone_on_with_if_all_that_is_in_sight_is_there(window, there, rest):
    """Against the definition: the longest of all leading contexts none of whose seen blocks is missing."""
    book, keys = Book(Window(tokens=window)), [bytes([i]) * 16 for i in range(len(there))]
    for slot, (key, resident) in enumerate(zip(keys, there, strict=True)):
        if resident:
            book.place(book.ensure(key, None), Tier.HOST, slot)
    whole = len(keys) * 16 - (16 - rest if rest and keys else 0)
    tokens = {count: whole if count == len(keys) else 16 * count for count in range(len(keys) + 1)}
    fit = [
        count
        for count in range(len(keys) + 1)
        if all(there[block] for block in range(Window(tokens=window).first_seen(tokens[count]), count))
    ]
    first, blocks = book.in_sight(keys, whole)
    assert max(fit) == first + len(blocks)
    assert keys[first : first + len(blocks)] == [block.key for block in blocks]
    assert first == (Window(tokens=window).first_seen(tokens[max(fit)]) if max(fit) else 0)
    stalled, _ = book.in_sight(keys, whole, disk=False)
    assert stalled == first


def key(branch, number):
    return bytes([branch, number]) * 8


deeds = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=30
)


@settings(max_examples=300)
@given(deeds=deeds)
def test_sessions_that_pass_and_share_blocks_are_counted_right(deeds):
    """Three sessions over three contexts that begin alike: hold, pass one by one, go back, end. `check()` after each."""
    book = Book(Window(tokens=32))
    for session, branch, count, passed, ends in deeds:
        name, first = f"s{session}", min(passed, count)
        keys = [key(0 if number < 3 else branch, number) for number in range(count)]
        if ends:
            gone = book.let_go(name)
        else:
            gone = book.hold(name, "t", keys[first:], 16 * count, 0.0, past=keys[:first], first=first)
            holding = book.holdings[name]
            assert [one.key for one in holding.chain] == keys[first:]
            for block in holding.chain:
                if not block.resident:
                    book.place(block, Tier.DEVICE, count)
        for block in gone:
            assert not block.holders
            assert not block.behind
            if block.resident:
                book.vacate(block, Tier.DEVICE)
            book.tidy(block)
        book.check()
        holding = book.holdings.get(name)
        if holding is not None and holding.chain:
            front = holding.chain[0]
            alone = len(front.holders) == 1
            assert book.shed(name, front) == alone
            assert not book.shed(name, front)
            assert holding.past[holding.first - 1] is front
            book.check()
    for name in list(book.holdings):
        for block in book.let_go(name):
            if block.resident:
                book.vacate(block, Tier.DEVICE)
            book.tidy(block)
    book.check()
    assert {} == book.blocks


@pytest.mark.parametrize(("window", "order"), [(0, "cba"), (32, "abc")])
def test_of_what_nobody_holds_the_latest_stays_longest_behind_windows(window, order):
    """Without windows a leaf is worth nothing without what it stands on; behind windows the latest are worth most."""
    book = Book(Window(tokens=window))
    for slot, letter in enumerate("abc"):
        book.place(book.ensure(letter.encode(), None), Tier.DEVICE, slot)
    assert order == "".join(block.key.decode() for block in book.victims(Tier.DEVICE, 0.0))
