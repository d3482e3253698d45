"""An answer whose call has to wait for something else first: the stream is there at once, the call starts later."""

from __future__ import annotations

import threading
from collections.abc import Callable

from agentkv.engine.base import Stream


def deferred(start: Callable[[], Stream], name: str) -> Stream:
    """A stream that passes on what the stream of `start()` brings. `start` runs on a thread of its own and may block.

    What it raises fails the stream. Cancelling the stream cancels the call; before the call has started, it is
    cancelled as soon as it does.
    """
    inner: list[Stream] = []
    lock = threading.Lock()
    cancelled = False

    def cancel() -> None:
        nonlocal cancelled
        with lock:
            cancelled = True
            streams = list(inner)
        for stream in streams:
            stream.cancel()

    outer = Stream(on_cancel=cancel)

    def run() -> None:
        try:
            if cancelled:
                return
            stream = start()
            with lock:
                inner.append(stream)
                late = cancelled
            if late:
                stream.cancel()
            for chunk in stream:
                outer.push(chunk)
            outer.finish(stream.result())
        except BaseException as error:  # it belongs to whoever waits for the answer
            outer.fail(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outer
