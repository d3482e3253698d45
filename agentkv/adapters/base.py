"""Adapter: what speaks one foreign engine's own protocol, and the receipt that each delivery has.

Covers the protocol and its values. Does not cover queue, deadline and breaker (`runtime/reach.py`), which call these
methods from one thread, nor any engine (one file each).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from agentkv.core.hint import Hint


class Outcome(StrEnum):
    """What became of a hint.

    APPLIED: the engine did something real. ADVISORY: it was told, or noted here for its next request, and promises
    nothing. UNSUPPORTED: this engine has nothing to be told. FAILED: it was not told; nobody waits for it.
    """

    APPLIED = "applied"
    ADVISORY = "advisory"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryReceipt:
    """One hint's, or one later deed's that followed from it. `detail` is for people and holds no prompt text."""

    adapter: str
    hint: str
    kind: str
    session: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


class Unreachable(Exception):
    """The engine did not answer, or not in a form that anybody could use; the message says what it did instead.

    `status`: the HTTP status where there was an answer at all. `dropped`: the connection ended before any of it.
    """

    def __init__(self, message: str, *, status: int | None = None, dropped: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.dropped = dropped


class Adapter(Protocol):
    """Speaks to one endpoint. `deliver`, `tick` and `reset` are called by one thread, one at a time."""

    @property
    def name(self) -> str:
        """The engine's name, for receipts."""
        ...

    @property
    def patience_s(self) -> float:
        """How long a hint may take in all, its time in the queue included; beyond that it is not worth telling."""
        ...

    def deliver(self, hint: Hint, within_s: float) -> DeliveryReceipt:
        """Tell the engine, in about `within_s`. Unreachable and any other error become a FAILED receipt."""
        ...

    def tick(self) -> tuple[Sequence[DeliveryReceipt], float | None]:
        """Do what is due now; what came of it, and in how many seconds to ask again (None: when a hint comes)."""
        ...

    def reset(self) -> None:
        """The engine was away and may have lost everything: believe nothing that was known of it."""
        ...

    def close(self) -> None:
        """Let go of connections. Idempotent."""
        ...


@runtime_checkable
class Routing(Protocol):
    """An adapter whose engine wants to be told something in each request. Called from many threads."""

    def fields(self, session: str) -> Mapping[str, Any]:
        """Fields for the request body of this session's next call; may wait for its context to be brought back."""
        ...

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        """The call to which `fields` gave something is over, whatever became of it.

        The context now holds `tokens`; of its prompt `cached_tokens` were reused (None: unknown).
        """
        ...
