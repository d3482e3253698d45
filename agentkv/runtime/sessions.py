"""SessionBook: what is known of each session that answers come from: its calls, its context, how much it usually says.

Covers the facts that hints and requests carry for a foreign engine. Does not cover where a session's KV is (the embedded
engine knows its own) nor what a task may spend (`books.py`). Bounded; what is forgotten costs precision, never an answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from agentkv.core.hint import SessionFacts
from agentkv.core.task import Caller, PriorityClass
from agentkv.core.usage import Timing, Usage

MOST_SESSIONS = 4096
_REMEMBERED = 16
"""Outputs that the next one's length is expected from."""
_FEWEST = 64
"""Computing fewer tokens than this says nothing of the rate."""
_MOST_TOOLS = 1024
PRIORITIES = {PriorityClass.BATCH: -50, PriorityClass.STEP: 0, PriorityClass.FOREGROUND: 50}
"""Ours on the neutral scale of -100..100."""


@dataclass(slots=True)
class _Known:
    task: str = ""
    parent: str = ""
    model: str = ""
    turn: int = 0
    tokens: int = 0
    priority: int = 0
    outputs: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    tools: set[str] = field(default_factory=set)


def session_of(caller: Caller) -> str:
    """The session of a caller whose engine keeps none: a branch (a sub-agent, a sent task) has a context of its own."""
    return f"{caller.task}:{caller.branch}" if caller.branch else caller.task


def parent_of(session: str, caller: Caller) -> str:
    """The session of the branch that this one was sent from; "" for a task's own."""
    if not caller.branch or session == caller.task:
        return ""
    outer = caller.branch.rpartition("|")[0]
    return f"{caller.task}:{outer}" if outer else caller.task


class SessionBook:
    """Thread-safe. `salt` is the tenant's; `routed`: whoever carries requests to the engine tells where calls begin."""

    def __init__(self) -> None:
        self.salt = ""
        self.routed = False
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._s_per_token: float | None = None

    def begun(self, session: str, caller: Caller, *, model: str = "", priority: PriorityClass | None = None) -> None:
        """A call of `session` starts."""
        with self._lock:
            known = self._of(session)
            known.task, known.parent = caller.task, parent_of(session, caller)
            known.model = model or known.model
            known.turn += 1
            if priority is not None:
                known.priority = PRIORITIES[priority]

    def seen(self, session: str, caller: Caller, *, model: str, tokens: int) -> None:
        """Somebody's own client calls for `session` with a prompt of about so many tokens."""
        with self._lock:
            known = self._of(session)
            known.task, known.parent = caller.task, parent_of(session, caller)
            known.model, known.tokens = model or known.model, tokens

    def ended(self, session: str, usage: Usage, timing: Timing | None = None, *, model: str = "") -> None:
        """A call of `session` was answered."""
        with self._lock:
            known = self._of(session)
            known.model = model or known.model
            known.tokens = usage.input_tokens + usage.output_tokens
            known.outputs.append(usage.output_tokens)
            computed = usage.uncached_tokens
            if timing is not None and timing.prefill_s > 0 and computed >= _FEWEST:
                rate = timing.prefill_s / computed
                before = self._s_per_token
                self._s_per_token = rate if before is None else before + (rate - before) / 4

    def tools(self, session: str, call: str, *, runs: bool) -> int:
        """A tool call runs, or is over; how many of its session run now (at least 1, for one that has just ended)."""
        with self._lock:
            known = self._of(session)
            if runs and len(known.tools) < _MOST_TOOLS:
                known.tools.add(call)
            elif not runs:
                known.tools.discard(call)
            return max(1, len(known.tools))

    def forget(self, session: str) -> None:
        """The session is over."""
        with self._lock:
            self._known.pop(session, None)

    def facts(self, session: str, *, task: str = "", purpose: str = "answer") -> SessionFacts:
        """What is known; little for a session that was not seen."""
        with self._lock:
            known = self._known.get(session) or _Known()
            outputs = known.outputs
            load_s = None if self._s_per_token is None else known.tokens * self._s_per_token
            return SessionFacts(
                session=session, task=task or known.task or session, parent=known.parent, turn=known.turn,
                tokens=known.tokens, model=known.model, salt=self.salt, priority=known.priority, load_s=load_s,
                osl=round(sum(outputs) / len(outputs)) if outputs else None, purpose=purpose,
            )  # fmt: skip

    def _of(self, session: str) -> _Known:
        known = self._known.setdefault(session, _Known())
        self._known.move_to_end(session)
        while len(self._known) > MOST_SESSIONS:
            self._known.popitem(last=False)
        return known
