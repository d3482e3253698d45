"""What holds for every policy, whatever the facts; and the rules of lazy, hazard and the keys one by one."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Residency, Tier
from agentkv.errors import ConfigError
from agentkv.policy import BASELINES, BOUNDS, OURS, RULES, make_rules
from agentkv.policy.baselines.programs import _fits
from agentkv.policy.evict import least_recently_used, next_use, remaining_s
from agentkv.policy.hazard import holding_price
from agentkv.policy.moves import way_back_s
from agentkv.policy.schedule import Claims, Demand, Queued, always, competes, first_come, program_order, without_loss


@dataclasses.dataclass
class Sitter:
    """A session that holds blocks."""

    used_s: float = 0.0
    wait_started_s: float = 0.0
    forecast: Forecast | None = None
    order: int = 0
    priority: int = 0
    background: bool = False
    tokens: int = 1000
    recompute_s: float = 1.0
    idle_share: float = 0.5


def forecast(*points):
    return Forecast(remaining_s=points, n=len(points), source="history")


def resident(**changes):
    """100 blocks on the device, 40 of them not written yet, room on host."""
    facts = {
        "session": "s", "tokens": 1600, "block_bytes": 1000, "total_blocks": 100, "device_blocks": 100, "host_blocks": 60,
        "unwritten_blocks": 40, "restore_host_s": 0.1, "restore_disk_s": 0.5, "recompute_s": 4.0, "host_free_blocks": 1000,
    }  # fmt: skip
    return Residency(**(facts | changes))


def away(**changes):
    """All 100 blocks on host only."""
    return resident(**({"device_blocks": 0, "host_blocks": 100, "unwritten_blocks": 0} | changes))


counts = st.integers(0, 10_000)
seconds = st.floats(0, 1e7)
residencies = st.builds(
    Residency, session=st.just("s"), tokens=counts, block_bytes=st.integers(1, 1 << 22), total_blocks=counts,
    device_blocks=counts, host_blocks=counts, disk_blocks=counts, missing_blocks=counts, unwritten_blocks=counts,
    restore_host_s=seconds, restore_disk_s=seconds, recompute_s=seconds, has_host=st.booleans(), has_disk=st.booleans(),
    pressed=st.booleans(), background=st.booleans(), free_blocks=counts, host_free_blocks=counts, queued=st.integers(0, 99),
    demand_blocks=counts,
)  # fmt: skip
forecasts = st.builds(
    lambda points, overdue: Forecast(
        remaining_s=tuple(sorted(points)), n=len(points), source="history", overdue=overdue
    ),
    st.lists(seconds, min_size=1, max_size=21),
    st.booleans(),
)
sitters = st.builds(
    Sitter, used_s=seconds, wait_started_s=seconds, forecast=st.none() | forecasts, order=counts,
    priority=st.integers(-3, 3), background=st.booleans(), tokens=counts, recompute_s=seconds,
    idle_share=st.floats(0, 1),
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(RULES))
@settings(max_examples=20, deadline=None)
@given(residency=residencies, wait=forecasts, started_s=seconds, elapsed_s=seconds)
def test_every_policy_is_total_and_deterministic(name, residency, wait, started_s, elapsed_s):
    """No facts raise, the same facts give the same answer, and the next question lies in the future."""
    rules = make_rules(name)
    now_s = started_s + elapsed_s
    decision = rules.decide(residency, wait, started_s, now_s)
    assert decision == make_rules(name).decide(residency, wait, started_s, now_s)
    assert decision.ask_again_s is None or decision.ask_again_s > now_s
    for move in decision.moves:
        assert move.session == "s"
        assert move.reason


@pytest.mark.parametrize("name", sorted(RULES))
@settings(max_examples=10, deadline=None)
@given(some=st.lists(sitters, min_size=2, max_size=6), now_s=seconds)
def test_every_eviction_key_orders_any_sessions(name, some, now_s):
    """Keys are comparable numbers without NaN, and asking twice gives the same order."""
    key = make_rules(name).evict_key
    keys = [key(one, now_s) for one in some]
    assert not any(math.isnan(part) for each in keys for part in each)
    assert sorted(keys) == sorted(key(one, now_s) for one in some)


@pytest.mark.parametrize("name", sorted(RULES))
@given(
    one=st.builds(Queued, order=counts, priority=st.integers(-3, 3), arrived_s=seconds),
    bytes_=st.tuples(*[seconds] * 3),
)
def test_higher_classes_go_first_and_an_idle_device_refuses_nobody(name, one, bytes_):
    """Admission may hold a call back only while others make progress."""
    rules = make_rules(name)
    own, ahead, fast = bytes_
    assert rules.turn_key(dataclasses.replace(one, priority=one.priority + 1)) < rules.turn_key(one)
    idle = Demand(own_bytes=own, ahead_bytes=ahead, device_bytes=fast, host_bytes=fast, busy=False, started=False)
    assert rules.admit(idle)
    busy = dataclasses.replace(idle, busy=True)
    assert rules.admit(dataclasses.replace(busy, ahead_bytes=ahead / 2)) >= rules.admit(busy)


def test_policies_are_made_by_name_with_their_options():
    """Unknown names and options are errors that say what there is; the three kinds make up the whole."""
    assert make_rules("lazy").name == "lazy"
    assert set(RULES) == set(OURS) | set(BASELINES) | set(BOUNDS)
    assert next(iter(OURS)) == "lazy"
    with pytest.raises(ConfigError, match=r"there are .*lazy"):
        make_rules("lasy")
    with pytest.raises(ConfigError, match="long_s"):
        make_rules("lazy", longs=3)
    with pytest.raises(ConfigError, match="no option sight"):
        make_rules("ladder", sight="oracle")
    for bad in ("x", -1, math.nan, True):
        with pytest.raises(ConfigError):
            make_rules("lazy", long_s=bad)
        with pytest.raises(ConfigError):
            make_rules("hazard", stall_price=bad)


def test_the_names_in_the_catalogue_are_the_rules_own():
    """A table that says `lru` is about LRU."""
    assert [] == [name for name, make in RULES.items() if not make().name.startswith(name)]


def test_remaining_is_the_median_of_what_is_left():
    """Conditional on the wait still running; as long again when every point has passed or nothing is known."""
    waiting = Sitter(forecast=forecast(1.0, 2.0, 10.0, 20.0, 30.0))
    assert remaining_s(waiting, 0.0) == 10.0
    assert remaining_s(waiting, 5.0) == 15.0
    assert remaining_s(waiting, 40.0) == 40.0
    assert remaining_s(Sitter(used_s=3.0), 10.0) == 7.0


def test_lru_gives_way_by_last_use_and_next_use_by_return():
    """Used 100 s ago and soon back, against used now and away for an hour: the two keys disagree."""
    old = Sitter(used_s=0.0, wait_started_s=0.0, forecast=forecast(101.0))
    new = Sitter(used_s=100.0, wait_started_s=100.0, forecast=forecast(3600.0))
    assert least_recently_used(old, 100.0) > least_recently_used(new, 100.0)
    assert next_use(new, 100.0) > next_use(old, 100.0)


def test_lazy_gives_way_by_long_waits_then_the_latest_task():
    """A long wait before a short one, the last one back in front; among short waits the latest task goes first."""
    key = make_rules("lazy", long_s=30).evict_key
    hour, minutes = Sitter(order=1, forecast=forecast(3600.0)), Sitter(order=9, forecast=forecast(300.0))
    early, late = Sitter(order=2, forecast=forecast(20.0)), Sitter(order=3, forecast=forecast(1.0))
    batch = Sitter(order=0, priority=-1, forecast=forecast(0.1))
    side = Sitter(order=0, background=True, forecast=forecast(0.1))
    assert [side, batch, hour, minutes, late, early] == sorted(
        [early, hour, side, late, minutes, batch], key=lambda one: key(one, 0.0), reverse=True
    )


def test_lazy_writes_ahead_only_into_host_room_that_nobody_else_needs():
    """Copies ahead cost nothing while the link is idle, unless they push another session's only copy out."""
    decide = make_rules("lazy").decide
    (move,) = decide(resident(), forecast(10.0), 0.0, 0.0).moves
    assert (Action.WRITE, Tier.HOST) == (move.action, move.to)
    assert decide(resident(host_free_blocks=39), forecast(10.0), 0.0, 0.0).moves == ()
    assert decide(resident(free_blocks=100), forecast(10.0), 0.0, 0.0).moves == ()
    assert (
        len(decide(resident(host_free_blocks=39, has_disk=True, free_blocks=99), forecast(10.0), 0.0, 0.0).moves) == 1
    )
    assert decide(resident(has_host=False), forecast(10.0), 0.0, 0.0).moves == ()


