"""The simulator's parts one by one: runs, links, the device's bursts, memory, what is compared."""

import heapq
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.core.rates import Prefill
from agentkv.core.residency import Tier
from agentkv.policy.evict import least_recently_used
from agentkv.sim import runs
from agentkv.sim.compare import mean
from agentkv.sim.context import Context
from agentkv.sim.costs import Costs
from agentkv.sim.device import Call, Device
from agentkv.sim.facts import worth_restoring
from agentkv.sim.link import Job, Link
from agentkv.sim.memory import Memory
from agentkv.sim.result import quantile


class Calendar:
    """Virtual time for one part."""

    def __init__(self):
        self.time_s = 0.0
        self._events = []
        self._ids = itertools.count()

    def now_s(self):
        return self.time_s

    def at(self, time_s, call):
        heapq.heappush(self._events, (time_s, next(self._ids), call))

    def run(self, until_s=math.inf):
        while self._events and self._events[0][0] <= until_s:
            self.time_s, _, call = heapq.heappop(self._events)
            call()
        self.time_s = max(self.time_s, until_s) if until_s < math.inf else self.time_s


# -- runs

blocks = st.sets(st.integers(0, 30))


def as_runs(some):
    made = ()
    for number in some:
        made = runs.union(made, ((number, number + 1),))
    return made


def as_set(some):
    assert all(lo < hi for lo, hi in some)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(some)), "sorted, disjoint, not touching"
    return {number for lo, hi in some for number in range(lo, hi)}


@settings(max_examples=60)
@given(a=blocks, b=blocks, n=st.integers(0, 31))
def test_runs_are_sets(a, b, n):
    """Every operation gives what Python's sets give."""
    ra, rb = as_runs(a), as_runs(b)
    assert a | b == as_set(runs.union(ra, rb))
    assert a - b == as_set(runs.minus(ra, rb))
    assert a & b == as_set(runs.both(ra, rb))
    assert {x for x in a if x < n} == as_set(runs.below(ra, n))
    assert set(sorted(a)[len(a) - min(n, len(a)) :]) == as_set(runs.last(ra, n))
    assert set(sorted(a)[:n]) == as_set(runs.first(ra, n))
    assert len(a) == runs.size(ra)
    assert next(x for x in range(40) if x not in a) == runs.leading(ra)


# -- links


def test_an_urgent_job_sets_the_one_in_service_aside_and_that_one_goes_on_after_it():
    """10 s of background work, an urgent second at 4 s: the urgent ends at 5, the other at 11."""
    calendar, ended = Calendar(), {}
    link = Link(1.0, at=calendar.at, now_s=calendar.now_s)
    link.submit(Job(10, lambda _: ended.setdefault("slow", calendar.time_s), urgent=False))
    calendar.run(until_s=4.0)
    link.submit(Job(1, lambda _: ended.setdefault("urgent", calendar.time_s), urgent=True))
    assert 0.0 == link.wait_s() - 1.0
    calendar.run()
    assert {"urgent": 5.0, "slow": 11.0} == ended
    assert (11.0, 11.0, 0) == (link.carried_bytes, link.busy_s, link.jobs)


def test_a_job_that_somebody_waits_for_now_overtakes():
    """The third of three background jobs is hurried at the start: it is carried second at the latest."""
    calendar, order = Calendar(), []
    link = Link(1.0, at=calendar.at, now_s=calendar.now_s)
    jobs = [Job(2, lambda _, name=name: order.append(name), urgent=False) for name in "abc"]
    for job in jobs:
        link.submit(job)
    link.hurry(jobs[2])
    calendar.run()
    assert ["c", "a", "b"] == order


# -- the device

COSTS = Costs(
    token_bytes=1, prefill=Prefill(linear_s=1e-3, quadratic_s=1e-7), decode_base_s=0.01, decode_per_token_s=1e-5,
    h2d_bytes_s=1, d2h_bytes_s=1, device_bytes=1e6, host_bytes=0, token_budget=64,
)  # fmt: skip
calls = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 200), st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=6
)


def reference(arrivals):
    """The specification, step by step: one chunk for the first that prefills, a token for each that decodes."""
    time_s, waiting, ended = 0.0, sorted(arrivals), {}
    prefilling, decoding = [], []
    while waiting or prefilling or decoding:
        if not prefilling and not decoding:
            time_s = max(time_s, waiting[0][0])
        while waiting and waiting[0][0] <= time_s:
            _, number, at, prompt, output = waiting.pop(0)
            prefilling.append([number, at, prompt, output])
            prefilling.sort()
        seconds = COSTS.decode_base_s + COSTS.decode_per_token_s * sum(call[1] for call in decoding)
        head = prefilling[0] if prefilling else None
        if head is not None:
            chunk = min(head[2] - head[1], COSTS.token_budget - len(decoding))
            seconds += COSTS.prefill.extend_s(head[1], head[1] + chunk)
        time_s += seconds
        for call in list(decoding):
            call[1] += 1
            call[3] -= 1
            if call[3] == 0:
                decoding.remove(call)
                ended[call[0]] = time_s
        if head is not None:
            head[1] += chunk
            if head[1] == head[2]:
                prefilling.remove(head)
                head[3] -= 1
                if head[3] == 0:
                    ended[head[0]] = time_s
                else:
                    decoding.append(head)
    return ended


