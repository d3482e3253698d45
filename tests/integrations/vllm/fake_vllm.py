"""vLLM's offloading classes as far as the plug-in touches them, with the behaviour of their documentation, and no engine.

`install(monkeypatch)` puts them where `import vllm...` finds them. `FakeManager` drives tiers and the policy as the real
tiering manager does: stores cascade, a miss in memory is looked up in the tiers, promotions are flushed at a step's end.
"""

from __future__ import annotations

import enum
import importlib
import sys
import time
import types
from dataclasses import dataclass, field
from typing import Any, ClassVar

BLOCK = 4096


class LookupResult(enum.Enum):
    MISS, HIT, HIT_PENDING, RETRY = range(4)


class Medium(enum.Enum):
    CPU, STORAGE = "CPU", "STORAGE"


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    state: dict[type, Any] = field(default_factory=dict)
    places: dict[bytes, int] = field(default_factory=dict)

    def set_state(self, value):
        self.state[type(value)] = value

    def get_state(self, kind):
        return self.state.get(kind)

    def get_offload_key_position(self, key):
        return self.places.get(key)


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: list[int]
    is_promotion: bool
    req_context: ReqContext


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class SecondaryTierManager:
    medium: ClassVar[Any] = None

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self._primary_kv_view = primary_kv_view
        self.tier_type = tier_type
        self.block_size_bytes = primary_kv_view.strides[0]

    def has_pending_work(self):
        return False

    def serve_external_requests(self, parent):
        pass

    def on_schedule_end(self, context):
        pass

    def on_request_finished(self, req_context):
        pass

    def shutdown(self):
        pass


class CachePolicy:
    def __init__(self, cache_capacity):
        self.cache_capacity = cache_capacity

    def mark_evictable(self, key):
        pass

    def mark_non_evictable(self, key):
        pass


class OffloadingWorker:
    pass


class TieringOffloadingSpec:
    def __init__(self, config):
        self.config = config
        self.extra_config = config.extra_config
        self.blocks_per_chunk = 1
        self.num_chunks = 4
        self.kv_bytes_per_chunk = self.cpu_page_size_per_worker = BLOCK
        self.replicated_layout = False

    @classmethod
    def build_metric_definitions(cls, extra_config):
        return {"tiers": [tier["type"] for tier in extra_config["secondary_tiers"]]}

    def get_worker(self, kv_caches):
        return "vllm's own"


class Platform:
    cpu = True

    def is_cpu(self):
        return self.cpu


@dataclass
class Chunk:
    chunk_id: int
    ref_cnt: int = -1


def make_key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


class FakeParent:
    def __init__(self, manager, index):
        self.on_new_request = lambda context: manager.on_new_request(context, without=index)
        self.lookup = lambda key, context: manager.lookup(key, context, without=index)
        self.on_request_finished = lambda context: manager.on_request_finished(context, without=index)


