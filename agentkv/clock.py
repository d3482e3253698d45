"""Time as an argument: a protocol, the real clock and a manual one for tests and the simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock for durations and a wall clock for stamps; never subtract wall times."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock with an arbitrary origin."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch, for records only."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that moves only when told to: the simulator and the tests run on it."""

    def __init__(self, start_s: float = 0.0, wall_ms: int = 0) -> None:
        self._now_s = start_s
        self._wall_ms = wall_ms

    def now_s(self) -> float:
        return self._now_s

    def wall_ms(self) -> int:
        return self._wall_ms

    def advance(self, seconds: float) -> None:
        """Move both clocks forward; a negative step raises ValueError (monotonic time never goes back)."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
        self._wall_ms += round(seconds * 1000)

    def step_wall(self, milliseconds: int) -> None:
        """Move the wall clock alone, either way, as NTP or a person does."""
        self._wall_ms += milliseconds
