"""Prefix watches, one per session: a prompt that does not extend the last one is computed again from where it breaks.

The first break of each kind is logged with its position and cause, all are counted; nothing is changed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from agentkv import log
from agentkv.context.prefix import PrefixWatch
from agentkv.core.task import UNATTRIBUTED
from agentkv.engine.base import Request

MAX_SESSIONS = 1024


class Prefixes:
    """Watches the prompts of all sessions. Thread-safe, never raises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: OrderedDict[str, PrefixWatch] = OrderedDict()

    def saw(self, session: str, request: Request) -> None:
        """A call of this session ended well."""
        if not session or request.messages is None or request.caller.task == UNATTRIBUTED:
            return
        try:
            with self._lock:
                watch = self._watches.setdefault(session, PrefixWatch(session))
                self._watches.move_to_end(session)
                while len(self._watches) > MAX_SESSIONS:
                    self._watches.popitem(last=False)
                if watch.is_another_prompt(request.messages):
                    watch.expect_break()
                watch.see(request.messages, request.tools)
        except Exception as error:
            log.failed("prefix_watch_failed", session=session, error=repr(error))

    def forget(self, sessions: Iterable[str]) -> None:
        """These sessions are over."""
        with self._lock:
            for session in sessions:
                self._watches.pop(session, None)
