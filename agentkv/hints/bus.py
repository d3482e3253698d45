"""Bus: hands each hint to its subscribers, in order, in the caller's own thread.

Covers delivery. Does not cover what a hint says (`core/hint.py`) nor any subscriber: forecaster, planner, ledger and
adapters are joined by `runtime/`. A subscriber must return fast: it runs inside the agent's own call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from agentkv.core.hint import Hint
from agentkv.log import count, failed

Subscriber = Callable[[Hint], object]


class Bus:
    """Delivers hints synchronously: each subscriber in the order of subscription, each hint in the order published.

    Order holds per thread, hence for everything that happens one after the other; hints that two threads publish at
    the same moment may reach two subscribers in different orders. A hint that a subscriber publishes is delivered
    after the one in delivery, so that everybody sees cause before effect.
    """

    def __init__(self) -> None:
        self._subscribers: tuple[_Subscription, ...] = ()
        self._lock = threading.Lock()
        self._pending = _Pending()

    @property
    def has_subscribers(self) -> bool:
        """False: whoever would build a hint can save the work."""
        return bool(self._subscribers)

    def subscribe(self, fn: Subscriber) -> Callable[[], None]:
        """Deliver every later hint to `fn`; the returned callable ends that, and may be called twice.

        The same function subscribed twice is called twice. A delivery that is already under way in another thread
        may still reach `fn` after it was unsubscribed.
        """
        subscription = _Subscription(fn)
        with self._lock:
            self._subscribers = (*self._subscribers, subscription)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(s for s in self._subscribers if s is not subscription)

        return unsubscribe

    def publish(self, hint: Hint) -> None:
        """Deliver `hint`. A subscriber that fails costs a counter (and a log line at its 1st, 2nd, 4th, 8th ...
        failure) and stops nobody else.

        KeyboardInterrupt, CancelledError and their like pass; hints that subscribers published meanwhile are then
        lost and the bus is as before.
        """
        if not self._subscribers:
            return
        pending = self._pending
        if pending.delivering:
            pending.hints.append(hint)
            return
        pending.delivering = True
        try:
            self._deliver(hint)
            while pending.hints:
                self._deliver(pending.hints.popleft())
        finally:
            pending.hints.clear()
            pending.delivering = False

    def _deliver(self, hint: Hint) -> None:
        for subscription in self._subscribers:
            try:
                subscription.fn(hint)
            except Exception as error:
                subscription.failures += 1
                if subscription.failures & (subscription.failures - 1):  # one that is dead fails at every hint
                    count("hint_subscriber_failed")
                    continue
                name = getattr(subscription.fn, "__qualname__", type(subscription.fn).__name__)
                failed(
                    "hint_subscriber_failed", subscriber=name, hint=str(hint.kind), error=repr(error),
                    failures=subscription.failures,
                )  # fmt: skip


class _Subscription:
    """One subscription; compared by identity, so that equal functions are told apart."""

    __slots__ = ("failures", "fn")

    def __init__(self, fn: Subscriber) -> None:
        self.fn = fn
        self.failures = 0


class _Pending(threading.local):
    """What this thread is delivering, and what was published meanwhile."""

    def __init__(self) -> None:
        self.delivering = False
        self.hints: deque[Hint] = deque()
