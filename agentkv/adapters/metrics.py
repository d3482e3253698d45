"""Metrics: what a server's `/metrics` says of its load and of where cached tokens came from.

Covers reading the Prometheus text form (bounded), whether requests wait there, and the cached tokens of one call as a
difference of counters, which is right only while nobody else's call computes in between: otherwise nothing is said. Does
not cover usage in answers (`core/reported.py`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping

from agentkv.adapters.base import Unreachable
from agentkv.adapters.http import Endpoint

WITHIN_S = 0.25
HITS_WITHIN_S = 0.1
"""A call's end waits for this at most, and only where the answer did not say."""
QUEUES = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
CACHED = "vllm:prompt_tokens_cached_by_source_total"
FINISHED = "vllm:request_success_total"
RUNNING = "vllm:num_requests_running"
SOURCES = {"device": "device", "host": "host", "disk": "disk", "p2p": "disk", "external_unspecified": "disk"}
"""Theirs -> ours; what is neither device nor host came from farther away."""
_FAILURES = 3
_MOMENT_S = 0.02


def samples(text: str, names: frozenset[str]) -> dict[tuple[str, str], float]:
    """The samples of these metrics, summed by name and `source` label; lines that cannot be read are left out."""
    found: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in names:
            continue
        labels, closed, rest = line.partition("}")
        value = (rest if closed else line[len(name) :]).split()
        try:
            number = float(value[0])
        except (IndexError, ValueError):
            continue
        if not math.isfinite(number) or number < 0:
            continue
        source = labels.partition('source="')[2].partition('"')[0] if closed else ""
        found[name, source] = found.get((name, source), 0.0) + number
    return found


class Load:
    """Whether a server has room for what nobody waits for. Thread-safe."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def busy(self, within_s: float = WITHIN_S) -> str | None:
        """Why not, "" if it has room, None where the server does not say."""
        try:
            text = self._endpoint.text("/metrics", within_s)
        except Unreachable as error:
            if error.status is None:
                return str(error)
            text = ""
        queues = samples(text, frozenset(QUEUES))
        if queues:
            waiting = sum(queues.values())
            return f"{waiting:.0f} requests wait at the server" if waiting else ""
        try:
            slots = self._endpoint.get("/slots", within_s)
        except Unreachable:
            return None
        if not isinstance(slots, list) or not slots or not all(isinstance(slot, Mapping) for slot in slots):
            return None
        return "every slot computes" if all(slot.get("is_processing") for slot in slots) else ""


class Hits:
    """Cached tokens by source, call by call, as differences of vLLM's counters. Thread-safe."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._before: dict[tuple[str, str], float] | None = None
        self._crossed = False
        self._failed = 0
        self._far = False

    def start(self) -> None:
        """Note where the counters stand."""
        self.of_call(0)

    def of_call(self, cached_tokens: int, prompt_tokens: int | None = None) -> dict[str, int] | None:
        """Where the cached tokens of the call that has just ended came from; in HITS_WITHIN_S at most.

        None where another call ended too or still computes, the server was started anew, says nothing, or says something
        else than the answer did (`cached_tokens`; 0 where that did not say), or more than the prompt had. Not asked where
        the answer said it and nothing ever came from farther than the device: then there is nothing to learn. Nor while
        the end of another call is being looked at: whose tokens those are nobody could tell.
        """
        if self._failed >= _FAILURES or (cached_tokens and not self._far):
            return None
        if not self._lock.acquire(blocking=False):
            self._crossed = True
            return None
        try:
            grown = self._grown()
        finally:
            self._lock.release()
        by: dict[str, int] = {}
        for (name, source), tokens in grown.items():
            if name == CACHED and tokens:
                tier = SOURCES.get(source, "disk")
                by[tier] = by.get(tier, 0) + round(tokens)
        told = sum(by.values())
        fits = cached_tokens in (0, told) and (prompt_tokens is None or told <= prompt_tokens)
        return by if by and fits else None

    def _grown(self) -> dict[tuple[str, str], float]:
        """By what the counters grew, if by one call's; {} otherwise. With the lock held."""
        ends_s = time.monotonic() + HITS_WITHIN_S
        before = None if self._crossed else self._before  # after ends that were not looked at, begin anew
        self._crossed = False
        now = self._read(ends_s)
        if before is not None and now is not None and _counters(now) == _counters(before):
            time.sleep(max(0.0, min(_MOMENT_S, ends_s - time.monotonic())))  # counted a moment after the answer's end
            now = self._read(ends_s)
        self._failed = self._failed + 1 if now is None else 0
        self._before = now
        if before is None or now is None or self._crossed or now.get((RUNNING, "")):
            return {}
        grown = {key: tokens - before.get(key, 0.0) for key, tokens in _counters(now).items()}
        if min(grown.values(), default=0.0) < 0 or grown.get((FINISHED, ""), 0.0) != 1:
            return {}
        return grown

    def _read(self, ends_s: float) -> dict[tuple[str, str], float] | None:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return None
        try:
            now = samples(self._endpoint.text("/metrics", left_s), frozenset((CACHED, FINISHED, RUNNING)))
        except Unreachable:
            return None
        self._far = any(tokens for (name, source), tokens in now.items() if name == CACHED and source != "device")
        return now


def _counters(said: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return {key: number for key, number in said.items() if key[0] != RUNNING}
