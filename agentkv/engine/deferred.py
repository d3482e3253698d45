"""An answer whose call has to wait for something else first: the stream is there at once, the call starts later."""

from __future__ import annotations

import threading
from collections.abc import Callable

from agentkv.engine.base import Request
from agentkv.engine.stream import Stream


def deferred(ready: Callable[[], Request], send: Callable[[Request], Stream], name: str) -> Stream:
    """A stream that passes on what the stream of `send(ready())` brings; both run on a thread of their own and may block.

    What they raise fails the stream. Cancelling the stream cancels the call; one that is not ready yet is never sent.
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
            request = ready()
            if cancelled:
                return
            stream = send(request)
            with lock:
                inner.append(stream)
                late = cancelled
            if late:
                stream.cancel()
            for chunk in stream:
                outer.push(chunk)
            outer.device_s = stream.device_s
            outer.finish(stream.result())
        except BaseException as error:  # it belongs to whoever waits for the answer
            outer.fail(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outer
