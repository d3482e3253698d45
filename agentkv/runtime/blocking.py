"""What may block: whether this thread must not, and a user's function that is waited for only so long."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import TypeVar, cast

Given = TypeVar("Given")
Answer = TypeVar("Answer")


def on_event_loop() -> bool:
    """True on the thread of a running event loop."""
    asyncio = sys.modules.get("asyncio")  # 30 ms that `import agentkv` must not pay
    return asyncio is not None and asyncio._get_running_loop() is not None


def within(seconds: float, function: Callable[[Given], Answer], given: Given) -> Answer:
    """What `function(given)` answers within so many seconds; its error, or TimeoutError, is raised. It runs on a thread of its own."""
    answers: queue.SimpleQueue[tuple[Answer | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((function(given), None))
        except BaseException as error:  # it belongs to whoever waits
            answers.put((None, error))

    threading.Thread(target=run, name=threading.current_thread().name, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds} s") from None
    if error is not None:
        raise error
    return cast("Answer", answer)
