"""What may block: whether this thread must not, and functions that are waited for, only so long or in an event loop."""

from __future__ import annotations

import contextlib
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


async def on_thread(function: Callable[[Callable[[], bool]], bool], undo: Callable[[], object]) -> None:
    """Wait for `function(gone)` on a thread of its own, without blocking the event loop; its error is raised.

    Cancelled, `gone()` is true from then on, and where the function did its work all the same (True), `undo()` is called.
    """
    import asyncio  # 20 ms that `import agentkv` must not pay
    import contextvars

    loop, done = asyncio.get_running_loop(), asyncio.Event()
    failed: list[BaseException] = []
    lock = threading.Lock()
    is_done = is_gone = worked = False

    def run() -> None:
        nonlocal is_done, worked
        try:
            worked = function(lambda: is_gone)
        except BaseException as error:  # it belongs to whoever waits
            failed.append(error)
        with lock:
            is_done = True
            late = is_gone
        if late and worked:
            undo()
        elif not late:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(done.set)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="agentkv-waits-for-budget", daemon=True).start()
    try:
        await done.wait()
    except BaseException:
        with lock:
            is_gone, late = True, is_done
        if late and worked:
            undo()
        raise
    if failed:
        raise failed[0]
