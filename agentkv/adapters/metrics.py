"""Metrics: what a server's `/metrics` says of its load and of where cached tokens came from.

Covers reading the Prometheus text form (bounded), whether requests wait there, and the cached tokens of one call as a
difference of counters, which is right only while nobody else's call ends in between: then nothing is said. Does not
cover usage in answers (`core/reported.py`).
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
        self._failed = 0
        self._far = False

    def start(self) -> None:
        """Note where the counters stand."""
        self.of_call(0)

    def of_call(self, cached_tokens: int) -> dict[str, int] | None:
        """Where the cached tokens of the call that has just ended came from.

        None where another call ended too, the server was started anew, says nothing, or says something else than the
        answer did (`cached_tokens`; 0 where that did not say). Not asked where the answer said it and nothing ever came
        from farther than the device: then there is nothing to learn.
        """
        if self._failed >= _FAILURES or (cached_tokens and not self._far):
            return None
        with self._lock:
            before = self._before
            now = self._read()
            if before is not None and now is not None and now == before:  # counted a moment after the answer's end
                time.sleep(_MOMENT_S)
                now = self._read()
            self._before = now
            if before is None or now is None:
                return None
            grown = {key: now[key] - before.get(key, 0.0) for key in now}
            if min(grown.values(), default=0.0) < 0 or grown.get((FINISHED, ""), 0.0) != 1:
                return None
        by: dict[str, int] = {}
        for (name, source), tokens in grown.items():
            if name == CACHED and tokens:
                tier = SOURCES.get(source, "disk")
                by[tier] = by.get(tier, 0) + round(tokens)
        return by if by and cached_tokens in (0, sum(by.values())) else None

    def _read(self) -> dict[tuple[str, str], float] | None:
        try:
            now = samples(self._endpoint.text("/metrics", HITS_WITHIN_S), frozenset((CACHED, FINISHED)))
        except Unreachable:
            self._failed += 1
            return None
        self._failed = 0
        self._far = any(tokens for (name, source), tokens in now.items() if name == CACHED and source != "device")
        return now
