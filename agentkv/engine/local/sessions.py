"""Sessions: which growing context a call belongs to, and what the engine remembers of it.

Covers: choosing a session, transcripts, the raw text behind tool calls, tasks in order of arrival. Does not cover:
blocks (`kv/`). The choice decides cost only. Thread-safe: callers choose, the engine's thread writes results.
Nothing grows for ever: tasks, a task's sessions and branches have limits; what goes is told, so that its blocks go.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import TypeVar

from agentkv.core.task import Caller
from agentkv.engine.local.chat import Written
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.engine.local.transcript import Transcript
from agentkv.errors import RequestInvalid

_IDLE_TASKS = 1024  # more tasks are forgotten, longest idle first: a graph without thread id makes one for each run
_SESSIONS_PER_TASK = 64  # more are forgotten, longest unused first: unattributed calls never end their task
_BRANCHES = 256  # that a session or a task remembers, latest last
_SAME_LINE = 0.5  # a prompt of the same branch that shares more than this is taken for an edited continuation
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a call wrote behind its prompt; with it `computed_tokens` have their KV."""

    prompt: Transcript
    written: str
    token_ids: list[int]
    computed_tokens: int

    def shared_chars(self, prompt: str) -> int:
        """Length of the part that `prompt` has in common with both; 0 if it is another prompt's."""
        at = len(self.prompt.text)
        if not prompt.startswith(self.prompt.text):
            return 0
        whole = Transcript(text=self.written)
        return at + whole.shared_chars(prompt[at:])

    def transcript(self, tokeniser: Tokeniser) -> Transcript:
        """Both together."""
        return self.prompt.answered(self.written, self.token_ids, tokeniser)


@dataclass(slots=True, eq=False)
class Session:
    """One growing context. `computed_tokens`: how many of the transcript's ids have had their KV computed."""

    key: str
    task: str
    transcript: Transcript = field(default_factory=Transcript)
    branches: dict[str, None] = field(default_factory=dict)
    raw_by_call: dict[str, Written] = field(default_factory=dict)
    computed_tokens: int = 0
    template_tokens: int = 0
    """So many of its first ids are the system prompt and the tools: other tasks begin with them too."""
    calls: int = 0
    """Calls under way."""
    dropped: bool = False
    others: dict[str, Told] = field(default_factory=dict)
    """Further choices of the last call, by the names under which their blocks are held: its client goes on with one."""
    asked: object = None
    """Whose choices these are."""

    @property
    def names(self) -> list[str]:
        """All names under which blocks are held for it."""
        return [self.key, *self.others]

    def take(self, told: Told, holder: str, asked: object, tokeniser: Tokeniser) -> list[str]:
        """A choice of the call `asked` has ended; names of choices of an earlier call, with which nobody goes on now."""
        passed = [] if asked is self.asked else list(self.others)
        others = self.others if asked is self.asked else {}
        self.asked = asked
        if holder == self.key:
            self.transcript, self.computed_tokens = told.transcript(tokeniser), told.computed_tokens
        else:
            others = {**others, holder: told}
        self.others = others  # another one: a caller's thread may be reading the last
        return passed

    def base(self, prompt: str, tokeniser: Tokeniser) -> tuple[Transcript, int]:
        """Of the last call's choices the one that has most in common with `prompt`, and how many of its ids are computed."""
        others = self.others
        if not others:
            return self.transcript, self.computed_tokens
        best = max(others.values(), key=lambda told: told.shared_chars(prompt))
        if best.shared_chars(prompt) <= self.transcript.shared_chars(prompt):
            return self.transcript, self.computed_tokens
        return best.transcript(tokeniser), best.computed_tokens


@dataclass(slots=True, eq=False)
class _Task:
    ordinal: int
    sessions: dict[str, Session] = field(default_factory=dict)  # longest unused first
    last: dict[str, str] = field(default_factory=dict)  # branch -> session
    made: int = 0

    @property
    def busy(self) -> bool:
        return any(session.calls for session in self.sessions.values())


