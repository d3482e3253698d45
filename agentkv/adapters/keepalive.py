"""KeepingAlive: a prefix that one pays for is read once more just before it expires, where that is cheaper than writing it again.

Covers the strategy; sending and paying are `prewarm.py`'s. The decision is `policy.hosted`'s: by the running tool's own
forecast, else by how long people took before.
"""

from __future__ import annotations

from collections.abc import Callable

from agentkv.adapters.hosted_waits import HostedWaits
from agentkv.adapters.prewarm import Plan, Wait

MARGIN_S = 20.0
"""So long before it expires: the lifetime counts from the start of the request that used it last."""


class KeepingAlive:
    """`waits(session)`: what is known of a session's prefix and waits."""

    def __init__(self, *, waits: Callable[[str], HostedWaits | None]) -> None:
        self._waits = waits

    def plan(self, wait: Wait, now_s: float) -> Plan | None:
        known = self._waits(wait.about.session)
        expires_s = None if known is None else known.expires_s(wait.about.session)
        if expires_s is None or expires_s <= now_s:
            return None
        return Plan(due_s=expires_s - MARGIN_S, purpose="keep-alive", fields={"max_tokens": 0})

    def ready(self, wait: Wait, now_s: float) -> str:
        known = self._waits(wait.about.session)
        if known is None:
            return "nothing is kept"
        deed = known.keep(wait.about.session, now_s=now_s, forecast=wait.forecast(now_s))
        if deed == "none":
            return "writing it again is cheaper"
        return ""

    def refused(self, wait: Wait) -> None:
        """What the provider does not take once it would not take again and again."""
        known = self._waits(wait.about.session)
        if known is not None:
            known.keep_refused(wait.about.session)

    def sent(self, wait: Wait, began_s: float, seconds: float) -> None:  # noqa: ARG002
        known = self._waits(wait.about.session)
        if known is not None:
            known.kept(wait.about.session, now_s=began_s)
