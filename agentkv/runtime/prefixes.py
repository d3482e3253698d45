"""Prefix watches, one per session: a prompt that does not extend the last one is computed again from where it breaks.

The first break of each kind is logged with its position and cause, all are counted and put into the bill; nothing is
changed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from agentkv import log
from agentkv.core.task import UNATTRIBUTED
from agentkv.engine.base import Generation, Request

if TYPE_CHECKING:
    from agentkv.context.explain import Explanation
    from agentkv.context.prefix import PrefixWatch

MAX_SESSIONS = 1024

Tell = Callable[[str, str, str, int], None]
"""Hears of a break: task, session, cause, tokens computed again."""


class Prefixes:
    """Watches the prompts of all sessions. Thread-safe, never raises."""

    def __init__(self, *, count: Callable[[str], int] | None = None, tell: Tell | None = None) -> None:
        self._count = count
        self._tell = tell
        self._lock = threading.Lock()
        self._watches: OrderedDict[str, tuple[str, PrefixWatch]] = OrderedDict()

    def saw(self, session: str, request: Request, generation: Generation | None = None, at_s: float = 0.0) -> None:
        """A call of this session ended well."""
        if not session or request.messages is None or request.caller.task == UNATTRIBUTED:
            return
        try:
            from agentkv.context.explain import seen

            usage = None if generation is None or generation.estimated else generation.usage
            model = "" if generation is None else generation.model
            told = self._watched(session, request, usage=usage, model=model, at_s=at_s)
            if told is not None and self._tell is not None and _is_break(told):
                self._tell(request.caller.task, session, str(told.cause), told.lost_tokens or 0)
            seen(
                session=session, task=request.caller.task, model=model, messages=request.messages, tools=request.tools,
                usage=usage, at_s=at_s, declared="fold" if request.fold else None,
            )  # fmt: skip
        except Exception as error:
            log.failed("prefix_watch_failed", session=session, error=repr(error))

    def _watched(self, session: str, request: Request, **facts: object) -> Explanation | None:
        from agentkv.context.prefix import PrefixWatch

        messages = request.messages or ()
        with self._lock:
            if session not in self._watches:
                self._watches[session] = (request.caller.task, PrefixWatch(session, count=self._count))
            _, watch = self._watches[session]
            self._watches.move_to_end(session)
            while len(self._watches) > MAX_SESSIONS:
                self._watches.popitem(last=False)
            if request.fold:
                watch.expect_break("fold")
            elif watch.is_another_prompt(messages):
                watch.expect_break()
            watch.see(messages, request.tools, **facts)  # type: ignore[arg-type]
            told = watch.explain()
            return told[-1] if told else None

    def explain(self, task: str) -> dict[str, tuple[Explanation, ...]]:
        """The last calls of each open session of the task, each against the call before."""
        with self._lock:
            return {session: watch.explain() for session, (owner, watch) in self._watches.items() if owner == task}

    def forget(self, sessions: Iterable[str]) -> None:
        """These sessions are over."""
        with self._lock:
            for session in sessions:
                self._watches.pop(session, None)


def _is_break(told: Explanation) -> bool:
    """True if the prompt itself broke: no declared fold, and nothing that became of the provider's cache."""
    from agentkv.context.breaks import PROVIDER

    return not told.extends and told.cause != "fold" and told.cause not in PROVIDER
