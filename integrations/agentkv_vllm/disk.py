"""AgentKVDisk: a tier of vLLM's behind the CPU tier: private files, checksummed blocks, room by our order.

Covers vLLM's jobs over `shelf.py`: each is carried out by a thread, loads before stores, and reported when the scheduler
asks. What cannot be written is not stored; what cannot be trusted is not loaded, and is computed again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from agentkv import log
from agentkv_vllm.sessions import Key
from agentkv_vllm.shelf import Shelf
from agentkv_vllm.side import shared
from agentkv_vllm.versions import require

require()

from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext  # noqa: E402  a version that was read
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402

_LOAD, _STORE, _END = 0, 1, 2
_THREADS = 2


class AgentKVDisk(SecondaryTierManager):
    """Blocks below `root_dir`, at most `capacity_bytes`; they go with the process."""

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        root_dir: str,
        capacity_bytes: int,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._bytes = primary_kv_view.cast("B")
        self._shelf = Shelf(root_dir, int(capacity_bytes), self.block_size_bytes, shared().sessions)
        self._jobs: queue.PriorityQueue[tuple[int, int, Any, list[Key]]] = queue.PriorityQueue()
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._under_way = 0
        self._idle = threading.Condition()
        self._numbers = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"agentkv-disk-{number}", daemon=True) for number in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def lookup(self, key: Key, req_context: Any) -> Any:  # noqa: ARG002  it makes no difference who asks
        return LookupResult.HIT if self._shelf.has(key) else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(_STORE, job_metadata, [])

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(_LOAD, job_metadata, self._shelf.pin(job_metadata.keys))

    def get_finished_jobs(self) -> Iterable[Any]:
        self._shelf.give_up()
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def on_new_request(self, req_context: Any) -> Any:  # noqa: ARG002  all are stored alike
        return RequestOffloadingContext()

    def touch(self, keys: Collection[Key], req_context: Any) -> None:
        """Uses are known by the sessions."""

    def drain_jobs(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._under_way == 0)

    def shutdown(self) -> None:
        """Wait for what is under way, and remove the files."""
        for _ in self._threads:
            self._numbers += 1
            self._jobs.put((_END, self._numbers, None, []))
        for thread in self._threads:
            thread.join()
        self._shelf.close()
        self._bytes.release()

    def _submit(self, kind: int, job: Any, pinned: list[Key]) -> None:
        with self._idle:
            self._under_way += 1
        self._numbers += 1
        self._jobs.put((kind, self._numbers, job, pinned))

    # -- the threads

    def _run(self) -> None:
        while True:
            kind, _, job, pinned = self._jobs.get()
            if kind == _END:
                return
            began_s = time.monotonic()
            loaded: list[Key] | None = None
            try:
                if kind == _LOAD:
                    loaded = self._loaded(job, pinned)
                    fine = len(loaded) == len(job.keys)
                else:
                    fine = self._shelf.write(list(self._views(job))) == len(job.keys)
            except Exception as error:
                log.failed("vllm_disk_failed", error=repr(error))
                fine = False
            result = JobResult(
                job_id=job.job_id, success=fine, successful_keys=tuple(loaded) if loaded and not fine else None,
                transfer_time=time.monotonic() - began_s, transfer_bytes=len(job.keys) * self.block_size_bytes,
            )  # fmt: skip
            with self._idle:
                self._done.put(result)
                self._under_way -= 1
                self._idle.notify_all()

    def _loaded(self, job: Any, pinned: list[Key]) -> list[Key]:
        there = set(pinned)
        blocks = [(key, view) for key, view in self._views(job) if key in there]
        good = self._shelf.read(blocks)
        return [key for (key, _), fine in zip(blocks, good, strict=True) if fine]

    def _views(self, job: Any) -> Iterable[tuple[Key, memoryview]]:
        size = self.block_size_bytes
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            start = int(chunk) * size
            yield key, self._bytes[start : start + size]
