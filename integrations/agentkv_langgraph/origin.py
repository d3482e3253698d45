"""Where a call was begun, and whether it was left there: LangChain tells no end of a model call that is cancelled.

Covers what waits on the stack of its caller (`invoke`, `ainvoke`, `batch`). Streams tell their end themselves as soon
as they have said a word.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

_WAITING = ("generate", "agenerate")
_STREAMING = ("stream", "astream")
_BETWEEN = ("langchain_core.callbacks.", "agentkv_langgraph.")  # who stands between the call and us


@dataclass(slots=True, eq=False)
class Origin:
    """The task of the event loop (else the thread) that began a call, and the call's own frame on its stack."""

    task: asyncio.Task[Any] | None
    thread: int
    call: FrameType | None

    @classmethod
    def here(cls) -> Origin:
        """To be asked from a start callback that runs inline."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
            frame = frame.f_back
        return cls(task=task_here(), thread=threading.get_ident(), call=frame)

    def is_left(self, *, began: bool) -> bool:
        """True where nobody waits for the call any more; False too where that cannot be seen from here.

        Only the line of control that began it can tell: what is not on its stack now has been left, unless it is a
        stream, which is off the stack between two words (`began`).
        """
        name = "" if self.call is None else self.call.f_code.co_name
        if name not in _WAITING and (began or name not in _STREAMING):
            return False
        if self.task is not None and self.task.done():
            return True
        if self.task is not task_here() or (self.task is None and self.thread != threading.get_ident()):
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.call:
            frame = frame.f_back
        return frame is None


def task_here() -> asyncio.Task[Any] | None:
    """The task of the event loop that runs here, if one does."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
