"""Side: what the tiers and the eviction order of one engine share: the sessions' books, the door, and the wake-up.

vLLM makes each of those by itself and hands none to another, so they meet here, one for each engine process. Covers what a
hint sets off: the books, and a wake-up when blocks are due. Does not cover bringing them back (`tier.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentkv import log
from agentkv.core.hint import HintKind
from agentkv.errors import ConfigError
from agentkv.hints.wire import WireHint
from agentkv_vllm.config import default_socket
from agentkv_vllm.door import Door
from agentkv_vllm.ports import ports
from agentkv_vllm.sessions import Sessions

MOST_KEPT = 256
_AGAIN_S = 0.5
_BEGINNINGS = (HintKind.TOOL_START, HintKind.TOOL_UPDATE)


class Side:
    """One engine's. `wake` ends its sleep, where that is possible. `close()` is idempotent."""

    def __init__(self, sessions: Sessions | None = None) -> None:
        self.sessions = sessions or Sessions()
        self.wake: Callable[[], None] | None = None
        self.door: Door | None = None
        self.closed_reason = "the tier that listens was not made"
        self._started_ms: deque[float] = deque(maxlen=MOST_KEPT)
        self._counts: dict[str, int] = dict.fromkeys(
            ("hints", "promotions", "under_way", "promoted_blocks", "missing_blocks"), 0
        )
        self._stirred = False
        self._found_ports: list[int] = []
        self._lock = threading.Lock()

    def open(self, path: Path | None) -> None:
        """Listen for hints. An address that cannot be had is logged: the engine works without."""
        try:
            self.door = Door(path or default_socket(), hear=self.hear, state=self.stats, tick=self._tick)
            self.closed_reason = ""
        except ConfigError as error:
            self.closed_reason = str(error)
            log.failed("vllm_door_closed", reason=str(error))

    def hear(self, hint: WireHint) -> tuple[str, str]:
        """What a hint does, in words; wakes the engine if blocks are due or given up."""
        self.count("hints")
        outcome = self.sessions.hear(hint)
        if outcome[0] == "applied":
            self._stirred = True
            due_s = self.sessions.next_due_s()
            later = hint.kind in _BEGINNINGS and due_s is not None and due_s > self.sessions.clock.now_s()
            if not later:  # else the door's own thread wakes it in time
                self.rouse()
        return outcome

    def wants_step(self) -> bool:
        """Whether the engine should take a step though it has no request."""
        if self._stirred:
            return True
        due_s = self.sessions.next_due_s()
        return due_s is not None and (self.wake is None or due_s <= self.sessions.clock.now_s())

    def settled(self) -> None:
        """The engine is taking a step, in which the tiers look at what hints have changed."""
        self._stirred = False

    def rouse(self) -> None:
        """End the engine's sleep, if we can."""
        if self.wake is not None:
            try:
                self.wake()
            except Exception as error:
                log.failed("vllm_wake_failed", error=repr(error))

    def count(self, name: str, more: int = 1) -> None:
        """Add to a counter of `stats`."""
        with self._lock:
            self._counts[name] += more

    def promoted(self, heard_s: float, due_s: float) -> None:
        """Blocks are on their way: how long after they were due, or after the hint where that came later."""
        late_s = self.sessions.clock.now_s() - max(heard_s, due_s)
        with self._lock:
            self._counts["promotions"] += 1
            self._started_ms.append(max(0.0, 1000 * late_s))

    def stats(self) -> dict[str, Any]:
        """Counts as plain JSON values; `started_ms` are the latest promotions, from due to on their way, `ports` the server's."""
        with self._lock:
            counts, started = dict(self._counts), [round(value, 3) for value in self._started_ms]
        wakes = "wakes" if self.wake is not None else "steps while anybody waits"
        return {**self.sessions.stats(), **counts, "started_ms": started, "idle": wakes, "ports": self._ports()}

    def _ports(self) -> list[int]:
        """Looked for until some are found: the server may not listen yet."""
        self._found_ports = self._found_ports or ports()
        return self._found_ports

    def close(self) -> None:
        """Stop listening."""
        door, self.door = self.door, None
        if door is not None:
            door.close()

    def _tick(self) -> float | None:
        """On the door's thread: wake the engine when something is due; in how many seconds to look again."""
        due_s = self.sessions.next_due_s()
        if due_s is None:
            return None
        left_s = due_s - self.sessions.clock.now_s()
        if left_s > 0:
            return left_s
        self.rouse()
        return _AGAIN_S


_made: Side | None = None
_making = threading.Lock()


def shared() -> Side:
    """This process's; made when first asked for."""
    global _made  # noqa: PLW0603  vLLM offers no place where two of its plug-ins could meet
    with _making:
        if _made is None:
            _made = Side()
        return _made


def start_anew() -> Side:
    """A new one, for a new engine in this process or a test; the old one is closed."""
    global _made  # noqa: PLW0603  as above
    with _making:
        if _made is not None:
            _made.close()
        _made = Side()
        return _made
