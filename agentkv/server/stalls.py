"""Waits that clients tell of: the neutral hint, and TokenCake's two events, become tool scopes of the runtime.

Covers which task and session a hint is about, opening and closing scopes, repeats, TokenCake's lifecycles. Does not
cover: reading a hint (`hints/wire.py`), what a scope does (forecasts, moves, the bill). Everything kept is bounded.
Nothing here raises into a call; a hint's outcome is its receipt.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from agentkv import log
from agentkv.core.hint import HintKind, ToolStatus
from agentkv.errors import AgentKVError, RequestInvalid
from agentkv.hints.wire import WireHint, safe
from agentkv.server.keys import Key

MOST_OPEN = 4096
_OF_TOOLS = frozenset({HintKind.TOOL_START, HintKind.TOOL_UPDATE, HintKind.TOOL_END, HintKind.TOOL_ERROR})
_Value = TypeVar("_Value")


class Scope(Protocol):
    """A tool call that runs."""

    def announce(self) -> object: ...
    def progress(self, share: float) -> None: ...
    def end(self, status: ToolStatus) -> None: ...


class Tools(Protocol):
    """Who opens tool scopes and ends tasks; AgentKV does."""

    def tool(self, name: str, *, expect_s: float | None, call_id: str, session: str | None) -> Scope: ...
    def task(self, key: str, *, final: bool, type: str) -> AbstractContextManager[object]: ...  # noqa: A002
    def finish(self, task: str) -> None: ...
    def finish_sessions(self, sessions: Iterable[str]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Where a call belongs: its task, and the session that it went on with."""

    task: str
    session: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    scope: Scope
    began_s: float


class _Latest(OrderedDict[Any, _Value], Generic[_Value]):
    """The newest entries; what is beyond `MOST_OPEN` goes, oldest first, through `gone`."""

    def __init__(self, gone: Callable[[_Value], None] | None = None) -> None:
        super().__init__()
        self._gone = gone

    def put(self, key: Any, value: _Value) -> None:
        self[key] = value
        self.move_to_end(key)
        while len(self) > MOST_OPEN:
            _, old = self.popitem(last=False)
            if self._gone is not None:
                self._gone(old)