@settings(max_examples=40, deadline=None)
@given(some=calls)
def test_bursts_end_when_single_steps_would(some):
    """Calls that arrive at any time, in mid-burst too: each ends at the same moment as step by step."""
    calendar, ended = Calendar(), {}
    device = Device(
        COSTS, at=calendar.at, now_s=calendar.now_s, ended=lambda call: ended.setdefault(call.owner, calendar.time_s)
    )
    arrivals = []
    for number, (time_s, at, new, output) in enumerate(some):
        arrivals.append((time_s, number, at, at + new, output))
        call = Call(number, key=(number,), at=at, prompt=at + new, output=output)
        calendar.at(time_s, lambda call=call: device.add(call))
    calendar.run()
    assert reference(arrivals) == pytest.approx(ended)


# -- memory


def memory(device=100, host=100, disk=0, **options):
    """Blocks of one byte, links of 10 blocks a second."""
    calendar = Calendar()

    def link():
        return Link(10.0, at=calendar.at, now_s=calendar.now_s)

    tiers = Memory(
        block_bytes=1, device=device, host=host, disk=disk, key=least_recently_used, now_s=calendar.now_s, h2d=link(),
        d2h=link(), read=link() if disk else None, write=link() if disk else None, **options,
    )  # fmt: skip
    return tiers, calendar


def settled(tiers, name, blocks_, *, used_s=0.0):
    """A context of so many blocks, all on the device."""
    context = Context(name, 0)
    tiers.add(context)
    assert tiers.seat(context, blocks_, 0)
    tiers.leave(context, blocks_)
    context.used_s = used_s
    return context


def test_the_longest_unused_gives_way_from_its_end_and_only_as_far_as_needed():
    """60 and 40 blocks, 30 wanted: the older one loses its last 30."""
    tiers, calendar = memory()
    old, new = settled(tiers, "old", 60, used_s=-9), settled(tiers, "new", 40)
    tiers.write(old, old.unwritten)
    calendar.run()
    assert tiers.make_room(30, None)
    assert (30, 40) == (old.device, new.device)
    assert 60 == old.leading()
    tiers.check()


def test_what_only_the_device_has_is_written_before_it_goes():
    """No room at once; once the copy has ended there is."""
    tiers, calendar = memory()
    dirty = settled(tiers, "dirty", 100)
    assert not tiers.make_room(30, None)
    calendar.run()
    assert tiers.make_room(30, None)
    assert (70, 100, 0) == (dirty.device, dirty.leading(), tiers.lost_blocks)
    tiers.check()


def test_what_cannot_be_written_is_lost_rather_than_in_the_way():
    """No host tier: room at once."""
    tiers, _ = memory(host=0)
    lost = settled(tiers, "lost", 100)
    assert tiers.make_room(30, None)
    assert (70, 30) == (lost.leading(), tiers.lost_blocks)
    tiers.check()


def test_who_runs_or_is_restored_never_gives_way():
    """A seated context and one that comes back ahead keep everything."""
    tiers, calendar = memory()
    seated = Context("seated", 0)
    tiers.add(seated)
    assert tiers.seat(seated, 60, 0)
    assert not tiers.make_room(50, None)
    tiers.leave(seated, 60)
    tiers.write(seated, seated.unwritten)
    calendar.run()
    assert tiers.make_room(100, None)
    assert 60 == tiers.prefetch(seated, evicts=False)
    assert not tiers.make_room(50, None)
    calendar.run()
    assert (60, 60) == (seated.device, seated.fetched)
    tiers.check()


def test_a_prefetch_that_is_evicted_unused_is_counted_as_wasted():
    """10 of its blocks go again before anybody has used them."""
    tiers, calendar = memory()
    context = settled(tiers, "s", 60)
    tiers.write(context, context.unwritten)
    calendar.run()
    assert tiers.make_room(100, None)
    tiers.prefetch(context, evicts=False)
    calendar.run()
    assert tiers.make_room(50, None)
    assert 10 == tiers.wasted_blocks


def test_a_full_host_spills_to_disk_and_takes_the_new_copy_then():
    """100 host blocks of one context, 40 more wanted by a later one: 40 go to disk, and nothing is lost."""
    tiers, calendar = memory(device=200, disk=500, elsewhere_first=False)
    first, second = settled(tiers, "first", 100, used_s=-9), settled(tiers, "second", 40)
    tiers.write(first, first.unwritten)
    calendar.run()
    assert 0 == tiers.write(second, second.unwritten)
    calendar.run()
    assert (60, 40, 40) == (runs.size(first.host), runs.size(first.disk), runs.size(second.host))
    assert (0, {}) == (tiers.lost_blocks, tiers.wanting)
    tiers.check()
    tiers.forget(first)
    tiers.forget(second)
    assert dict.fromkeys(Tier, 0) == tiers.used


