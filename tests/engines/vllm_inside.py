"""Run by vLLM's own interpreter: the plug-in's classes against vLLM's, without an engine. Prints "all fits"."""

from __future__ import annotations

import inspect
import os
import random
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from agentkv_vllm import side
from agentkv_vllm.config import completed
from agentkv_vllm.disk import AgentKVDisk
from agentkv_vllm.policy import AgentKVPolicy
from agentkv_vllm.sessions import Sessions
from agentkv_vllm.spec import AgentKVSpec, MemcpyWorker
from agentkv_vllm.tier import AgentKVTier
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from agentkv.clock import ManualClock
from agentkv.hints.wire import WireHint, read, read_envelope

PAGE = 4096
CHUNKS = 24


def signatures():
    """What vLLM calls by position or by name is taken, and nothing abstract is left."""
    pairs = [
        (AgentKVPolicy, CachePolicy), (AgentKVTier, SecondaryTierManager), (AgentKVDisk, SecondaryTierManager),
        (AgentKVSpec, TieringOffloadingSpec), (MemcpyWorker, base.OffloadingWorker),
    ]  # fmt: skip
    for ours, theirs in pairs:
        assert issubclass(ours, theirs), ours
        assert not getattr(ours, "__abstractmethods__", None), ours.__abstractmethods__
        for name, method in vars(ours).items():
            given = getattr(theirs, name, None)
            if name.startswith("_") or not inspect.isfunction(method) or not callable(given):
                continue
            wanted = [p for p in inspect.signature(given).parameters if p != "self"]
            found = inspect.signature(method)
            found.bind(None, *wanted)
            found.bind(None, **dict.fromkeys(wanted))


def envelope():
    """The form that vLLM decodes is the one that we write, and the other way round."""
    hint = read({"v": "agentkv.hint/1", "id": "h", "kind": "tool_start", "ts_ms": 5, "session": "a"})
    assert isinstance(hint, WireHint)
    decoded = msgspec.convert(hint.to_envelope(), KvHintsEnvelope)
    assert [hint] == read_envelope(msgspec.to_builtins(decoded))
    again = msgspec.json.decode(msgspec.json.encode(hint.to_envelope()), type=KvHintsEnvelope)
    assert decoded == again


