"""Windows in the data plane: what a context needs, which contexts can be gone on with, and who remembers what was passed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.core.residency import Action, Tier
from agentkv.kv.book import Book
from agentkv.kv.family import hand_over, make_family
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.window import Window

from .conftest import GEOMETRY

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


WINDOW = 40
"""At the border of a block its next token sees three blocks."""


def test_a_chain_far_longer_than_the_device_passes_through_it(rig):
    """Twenty blocks through five; below them nothing is written, and what is left is the window."""
    r = rig(device=5, window=WINDOW)
    keys = r.keys("a", 20)
    r.turn_of("a", keys)
    r.settle()
    assert (3, 0, 0, 0) == r.where("a")
    assert 0 == r.tiers.stats()["bytes"]["d2h"]
    assert 20 == r.tiers.match(keys)
    assert [] == r.wrong


def test_what_a_call_has_passed_is_not_written_to_make_room(rig):
    """Blocks of the turn before are held and have no copy; once the window has passed them they go as they are."""
    r = rig(device=5, window=WINDOW)
    keys = r.keys("a", 16)
    r.turn_of("a", keys[:5])
    r.turn_of("a", keys)
    r.settle()
    assert 0 == r.tiers.stats()["bytes"]["d2h"]
    assert [] == r.wrong


@pytest.mark.parametrize("landed", [False, True])
def test_a_copy_below_the_device_is_given_up_when_the_window_has_passed(rig, landed):
    """One that is still on its way lands, since it had started, and goes."""
    r = rig(window=WINDOW, device=12)
    keys = r.keys("a", 9)
    r.turn_of("a", keys[:4])
    r.move("a", Action.WRITE, Tier.HOST)
    while not r.tiers.stats()["moving_blocks"]:
        r.turn()
    if landed:
        r.settle()
        assert 3 == r.tiers.stats()["host"]["used"]
    r.tiers.hold("a", "a", keys, 9 * 16)
    r.settle()
    assert 0 == r.tiers.stats()["host"]["used"]


def test_a_context_without_its_partial_block_keeps_what_its_last_full_one_needs(rig):
    """Tokens behind the last key do not move the window: the context is gone on with at its border."""
    r = rig(device=12, window=WINDOW)
    keys = r.keys("a", 9)
    r.turn_of("a", keys)
    r.tiers.hold("a", "a", keys, 9 * 16 + 8)
    r.park("a")
    assert 9 == r.tiers.match(keys)
    lease = r.start("a", keys)
    assert 6 == lease.first
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    r.settle()
    assert [] == r.wrong


def test_the_template_of_an_ended_task_is_kept_though_its_window_had_passed_it(rig):
    """Two minutes for the next task that begins the same way; nothing else of the task."""
    r = rig(device=12, window=WINDOW)
    keys = r.keys("a", 9)
    r.turn_of("a", keys)
    r.tiers.hold("a", "a", keys, 9 * 16, template_tokens=4 * 16 + 3)
    r.tiers.drop_task("a")
    r.settle()
    assert (4, 4) == (r.tiers.match(keys), r.tiers.stats()["template_blocks"])
    assert 8 == r.tiers.stats()["device"]["free"]
    r.turn_of("b", keys[:4] + r.keys("b", 5))
    r.clock.advance(121)
    r.tiers.tick()
    assert 4 == r.tiers.match(keys)  # it was taken over, though all of it is behind that window too
    r.tiers.drop_task("b")
    r.settle()
    assert 12 == r.tiers.stats()["device"]["free"]


def test_what_is_as_good_as_free_is_told_as_free(rig):
    """A policy that asks whether there is room hears of blocks that nobody needs."""
    r = rig(device=12, window=WINDOW)
    r.turn_of("a", r.keys("a", 12))
    r.settle()
    assert (0, 9, 3) == tuple(r.tiers.stats()["device"][name] for name in ("free", "behind", "dirty"))
    assert 9 == r.tiers.residency("a").free_blocks


def test_a_clean_block_that_nobody_needs_is_counted_clean_only(rig):
    """The template of an ended task that has copies on the host, and one block of it that its window had passed."""
    r = rig(device=12, window=WINDOW)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.tiers.hold("a", "a", keys, 4 * 16, template_tokens=4 * 16)
    r.moved("a", Action.WRITE, Tier.HOST)
    r.tiers.drop_task("a")
    r.settle()
    told = r.tiers.stats()["device"]
    assert (4, 3, 4, 0) == tuple(told[name] for name in ("keyed", "clean", "behind", "dirty"))


def test_a_session_wakes_on_another_device_with_its_window_only(rig_class, tmp_path):
    """The blocks before have no copy that could be shared; those in sight are found behind the hole."""
    shared = make_family(GEOMETRY, device="cpu", host_bytes=16 * GEOMETRY.slot_bytes, slab=None)
    a, b = (rig_class(device=12, family=shared, streams=AdversarialStreams(at), window=WINDOW) for at in range(2))
    keys = a.keys("s", 9)
    a.turn_of("s", keys)
    a.moved("s", Action.WRITE, Tier.HOST)
    a.tiers.hold("s", "s", keys, 9 * 16, template_tokens=4 * 16)
    assert 9 == b.tiers.match(keys)  # shared without being handed over, too
    hand_over("s", source=a.tiers, to=b.tiers)
    assert b.tiers._book.holdings["s"].first == 6
    assert 9 == b.tiers.match(keys)
    assert (6, 3) == (b.turn_of("s", keys).first, b.tiers.residency("s").total_blocks)
    b.settle()
    assert [] == b.wrong
    hand_over("s", source=b.tiers, to=a.tiers)
    a.tiers.drop_task("s")
    assert 0 == a.tiers.stats()["template_blocks"]  # what was handed over is no template: that is behind the window
    for one in (a, b):
        one.tiers.check()
        one.close()


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_copies_and_compute_reads_a_wrong_byte(rig, seed):
    """Sessions that grow, go back and share beginnings, moves at any moment, on streams that do all that CUDA may do."""
    dice = random.Random(seed)
    r = rig(
        device=dice.choice([5, 6, 9]), host=dice.choice([3, 8]), disk=dice.choice([0, 12]), window=dice.choice([16, 33, 40]),
        streams=AdversarialStreams(seed),
    )  # fmt: skip
    chains = {name: r.keys("same", 3) + r.keys(name, 17) for name in "abc"}
    moves = [(Action.WRITE, Tier.HOST), (Action.DEMOTE, Tier.HOST), (Action.DEMOTE, Tier.DISK), (Action.PREFETCH, None)]
    reused = 0
    for _turn in range(30):
        name = dice.choice("abc")
        if dice.random() < 0.1:
            r.tiers.drop(name)
        keys = chains[name][: dice.randrange(1, 20)]
        reused += r.turn_of(name, keys).end
        r.tiers.check()
        for action, to in dice.choices(moves, k=dice.randrange(3)):
            r.move(dice.choice("abc"), action, to)
        for _ in range(dice.randrange(6)):
            r.turn()
    r.settle()
    assert [] == r.wrong
    assert reused > 30
    for name in "abc":
        r.tiers.drop(name)
    r.settle()
    assert r.tiers.num_blocks == r.tiers.stats()["device"]["free"]
    assert 0 == r.tiers.stats()["host"]["used"]
