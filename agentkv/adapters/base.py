"""Adapter: what speaks one foreign engine's own protocol, and the receipt that each delivery has.

Covers the protocol and its values. Does not cover queue, deadline and breaker (`runtime/reach.py`), which call these
methods from one thread, nor any engine (one file each).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from agentkv.clock import Clock
from agentkv.core.hint import Hint, SessionFacts
from agentkv.core.usage import Usage

_REFUSALS = 400
_FAILURES = 500
_NOT_IMPLEMENTED = 501


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
    """One hint's, or one later deed's that followed from it. `detail` is for people and holds no prompt text.

    `refused`: it FAILED by the engine's own word, so the engine is there.
    """

    adapter: str
    hint: str
    kind: str
    session: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0
    refused: bool = False


class Unreachable(Exception):
    """The engine did not answer, or not in a form that anybody could use; the message says what it did instead.

    `status`: the HTTP status where there was an answer at all. `dropped`: the connection ended before any of it.
    """

    def __init__(self, message: str, *, status: int | None = None, dropped: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.dropped = dropped

    @property
    def refused(self) -> bool:
        """Whether the engine itself said no. A server's own failure (5xx), or a proxy's words, are no answer of its."""
        return self.status is not None and (_REFUSALS <= self.status < _FAILURES or self.status == _NOT_IMPLEMENTED)


def receipted(name: str, hint: Hint, act: Callable[[], tuple[Outcome, str]], clock: Clock) -> DeliveryReceipt:
    """The receipt of what `act` did about the hint; an engine that cannot be reached is a failure, one that says no another."""
    began_s = clock.now_s()
    try:
        outcome, detail = act()
        refused = outcome is Outcome.FAILED
    except Unreachable as error:
        outcome, detail, refused = Outcome.FAILED, str(error), error.refused
    return DeliveryReceipt(
        adapter=name, hint=hint.id, kind=str(hint.kind), session=hint.session or hint.task, outcome=outcome,
        detail=detail, seconds=clock.now_s() - began_s, refused=refused,
    )  # fmt: skip


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What a request is to carry beside what the user wrote; the user's own values win, deeply.

    `priority` in the body goes out only where `priority_ok` says that this server was found to take it: a stock server
    refuses the whole request. `shape(path, body)` may give another body altogether, for marks inside of messages; it is
    asked with the parsed body (not to be changed in place) and None means that there is nothing to change. `marks` are
    the names that it brings: refused by the server several times running, it is not asked again. `paths`: fields of the body for requests to routes that end in a name
    ("/responses"). `routes`: only requests to routes that end in one of these carry anything. `saw(request)` hears of the request as it was accepted. `session`: whose call it is. `owed`: whether the
    adapter gave it, and is to be told when the call is over.
    """

    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    priority_ok: bool = False
    shape: Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None] | None = None
    marks: frozenset[str] = frozenset()
    paths: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    routes: tuple[str, ...] = ()
    saw: Callable[[Any], None] | None = None
    session: str = ""
    owed: bool = True


@runtime_checkable
class Routing(Protocol):
    """An adapter whose engine wants to be told something in each request. Called from many threads."""

    def carries(self, about: SessionFacts) -> Extra | None:
        """What this session's next call is to carry; may wait for its context to be brought back."""
        ...

    def ended(self, session: str, *, tokens: int, cached_tokens: int | None) -> None:
        """The call to which `carries` gave something is over, whatever became of it.

        The context now holds `tokens`; of its prompt `cached_tokens` were reused (None: unknown).
        """
        ...


@runtime_checkable
class Telling(Protocol):
    """An adapter whose engine tells elsewhere than in its answers where cached tokens came from."""

    def cached_by(self, usage: Usage) -> Mapping[str, int] | None:
        """Where the cached tokens of the call that has just ended came from; None where that cannot be told."""
        ...
