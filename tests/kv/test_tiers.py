"""What an engine and a planner see of the tiers, on the adversary's streams."""

from __future__ import annotations

import threading

import pytest

from agentkv.core.residency import Action, Outcome, Tier
from agentkv.errors import Closed, ConfigError
from agentkv.kv.streams import DONE
from agentkv.kv.streams.cpu import CpuStreams
from agentkv.kv.tiers import Tiers


def test_a_session_that_was_kept_is_found_on_the_device(rig):
    """A second turn leases all blocks of the first, and nothing is copied."""
    r = rig()
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    lease = r.turn_of("a", keys)
    r.settle()
    assert 4 == len(lease.blocks)
    assert 0 == lease.loaded_blocks
    assert [] == r.wrong
    assert 0 == r.tiers.stats()["bytes"]["h2d"]


def test_a_session_comes_back_from_the_host_bit_for_bit(rig):
    """After its device blocks went, the bytes come from the host."""
    r = rig()
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    assert (0, 4, 0, 0) == r.where("a")
    lease = r.turn_of("a", keys)
    r.settle()
    assert (4, 4, 0) == (lease.loaded_blocks, lease.from_host, lease.from_disk)
    assert [] == r.wrong


def test_a_session_comes_back_from_disk_bit_for_bit(rig):
    """With a host tier too small for two sessions, the first one's blocks come from disk."""
    r = rig(device=8, host=4, disk=16)
    for name in ("a", "b"):
        r.turn_of(name, r.keys(name, 4))
        assert Outcome.DONE == r.moved(name, Action.DEMOTE, Tier.DISK).outcome
    r.park("a", Tier.DISK)
    assert (0, 0, 4, 0) == r.where("a")
    lease = r.turn_of("a", r.keys("a", 4))
    r.settle()
    assert (4, 0, 4) == (lease.loaded_blocks, lease.from_host, lease.from_disk)
    assert [] == r.wrong


def test_writing_makes_clean_and_frees_nothing(rig):
    """After WRITE the device copies are still there, and evictable at once."""
    r = rig()
    r.turn_of("a", r.keys("a", 4))
    receipt = r.moved("a", Action.WRITE, Tier.HOST)
    assert (Outcome.DONE, 4) == (receipt.outcome, receipt.blocks)
    assert (4, 4, 0, 0) == r.where("a")
    assert 4 == r.tiers.stats()["device"]["clean"]
    assert r.tiers.allocate(8) is not None


def test_a_second_write_has_nothing_to_do(rig):
    """Only blocks without a copy are written; the receipt of none comes at once."""
    r = rig()
    r.turn_of("a", r.keys("a", 4))
    r.moved("a", Action.WRITE, Tier.HOST)
    before = r.tiers.stats()["bytes"]["d2h"]
    assert r.move("a", Action.WRITE, Tier.HOST) is False
    assert Outcome.NOTHING == r.receipts[-1].outcome
    assert before == r.tiers.stats()["bytes"]["d2h"]


@pytest.mark.parametrize("action", [Action.DEMOTE, Action.WRITE])
def test_a_context_larger_than_the_host_reaches_the_disk(rig, action):
    """Its copies on the host that are on disk too make room for the rest of it."""
    r = rig(device=16, host=4, disk=16)
    keys = r.keys("a", 12)
    r.turn_of("a", keys)
    receipt = r.moved("a", action, Tier.DISK)
    assert (Outcome.DONE, 12) == (receipt.outcome, receipt.blocks)
    assert 12 == r.where("a")[2]
    r.evict("a", Tier.DEVICE)
    r.turn_of("a", keys)
    assert [] == r.wrong


def test_a_context_larger_than_the_host_comes_back_ahead(rig):
    """A prefetch passes through the few host slots, as a load on demand does."""
    r = rig(device=16, host=4, disk=16)
    keys = r.keys("a", 12)
    r.turn_of("a", keys)
    r.moved("a", Action.DEMOTE, Tier.DISK)
    r.evict("a", Tier.DEVICE)
    receipt = r.moved("a", Action.PREFETCH, Tier.DEVICE)
    assert (Outcome.DONE, 12) == (receipt.outcome, 12)
    assert (12, 12) == (r.where("a")[0], r.where("a")[2])
    r.turn_of("a", keys)
    assert [] == r.wrong


