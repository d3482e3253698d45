"""The one lock of the data plane, and what happens at its release: trips advance, others are called.

Covers the lock, who waits for quiet, who wants to hear of room. What others gave us to call is called after the
release, so that nobody's code runs under our lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from agentkv.errors import Closed
from agentkv.log import failed


class Turn(Protocol):
    """What is done at each release of the lock, while it is still held."""

    def __call__(self) -> list[Callable[[], None]]:
        """Returns what is to be called without the lock."""
        ...


class OwnLock:
    """A lock of this process alone: in a forked child, which may have been made while somebody held it, it raises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # the signature of threading.Lock
        if os.getpid() != self._pid:
            raise Closed(f"these KV tiers belong to process {self._pid}; a forked child must make its own engine")
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Guard:
    """`locked()` for the front door; `copying()` for the lanes, after whose work there may be room."""

    def __init__(self, lock: OwnLock) -> None:
        self.lock = lock
        self.turn: Turn = list
        self.idle: Callable[[], bool] = lambda: True
        self.room_changed = False
        """Set under the lock: watchers are called at its release."""
        self._quiet = threading.Condition(self.lock)  # type: ignore[arg-type]  # it asks for acquire and release only
        self._watchers: list[Callable[[], None]] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock."""
        calls: list[Callable[[], None]] = []
        try:
            with self.lock:
                try:
                    yield
                finally:
                    calls = self._release()
        finally:
            for call in calls:
                self.call(call)

    def _release(self) -> list[Callable[[], None]]:
        calls = self.turn()
        if self.idle():
            self._quiet.notify_all()
        if self.room_changed:
            self.room_changed = False
            calls += self._watchers
        return calls

    @staticmethod
    def call(fn: Callable[[], None]) -> None:
        """Call what others gave us; what it raises is logged."""
        try:
            fn()
        except Exception as error:
            failed("kv_callback_failed", error=repr(error))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Hold the lock; whenever a copy starts or ends, there may be room."""
        with self.locked():
            self.room_changed = True
            yield

    def watch(self, fn: Callable[[], None]) -> None:
        """Have `fn` called, from any thread, whenever there may be room."""
        with self.lock:
            self._watchers = [*self._watchers, fn]

    def wait_until_idle(self, timeout_s: float) -> bool:
        """False if `timeout_s` passed first."""
        with self.lock:
            return self._quiet.wait_for(self.idle, timeout_s)
