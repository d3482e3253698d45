"""The OpenAI clients of one AgentKV: the app behind them is made when the first is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentkv.core.task import Caller
from agentkv.engine.base import Engine, Request, Stream

if TYPE_CHECKING:
    from agentkv.server.transport import InProcess


class Doors:
    """Makes clients that reach `submit` without a socket. Thread-safe."""

    def __init__(self, *, submit: Callable[[Request], Stream], engine: Engine, caller: Callable[[], Caller]) -> None:
        self._submit = submit
        self._engine = engine
        self._caller = caller
        self._lock = threading.Lock()
        self._in_process: InProcess | None = None

    def open(self) -> Any:
        """The way in; the same each time."""
        from agentkv.server.app import create_app
        from agentkv.server.transport import InProcess

        with self._lock:
            if self._in_process is None:
                app = create_app(self._submit, model=self._engine.model, count_tokens=self._engine.count_tokens)
                self._in_process = InProcess(app, identify=self._caller)
            return self._in_process

    def close(self) -> None:
        """End what is under way. Idempotent."""
        with self._lock:
            doors = self._in_process
        if doors is not None:
            doors.close()
