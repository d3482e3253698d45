"""Sessions: which growing context a call belongs to, and what the engine remembers of it.

Covers: choosing a session, transcripts, the raw text behind tool calls, tasks in order of arrival. Does not cover:
blocks (`kv/`). The choice decides cost only. Thread-safe: callers choose, the engine's thread writes results.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from agentkv.core.task import Caller
from agentkv.engine.local.transcript import Transcript
from agentkv.errors import RequestInvalid

_SESSIONS_PER_TASK = 64  # more are forgotten, longest unused first: unattributed calls never end their task
_SAME_LINE = 0.5  # a prompt of the same branch that shares more than this is taken for an edited continuation


@dataclass(slots=True, eq=False)
class Session:
    """One growing context. `computed_tokens`: how many of the transcript's ids have had their KV computed."""

    key: str
    task: str
    transcript: Transcript = field(default_factory=Transcript)
    branches: set[str] = field(default_factory=set)
    raw_by_call: dict[str, str] = field(default_factory=dict)
    computed_tokens: int = 0
    calls: int = 0
    """Calls under way."""
    dropped: bool = False


@dataclass(slots=True, eq=False)
class _Task:
    ordinal: int
    sessions: dict[str, Session] = field(default_factory=dict)  # longest unused first
    last: dict[str, str] = field(default_factory=dict)  # branch -> session
    made: int = 0


class Sessions:
    """All sessions of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, _Task] = {}
        self._by_key: dict[str, Session] = {}
        self._ordinal = 0

    def choose(self, caller: Caller, prompt: str, wanted: str | None) -> Session:
        """The session that a call with this rendered prompt belongs to, not yet joined.

        `wanted` if given; else the idle session of the task that shares most with the prompt, if it shares the whole
        of its last prompt, or more than half of it on the same branch; else a new one.
        """
        with self._lock:
            if wanted is not None:
                known = self._by_key.get(wanted)
                if known is not None and known.task != caller.task:
                    raise RequestInvalid(
                        f"session {wanted!r} belongs to task {known.task!r}, not to {caller.task!r}", param="session"
                    )
                return known or Session(key=wanted, task=caller.task)
            task = self._tasks.get(caller.task)
            best, shared = None, -1
            for session in task.sessions.values() if task else ():
                chars = session.transcript.shared_chars(prompt)
                sent = session.transcript.prompt_chars
                fits = chars >= sent or (caller.branch in session.branches and chars > _SAME_LINE * sent)
                if fits and not session.calls and chars > shared:
                    best, shared = session, chars
            return best or Session(key="", task=caller.task)

    def join(self, session: Session, caller: Caller) -> tuple[int, list[str]]:
        """A call of `session` starts: (its task's place in order of arrival, sessions forgotten for it)."""
        with self._lock:
            task = self._tasks.get(caller.task)
            if task is None:
                self._ordinal += 1
                task = self._tasks[caller.task] = _Task(ordinal=self._ordinal)
            if not session.key:
                task.made += 1
                session.key = f"{caller.task}#{task.made}"
            task.sessions.pop(session.key, None)
            task.sessions[session.key] = session
            task.last[caller.branch] = session.key
            self._by_key[session.key] = session
            session.branches.add(caller.branch)
            session.calls += 1
            session.dropped = False
            idle = [s for s in task.sessions.values() if not s.calls]
            surplus = idle[: max(0, len(task.sessions) - _SESSIONS_PER_TASK)]
            for old in surplus:
                self._forget(old)
                del task.sessions[old.key]
            return task.ordinal, [old.key for old in surplus]

    def leave(self, session: Session) -> None:
        """A call of `session` has ended."""
        with self._lock:
            session.calls -= 1

    def raw_of(self, task: str, call_id: str) -> str | None:
        """What the model really wrote in the turn that asked for this tool call."""
        with self._lock:
            known = self._tasks.get(task)
            sessions = known.sessions.values() if known else ()
            return next((s.raw_by_call[call_id] for s in sessions if call_id in s.raw_by_call), None)

    def last_session(self, caller: Caller) -> str | None:
        """The session that the caller's branch used last."""
        with self._lock:
            task = self._tasks.get(caller.task)
            return None if task is None else task.last.get(caller.branch)

    def finish(self, task: str) -> None:
        """Forget the task."""
        with self._lock:
            known = self._tasks.pop(task, None)
            for session in known.sessions.values() if known else ():
                self._forget(session)

    def _forget(self, session: Session) -> None:
        session.dropped = True
        self._by_key.pop(session.key, None)

    def count(self) -> int:
        """How many sessions are remembered."""
        with self._lock:
            return len(self._by_key)
