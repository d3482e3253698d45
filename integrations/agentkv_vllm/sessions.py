"""Sessions: what each context in this engine waits for, which blocks it has, and when they should be back.

Covers the books behind hints: waits with a time limit, the moment at which blocks are to be brought back (the forecast's low
quantile, less the time that this takes), the blocks of a session in the order of its prompt, and who is over. Does not
cover who gives way (`order.py`) nor any copy. Needs no vLLM. Thread-safe; every bound is a constant here.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from agentkv.clock import Clock, SystemClock
from agentkv.core.forecast import Forecast, last_of
from agentkv.core.hint import HintKind
from agentkv.hints.wire import WireHint, WireWait, safe
from agentkv.policy.waiting import LOW

MOST_SESSIONS = 1024
MOST_BLOCKS = 65_536
"""Of one session; a context of a million tokens in blocks of 16."""
MOST_CALLS = 64
"""Tool calls of one session that run at once."""
MARGIN_S = 0.1
SHORTEST_LIFE_S = 60.0
LONGEST_LIFE_S = 3600.0
"""A wait of which nothing more is heard is forgotten after four times its p90, within these bounds; a request after the longest."""
IDLE_LIFE_S = 3600.0
"""A session that neither calls nor waits is forgotten after this; its blocks then count by their last use alone."""
_EXPIRE_S = 1.0
_LIFE = 4.0
_LATEST_S = 60.0
_FIRST_S_PER_BLOCK = 2e-3

Key = bytes


@dataclass(slots=True)
class Session:
    """One context; a `policy.evict.Held`, so that the very keys of `agentkv.policy` order it. Monotonic seconds."""

    name: str
    order: int
    used_s: float
    wait_started_s: float = 0.0
    forecast: Forecast | None = None
    priority: int = 0
    background: bool = False
    tokens: int = 0
    recompute_s: float = 0.0
    idle_share: float = 0.0
    returning: bool = False
    """Its tools have ended, its next call is due any moment."""
    running: int = 0
    began_s: float = 0.0
    """When its latest request came."""
    calls: dict[str, tuple[float, Forecast]] = field(default_factory=dict)
    heard_s: float = 0.0
    due_s: float | None = None
    ends_s: float | None = None
    """When the wait is forgotten if nothing more is heard of it."""
    blocks: dict[tuple[int, int], Key] = field(default_factory=dict)
    """By cache group and place in the prompt."""

    def keys(self) -> list[Key]:
        """Its blocks from the beginning of the prompt to its end."""
        return [self.blocks[place] for place in sorted(self.blocks, key=lambda place: (place[1], place[0]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Blocks of a session that should be on their way now. `heard_s`: when the hint behind it came."""

    name: str
    keys: tuple[Key, ...]
    heard_s: float
    due_s: float


