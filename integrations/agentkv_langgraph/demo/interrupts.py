"""Ctrl-C that is never lost: Python drops a KeyboardInterrupt that is raised inside a finaliser or a weak reference's
callback, so it is remembered as well, and whoever waits asks `check` from time to time.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self._came = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed and got lost."""
        if self._came:
            raise KeyboardInterrupt

    def press(self, _number: int = signal.SIGINT, _frame: FrameType | None = None) -> None:
        """What the signal does: as always, and it is remembered."""
        self._came = True
        raise KeyboardInterrupt


@contextmanager
def remembered() -> Iterator[Interrupts]:
    """Remember Ctrl-C inside the block; in a thread that gets no signals nothing changes."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts.press)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
