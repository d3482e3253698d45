"""Tiers and order together, driven as vLLM's tiering manager drives them: blocks come back before they are asked for."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import fake_vllm
import pytest
from agentkv_vllm import side, wake
from agentkv_vllm.sessions import Sessions
from fake_vllm import BLOCK, FakeManager, LookupResult, make_key

from agentkv.adapters.vllm_door import DoorCaller
from agentkv.clock import SystemClock
from agentkv.errors import ConfigError


def params(name):
    return {"agentkv": {"session": name}}


def keys(*numbers):
    return [make_key(number) for number in numbers]


@pytest.fixture
def engine(vllm, clock, socket_path, tmp_path):
    """Six chunks of memory, a disk, our tier; `say(hint)` is what comes in at the door."""
    side._made.sessions = Sessions(clock=clock)
    made = FakeManager(
        6,
        vllm.policy.AgentKVPolicy,
        [
            partial(vllm.disk.AgentKVDisk, tier_type="disk", root_dir=str(tmp_path / "kv"), capacity_bytes=64 * BLOCK),
            partial(vllm.tier.AgentKVTier, tier_type="ours", socket=str(socket_path), wake=False),
        ],
    )
    made.clock = clock
    made.side = side.shared()
    made.side.wake = lambda: None  # else it takes steps while anybody waits
    yield made
    try:
        made.policy._order.check()
    finally:
        made.close()


def in_memory(engine, *numbers):
    return [number for number in numbers if make_key(number) in engine.policy._order.copies]


def test_a_hinted_session_is_back_in_memory_before_its_call(engine, wired, clock):
    """Pushed out by others, brought back at the low quantile, found whole and with the right bytes by its next call."""
    engine.request("r1", keys(1, 2, 3), params=params("ada"))
    engine.settle()
    engine.side.hear(wired("tool_start", "ada", p10=10, p50=20))
    engine.request("r2", keys(11, 12, 13, 14, 15, 16), params=params("bob"))
    engine.settle()
    assert [] == in_memory(engine, 1, 2, 3)
    engine.side.hear(wired("tool_start", "bob", p10=900))
    assert 0 == engine.side.stats()["promotions"]
    clock.advance(9.95)
    engine.settle()
    assert [1, 2, 3] == in_memory(engine, 1, 2, 3)
    steps = engine.steps
    held = engine.request("r3", keys(1, 2, 3, 4), params=params("ada"))
    assert {key: key[:32] for key in keys(1, 2, 3)} == held
    assert engine.steps == steps + 1  # it waited for nothing
    stats = engine.side.stats()
    assert (1, 3, 0) == (stats["promotions"], stats["promoted_blocks"], stats["missing_blocks"])
    engine.side.sessions.check()


def test_without_a_hint_the_call_itself_waits_for_the_disk(engine):
    """The baseline: vLLM's own promotion on demand."""
    engine.request("r1", keys(1, 2, 3), params=params("ada"))
    engine.settle()
    engine.request("r2", keys(11, 12, 13, 14, 15, 16))
    engine.settle()
    steps = engine.steps
    assert 3 == len(engine.request("r3", keys(1, 2, 3), params=params("ada")))
    assert engine.steps > steps + 1


@pytest.mark.parametrize("session", [None, "ada"])
def test_a_prompt_longer_than_the_tier_does_not_push_itself_out_for_ever(engine, clock, session):
    """What fits of its beginning is found, the rest is computed; the request does not wait for what cannot be."""
    whose = params(session) if session else None
    engine.request("r1", keys(*range(1, 6)), params=whose)
    engine.settle()
    clock.advance(1)
    engine.request("r2", keys(*range(1, 10)), params=whose)
    clock.advance(1)
    for place in range(6, 10):  # its end is only on the disk
        engine.request(f"x{place}", keys(place))
        engine.settle()
        clock.advance(1)
    engine.request("other", keys(21, 22, 23, 24, 25, 26))
    engine.settle()
    clock.advance(1)
    steps = engine.steps
    held = engine.request("r3", keys(*range(1, 10)), params=whose)
    assert list(held) == keys(*range(1, 7))
    assert engine.steps - steps < 2000