def test_a_disk_too_small_for_a_context_takes_what_it_can(rig):
    """The receipt says so, nothing waits for ever, and no copy on the host goes that is not on disk."""
    r = rig(device=16, host=4, disk=2)
    r.turn_of("a", r.keys("a", 12))
    assert 4 == r.moved("a", Action.WRITE, Tier.HOST).blocks
    assert 4 == r.tiers.vacate("a", Tier.DEVICE)
    receipt = r.moved("a", Action.DEMOTE, Tier.DISK)
    assert Outcome.PARTIAL == receipt.outcome
    assert (8, 2, 0) == (r.where("a")[0], r.where("a")[2], r.where("a")[3])


def test_a_prefetch_takes_free_room_only(rig):
    """PREFETCH brings back the leading blocks that fit, and evicts nobody who is back sooner."""
    r = rig(device=6, host=12)
    r.turn_of("a", r.keys("a", 4))
    r.park("a")
    r.turn_of("b", r.keys("b", 4))
    r.moved("b", Action.WRITE, Tier.HOST)
    r.tiers.expect("b", r.clock.now_s() + 1)
    r.tiers.expect("a", r.clock.now_s() + 100)
    receipt = r.moved("a", Action.PREFETCH, Tier.DEVICE)
    assert (Outcome.PARTIAL, 2) == (receipt.outcome, receipt.blocks)
    assert (2, 4, 0, 0) == r.where("a")
    assert (4, 4, 0, 0) == r.where("b")


def test_a_prefetch_evicts_whoever_is_back_later(rig):
    """Clean blocks of others are room, if their session can wait longer."""
    r = rig(device=6, host=12)
    r.turn_of("a", r.keys("a", 4))
    r.park("a")
    r.turn_of("b", r.keys("b", 4))
    r.moved("b", Action.WRITE, Tier.HOST)
    r.tiers.expect("b", r.clock.now_s() + 100)
    r.tiers.expect("a", r.clock.now_s() + 1)
    assert Outcome.DONE == r.moved("a", Action.PREFETCH, Tier.DEVICE).outcome
    assert (4, 2) == (r.where("a")[0], r.where("b")[0])


def test_a_lease_overtakes_prefetches_queued_before_it(rig):
    """Its blocks are on their way as a background job already; now somebody waits for them."""
    r = rig(device=20, host=20)
    for name in ("v", "w", "x", "y", "z"):
        r.turn_of(name, r.keys(name, 4))
        r.moved(name, Action.WRITE, Tier.HOST)
        r.evict(name, Tier.DEVICE)
    r.receipts.clear()
    for name in ("v", "w", "x", "y", "z"):
        assert r.move(name, Action.PREFETCH, Tier.DEVICE)
    lease = r.start("z", r.keys("z", 4))
    r.until(lambda: lease.ticket.done or None)
    assert {"v", "w"} >= {receipt.move.session for receipt in r.receipts if receipt.move.session != "z"}
    r.tiers.release("z", lease.blocks, used=r.streams.record())


def test_a_prefetch_to_the_host_fills_the_host(rig):
    """Blocks on disk come up to the host, and not further."""
    r = rig(device=4, host=4, disk=8)
    r.turn_of("a", r.keys("a", 4))
    r.park("a", Tier.DISK)
    r.turn_of("b", r.keys("b", 4))
    r.park("b")
    assert (0, 0, 4, 0) == r.where("a")
    r.tiers.drop("b")
    assert Outcome.DONE == r.moved("a", Action.PREFETCH, Tier.HOST).outcome
    assert (0, 4, 4, 0) == r.where("a")


def test_a_dropped_session_is_gone_without_a_byte_written(rig):
    """DROP frees every tier and writes nothing (A6)."""
    r = rig(disk=16)
    r.turn_of("a", r.keys("a", 4))
    assert Outcome.DONE == r.moved("a", Action.DROP).outcome
    stats = r.tiers.stats()
    assert (0, 0, 0) == tuple(stats[tier]["used"] for tier in ("device", "host", "disk"))
    assert 0 == stats["bytes"]["d2h"]
    assert r.tiers.residency("a") is None
    assert 0 == r.tiers.match(r.keys("a", 4))


def test_a_dropped_task_takes_all_its_sessions(rig):
    """`drop_task` forgets the task's sessions and no other."""
    r = rig()
    r.turn_of("a1", r.keys("a1", 2), task="a")
    r.turn_of("a2", r.keys("a2", 2), task="a")
    r.turn_of("b", r.keys("b", 2), task="b")
    r.tiers.drop_task("a")
    r.settle()
    assert 2 == r.tiers.stats()["device"]["used"]
    assert (2, 0, 0, 0) == r.where("b")


