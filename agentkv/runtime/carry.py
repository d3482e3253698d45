"""What one segment of a task leaves to the next: a structured summary and the handles of raw outputs, nothing else."""

from __future__ import annotations

import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from agentkv.context.notebook import Fold
from agentkv.context.summary import Summary, extract
from agentkv.core.message import Message
from agentkv.core.task import Caller
from agentkv.runtime.identity import segment_of

MAX_TASKS = 1024
MAX_HANDLES = 16
MAX_CHARS = 16_000
"""What one call is told of earlier segments, the newest first; some 4,000 tokens."""
_HANDLE = re.compile(r"read_output\(['\"]([\w-]{4,80})['\"]")


class Carry:
    """Texts by task, in the order in which segments ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, dict[str, str]] = OrderedDict()

    def add(self, task: str, segment: str, text: str) -> None:
        """`segment` has ended with this."""
        with self._lock:
            texts = self._texts.setdefault(task, {})
            texts.pop(segment, None)
            texts[segment] = text
            while len(self._texts) > MAX_TASKS:
                self._texts.popitem(last=False)

    def text(self, caller: Caller) -> str:
        """What the first call of this caller's segment is told; "" outside of segments."""
        own = segment_of(caller.branch)
        if own is None:
            return ""
        with self._lock:
            texts = dict(self._texts.get(caller.task, {}))
        told = [f"[From the segment {name!r}]\n{text}" for name, text in texts.items() if name != own]
        sizes = itertools.accumulate(len(text) for text in reversed(told))
        kept = sum(size <= MAX_CHARS for size in sizes) or 1
        if kept < len(told):
            told[: len(told) - kept] = [f"[{len(told) - kept} earlier segments are not told any more]"]
        return "\n\n".join(told)

    def forget(self, task: str) -> None:
        """The task is over."""
        with self._lock:
            self._texts.pop(task, None)


def conclusion(
    views: Iterable[tuple[tuple[Message, ...], Fold | None]], *, max_tokens: int, count: Callable[[str], int]
) -> str:
    """The prompts of a segment (each with the fold that holds in it) as one text of at most `max_tokens`, handles
    beside. "" where there is nothing to say.
    """
    whole: Summary | None = None
    handles: dict[str, None] = {}
    for messages, fold in views:
        earlier = None if fold is None else Summary.parse(fold.text, own=True)
        found = extract(messages, earlier)
        whole = found if whole is None else whole.merged(found)
        for message in messages:
            handles.update(dict.fromkeys(_HANDLE.findall(message.content)))
    if whole is None:
        return ""
    text = whole.bounded(max_tokens, count).text()
    kept = list(handles)[-MAX_HANDLES:]
    return f"{text}\nRaw outputs: {', '.join(kept)}" if kept else text
