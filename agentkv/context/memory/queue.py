"""Queue: what is to be written, on its way to a thread of its own. Nobody who puts something in ever waits.

Covers the bound (entries and characters: what is too much is refused and counted), batches, flush and close. Does not
cover what writing means.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from agentkv.errors import ConfigError
from agentkv.log import count, failed

BATCH = 64
T = TypeVar("T")


class Queue(Generic[T]):
    """Entries for `write`, which gets them in order, up to BATCH at once, on a thread that starts with the first one.

    Entries whose `write` raises are lost: counted, one line in the log, never raised. `close()` is idempotent.
    """

    def __init__(self, write: Callable[[Sequence[T]], None], *, name: str, max_entries: int, max_chars: int) -> None:
        if max_entries < 1 or max_chars < 1:
            raise ConfigError(f"a queue of {max_entries} entries and {max_chars} characters holds nothing; give >= 1")
        self._write = write
        self._name = name
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._waiting: deque[tuple[T, int]] = deque()
        self._chars = 0
        self._writing = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._state = threading.Condition()

    def __len__(self) -> int:
        """Entries that are not written yet."""
        with self._state:
            return len(self._waiting) + self._writing

    def put(self, entry: T, chars: int) -> bool:
        """Write `entry`, of `chars` characters, soon. False, counted, if the queue is full or closed."""
        with self._state:
            full = len(self._waiting) >= self._max_entries or (self._chars and self._chars + chars > self._max_chars)
            if self._closed or full:
                count("memory_closed" if self._closed else "memory_full")
                return False
            self._waiting.append((entry, chars))
            self._chars += chars
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                atexit.register(self.close)  # a program that forgets to close keeps what it learnt
            self._state.notify_all()
        return True

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything put so far is written; False if that did not happen in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._state:
            while self._waiting or self._writing:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._state.wait(left_s)
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, then end the thread. Later entries are refused."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        atexit.unregister(self.close)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._waiting and not self._closed:
                    self._state.wait()
                if not self._waiting:
                    return
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                self._chars -= sum(chars for _, chars in batch)
                self._writing = len(batch)
            try:
                self._write([entry for entry, _ in batch])
            except Exception as error:
                failed("memory_not_written", entries=len(batch), error=repr(error)[:200])
            with self._state:
                self._writing = 0
                self._state.notify_all()
