"""The order in which copies are given up."""

from __future__ import annotations

import pytest

from agentkv.core.residency import Tier
from agentkv.kv.book import Book

NOW_S = 100.0


@pytest.fixture
def book():
    made = Book()
    yield made
    made.check()


def add(book, session, keys, *, used_s=0.0, expected_s=None, tier=Tier.DEVICE):
    book.hold(session, session, [key.encode() for key in keys], 0, used_s)
    book.holdings[session].expected_s = expected_s
    for key in keys:
        block = book.blocks[key.encode()]
        if not block.has(tier):
            book.place(block, tier, len(book.blocks))


def order(book, **options):
    return "".join(block.key.decode() for block in book.victims(Tier.DEVICE, NOW_S, **options))


def test_the_least_recently_used_session_loses_its_end_first(book):
    """LRU over sessions, leaves first inside."""
    add(book, "old", "abc", used_s=10)
    add(book, "new", "xyz", used_s=90)
    assert "cbazyx" == order(book)


def test_whoever_is_back_last_goes_first(book):
    """A forecast beats recency."""
    add(book, "soon", "ab", used_s=10, expected_s=NOW_S + 1)
    add(book, "late", "xy", used_s=90, expected_s=NOW_S + 60)
    assert "yxba" == order(book)


def test_an_unknown_return_counts_as_long_as_the_absence_so_far(book):
    """Away for 30 s without a forecast goes between back in 10 and back in 60 seconds."""
    add(book, "unknown", "u", used_s=NOW_S - 30)
    add(book, "soon", "s", expected_s=NOW_S + 10)
    add(book, "late", "l", expected_s=NOW_S + 60)
    add(book, "overdue", "o", expected_s=NOW_S - 1)
    assert "luso" == order(book)


def test_never_back_goes_before_everything(book):
    """Infinity is a forecast too."""
    add(book, "late", "l", expected_s=NOW_S + 1e6)
    add(book, "never", "n", expected_s=float("inf"))
    assert "nl" == order(book)


def test_a_shared_block_counts_for_whoever_is_back_first(book):
    """The prefix of a session that is back soon stays, whoever else holds it."""
    add(book, "late", "abx", expected_s=NOW_S + 60)
    add(book, "soon", "aby", expected_s=NOW_S + 1)
    assert "xyba" == order(book)


def test_a_demoted_session_goes_first_above_its_tier(book):
    """Demoted to disk: its copies on device and host are the first to go; demoted to host: those on the device."""
    add(book, "soon", "a", expected_s=NOW_S + 1)
    add(book, "late", "b", expected_s=NOW_S + 60)
    book.holdings["soon"].demoted_to = Tier.HOST
    assert "ab" == order(book)
    for key in (b"a", b"b"):
        book.place(book.blocks[key], Tier.HOST, key[0])
    assert [b"b", b"a"] == [block.key for block in book.victims(Tier.HOST, NOW_S)]


def test_blocks_without_a_holder_go_before_all_others(book):
    """Left over by a cancelled sequence: the newest first, for it stands on the older."""
    add(book, "late", "l", expected_s=NOW_S + 60)
    for slot, key in enumerate((b"p", b"q"), 50):
        book.place(book.ensure(key, None), Tier.DEVICE, slot)
    assert "qpl" == order(book)


def test_below_a_session_only_what_goes_before_it(book):
    """Nobody makes room at the cost of those who are back sooner, nor at its own."""
    add(book, "late", "ax", expected_s=NOW_S + 60)
    add(book, "middle", "ay", expected_s=NOW_S + 30)
    add(book, "soon", "z", expected_s=NOW_S + 1)
    assert "x" == order(book, below=book.holdings["middle"])


def test_holding_a_longer_chain_keeps_what_is_the_same(book):
    """The next turn adds blocks; a template that strips the tail loses them."""
    add(book, "s", "abc")
    assert [] == book.hold("s", "s", [b"a", b"b", b"c", b"d"], 0, NOW_S)
    assert 1 == book.holdings["s"].missing
    lost = book.hold("s", "s", [b"a", b"b"], 0, NOW_S)
    assert [b"c", b"d"] == [block.key for block in lost]


def test_a_chain_with_a_key_twice_changes_nothing(book):
    """It cannot be one; the session stays as it was."""
    add(book, "s", "abc")
    with pytest.raises(ValueError, match="differ"):
        book.hold("s", "s", [b"a", b"a"], 0, NOW_S)
    assert 3 == len(book.holdings["s"].chain)


def test_a_policys_key_says_who_gives_way(book):
    """The greatest first, demoted ones still before all others; without a key it is whoever is back last."""
    for name, place in (("a", 2), ("b", 3), ("c", 1)):
        add(book, name, [name])
        book.holdings[name].order = place
    book.rank = lambda held, _now_s: (held.order,)
    assert "bac" == order(book)
    book.holdings["c"].demoted_to = Tier.HOST
    assert "cba" == order(book)