def test_the_end_of_the_tool_brings_it_back_at_once(engine, wired, clock):
    """Whatever the forecast said."""
    engine.request("r1", keys(1, 2), params=params("ada"))
    engine.settle()
    engine.side.hear(wired("tool_start", "ada", p10=800))
    engine.request("r2", keys(11, 12, 13, 14, 15, 16))
    engine.settle()
    assert [] == in_memory(engine, 1, 2)
    clock.advance(1)
    engine.side.hear(wired("tool_end", "ada"))
    assert engine.tiers[1].has_pending_work()
    engine.settle()
    assert [1, 2] == in_memory(engine, 1, 2)


def test_a_prefetch_pushes_out_nobody_who_is_back_sooner(engine, wired):
    """Then its session waits for the disk, as it would have done; what was there of its beginning stays of use."""
    engine.request("r1", keys(1, 2), params=params("ada"))
    engine.settle()
    engine.side.hear(wired("tool_start", "ada", p10=50))
    engine.request("r2", keys(11, 12, 13, 14, 15, 16), params=params("bob"))
    engine.settle()
    engine.side.hear(wired("tool_start", "bob", p10=5))
    assert [] == in_memory(engine, 1, 2)
    engine.side.sessions.get("ada").due_s = 0.0
    engine.settle()
    assert [] == in_memory(engine, 1, 2)
    assert 2 == engine.side.stats()["missing_blocks"]


def test_an_ended_session_leaves_the_disk_and_gives_way_first(engine, wired):
    """Its blocks are not found again, not even by itself."""
    engine.request("r1", keys(1, 2), params=params("ada"))
    engine.request("r2", keys(3, 4, 5), params=params("bob"))
    engine.settle()
    engine.side.hear(wired("session_end", "ada"))
    assert engine.tiers[1].has_pending_work()
    engine.settle()
    disk = engine.tiers[0]
    assert [LookupResult.MISS, LookupResult.HIT] == [disk.lookup(make_key(n), None) for n in (1, 3)]
    engine.request("r3", keys(11, 12, 13))
    assert [3, 4, 5] == in_memory(engine, 1, 2, 3, 4, 5)


def test_blocks_that_cannot_be_trusted_are_computed_again(engine, wired, clock, monkeypatch):
    """A promotion that fails in part keeps what was good; nothing is served that failed its checksum."""
    engine.request("r1", keys(1, 2, 3), params=params("ada"))
    engine.settle()
    engine.request("r2", keys(11, 12, 13, 14, 15, 16))
    engine.settle()
    slab = engine.tiers[0]._shelf._slab
    real = slab.read
    clock.advance(1)
    monkeypatch.setattr(
        slab,
        "read",
        lambda images: [fine and image.key != make_key(2) for image, fine in zip(images, real(images), strict=True)],
    )
    engine.side.hear(wired("tool_end", "ada"))
    engine.settle()
    assert [1, 3] == in_memory(engine, 1, 2, 3)
    assert [make_key(1)] == list(engine.request("r3", keys(1, 2, 3), params=params("ada")))


def test_a_promotion_that_never_ends_is_left_to_itself(engine, wired, clock, monkeypatch):
    """The engine goes back to sleep."""
    engine.request("r1", keys(1), params=params("ada"))
    engine.settle()
    engine.side.hear(wired("tool_end", "ada"))
    tier = engine.tiers[1]
    parent = SimpleNamespace(
        on_new_request=lambda _: None, on_request_finished=lambda _: None, lookup=lambda *_: LookupResult.RETRY
    )
    tier.serve_external_requests(parent)
    assert tier.has_pending_work()
    clock.advance(31)
    tier.serve_external_requests(parent)
    assert not tier._promotions


