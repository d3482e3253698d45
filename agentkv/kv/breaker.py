"""When a disk that failed is written to again: one try after a pause that doubles with each failure in a row.

A full disk is asked again after the first pause each time: space comes back without notice. Knows nothing of disks;
its owner says what failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LONGEST_PAUSE_S = 300.0


class Breaker:
    """Lets writes through until one fails; then, after a pause, a single one to see. Thread-safe."""

    def __init__(self, retry_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._retry_s = retry_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._failures = 0
        self._reason = ""
        self._off_until_s = 0.0
        self._probe_until_s = 0.0

    @property
    def off(self) -> str | None:
        """Why nothing may be written now; None if all is well or a try is due."""
        now_s = self._now_s()
        if self._failures == 0 or (now_s >= self._off_until_s and now_s >= self._probe_until_s):
            return None
        return self._reason

    def probe(self) -> bool:
        """Ask to write. After a pause only the first who asks may, until it is known how that went; if that is never
        known, the next may after another pause.
        """
        with self._lock:
            if self.off is not None:
                return False
            if self._failures:
                self._probe_until_s = self._now_s() + self._retry_s
            return True

    def failed(self, reason: str, *, full: bool) -> None:
        """A write failed. Writes that were under way together count once."""
        with self._lock:
            now_s = self._now_s()
            if self._failures and now_s < self._off_until_s:
                return
            self._failures += 1
            longest_s = max(_LONGEST_PAUSE_S, self._retry_s)
            pause_s = self._retry_s if full else min(self._retry_s * 2 ** min(self._failures - 1, 30), longest_s)
            self._off_until_s, self._probe_until_s = now_s + pause_s, 0.0
            self._reason = (
                f"a write failed: {reason}; read-only, tried again {pause_s:.3g} s after failure {self._failures}"
            )

    def worked(self) -> None:
        """A write went through: all is well."""
        if self._failures:
            with self._lock:
                self._failures = 0