class FakeManager:
    """Memory of `chunks` chunks with a policy, and tiers made by `make(spec, view)`."""

    def __init__(self, chunks, policy, makers):
        self.bytes = bytearray(chunks * BLOCK)
        self.view = memoryview(self.bytes).cast("B", (chunks, BLOCK))
        self.policy = policy(cache_capacity=chunks)
        self.free = list(range(chunks))[::-1]
        self.tiers = [make(None, self.view) for make in makers]
        self.jobs: dict[int, TransferJob] = {}
        self.pending: dict[tuple[int, str], TransferJob] = {}
        self.seen: dict[str, set[bytes]] = {}
        self.steps = self.numbers = 0
        self.clock = None

    # what the engine does

    def request(self, name, keys, *, params=None, content=None):
        """A whole request: lookups (with steps until nothing is pending), then its new blocks stored. Returns hits."""
        if self.clock is not None:
            self.clock.advance(0.1)  # requests come one after the other
        context = ReqContext(name, params, places={key: 128 * (number + 1) for number, key in enumerate(keys)})
        self.on_new_request(context)
        for _ in range(3000):
            results = []
            for key in keys:
                results.append(self.lookup(key, context))
                if results[-1] is LookupResult.MISS:
                    break
            if not {LookupResult.HIT_PENDING, LookupResult.RETRY} & set(results):
                break
            self.step()
            time.sleep(0.0005)  # the disk's threads take real time
        else:
            raise AssertionError("a request that waits for ever")
        hits = [key for key, result in zip(keys, results, strict=False) if result is LookupResult.HIT]
        held = {key: self.content(key) for key in hits}
        new = [key for key in keys if key not in hits]
        written = self.prepare_store(new, context)
        if written is not None:
            for key in written:
                chunk = self.policy.get(key)
                self.write(chunk.chunk_id, (content or (lambda one: one[:32]))(key))
            self.complete_store(written, context)
        self.seen.setdefault(name, set()).update(keys)
        self.policy.on_request_finished((tuple(keys),), set(new), set(hits), context)
        for tier in self.tiers:
            tier.on_request_finished(context)
        self.step()
        return held

    def content(self, key):
        chunk = self.policy.get(key).chunk_id
        return bytes(self.bytes[chunk * BLOCK : chunk * BLOCK + 32])

    def write(self, chunk, content):
        self.bytes[chunk * BLOCK : chunk * BLOCK + 32] = content

    def step(self):
        self.steps += 1
        self.process()
        for index, tier in enumerate(self.tiers):
            tier.serve_external_requests(FakeParent(self, index))
        for (index, _), job in list(self.pending.items()):
            self.jobs[job.job_id] = job
            self.tiers[index].submit_load(job)
        self.pending.clear()
        for tier in self.tiers:
            tier.on_schedule_end(None)

    def settle(self):
        """Steps while anything is pending, as an engine that was woken takes."""
        for _ in range(2000):
            if not self.jobs and not any(tier.has_pending_work() for tier in self.tiers):
                return
            self.step()
            for tier in self.tiers:
                tier.drain_jobs()
        raise AssertionError("it never comes to rest")

    # what the real manager does

    def on_new_request(self, context, without=None):
        for index, tier in enumerate(self.tiers):
            if index != without:
                tier.on_new_request(context)
        return RequestOffloadingContext()

    def on_request_finished(self, context, without=None):
        self.policy.on_request_finished((), set(), set(), context)
        for index, tier in enumerate(self.tiers):
            if index != without:
                tier.on_request_finished(context)

    def lookup(self, key, context, without=None):
        self.process()
        chunk = self.policy.get(key)
        if chunk is not None:
            return LookupResult.HIT if chunk.ref_cnt >= 0 else LookupResult.HIT_PENDING
        for index, tier in enumerate(self.tiers):
            if index != without and tier.lookup(key, context) is LookupResult.HIT:
                written = self.prepare_store([key], context)
                if written is None:
                    return LookupResult.MISS
                job = self.pending.setdefault(
                    (index, context.req_id), TransferJob(self.number(), [], [], True, context)
                )
                job.keys.append(key)
                job.chunk_ids.append(self.policy.get(key).chunk_id)
                return LookupResult.HIT_PENDING
        return LookupResult.MISS

    def prepare_store(self, keys, context):
        new = [key for key in keys if self.policy.get(key) is None]
        if not new:
            return []
        self.policy.on_store_miss(new, context)
        wanted = len(new) - len(self.free)
        if wanted > 0:
            given = self.policy.evict(wanted, set(keys))
            if given is None:
                return None
            assert len(given) == wanted
            assert all(chunk.ref_cnt == 0 for _, chunk in given)
            self.free += [chunk.chunk_id for _, chunk in given]
        for key in new:
            self.policy.insert(key, Chunk(self.free.pop()))
        return new

    def complete_store(self, keys, context):
        for key in keys:
            self.policy.get(key).ref_cnt = 0
        for index, tier in enumerate(self.tiers):
            for key in keys:
                self.policy.get(key).ref_cnt += 1
            chunks = [self.policy.get(key).chunk_id for key in keys]
            job = TransferJob(self.number(), set(keys), [], False, context)
            job.chunk_ids = [chunks[keys.index(key)] for key in job.keys]
            self.jobs[job.job_id] = job
            tier.submit_store(job)
            assert index >= 0

    def process(self):
        for tier in self.tiers:
            for result in tier.get_finished_jobs():
                job = self.jobs.pop(result.job_id)
                good = set(job.keys if result.success else result.successful_keys or ())
                for key in job.keys:
                    chunk = self.policy.get(key)
                    if not job.is_promotion:
                        chunk.ref_cnt -= 1
                    elif key in good:
                        chunk.ref_cnt = 0
                    else:
                        self.policy.remove(key)
                        self.free.append(chunk.chunk_id)

    def number(self):
        self.numbers += 1
        return self.numbers

    def close(self):
        for tier in self.tiers:
            tier.shutdown()
        self.view.release()


OURS = ("policy", "tier", "disk", "spec")


def install(monkeypatch, version="0.32.0+cpu") -> types.SimpleNamespace:
    """Put the fakes in place, and the plug-in's modules that need vLLM on top of them."""
    parts = {
        "vllm": {"__version__": version},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.v1": {},
        "vllm.v1.engine": {"EngineCoreRequestType": types.SimpleNamespace(WAKEUP=b"\x05")},
        "vllm.v1.kv_offload": {},
        "vllm.v1.kv_offload.base": {
            "LookupResult": LookupResult, "Medium": Medium, "ReqContext": ReqContext,
            "RequestOffloadingContext": RequestOffloadingContext, "OffloadingWorker": OffloadingWorker,
            "TransferResult": TransferResult,
            "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
        },
        "vllm.v1.kv_offload.cpu": {},
        "vllm.v1.kv_offload.cpu.policies": {},
        "vllm.v1.kv_offload.cpu.policies.base": {"CachePolicy": CachePolicy},
        "vllm.v1.kv_offload.cpu.shared_offload_region": {"SharedOffloadRegion": object},
        "vllm.v1.kv_offload.tiering": {},
        "vllm.v1.kv_offload.tiering.base": {"JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager},
        "vllm.v1.kv_offload.tiering.spec": {"TieringOffloadingSpec": TieringOffloadingSpec},
    }  # fmt: skip
    for name, members in parts.items():
        module = types.ModuleType(name)
        module.__path__ = []
        for member, value in members.items():
            setattr(module, member, value)
        monkeypatch.setitem(sys.modules, name, module)
    found = {}
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"agentkv_vllm.{name}", raising=False)
    for name in OURS:
        found[name] = importlib.import_module(f"agentkv_vllm.{name}")
    return types.SimpleNamespace(**found)