class Engine:
    """vLLM's own tiering manager over our tiers and policy; `device` stands for the blocks' true content."""

    def __init__(self, folder, clock, seed):
        side.start_anew()
        side._made.sessions = Sessions(clock=clock)
        self.clock = clock
        self.side = side.shared()
        self.region = SharedOffloadRegion(
            engine_id=f"agentkv-test-{os.getpid()}-{seed}", num_chunks=CHUNKS, rank=None, kv_bytes_per_chunk=PAGE,
            cpu_page_size=PAGE,
        )  # fmt: skip
        primary = CPUPrimaryTierOffloadingManager(
            num_chunks=CHUNKS, cache_policy="AgentKVPolicy", cache_policy_module_path="agentkv_vllm.policy",
            mmap_region=self.region,
        )  # fmt: skip
        self.view = primary.get_kv_memoryview()
        self.memory = self.view.cast("B")
        self.disk = AgentKVDisk(None, self.view, "disk", root_dir=str(folder / "kv"), capacity_bytes=96 * PAGE)
        self.tier = AgentKVTier(None, self.view, "ours", socket=str(folder / "v.sock"), wake=False)
        self.side.wake = lambda: None
        self.manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[self.disk, self.tier])
        self.policy = primary._policy
        self.numbers = 0
        self.promoted = self.hits = self.asked = 0

    def key(self, name, place):
        return make_offload_key(f"{name}:{place}".encode().ljust(32, b"."), 0)

    def truth(self, key):
        return (key * (PAGE // len(key) + 1))[:PAGE]

    def request(self, session, keys):
        self.numbers += 1
        self.clock.advance(0.1)  # requests come one after the other
        context = ReqContext(f"r{self.numbers}", {"agentkv": {"session": session}} if session else None)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, 128 * (place + 1))
        self.manager.on_new_request(context)
        for _ in range(5000):
            found = []
            for key in keys:
                found.append(self.manager.lookup(key, context))
                if found[-1] is LookupResult.MISS:
                    break
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                break
            self.step()
            time.sleep(0.0005)
        else:
            raise AssertionError("a lookup that is never answered")
        hits = [key for key, result in zip(keys, found, strict=False) if result is LookupResult.HIT]
        self.hits += len(hits)
        self.asked += len(keys)
        if hits:
            spec = self.manager.prepare_load(hits, context)
            for key, chunk in zip(hits, spec.chunk_ids, strict=True):
                held = bytes(self.memory[int(chunk) * PAGE : (int(chunk) + 1) * PAGE])
                assert held == self.truth(key), "wrong bytes"
            self.manager.complete_load(hits, context)
        stored = self.manager.prepare_store(keys, context)
        if stored is not None and stored.keys_to_store:
            for key, chunk in zip(stored.keys_to_store, stored.store_spec.chunk_ids, strict=True):
                self.memory[int(chunk) * PAGE : (int(chunk) + 1) * PAGE] = self.truth(key)
            self.manager.complete_store(set(stored.keys_to_store), context)
        self.manager.on_request_finished(context)
        self.step()
        return len(hits)

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def settle(self):
        for _ in range(5000):
            if not self.manager.has_pending_work():
                return
            self.step()
            time.sleep(0.0005)
        raise AssertionError("it never comes to rest")

    def say(self, kind, session, p10=None):
        body = {"v": "agentkv.hint/1", "id": "h", "kind": kind, "ts_ms": self.clock.wall_ms(), "session": session}
        if p10 is not None:
            body["wait"] = {"p10_ms": int(1000 * p10), "p50_ms": int(2000 * p10), "p90_ms": int(4000 * p10)}
        self.side.hear(read(body))

    def check(self):
        self.side.sessions.check()
        self.policy._order.check()
        self.disk._shelf.check()
        primary = self.manager.primary_tier
        copies = self.policy._order.copies
        idle = sum(chunk.ref_cnt == 0 for chunk in copies.values())
        assert idle == primary._num_evictable_cache_chunks
        chunks = [chunk.chunk_id for chunk in copies.values()]
        assert len(set(chunks)) == len(chunks), "one chunk for two"
        assert CHUNKS == len(chunks) + primary._get_num_free_chunks(), (len(chunks), primary._get_num_free_chunks())

    def close(self):
        self.settle()
        self.memory.release()
        self.manager.shutdown()


def random_life(seed, deeds=150):
    """Requests, hints, resets and time in any order: every byte that is served is right, every count holds."""
    dice = random.Random(seed)
    clock = ManualClock(start_s=10.0, wall_ms=10**12)
    with tempfile.TemporaryDirectory(prefix="akv") as folder:
        engine = Engine(Path(folder), clock, seed)
        lengths = dict.fromkeys("abcdef", 3)
        for _ in range(deeds):
            name = dice.choice("abcdef")
            match dice.choice(["call", "call", "call", "wait", "end", "reset", "pass", "loose", "over"]):
                case "call":
                    lengths[name] = min(9, lengths[name] + dice.choice([0, 0, 1]))
                    shared = [engine.key("shared", place) for place in range(2)]
                    engine.request(name, shared + [engine.key(name, place) for place in range(lengths[name])])
                case "wait":
                    engine.say("tool_start", name, dice.choice([0.0, 1.0, 30.0, 900.0]))
                case "end":
                    engine.say("tool_end", name)
                case "over":
                    engine.say("session_end", name)
                case "loose":
                    engine.request("", [engine.key("loose", place) for place in dice.sample(range(40), 3)])
                case "pass":
                    clock.advance(dice.choice([0.1, 1.0, 30.0, 4000.0]))
                case "reset":
                    if dice.random() < 0.2:
                        engine.manager.reset_cache()
                        getattr(engine.manager, "on_reset_flushed", lambda: None)()  # 0.33 holds promotions until then
            if dice.random() < 0.5:
                engine.settle()
                engine.check()
        engine.settle()
        engine.check()
        state = engine.side.stats()
        engine.close()
        return state, engine.hits, engine.asked


def hinted_session_is_back():
    """The whole way with vLLM's own manager: pushed out, hinted, there before it is asked for."""
    clock = ManualClock(start_s=10.0, wall_ms=10**12)
    with tempfile.TemporaryDirectory(prefix="akv") as folder:
        engine = Engine(Path(folder), clock, "one")
        mine = [engine.key("ada", place) for place in range(10)]
        engine.request("ada", mine)
        engine.settle()
        engine.say("tool_start", "ada", 30.0)
        for name in "bcd":
            engine.request(name, [engine.key(name, place) for place in range(12)])
            engine.settle()
        assert not engine.policy._order.copies.keys() & set(mine)
        clock.advance(1)
        for name in "bcd":
            engine.say("tool_start", name, 900.0)
        clock.advance(29.5)
        engine.settle()
        assert set(mine) <= engine.policy._order.copies.keys()
        assert 10 == engine.request("ada", mine)
        assert 10 == engine.side.stats()["promoted_blocks"]
        engine.close()
        assert not list(Path(folder).rglob("segment*"))


def worker():
    """A pool as vLLM hands it over, a tier in shared memory: out and back into other blocks, for chunks of several blocks."""
    for per in (1, 2):
        layers = [torch.randint(0, 127, (16, 64), dtype=torch.int8) for _ in range(3)]
        caches = base.CanonicalKVCaches(
            tensors=[base.CanonicalKVCacheTensor(tensor=layer, page_size_bytes=64) for layer in layers],
            group_data_refs=[[base.CanonicalKVCacheRef(tensor_idx=n, page_size_bytes=64) for n in range(3)]],
        )
        region = SharedOffloadRegion(
            engine_id=f"agentkv-worker-{os.getpid()}-{per}", num_chunks=8, rank=0, kv_bytes_per_chunk=PAGE,
            cpu_page_size=3 * 64 * per,
        )  # fmt: skip
        before = [layer.clone() for layer in layers]
        made = MemcpyWorker(caches, region, per)
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        chunks = CPULoadStoreSpec([6, 2, 5, 1][: -(-4 // per)])
        assert made.submit_store(7, base.GPULoadStoreSpec([3, 9, 4, 11], [4], [0]), chunks)
        made.wait({7})
        for layer in layers:
            layer.zero_()
        assert made.submit_load(8, chunks, base.GPULoadStoreSpec([1, 2, 12, 0], [4], [0]))
        made.wait({8})
        for layer, was in zip(layers, before, strict=True):
            assert torch.equal(layer[[1, 2, 12, 0]], was[[3, 9, 4, 11]])
            assert 0 == layer[3].sum()
        assert [(7, True), (8, True)] == [(one.job_id, one.success) for one in made.get_finished()]
        made.shutdown()
        assert not Path(region.mmap_path).exists()


def main():
    signatures()
    envelope()
    assert ["AgentKVTier"] == [tier["type"] for tier in completed({})["secondary_tiers"]]
    worker()
    hinted_session_is_back()
    promotions = hits = asked = 0
    for seed in range(6):
        state, served, wanted = random_life(seed)
        promotions += state["promotions"]
        hits, asked = hits + served, asked + wanted
    assert promotions > 10, promotions
    assert 0.3 < hits / asked < 1, (hits, asked)
    print(f"all fits: {promotions} promotions, {hits} of {asked} blocks found")


if __name__ == "__main__":
    main()
