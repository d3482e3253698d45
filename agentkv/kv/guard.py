"""The one lock of the data plane, and what happens at its release: trips advance, others are called.

Covers the lock, who waits for quiet, who wants to hear of room. What others gave us to call is called after the
release, so that nobody's code runs under our lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from agentkv.log import failed


class Turn(Protocol):
    """What is done at each release of the lock, while it is still held."""

    def __call__(self) -> list[Callable[[], None]]:
        """Returns what is to be called without the lock."""
        ...


class Guard:
    """`locked()` for the front door; `copying()` for the lanes, after whose work there may be room."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self.turn: Turn = list
        self.idle: Callable[[], bool] = lambda: True
        self.room_changed = False
        """Set under the lock: watchers are called at its release."""
        self._quiet = threading.Condition(self.lock)
        self._watchers: list[Callable[[], None]] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock."""
        with self.lock:
            yield
            calls = self.turn()
            if self.idle():
                self._quiet.notify_all()
            if self.room_changed:
                self.room_changed = False
                calls += self._watchers
        for call in calls:
            try:
                call()
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
