"""AgentKVPolicy: vLLM's CachePolicy with our order of giving way in the CPU tier.

Covers the interface of vLLM's class and which session a key is stored for; the order itself is `order.py`. Loaded by vLLM:
`"eviction_policy": "AgentKVPolicy", "cache_policy_module_path": "agentkv_vllm.policy"`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from agentkv_vllm.order import Order
from agentkv_vllm.sessions import Key, session_of
from agentkv_vllm.side import shared
from agentkv_vllm.versions import require

require()

from vllm.v1.kv_offload.base import get_offload_group_idx  # noqa: E402  only for a version that was read
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy  # noqa: E402

LOOKED_S = 0.05
"""A request that waits looks its blocks up in every step, about once a millisecond, or after a step of compute."""


class Prefetch:
    """Marks a request context as one of ours, which brings blocks back and is no use of them."""


class AgentKVPolicy(CachePolicy):
    """Whoever is expected back last gives way first; blocks of sessions that have ended go before all others."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._sessions = shared().sessions
        self._order = Order(self._sessions)
        self._asker = ""
        self._looked_s: dict[Key, float] = {}

    def get(self, key: Key) -> Any:
        """Called for each block of a request's prompt, in each step until all of them are there."""
        copy = self._order.copies.get(key)
        if copy is not None:
            self._looked_s[key] = self._sessions.clock.now_s()
        return copy

    def insert(self, key: Key, chunk: Any, req_context: Any = None) -> None:  # noqa: ARG002  0.33 says who stores
        self._asker = ""
        self._order.add(key, chunk)

    def remove(self, key: Key) -> None:
        self._order.remove(key)
        self._looked_s.pop(key, None)

    def touch(self, keys: Iterable[Key], req_context: Any) -> None:
        if not _is_prefetch(req_context):
            self._order.use(keys)

    def on_store_miss(self, keys: Iterable[Key], req_context: Any) -> None:
        """Called just before room is made for `keys`: for whom it is, and whose they are."""
        session = session_of(req_context.kv_transfer_params)
        self._asker = session if _is_prefetch(req_context) else ""
        self._note(session, keys, req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Key]],
        insertion_only_keys: set[Key],  # noqa: ARG002  it makes no difference here whether a key was new
        reused_keys: set[Key],  # noqa: ARG002  likewise
        req_context: Any,
    ) -> None:
        if _is_prefetch(req_context):
            return
        session = session_of(req_context.kv_transfer_params)
        for keys in key_groups:
            self._note(session, keys, req_context)
            self._order.use(keys)

    def evict(self, n: int, protected: set[Key]) -> list[tuple[Key, Any]] | None:
        """What a request looked at just now stays: a prompt longer than the tier would push its own beginning out for its
        end and that for its beginning, for ever. So its end is not found, and is computed.
        """
        asker, self._asker = self._asker, ""
        since_s = self._sessions.clock.now_s() - LOOKED_S
        keys = self._order.victims(
            n, protected, asker=asker, spared=lambda key: self._looked_s.get(key, -math.inf) >= since_s
        )
        if keys is None:
            return None
        given = [(key, self._order.copies[key]) for key in keys]
        for key in keys:
            self.remove(key)
        return given

    def clear(self) -> None:
        self._order.clear()
        self._looked_s.clear()

    def _note(self, session: str, keys: Iterable[Key], req_context: Any) -> None:
        if session and not _is_prefetch(req_context):
            self._sessions.holds(session, placed(keys, req_context))


def placed(keys: Iterable[Key], req_context: Any) -> list[tuple[int, int, Key]]:
    """(cache group, place in the prompt, key) for each key whose place the request knows."""
    found = []
    for key in keys:
        place = req_context.get_offload_key_position(key)
        if place is not None:
            found.append((get_offload_group_idx(key), int(place), key))
    return found


def _is_prefetch(req_context: Any) -> bool:
    return req_context.get_state(Prefetch) is not None
