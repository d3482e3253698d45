"""Wake: how a thread of ours gets an engine that sleeps in its input queue to take a step.

An idle EngineCore waits for the next request, and a tier that has work all of a sudden does not end that. Its queue takes a
wake-up message that does nothing else (vLLM's own shutdown uses it). The engine is found once, among the callers of the
constructor that asks: connectors are made inside the engine's. Where it is not found (another version, an engine without a
process of its own), the tier says that it has work for as long as anybody waits, which costs a step each millisecond.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_DEEPEST = 60


def waker() -> Callable[[], None] | None:
    """A function that any thread may call to wake the engine that is being made further up this very stack; else None."""
    queue = _queue_above()
    if queue is None:
        return None
    try:
        from vllm.v1.engine import EngineCoreRequestType

        message = (EngineCoreRequestType.WAKEUP, None)
    except (ImportError, AttributeError):
        return None
    return lambda: queue.put_nowait(message)


def _queue_above() -> Any:
    frame = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        engine = frame.f_locals.get("self")
        if engine is not None and any(kind.__name__ == "EngineCoreProc" for kind in type(engine).__mro__):
            queue = getattr(engine, "input_queue", None)
            return queue if hasattr(queue, "put_nowait") else None
    return None