def test_hazard_stays_while_nobody_waits_and_makes_room_when_the_price_exceeds_the_chance():
    """h is zero without pressure; with it, a session that is hardly back within its restore time goes."""
    decide = make_rules("hazard").decide
    assert [m.action for m in decide(resident(), forecast(1000.0), 0.0, 0.0).moves] == [Action.WRITE]
    pressed = resident(pressed=True, queued=2, demand_blocks=100)
    assert [m.action for m in decide(pressed, forecast(1000.0), 0.0, 0.0).moves] == [Action.DEMOTE]
    assert holding_price(pressed) == 2.0
    assert holding_price(resident()) == 0.0
    assert [m.action for m in decide(away(), forecast(0.05), 0.0, 0.0).moves] == [Action.PREFETCH]
    assert decide(away(), forecast(1000.0), 0.0, 0.0).moves == ()


def test_the_way_back_is_from_where_the_blocks_are():
    """Nothing away costs nothing; a half on disk costs half a disk restore and half a copy."""
    assert way_back_s(resident()) == 0.0
    assert way_back_s(away()) == pytest.approx(0.1)
    assert way_back_s(away(host_blocks=50, disk_blocks=50)) == pytest.approx(0.3)


def test_continuum_pins_until_its_time_is_up():
    """Two hundred calls that all take 1 s: pinned for one second, then the longest unused goes first."""
    known = Forecast(remaining_s=(1.0, 1.0, 1.0), n=200, source="history")
    key = make_rules("continuum").evict_key
    pinned, older = Sitter(used_s=0.0, forecast=known), Sitter(used_s=-1.0, wait_started_s=-1.0, forecast=known)
    assert key(older, 0.9) > key(pinned, 0.9)
    assert key(pinned, 0.9)[0] is False
    assert key(pinned, 1.1)[0] is True


