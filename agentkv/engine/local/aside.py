"""Aside: what is told beside an answer's text: thoughts, and calls while they are written.

Covers collecting it between two chunks. Gates (`toolcalls.py`, `held.py`, `thoughts.py`, `responses.py`) put it in, the
answer takes it out.
"""

from __future__ import annotations

from agentkv.engine.base import CallDelta


class Aside:
    """One answer's. Gates that stand one inside the other share it."""

    def __init__(self) -> None:
        self.thought = ""
        """All of it, as it was told."""
        self.called = False
        """A call is being told, or was: the text behind it is no part of what came before."""
        self.hidden_bytes = 0
        """So much of the model's text, in UTF-8, was no answer; whoever reads it sets it back."""
        self._fresh = ""
        self._calls: list[CallDelta] = []

    @property
    def waits(self) -> bool:
        """True if there is something to take."""
        return bool(self._fresh or self._calls)

    def think(self, text: str) -> None:
        """A piece of the model's thoughts."""
        self.thought += text
        self._fresh += text

    def call(self, delta: CallDelta) -> None:
        """A piece of a call; more arguments of one call become one piece."""
        self.called = True
        last = self._calls[-1] if self._calls else None
        if last is not None and last.index == delta.index and not last.id:
            self._calls[-1] = CallDelta(index=delta.index, arguments=last.arguments + delta.arguments)
        else:
            self._calls.append(delta)

    def take(self) -> tuple[str, tuple[CallDelta, ...]]:
        """(thoughts, calls) since this was asked last."""
        taken = self._fresh, tuple(self._calls)
        self._fresh, self._calls = "", []
        return taken
