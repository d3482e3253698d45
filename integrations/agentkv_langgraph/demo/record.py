"""Recording a run and playing it again: the same calls, the same tokens, the same waits, on another AgentKV.

The recorder stands between the graph and an AgentKV and hands everything on. The replay needs neither the graph nor
the tools: it repeats each task's model calls with the recorded token ids and sleeps where a tool ran.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from agentkv.core.task import UNATTRIBUTED
from agentkv.engine.base import Generation, Request
from agentkv.engine.stream import Stream
from agentkv_langgraph.demo.tools import Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call that ended well."""

    request: Request
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One tool call and how long it took."""

    tool: str
    command: str
    seconds: float


Step = Turn | Wait


class Recorder:
    """An AgentKV that is written down, task by task, while it is used."""

    def __init__(self, kv: Any) -> None:
        self._kv = kv
        self._lock = threading.Lock()
        self._running: set[Stream] = set()
        self._stopped = False
        self.steps: dict[str, list[Step]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    def submit(self, request: Request) -> Stream:
        """As `AgentKV.submit`."""
        if self._stopped:
            raise Stopped
        if request.caller.task == UNATTRIBUTED:
            request = replace(request, caller=self._kv.caller())
        stream: Stream = self._kv.submit(request)
        with self._lock:
            self._running.add(stream)
            stopped = self._stopped

        def ended(generation: Generation | None, _error: BaseException | None) -> None:
            with self._lock:
                self._running.discard(stream)
            if generation is not None:
                self._write(request.caller.task, Turn(request=request, token_ids=generation.token_ids))

        stream.on_end(ended)
        if stopped:
            stream.cancel()
        return stream

    @contextmanager
    def tool(self, name: str, *, args: dict[str, str], **options: Any) -> Iterator[Any]:
        """As `AgentKV.tool`."""
        with self._kv.tool(name, args=args, **options) as call:
            started_s = time.monotonic()
            yield call
            seconds = time.monotonic() - started_s
        self._write(self._kv.caller().task, Wait(tool=name, command=args.get("cmd", ""), seconds=seconds))

    def stop(self) -> None:
        """Cancel every model call, the running ones and all that are still to come."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for stream in running:
            stream.cancel()

    def _write(self, task: str, step: Step) -> None:
        with self._lock:
            self.steps.setdefault(task, []).append(step)


def replay_task(kv: Any, task: str, steps: list[Step], stop: threading.Event) -> None:
    """Repeat one task's steps on `kv` (usually a Recorder around one, so that it can be stopped)."""
    with kv.task(task):
        for step in steps:
            if isinstance(step, Wait):
                with kv.tool(step.tool, args={"cmd": step.command}):
                    if stop.wait(step.seconds):
                        raise Stopped
            else:
                kv.submit(replace(step.request, forced_ids=step.token_ids, session=None)).result()