def test_infercept_gives_way_by_the_smaller_waste():
    """A long preserve that is cheaper to discard counts as the discard."""
    key = make_rules("infercept").evict_key
    cheap = Sitter(recompute_s=0.1, tokens=100)
    dear = Sitter(recompute_s=100.0, tokens=100)
    assert key(cheap, 50.0) == (20.0,)
    assert key(dear, 50.0) == (5000.0,)


def test_orders_of_turns():
    """First come by arrival, program order by task; classes before both."""
    early = Queued(order=1, priority=0, arrived_s=9.0)
    late = Queued(order=2, priority=0, arrived_s=5.0)
    assert first_come(late) < first_come(early)
    assert program_order(early) < program_order(late)
    assert program_order(dataclasses.replace(late, priority=1)) < program_order(early)


def test_programs_are_held_back_while_those_before_them_fill_the_memory():
    """ThunderAgent and MORI: 60 + 50 > 100."""
    demand = Demand(own_bytes=50, ahead_bytes=60, device_bytes=60, host_bytes=40, busy=True, started=True)
    assert not _fits(demand)
    assert _fits(dataclasses.replace(demand, ahead_bytes=50))
    assert always(demand)


def test_lazy_holds_tasks_back_while_the_largest_tier_is_full_of_those_before_them():
    """What is on the device has its copy below, so tiers do not add up; a disk that holds all holds nobody back."""
    demand = Demand(own_bytes=10, ahead_bytes=75, device_bytes=60, host_bytes=100, busy=True, started=True)
    assert make_rules("lazy").admit is without_loss
    assert without_loss(demand)
    assert not without_loss(dataclasses.replace(demand, ahead_bytes=76))
    assert without_loss(dataclasses.replace(demand, ahead_bytes=76, disk_bytes=1000))
    assert without_loss(dataclasses.replace(demand, ahead_bytes=1e9, busy=False))


def test_only_who_computes_or_is_soon_back_competes_for_memory():
    """A context that is away for an hour may as well be away from memory."""
    soon, late = Sitter(forecast=forecast(60.0)), Sitter(forecast=forecast(61.0))
    assert competes(soon, 0.0, is_here=False)
    assert not competes(late, 0.0, is_here=False)
    assert competes(late, 0.0, is_here=True)


@given(st.lists(st.tuples(st.tuples(st.integers(-1, 1), st.integers(0, 9)), st.integers(0, 100))))
def test_claims_add_up_in_program_order(claims):
    """For each place what stands before it, and not its own."""
    told = Claims(claims)
    for place, _ in claims:
        assert told.before(place) == sum(size for other, size in claims if other < place)