class Sessions:
    """All sessions of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, _Task] = {}  # longest idle first
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
            task = self._tasks.pop(caller.task, None)
            if task is None:
                self._ordinal += 1
                task = _Task(ordinal=self._ordinal)
            self._tasks[caller.task] = task
            if not session.key:
                task.made += 1
                session.key = f"{caller.task}#{task.made}"
            task.sessions.pop(session.key, None)
            task.sessions[session.key] = session
            _remember(task.last, caller.branch, session.key)
            _remember(session.branches, caller.branch, None)
            self._by_key[session.key] = session
            session.calls += 1
            session.dropped = False
            return task.ordinal, [*self._surplus_sessions(task), *self._surplus_tasks()]

    def _surplus_sessions(self, task: _Task) -> list[str]:
        """Forget idle sessions of a task that has too many."""
        idle = [session for session in task.sessions.values() if not session.calls]
        surplus = idle[: max(0, len(task.sessions) - _SESSIONS_PER_TASK)]
        for old in surplus:
            self._forget(old)
            del task.sessions[old.key]
        keys = [name for old in surplus for name in old.names]
        if keys:
            task.last = {branch: key for branch, key in task.last.items() if key not in keys}
        return keys

    def _surplus_tasks(self) -> list[str]:
        """Forget idle tasks where there are too many; the keys of their sessions."""
        many = len(self._tasks) - _IDLE_TASKS
        if many <= 0:
            return []
        idle = itertools.islice((name for name, task in self._tasks.items() if not task.busy), many)
        return [key for name in list(idle) for key in self._forget_task(name)]

    def revive(self, session: Session) -> None:
        """Take in a session of an earlier process, with its task."""
        with self._lock:
            task = self._tasks.get(session.task)
            if task is None:
                self._ordinal += 1
                task = self._tasks[session.task] = _Task(ordinal=self._ordinal)
            head, _, number = session.key.rpartition("#")
            if head == session.task and number.isdecimal():
                task.made = max(task.made, int(number))  # no new session may get this one's name
            task.sessions[session.key] = session
            for branch in session.branches:
                _remember(task.last, branch, session.key)
            self._by_key[session.key] = session

    def take_out(self, task: str) -> list[Session] | None:
        """Forget the task but keep its sessions whole, for another engine. None if a call of it is under way."""
        with self._lock:
            known = self._tasks.get(task)
            if known is not None and known.busy:
                return None
            self._tasks.pop(task, None)
            sessions = list(known.sessions.values()) if known else []
            for session in sessions:
                self._by_key.pop(session.key, None)
            return sessions

    def tasks(self) -> list[str]:
        """The tasks that are remembered, longest idle first."""
        with self._lock:
            return list(self._tasks)

    def get(self, key: str) -> Session | None:
        """The session of that name."""
        with self._lock:
            return self._by_key.get(key)

    def beside(self, key: str) -> list[str]:
        """Names under which blocks of this session's further choices are held. Takes no lock: moves must never wait."""
        session = self._by_key.get(key)
        return [] if session is None else list(session.others)

    def leave(self, session: Session) -> None:
        """A call of `session` has ended."""
        with self._lock:
            session.calls -= 1
            task = self._tasks.pop(session.task, None)
            if task is not None:  # idle from now on
                self._tasks[session.task] = task

    def raw_of(self, task: str, call_id: str) -> Written | None:
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

    def drop(self, key: str) -> list[str]:
        """Forget one session: under which names its blocks are held. None where a call of it runs to its end."""
        with self._lock:
            session = self._by_key.get(key)
            if session is None:
                return []
            task = self._tasks.get(session.task)
            if task is not None:
                task.sessions.pop(key, None)
                task.last = {branch: last for branch, last in task.last.items() if last != key}
            self._forget(session)
            return [] if session.calls else session.names

    def finish(self, task: str) -> list[str]:
        """Forget the task; the keys of its sessions."""
        with self._lock:
            return self._forget_task(task)

    def _forget_task(self, name: str) -> list[str]:
        task = self._tasks.pop(name, None)
        sessions = list(task.sessions.values()) if task else []
        for session in sessions:
            self._forget(session)
        return [name for session in sessions for name in session.names]

    def others(self) -> list[str]:
        """Names under which blocks of further choices are held."""
        with self._lock:
            return [name for session in self._by_key.values() for name in session.others]

    def _forget(self, session: Session) -> None:
        session.dropped = True
        self._by_key.pop(session.key, None)

    def count(self) -> int:
        """How many sessions are remembered."""
        with self._lock:
            return len(self._by_key)


def _remember(latest: dict[str, _Value], branch: str, value: _Value) -> None:
    """Put a branch last; the first one goes where there are too many."""
    latest.pop(branch, None)
    latest[branch] = value
    if len(latest) > _BRANCHES:
        del latest[next(iter(latest))]
