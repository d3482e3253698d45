"""Where facts come from: an AgentKV, or a Ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from agentkv.budget.facts import Fact


class Source(Protocol):
    """Tells facts as they happen."""

    def on_fact(self, listener: Callable[[Fact], None], /) -> Callable[[], None]:
        """Call `listener` with every fact from now on; returns the way to stop."""
        ...
