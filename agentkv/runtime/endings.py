"""The end of a task or of a segment of one: its sessions are destroyed everywhere, without writing a byte."""

from __future__ import annotations

from agentkv.context.cuts import Cut, propose_cut
from agentkv.engine.base import Engine
from agentkv.runtime.books import Books
from agentkv.runtime.contexts import Contexts
from agentkv.runtime.emit import Emitter
from agentkv.runtime.identity import segment_of
from agentkv.runtime.planner import Planner
from agentkv.runtime.prefixes import Prefixes


class Endings:
    """Ends things. Thread-safe; unknown and repeated keys are no-ops."""

    def __init__(
        self,
        *,
        engine: Engine,
        planner: Planner | None,
        books: Books,
        prefixes: Prefixes,
        contexts: Contexts,
        emitter: Emitter,
    ) -> None:
        self._engine = engine
        self._planner = planner
        self._books = books
        self._prefixes = prefixes
        self._contexts = contexts
        self._emitter = emitter

    def task(self, task: str) -> None:
        """The task is over."""
        sessions = list(self._books.sessions(task))
        self._forget(sessions)
        self._contexts.forget(task)
        finish_task = getattr(self._engine, "finish_task", None)
        if finish_task is not None:
            finish_task(task)
        self._books.close_task(task)
        self._tell(task, sessions)

    def segment(self, task: str, name: str, *, carry: bool) -> str:
        """The segment is over: its KV is freed, and what it found is told to the next one; that text."""
        text = self._contexts.close_segment(task, name, carry=carry)
        sessions = [key for key, branch in self._books.sessions(task).items() if segment_of(branch) == name]
        self._forget(sessions)
        finish_sessions = getattr(self._engine, "finish_sessions", None)
        if finish_sessions is not None:
            finish_sessions(sessions)
        self._books.forget_sessions(sessions)
        self._tell(task, sessions)
        return text

    def propose_cut(self, task: str) -> Cut | None:
        """Whether the task's largest growing session should end soon; see `context.cuts`."""
        options = self._contexts.options
        window = getattr(self._engine, "context_tokens", None)
        if options is not None and options.window_tokens is not None:
            window = options.window_tokens
        account = self._books.account(task)
        budget = account.budget.tokens
        left = None if budget is None else max(0, budget - account.used.tokens)
        cuts = [
            propose_cut(sizes, window_tokens=window, budget_left=left)
            for sizes in self._books.prompt_sizes(task).values()
        ]
        return min((cut for cut in cuts if cut is not None), key=lambda cut: cut.calls_left, default=None)

    def _forget(self, sessions: list[str]) -> None:
        self._prefixes.forget(sessions)
        if self._planner is not None:
            self._planner.forget(sessions)

    def _tell(self, task: str, sessions: list[str]) -> None:
        for session in sessions:
            self._emitter.session_end(task=task, session=session)
