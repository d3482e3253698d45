"""Lines: which view a call's messages belong to. Thread-safe.

A line is one conversation of one branch of a task. The choice decides cost only: a conversation that is not found
again is read from its beginning, and gives the same prompt.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from agentkv.context.notebook import Fold
from agentkv.context.view import Stages, View
from agentkv.core.message import Message
from agentkv.core.task import UNATTRIBUTED
from agentkv.runtime.identity import segment_of

MAX_KEYS = 1024
"""Branches that are remembered, the ones used last."""
PER_KEY = 64
"""Conversations of one branch: forks, retries of an earlier point, sub-agents without a branch of their own. As many as
an engine keeps sessions; of one that is forgotten nobody knows what its prefix is worth."""

Key = tuple[str, str]
"""Task and branch."""


@dataclass(slots=True, eq=False)
class Line:
    """A view with what the runtime knows of it; `lock` is held for every use of the view."""

    view: View
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: bool = False
    """What earlier segments left was told, or there was nothing to tell."""
    making: threading.Lock = field(default_factory=threading.Lock)
    """Held while a fold is made, without `lock`: calls that come meanwhile wait for it and make none of their own."""
    waits_seen: bool = False
    """A tool of this branch told when it ran, so a fold may be put into such a wait."""
    postponed: bool = False
    """A fold that pays was left for the next wait."""
    failed_folds: int = 0
    """Folds that failed since the last one that did not."""
    calls_to_retry: int = 0
    """So many calls go as they are before a fold is tried again."""
    folding: threading.Thread | None = None
    prompt: tuple[Message, ...] = ()
    """The last prompt as it was handed over; `session` is where one of this line was answered."""
    session: str = ""
    rendering: dict[str, Any] = field(default_factory=dict)
    """How its last prompt is rendered, in a Request's fields."""
    sent_fold: Fold | None = None
    """The fold that held in the last prompt."""
    made: Fold | None = None
    """A fold that was made during a wait and takes effect with the next call."""


class Lines:
    """All conversations of one runtime."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._nobody = f"|{secrets.token_hex(8)}"  # callers of whom nothing is known share nothing beyond this runtime
        self._lock = threading.Lock()
        self._by_key: OrderedDict[Key, list[Line]] = OrderedDict()

    def of(self, key: Key, messages: tuple[Message, ...]) -> Line:
        """The line that `messages` go on with, the longest there is; else a new one."""
        with self._lock:
            lines = self._by_key.setdefault(key, [])
            self._by_key.move_to_end(key)
            while len(self._by_key) > MAX_KEYS:
                self._by_key.popitem(last=False)
            fitting = [line for line in lines if line.view.continues(messages)]
            if fitting:
                best = max(fitting, key=lambda line: len(line.view.raw))
                lines.remove(best)
            else:
                nobody = self._nobody if key[0] == UNATTRIBUTED else ""
                scope = f"{key[0]}|{segment_of(key[1]) or ''}{nobody}"
                best = Line(view=View(self._stages, scope=scope), waits_seen=any(line.waits_seen for line in lines))
            lines.append(best)  # the one used last stands last
            del lines[:-PER_KEY]
            return best

    def last(self, key: Key) -> Line | None:
        """The line used last by this branch, else by the one that it was sent from."""
        task, branch = key
        with self._lock:
            while True:
                lines = self._by_key.get((task, branch))
                if lines:
                    return lines[-1]
                if not branch:
                    return None
                branch = branch.rpartition("|")[0]

    def answered(self, key: Key, prompt: tuple[Message, ...], session: str) -> None:
        """The line that sent this very prompt lives in `session`."""
        with self._lock:
            for line in self._by_key.get(key, ()):
                if line.prompt is prompt:
                    line.session = session

    def all_of(self, task: str) -> list[tuple[Key, Line]]:
        """Every line of a task, branch by branch."""
        with self._lock:
            return [(key, line) for key, lines in self._by_key.items() if key[0] == task for line in lines]

    def forget_segment(self, task: str, name: str) -> None:
        """The segment is over."""
        with self._lock:
            for key in [key for key in self._by_key if key[0] == task and segment_of(key[1]) == name]:
                del self._by_key[key]

    def forget(self, task: str) -> None:
        """The task is over."""
        with self._lock:
            for key in [key for key in self._by_key if key[0] == task]:
                del self._by_key[key]
