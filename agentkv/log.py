"""The one logger, `structlog.get_logger("agentkv")`, imported only when the first line is written.

Where structlog is not installed (a bare machine with torch that runs from a source checkout), the same lines go to
the standard library's logger of that name.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

counters: Counter[str] = Counter()
_warned: set[str] = set()
_lock = threading.Lock()


class StandardLogger:
    """structlog's calls on the standard logger: `event` first, the fields behind it as key=value."""

    def __init__(self) -> None:
        import logging  # 12 ms that `import agentkv` must not pay

        self._logger = logging.getLogger("agentkv")

    def info(self, event: str, **fields: Any) -> None:
        """A line that says what happened."""
        self._logger.info("%s", _line(event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        """A line that somebody should read."""
        self._logger.warning("%s", _line(event, fields))


def get_logger() -> Any:
    """The library's structlog logger. We never configure structlog: that is the application's right.

    Where nobody has, lines go to standard error instead of structlog's standard output, which is the program's own.
    """
    try:
        import structlog  # 60 ms that `import agentkv` must not pay
    except ImportError:
        return StandardLogger()
    if structlog.is_configured():
        return structlog.get_logger("agentkv")
    return structlog.wrap_logger(structlog.PrintLogger(sys.stderr))


def count(event: str) -> None:
    """Add one to the counter `event`; `stats()` shows the counters."""
    with _lock:
        counters[event] += 1


def failed(event: str, **fields: Any) -> None:
    """Where hints, moves and reports fail: one counter and one warning line, never an exception."""
    count(event)
    _write(event, fields)


def warn_once(event: str, **fields: Any) -> None:
    """A warning that a process prints once per event name."""
    count(event)
    with _lock:
        if event in _warned:
            return
        _warned.add(event)
    _write(event, fields)


def _write(event: str, fields: dict[str, Any]) -> None:
    try:
        get_logger().warning(event, **fields)
    except Exception:  # a broken log sink must not break the agent
        count("log_failed")


def _line(event: str, fields: dict[str, Any]) -> str:
    return " ".join([event, *(f"{name}={value!r}" for name, value in fields.items())])