def test_shared_blocks_survive_the_drop_of_one_holder(rig):
    """Two sessions with one prefix hold it once; it goes with the last of them."""
    r = rig()
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    lease = r.turn_of("b", keys[:3])
    assert 3 == len(lease.blocks)
    assert 4 == r.tiers.stats()["device"]["used"]
    r.tiers.drop("a")
    r.settle()
    assert 3 == r.tiers.stats()["device"]["used"]
    assert (3, 0, 0, 0) == r.where("b")


def test_dropping_a_running_session_waits_for_its_release(rig):
    """Pinned blocks stay readable until released, then go at once."""
    r = rig()
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    lease = r.start("a", keys)
    r.tiers.drop("a")
    r.read("a", lease.blocks, keys)
    r.settle()
    assert 4 == r.tiers.stats()["device"]["used"]
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    r.settle()
    assert 0 == r.tiers.stats()["device"]["used"]
    assert [] == r.wrong


def test_a_lease_outlives_the_drop_of_its_session(rig):
    """Even while it loads: the sequence gets its blocks, and they go when it is done with them."""
    r = rig()
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    lease = r.start("a", keys)
    r.tiers.drop("a")
    r.settle()
    assert lease.ticket.failed_from is None
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    r.settle()
    assert [] == r.wrong
    assert (0, 0) == (r.tiers.stats()["device"]["used"], r.tiers.stats()["host"]["used"])


def test_a_session_that_is_held_again_before_its_blocks_went_keeps_them(rig):
    """Dropped and held anew while a sequence still has them pinned."""
    r = rig()
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    lease = r.start("a", keys)
    r.tiers.drop("a")
    r.tiers.hold("a", "a", keys, 64)
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    assert (4, 0, 0, 0) == r.where("a")


def test_dropping_calls_off_copies_that_have_not_started(rig):
    """Moves of a dropped session end as cancelled and leak nothing."""
    r = rig()
    r.turn_of("a", r.keys("a", 4))
    assert r.move("a", Action.WRITE, Tier.HOST)
    r.tiers.drop("a")
    r.settle()
    assert Outcome.CANCELLED == r.receipts[-1].outcome
    stats = r.tiers.stats()
    assert (0, 0) == (stats["device"]["used"], stats["host"]["used"])
    assert 0 == stats["bytes"]["d2h"]


def test_a_hit_ends_at_a_hole(rig):
    """Blocks behind a missing one do not count."""
    r = rig(device=4, host=0)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    assert 4 == r.tiers.match(keys)
    assert 0 == r.tiers.match([b"x" * 16, *keys])
    assert 2 == r.tiers.match([*keys[:2], b"x" * 16, *keys[2:]])


def test_committing_what_is_there_already_gives_the_other_block(rig):
    """Two sequences that compute the same block end up with one, and the duplicate is freed."""
    r = rig()
    keys = r.keys("a", 1)
    first, second = r.tiers.allocate(2)
    done = r.streams.record()
    assert first == r.tiers.commit("a", first, keys[0], None, done)
    assert first == r.tiers.commit("b", second, keys[0], None, done)
    assert 1 == r.tiers.stats()["device"]["used"]
    r.tiers.release("a", [first], used=done)
    r.tiers.release("b", [first], used=done)
    with pytest.raises(ValueError, match="not in use"):
        r.tiers.release("b", [first], used=done)


def test_committing_what_is_on_its_way_leaves_the_block_private(rig):
    """Two copies of one block are no harm: the caller keeps its own, the other becomes known when it has arrived."""
    r = rig()
    keys = r.keys("a", 1)
    r.turn_of("a", keys)
    r.park("a")
    lease = r.tiers.acquire("a", keys)
    (mine,) = r.tiers.allocate(1)
    assert mine == r.tiers.commit("b", mine, keys[0], None, r.streams.record())
    assert mine not in lease.blocks
    r.settle()
    r.tiers.release("b", [mine], used=r.streams.record())
    r.tiers.release("a", lease.blocks, used=r.streams.record())
    assert 1 == r.tiers.stats()["device"]["used"]


def test_a_recomputed_block_that_the_host_has_is_clean(rig):
    """The key says what it is: a device copy of a block on the host needs no write."""
    r = rig()
    keys = r.keys("a", 2)
    r.turn_of("a", keys)
    r.park("a")
    blocks = []
    for at in range(2):
        r.write("b", blocks, keys, at)
    assert 2 == r.tiers.stats()["device"]["clean"]
    r.tiers.release("b", blocks, used=r.streams.record())