def test_a_context_cut_short_while_it_is_written_keeps_its_accounts():
    """Half of the blocks under way are cut: only the others arrive."""
    tiers, calendar = memory()
    context = settled(tiers, "s", 60)
    tiers.write(context, context.unwritten)
    tiers.cut(context, 30)
    tiers.check()
    calendar.run()
    assert 30 == runs.size(context.host)
    tiers.check()


@pytest.mark.parametrize("elsewhere_first", [True, False])
def test_host_copies_that_the_device_has_too_give_way_first_only_if_told_to(elsewhere_first):
    """Without it the order of use decides, and what is on the host alone is lost."""
    tiers, calendar = memory(device=200, elsewhere_first=elsewhere_first)
    old, newer = settled(tiers, "old", 50, used_s=-9), settled(tiers, "newer", 50, used_s=-5)
    for one in (old, newer):
        tiers.write(one, one.unwritten)
    calendar.run()
    tiers.make_room(150, newer)
    assert (0, 50) == (old.device, newer.device)
    new = settled(tiers, "new", 40)
    assert 40 == tiers.write(new, new.unwritten)
    assert ((50, 10) if elsewhere_first else (10, 50)) == (runs.size(old.host), runs.size(newer.host))
    assert (0 if elsewhere_first else 40) == tiers.lost_blocks


def test_a_prefetch_is_called_off_when_what_it_brings_is_cut_away():
    """60 blocks on their way back, and the next prompt shares only 30: the room is free again, nothing arrives."""
    tiers, calendar = memory()
    context = settled(tiers, "s", 60)
    tiers.write(context, context.unwritten)
    calendar.run()
    tiers.make_room(100, None)
    assert 60 == tiers.prefetch(context, evicts=False)
    tiers.cut(context, 30)
    tiers.check()
    calendar.run()
    assert (0, 0, 30) == (context.device, context.incoming, context.leading())


def test_nothing_is_dropped_while_spilled_room_is_about_to_appear():
    """The host is full and spills to disk for an unwritten context: that one is written then, not lost now."""
    tiers, calendar = memory(device=100, host=50, disk=500, elsewhere_first=False)
    old = settled(tiers, "old", 50, used_s=-9)
    tiers.write(old, old.unwritten)
    calendar.run()
    assert tiers.make_room(100, None)
    dirty = settled(tiers, "dirty", 100)
    assert not tiers.make_room(40, None)
    assert 0 == tiers.lost_blocks
    calendar.run()
    tiers.make_room(40, None)
    calendar.run()
    assert tiers.make_room(40, None)
    assert (0, 100, 50) == (tiers.lost_blocks, dirty.leading(), old.leading())
    tiers.check()


def test_room_for_a_call_is_not_made_from_its_own_blocks():
    """Its 50 blocks on the full host stay, though they are the longest unused and another's need a place."""
    tiers, calendar = memory(device=100, host=50, elsewhere_first=False)
    coming = settled(tiers, "coming", 50)
    tiers.write(coming, coming.unwritten)
    calendar.run()
    assert tiers.make_room(100, None)
    settled(tiers, "dirty", 100)
    coming.used_s = -9
    assert tiers.seat(coming, 60, 50)
    assert 50 == coming.leading()
    tiers.check()


# -- figures


def test_quantiles_and_intervals():
    """Linear quantiles; a single seed has no interval, three have Student's."""
    assert (0.0, 5.0, 9.5) == (quantile([], 0.5), quantile([0, 10], 0.5), quantile([0, 10], 0.95))
    assert mean([1.0]).half is None
    assert mean([1.0, 2.0, 3.0]).half == pytest.approx(4.30 / math.sqrt(3))


def test_a_disk_that_reads_slower_than_the_device_computes_is_not_used():
    """1,600 tokens: computing takes 1.6 s; a disk of 100 bytes a second would take 16 s, one of 10,000 does not."""
    context = Context("s", 0)
    context.total, context.disk = 100, ((0, 100),)
    slow, quick = (
        Costs(
            token_bytes=1, prefill=Prefill(linear_s=1e-3), decode_base_s=0.01, decode_per_token_s=0, h2d_bytes_s=1e6,
            d2h_bytes_s=1e6, read_bytes_s=rate, write_bytes_s=rate, device_bytes=1e6, host_bytes=0, disk_bytes=1e6,
        )
        for rate in (100.0, 1e4)
    )  # fmt: skip
    assert 0 == used(context, slow)
    assert 100 == used(context, quick)


def used(context, costs):
    return worth_restoring(context, 100, costs, has_disk=True, shared=0)