class Stalls:
    """The open waits of one server. Thread-safe; may block, so the app calls it on worker threads."""

    def __init__(self, tools: Tools, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._tools = tools
        self._now_s = now_s
        self._lock = threading.Lock()
        self._open: _Latest[_Wait] = _Latest(lambda wait: wait.scope.end(ToolStatus.CANCELLED))
        self._seen: _Latest[None] = _Latest()
        self._names: _Latest[str] = _Latest()
        self._lifecycles: _Latest[Line] = _Latest()

    # -- what calls leave behind

    def called(self, key: Key | None, task: str, session: str, lifecycle: str | None) -> None:
        """A model call went through: its names can be told of from now on, also where they travel as a digest."""
        tenant = _tenant(key)
        with self._lock:
            for name in filter(None, (task, session)):
                plain = name.removeprefix(f"{tenant}/") if tenant else name
                if safe(plain) != plain:
                    self._names.put((tenant, safe(plain)), name)
            if lifecycle is not None:
                self._lifecycles.put((tenant, lifecycle), Line(task=task, session=session or None))

    # -- the neutral hint

    def hint(self, key: Key | None, hint: WireHint) -> dict[str, Any]:
        """Take a hint; its receipt: applied, advisory (nothing to do), repeated, or failed, with a reason."""
        with self._lock:
            known = (_tenant(key), hint.id) in self._seen
            if hint.id and not known:
                self._seen.put((_tenant(key), hint.id), None)
        if known:
            return _receipt(hint, "repeated")
        try:
            return _receipt(hint, self._take(key, hint))
        except AgentKVError as error:
            return _receipt(hint, "failed", str(error))
        except Exception as error:
            log.failed("hint_failed", error=repr(error))
            return _receipt(hint, "failed", "the log says why")

    def _take(self, key: Key | None, hint: WireHint) -> str:
        line = self._line(key, hint)
        if hint.kind is HintKind.SESSION_END:
            return self._ended(line, hint)
        if hint.call is None or hint.kind not in _OF_TOOLS:
            return "advisory"  # turns: the engine sees them itself
        name = (line.task, hint.call.id)
        if hint.kind is HintKind.TOOL_START:
            expect_s = None if hint.wait is None else hint.wait.p50_ms / 1000
            return self._start(name, key, line, tool=hint.call.tool, expect_s=expect_s)
        with self._lock:
            wait = self._open.get(name) if hint.kind is HintKind.TOOL_UPDATE else self._open.pop(name, None)
        if wait is None:
            return "advisory"  # its start was not told, or it has expired
        if hint.kind is not HintKind.TOOL_UPDATE:
            wait.scope.end(ToolStatus.FAILED if hint.kind is HintKind.TOOL_ERROR else ToolStatus.SUCCEEDED)
        elif hint.wait is not None:
            passed_s = self._now_s() - wait.began_s
            wait.scope.progress(passed_s / (passed_s + hint.wait.p50_ms / 1000) if passed_s > 0 else 0.0)
        return "applied"

    def _line(self, key: Key | None, hint: WireHint) -> Line:
        """A hint without a parent is about a task's own session, or about one that the engine named."""
        if hint.parent:
            return Line(task=self._named(key, hint.parent), session=self._named(key, hint.session))
        name = self._named(key, hint.session)
        task, separator, number = name.rpartition("#")
        if separator and number.isdecimal():
            return Line(task=task, session=name)
        return Line(task=name, session=None)

    def _named(self, key: Key | None, name: str) -> str:
        with self._lock:
            known = self._names.get((_tenant(key), name))
        return known or (key.task(name) if key else name)

    def _ended(self, line: Line, hint: WireHint) -> str:
        if not hint.final:
            return "advisory"
        if line.session is None:
            self._tools.finish(line.task)
        else:
            self._tools.finish_sessions([line.session])
        return "applied"

    def _start(self, name: tuple[str, str], key: Key | None, line: Line, *, tool: str, expect_s: float | None) -> str:
        def open_scope() -> Scope:
            with self._tools.task(line.task, final=False, type=_type(key)):
                scope = self._tools.tool(tool, expect_s=expect_s, call_id=name[1], session=line.session)
                scope.announce()
                return scope

        with self._lock:
            if name in self._open:
                return "repeated"
        scope = contextvars.Context().run(open_scope)
        with self._lock:
            self._open.put(name, _Wait(scope=scope, began_s=self._now_s()))
        return "applied"

    # -- TokenCake's events

    def started(self, key: Key | None, lifecycle: str, kind: str, estimate_s: float | None) -> str:
        """stall_started: "applied", "unknown" or "conflict"."""
        with self._lock:
            line = self._lifecycles.get((_tenant(key), lifecycle))
        if line is None:
            return "unknown"
        outcome = self._start((line.task, lifecycle), key, line, tool=kind, expect_s=estimate_s)
        return "conflict" if outcome == "repeated" else outcome

    def finished(self, key: Key | None, lifecycle: str) -> str:
        """stall_finished: "applied" or "unknown"."""
        with self._lock:
            line = self._lifecycles.get((_tenant(key), lifecycle))
            wait = None if line is None else self._open.pop((line.task, lifecycle), None)
        if wait is None:
            return "unknown"
        wait.scope.end(ToolStatus.SUCCEEDED)
        return "applied"

    def close(self) -> None:
        """End what is open: nobody will tell of it any more."""
        with self._lock:
            waits = list(self._open.values())
            self._open.clear()
        for wait in waits:
            wait.scope.end(ToolStatus.CANCELLED)


def read_hints(body: Any) -> list[Any]:
    """The hints in a body: one, a list under "hints", or the actions of a `kv_hints` envelope. Raises RequestInvalid."""
    if not isinstance(body, dict):
        raise RequestInvalid("a hint is an object", param="body", code="invalid_type")
    hints = body.get("hints", [body])
    if "actions" in body:
        from agentkv.hints.wire import read_envelope

        return read_envelope(body)
    if not isinstance(hints, list) or len(hints) > MOST_OPEN:
        raise RequestInvalid(f"hints is a list of at most {MOST_OPEN} hints", param="hints", code="invalid_type")
    return hints


def _tenant(key: Key | None) -> str:
    return "" if key is None else key.name


def _type(key: Key | None) -> str:
    return "" if key is None else f"key:{key.name}"


def _receipt(hint: WireHint, outcome: str, detail: str = "") -> dict[str, Any]:
    return {"id": hint.id, "outcome": outcome, **({"detail": detail} if detail else {})}