def test_the_one_expected_back_last_is_evicted_first(rig):
    """What is told about the future beats the order of use."""
    r = rig(device=8, host=16)
    for name in ("a", "b"):
        r.turn_of(name, r.keys(name, 4))
        r.moved(name, Action.WRITE, Tier.HOST)
    r.tiers.expect("a", r.clock.now_s() + 5)
    r.tiers.expect("b", r.clock.now_s() + 50)
    assert r.tiers.allocate(4) is not None
    assert (4, 0) == (r.where("a")[0], r.where("b")[0])


def test_without_forecasts_the_least_recently_used_goes_first(rig):
    """And within a session the end goes before the beginning."""
    r = rig(device=8, host=16)
    for name in ("a", "b"):
        r.turn_of(name, r.keys(name, 4))
        r.moved(name, Action.WRITE, Tier.HOST)
    r.turn_of("a", r.keys("a", 4))
    assert r.tiers.allocate(3) is not None
    assert (4, 1) == (r.where("a")[0], r.where("b")[0])
    lease = r.tiers.acquire("b", r.keys("b", 1))
    assert 0 == lease.loaded_blocks


def test_a_demoted_session_goes_before_all_others(rig):
    """Even if it is back sooner."""
    r = rig(device=8, host=16)
    for name in ("a", "b"):
        r.turn_of(name, r.keys(name, 4))
        r.moved(name, Action.WRITE, Tier.HOST)
    r.tiers.expect("a", r.clock.now_s() + 5)
    r.tiers.expect("b", r.clock.now_s() + 50)
    r.moved("a", Action.DEMOTE, Tier.HOST)
    assert r.tiers.allocate(4) is not None
    assert (0, 4) == (r.where("a")[0], r.where("b")[0])


def test_a_session_that_is_back_is_no_first_victim_any_more(rig):
    """A lease ends what was said about its absence: demoted and expected late are history."""
    r = rig(device=8, host=16)
    for name in ("a", "b"):
        r.turn_of(name, r.keys(name, 4))
        r.moved(name, Action.WRITE, Tier.HOST)
    r.moved("a", Action.DEMOTE, Tier.HOST)
    r.tiers.expect("a", r.clock.now_s() + 1000)
    r.turn_of("a", r.keys("a", 4))
    assert r.tiers.allocate(4) is not None
    assert (4, 0) == (r.where("a")[0], r.where("b")[0])


def test_dirty_blocks_are_written_before_they_make_room(rig):
    """`allocate` starts the write and says None; when it has ended, there is room and nothing is lost."""
    r = rig(device=4, host=8)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    assert r.tiers.allocate(2) is None
    blocks = r.until(lambda: r.tiers.allocate(2))
    assert (2, 0) == (r.where("a")[0], r.where("a")[3])
    r.tiers.release("b", blocks, used=r.streams.record())
    r.turn_of("a", keys)
    r.settle()
    assert [] == r.wrong


def test_without_a_host_tier_dirty_blocks_are_dropped(rig):
    """Recompute is always possible; a deadlock never is."""
    r = rig(device=4, host=0)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    assert r.tiers.allocate(3) is not None
    assert (1, 0, 0, 3) == r.where("a")


def test_a_lease_that_does_not_fit_leaves_nothing_behind(rig):
    """None means that nothing has happened: the blocks are as they were."""
    r = rig(device=4, host=8)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    r.park("a")
    mine = r.tiers.allocate(2)
    assert r.tiers.acquire("a", keys) is None
    r.tiers.check()
    assert 2 == r.tiers.stats()["device"]["pinned"]
    r.tiers.release("b", mine, used=r.streams.record())
    assert 4 == len(r.turn_of("a", keys).blocks)


def test_watchers_hear_of_room(rig):
    """`on_room` is called after a release and after a copy."""
    r = rig()
    heard = []
    r.tiers.on_room(lambda: heard.append(True))
    r.turn_of("a", r.keys("a", 2))
    assert heard
    heard.clear()
    r.moved("a", Action.WRITE, Tier.HOST)
    assert heard


def test_a_watcher_that_raises_breaks_nothing(rig):
    """It is logged and counted; the others are called."""
    r = rig()
    heard = []
    r.tiers.on_room(lambda: 1 / 0)
    r.tiers.on_room(lambda: heard.append(True))
    r.turn_of("a", r.keys("a", 2))
    assert heard


def test_a_move_for_an_unknown_session_is_a_receipt(rig):
    """Never an exception."""
    r = rig()
    assert r.move("nobody", Action.WRITE, Tier.HOST) is False
    assert (Outcome.NOTHING, "an unknown session") == (r.receipts[-1].outcome, r.receipts[-1].detail)