class Sessions:
    """The books. At most `most` sessions; `margin_s`: how much earlier than needed blocks are due."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        margin_s: float = MARGIN_S,
        most: int = MOST_SESSIONS,
    ) -> None:
        self.clock = clock or SystemClock()
        self.margin_s = margin_s
        self._most = most
        self.lock = threading.RLock()
        """Held by whoever reads several facts that must fit together."""
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the longest unused first
        self._owners: dict[Key, set[str]] = {}
        self._told: list[deque[tuple[Key, bool]]] = []
        self._expired_s = -math.inf
        self._heap: list[tuple[float, str]] = []  # by due time; entries that no longer hold are skipped
        self._numbers = 0
        self.s_per_block = _FIRST_S_PER_BLOCK

    # -- what requests tell

    def begins(self, name: str) -> None:
        """A request of this session is there: it waits for nothing any more."""
        with self.lock:
            session = self._sessions.get(name) or self._new(name)
            session.running += 1
            session.began_s = self.clock.now_s()
            self._awake(session)

    def ends(self, name: str) -> None:
        """A request of this session is over."""
        with self.lock:
            session = self._sessions.get(name)
            if session is not None:
                session.running = max(0, session.running - 1)
                session.used_s = self.clock.now_s()

    def holds(self, name: str, blocks: Iterable[tuple[int, int, Key]]) -> None:
        """Blocks of this session, as (cache group, place in the prompt, key); a place has one block, the latest."""
        with self.lock:
            session = self._sessions.get(name)
            if session is None:
                return
            for group, place, key in blocks:
                old = session.blocks.get((group, place))
                if old == key:
                    continue
                if old is None and len(session.blocks) >= MOST_BLOCKS:
                    return
                if old is not None:
                    self._disown(old, name)
                session.blocks[group, place] = key
                self._owners.setdefault(key, set()).add(name)

    # -- what hints tell

    def hear(self, hint: WireHint) -> tuple[str, str]:
        """Take a hint in; the outcome ("applied", "advisory") and what follows from it, in words."""
        with self.lock:
            now_s = self.clock.now_s()
            session = self._sessions.get(hint.session)
            if session is None:
                return "advisory", "no call of this session was seen here"
            if hint.next is not None:
                session.priority = hint.next.priority
            if hint.final or hint.kind is HintKind.SESSION_END or (hint.keep and hint.keep.strength == "drop"):
                return self._release(session)
            match hint.kind:
                case HintKind.TOOL_START | HintKind.TOOL_UPDATE:
                    return self._waits(session, hint, now_s)
                case HintKind.TOOL_END | HintKind.TOOL_ERROR:
                    return self._returns(session, hint, now_s)
                case HintKind.TURN_START:
                    self._awake(session)
                case HintKind.TURN_END:
                    session.used_s = now_s
            return "advisory", "noted"

    def _waits(self, session: Session, hint: WireHint, now_s: float) -> tuple[str, str]:
        if hint.wait is None:
            return "advisory", "nothing is known of how long it will take"
        call = "" if hint.call is None else hint.call.id
        if call not in session.calls and len(session.calls) >= MOST_CALLS:
            return "failed", f"{MOST_CALLS} calls of this session run already"
        late_s = min(max(0.0, (self.clock.wall_ms() - hint.ts_ms) / 1000), _LATEST_S)
        session.calls[call] = (now_s - late_s, forecast_of(hint.wait))
        session.heard_s = now_s
        self._plan(session, now_s)
        assert session.due_s is not None
        return "applied", f"{len(session.blocks)} blocks are due in {max(0.0, session.due_s - now_s):.3f} s"

    def _plan(self, session: Session, now_s: float) -> None:
        """Of several calls the session waits for the last: one forecast, counted from now."""
        forecasts = [whole.after(max(0.0, now_s - began_s)) for began_s, whole in session.calls.values()]
        forecast = last_of(forecasts)
        session.forecast, session.wait_started_s, session.returning = forecast, now_s, False
        load_s = len(session.blocks) * self.s_per_block
        self._due(session, now_s + max(0.0, forecast.quantile_s(LOW) - load_s - self.margin_s))
        life_s = min(max(SHORTEST_LIFE_S, _LIFE * forecast.quantile_s(0.9)), LONGEST_LIFE_S)
        session.ends_s = now_s + life_s

    def _returns(self, session: Session, hint: WireHint, now_s: float) -> tuple[str, str]:
        session.calls.pop("" if hint.call is None else hint.call.id, None)
        session.heard_s = now_s
        if session.calls:
            self._plan(session, now_s)
            return "applied", f"{len(session.calls)} calls still run"
        session.forecast, session.returning = None, True
        session.ends_s = now_s + SHORTEST_LIFE_S
        self._due(session, now_s)
        return "applied", f"{len(session.blocks)} blocks are due now"

    def _due(self, session: Session, due_s: float) -> None:
        session.due_s = due_s
        heapq.heappush(self._heap, (due_s, session.name))
        if len(self._heap) > 4 * self._most:  # mostly entries that no longer hold
            self._heap = [(one.due_s, one.name) for one in self._sessions.values() if one.due_s is not None]
            heapq.heapify(self._heap)

    def _awake(self, session: Session) -> None:
        now_s = self.clock.now_s()
        session.calls.clear()
        session.forecast, session.due_s, session.ends_s, session.returning = None, None, None, False
        session.used_s = now_s
        self._sessions.move_to_end(session.name)

    def _release(self, session: Session) -> tuple[str, str]:
        """Its blocks that nobody else has are free to go; it may call again later, and is new then."""
        own = self._forget(session, over=True)
        return "applied", f"{len(own)} of {len(session.blocks)} blocks are given up"

    # -- what follows

    def due(self) -> list[Due]:
        """Sessions whose blocks should be on their way now; each is told once for a hint."""
        with self.lock:
            now_s = self.clock.now_s()
            self._expire(now_s)
            found = []
            for session in self._sessions.values():
                if session.due_s is not None and session.due_s <= now_s:
                    found.append(
                        Due(name=session.name, keys=tuple(session.keys()), heard_s=session.heard_s, due_s=session.due_s)
                    )
                    session.due_s = None
            return sorted(found, key=lambda due: due.due_s)

    def next_due_s(self) -> float | None:
        """When the next session is due, monotonic; None where nobody waits."""
        with self.lock:
            while self._heap:
                due_s, name = self._heap[0]
                session = self._sessions.get(name)
                if session is not None and session.due_s == due_s:
                    return due_s
                heapq.heappop(self._heap)
            return None

    def let_go(self) -> deque[tuple[Key, bool]]:
        """A queue of its own for whoever asks: blocks that nobody has any more, and whether their session has ended."""
        told: deque[tuple[Key, bool]] = deque(maxlen=MOST_BLOCKS)
        with self.lock:
            self._told.append(told)
        return told

    def loaded(self, blocks: int, seconds: float) -> None:
        """So long did it take to bring so many blocks back: what is due later starts by this."""
        if blocks > 0 and seconds >= 0:
            with self.lock:
                self.s_per_block += (seconds / blocks - self.s_per_block) / 4

    # -- for the order

    def every(self) -> list[Session]:
        """All sessions, the longest unused first. What they hold may change under another thread's hands."""
        with self.lock:
            self._expire(self.clock.now_s())
            return list(self._sessions.values())

    def get(self, name: str) -> Session | None:
        """The session of that name."""
        return self._sessions.get(name)

    def has_owner(self, key: Key) -> bool:
        """Whether any session has this block."""
        return key in self._owners

    def owners(self, key: Key) -> frozenset[str]:
        """Sessions that have this block."""
        return frozenset(self._owners.get(key, ()))

    def stats(self) -> dict[str, Any]:
        """Counts as plain JSON values."""
        with self.lock:
            waiting = sum(session.ends_s is not None for session in self._sessions.values())
            return {
                "sessions": len(self._sessions), "waiting": waiting, "blocks": len(self._owners),
                "s_per_block": round(self.s_per_block, 6),
            }  # fmt: skip

    def check(self) -> None:
        """Every redundant fact, recomputed."""
        with self.lock:
            owners: dict[Key, set[str]] = {}
            for session in self._sessions.values():
                assert session.running >= 0
                for key in session.blocks.values():
                    owners.setdefault(key, set()).add(session.name)
            assert owners == self._owners, "an owner too many, or one too few"
            assert len(self._sessions) <= self._most

    def _new(self, name: str) -> Session:
        while len(self._sessions) >= self._most:
            idle = next((s for s in self._sessions.values() if not s.running), None)
            self._forget(idle or next(iter(self._sessions.values())))
        self._numbers += 1
        session = self._sessions[name] = Session(name=name, order=self._numbers, used_s=self.clock.now_s())
        return session

    def _expire(self, now_s: float) -> None:
        """At most once a second: it is asked for in every step."""
        if now_s < self._expired_s + _EXPIRE_S:
            return
        self._expired_s = now_s
        for session in list(self._sessions.values()):
            if session.ends_s is not None and session.ends_s <= now_s:
                session.calls.clear()
                session.forecast, session.due_s, session.ends_s, session.returning = None, None, None, False
            if session.began_s + LONGEST_LIFE_S <= now_s:  # a request whose end nobody told
                session.running = 0
            if not session.running and session.ends_s is None and session.used_s + IDLE_LIFE_S <= now_s:
                self._forget(session)

    def _forget(self, session: Session, *, over: bool = False) -> list[Key]:
        """Out of the books; the keys that were its alone."""
        del self._sessions[session.name]
        session.due_s = None
        return [key for key in dict.fromkeys(session.keys()) if self._disown(key, session.name, over=over)]

    def _disown(self, key: Key, name: str, *, over: bool = False) -> bool:
        """True if nobody has the block any more."""
        owners = self._owners.get(key)
        if owners is None:
            return False
        owners.discard(name)
        if not owners:
            del self._owners[key]
            for told in self._told:
                told.append((key, over))
        return not owners


def forecast_of(wait: WireWait) -> Forecast:
    """Three quantiles as a forecast whose 10 %, 50 % and 90 % quantiles they are: eleven points, straight between them."""
    p10, p50, p90 = (milliseconds / 1000 for milliseconds in (wait.p10_ms, wait.p50_ms, wait.p90_ms))
    points = (
        p10,
        *(p10 + (p50 - p10) * step / 4 for step in range(4)),
        p50,
        *(p50 + (p90 - p50) * step / 4 for step in range(1, 4)),
        p90,
        p90,
    )
    return Forecast(remaining_s=tuple(sorted(points)), n=wait.n, source=wait.source)  # sums round


def session_of(params: Any) -> str:
    """The session that a request's kv_transfer_params name, made safe; "" where they name none."""
    ours = params.get("agentkv") if isinstance(params, dict) else None
    name = ours.get("session") if isinstance(ours, dict) else None
    return safe(name) if isinstance(name, str) else ""