@pytest.mark.parametrize("broken", ["on_new_request", "lookup", "on_request_finished"])
def test_a_manager_that_fails_stops_no_step(engine, wired, broken):
    """Nothing raises into the scheduler, whatever its own parts do."""
    engine.request("r1", keys(1), params=params("ada"))
    engine.settle()
    engine.side.hear(wired("tool_end", "ada"))
    parent = SimpleNamespace(
        on_new_request=lambda _: None, on_request_finished=lambda _: None, lookup=lambda *_: LookupResult.HIT
    )

    def fails(*_):
        raise RuntimeError("broken")

    setattr(parent, broken, fails)
    tier = engine.tiers[1]
    tier.serve_external_requests(parent)
    tier.on_schedule_end(None)
    assert not tier._promotions


def test_one_step_looks_up_only_so_much(engine, wired, vllm, monkeypatch):
    """The scheduler waits meanwhile; the rest follows in the next step."""
    monkeypatch.setattr(vllm.tier, "MOST_LOOKUPS", 2)
    engine.request("r1", keys(1, 2, 3, 4, 5), params=params("ada"))
    engine.settle()
    asked = []
    parent = SimpleNamespace(
        on_new_request=lambda _: None, on_request_finished=lambda _: None,
        lookup=lambda key, _: asked.append(key) or LookupResult.HIT,
    )  # fmt: skip
    engine.side.hear(wired("tool_end", "ada"))
    tier = engine.tiers[1]
    for expected in (2, 4, 5):
        tier.serve_external_requests(parent)
        assert expected == len(asked)
    assert keys(1, 2, 3, 4, 5) == asked


def test_requests_without_a_session_are_stored_and_found_all_the_same(engine):
    """The plug-in is an ordinary offloading tier to everybody else; hostile parameters are none."""
    for number, odd in enumerate([None, {}, {"agentkv": 3}, {"agentkv": {"session": ["x"]}}, {"other": 1}]):
        engine.request(f"r{number}", keys(1, 2), params=odd)
    engine.settle()
    assert 2 == len(engine.request("again", keys(1, 2)))
    assert 0 == engine.side.stats()["sessions"]


def test_the_door_and_the_engine_meet(engine, clock):
    """From a line at the socket to blocks on their way."""
    engine.request("r1", keys(1, 2), params=params("ada"))
    engine.settle()
    engine.request("r2", keys(11, 12, 13, 14, 15, 16))
    engine.settle()
    clock.advance(1)
    caller = DoorCaller(engine.side.door.path)
    line = {"v": "agentkv.hint/1", "id": "h", "kind": "tool_end", "ts_ms": clock.wall_ms(), "session": "ada"}
    assert "applied" == caller.say(json.dumps(line), 2)["outcome"]
    engine.settle()
    state = caller.state()
    assert (1, 1, [0.0]) == (state["sessions"], state["promotions"], state["started_ms"])
    caller.close()


def test_a_second_engine_on_the_same_socket_works_without_hints(engine, vllm):
    """It says why; an agent's calls go on."""
    other = side.Side()
    other.open(engine.side.door.path)
    assert other.door is None
    assert "another engine" in other.closed_reason


def test_an_idle_engine_is_woken_when_something_is_due(vllm, wired):
    """By its own queue, in time, and only then; without a queue it takes steps while somebody waits."""
    woken = []
    found = side.Side()
    found.wake = lambda: woken.append(time.monotonic())
    found.sessions.begins("ada")
    found.sessions.holds("ada", [(0, 1, b"k")])
    assert not found.wants_step()
    began = time.monotonic()
    found.sessions.margin_s = 0.0
    found.hear(replace(wired("tool_start", "ada", p10=0.15), ts_ms=SystemClock().wall_ms()))
    found.settled()
    assert not found.wants_step()
    found._ticker = threading.Thread(target=lambda: [time.sleep(found._tick() or 0.01) for _ in range(2)])
    found._ticker.start()
    found._ticker.join()
    assert 0.1 < woken[0] - began < 1
    assert found.wants_step()
    found.wake = None
    found.sessions.due()
    found.hear(wired("tool_start", "ada", p10=500))
    found.settled()
    assert found.wants_step()