@pytest.mark.parametrize("to", [Tier.HOST, Tier.DISK])
def test_a_move_to_a_tier_that_is_not_there_is_a_receipt(rig, to):
    """It says which tier is missing."""
    r = rig(host=0)
    r.turn_of("a", r.keys("a", 2))
    assert r.move("a", Action.WRITE, to) is False
    assert f"there is no {to.name.lower()} tier" == r.receipts[-1].detail


def test_residency_prices_are_positive_and_ordered(rig):
    """Before any copy was measured the priors answer."""
    r = rig(disk=16)
    r.turn_of("a", r.keys("a", 4))
    r.tiers.prefill_tokens_s = 64.0
    facts = r.tiers.residency("a")
    assert 1.0 == facts.recompute_s
    assert 0 < facts.restore_host_s < facts.restore_disk_s
    assert (4, 4, 64) == (facts.total_blocks, facts.unwritten_blocks, facts.tokens)
    assert facts.pressed is False
    r.tiers.set_pressed(True)
    assert r.tiers.residency("a").pressed is True


def test_sizes_that_cannot_work_are_refused(rig_class):
    """The message names the tier and the numbers."""
    with pytest.raises(ConfigError, match=r"device memory of .* holds 1 blocks"):
        rig_class(device=1)
    with pytest.raises(ConfigError, match=r"host memory of .* holds 1 blocks"):
        rig_class(host=1)


def test_a_pool_that_no_memory_can_hold_is_refused_with_both_numbers(rig_class):
    """What was asked and what is there; it used to be torch's own error, after minutes of loading."""
    with pytest.raises(ConfigError, match=r"device memory of 524288\.0 TiB .* cpu; \S+ \w+ are available"):
        rig_class(device=(1 << 60) // 4096)


def test_a_disk_without_a_host_is_refused(rig, rig_class, tmp_path):
    """Blocks pass through host memory."""
    with pytest.raises(ConfigError, match="needs a host tier"):
        rig_class(host=0, disk=8, directory=tmp_path / "d")


def test_threads_carry_copies_without_being_asked(rig):
    """With real threads and CPU streams a write ends by itself, and the ticket wakes who waits."""
    r = rig(streams=CpuStreams(), threads=True, disk=16)
    keys = r.keys("a", 4)
    r.turn_of("a", keys)
    ended = threading.Event()
    r.tiers.on_room(ended.set)
    r.park("a", Tier.DISK)
    assert ended.is_set()
    called = threading.Event()
    lease = r.tiers.acquire("a", keys)
    lease.ticket.add_done_callback(called.set)
    assert lease.ticket.wait(10)
    assert called.wait(10)
    assert lease.ticket.failed_from is None
    r.read("a", lease.blocks, keys)
    r.tiers.release("a", lease.blocks, used=DONE)
    assert [] == r.wrong


def test_close_is_idempotent_and_stops_the_threads(rig_class):
    """No thread of ours is left."""
    r = rig_class(streams=CpuStreams(), threads=True)
    r.turn_of("a", r.keys("a", 4))
    r.moved("a", Action.WRITE, Tier.HOST)
    r.tiers.close()
    r.tiers.close()
    assert [] == [thread.name for thread in threading.enumerate() if thread.name.startswith("agentkv-")]


@pytest.mark.parametrize(("planned", "outcome"), [(True, Outcome.FAILED), (False, Outcome.CANCELLED)])
def test_whoever_waits_at_close_hears_of_it(rig_class, planned, outcome):
    """A ticket that is out ends as failed, a receipt comes, and new leases are refused."""
    r = rig_class(device=8)
    for name in ("a", "b"):
        r.turn_of(name, r.keys(name, 4))
        r.settle()
    r.moved("a", Action.WRITE, Tier.HOST)
    r.evict("a", Tier.DEVICE)
    lease = r.tiers.acquire("a", r.keys("a", 4))
    assert r.move("b", Action.WRITE, Tier.HOST)
    if planned:
        r.tiers.pump()
    r.tiers.close()
    assert (True, 0) == (lease.ticket.done, lease.ticket.failed_from)
    assert outcome == r.receipts[-1].outcome
    with pytest.raises(Closed):
        r.tiers.acquire("a", r.keys("a", 4))
    with pytest.raises(Closed):
        r.tiers.allocate(1)
    assert r.move("a", Action.WRITE, Tier.HOST) is False
    assert Outcome.FAILED == r.receipts[-1].outcome
    r.tiers.release("a", lease.blocks, used=DONE)
    r.tiers.drop("a")


def test_the_front_door_is_a_context_manager(rig_class):
    """Leaving it closes it."""
    r = rig_class()
    with r.tiers as tiers:
        assert isinstance(tiers, Tiers)
    assert r.tiers._closed