def test_the_end_of_a_session_wakes_an_engine_in_which_others_wait(wired):
    """What it had on disk is given up at once; a tool that has just begun wakes nobody."""
    woken = []
    found = side.Side()
    found.wake = lambda: woken.append(1)
    for name in ("ada", "bob"):
        found.sessions.begins(name)
        found.hear(wired("tool_start", name, p10=500))
    assert [] == woken
    found.hear(wired("session_end", "ada"))
    assert [1] == woken
    assert found.wants_step()
    found.settled()
    assert not found.wants_step()


def test_the_engines_queue_is_found_among_the_callers(vllm):
    """And nothing else is taken for it."""

    class EngineCoreProc:
        def __init__(self):
            self.sent = []
            self.input_queue = SimpleNamespace(put_nowait=self.sent.append)
            self.wake = self.deeper(3)

        def deeper(self, levels):
            return wake.waker() if levels == 0 else self.deeper(levels - 1)

    engine = EngineCoreProc()
    engine.wake()
    assert [(b"\x05", None)] == engine.sent
    assert wake.waker() is None


@pytest.mark.parametrize("margin_s", [-1, 60, "1", True, None])
def test_a_margin_that_cannot_work_is_an_error(vllm, margin_s):
    """When the server starts, not when a hint comes."""
    view = memoryview(bytearray(BLOCK)).cast("B", (1, BLOCK))
    with pytest.raises(ConfigError):
        vllm.tier.AgentKVTier(None, view, "ours", margin_s=margin_s)


def test_the_spec_completes_its_configuration_and_leaves_gpus_to_vllm(vllm, monkeypatch):
    """Metrics are made from the same configuration as the tiers."""
    extra = {"cpu_bytes_to_use": 1, "agentkv": {"disk": "/kv"}}
    assert ["AgentKVDisk", "AgentKVTier"] == vllm.spec.AgentKVSpec.build_metric_definitions(extra)["tiers"]

    @dataclass
    class Config:
        extra_config: dict = field(default_factory=dict)
        canonical_layout: bool = False

    spec = vllm.spec.AgentKVSpec(Config(extra))
    assert "AgentKVPolicy" == spec.extra_config["eviction_policy"]
    monkeypatch.setattr(fake_vllm.Platform, "cpu", False)
    assert "vllm's own" == spec.get_worker(None)
    monkeypatch.setattr(fake_vllm.Platform, "cpu", True)
    with pytest.raises(ConfigError, match="canonical"):
        vllm.spec.AgentKVSpec(Config(extra, canonical_layout=True)).get_worker(None)


def test_the_worker_reads_vllms_lists_by_group(vllm):
    """Blocks and chunks of several cache groups stand in one list; what does not fit is an error, not a wrong copy."""
    worker = vllm.spec.MemcpyWorker.__new__(vllm.spec.MemcpyWorker)
    worker._per, worker._planes = 2, [["a"], ["b"], ["c"]]
    pool = SimpleNamespace(block_ids=[5, 6, 7, 9], group_sizes=[3, 0, 1], block_indices=[1, 0, 4])
    groups = worker._groups(pool, SimpleNamespace(block_ids=[1, 2, 3]))
    assert [([5, 6, 7], [1, 2], 1), ([], [], 0), ([9], [3], 0)] == [(g.blocks, g.chunks, g.skip) for g in groups]
    with pytest.raises(ValueError, match="do not fit"):
        worker._groups(pool, SimpleNamespace(block_ids=[1, 2, 3, 4]))
