"""Entries: log probabilities wait for the text of their tokens and are told with it.

Covers: where in the text a token's bytes lie, which entries are certain. Does not cover: the text itself (`answer.py`).
"""

from __future__ import annotations

from agentkv.engine.base import TokenLogprob
from agentkv.engine.local.detokenise import Utf8


class Entries:
    """One answer's. Places are bytes of its text in UTF-8, from its beginning, hidden text included."""

    def __init__(self) -> None:
        self.all: list[TokenLogprob] = []
        """The entries of the text that was shown."""
        self._fresh: list[TokenLogprob] = []
        self._waiting: list[tuple[int, int, TokenLogprob]] = []  # (where its bytes begin, where they end, entry)
        self._utf8 = Utf8()
        self._spelled = self._end = self._shown = 0
        self._called = False

    def wait(self, entry: TokenLogprob) -> None:
        """The next token's. Half a character is counted as far as it came: it lies behind the whole ones before it, and is
        shown as a whole.
        """
        start = self._end
        self._spelled += len(self._utf8.read(entry.raw).encode())
        self._end = self._spelled + len(self._utf8.held)
        self._waiting.append((start, self._end, entry))

    def settle(self, end: int) -> None:
        """The text of all tokens so far ends here; a decoder may have left a first space out."""
        self._utf8.rest()
        if end < self._end:
            self._waiting = [(min(start, end), min(stop, end), entry) for start, stop, entry in self._waiting]
        self._spelled = self._end = end

    def show(self, text: str, *, hidden: int, called: bool) -> None:
        """`text` is shown, behind so many `hidden` bytes: the entries of both are settled. `called`: a call began in it,
        and what follows is no longer in one piece.
        """
        if hidden:
            self._shown += hidden
            self._waiting = [one for one in self._waiting if one[0] >= self._shown]
        if not self._waiting:
            return
        self._shown += len(text.encode())
        count = sum(end <= self._shown for _, end, _ in self._waiting)
        told, self._waiting = [entry for *_, entry in self._waiting[:count]], self._waiting[count:]
        if self._called:
            return
        self._fresh += told
        self.all += told
        self._called = called

    def skip(self) -> None:
        """What is not shown by now never is."""
        self._waiting.clear()
        self._shown = self._end

    def take(self) -> tuple[TokenLogprob, ...]:
        """Entries of what was shown since this was asked last."""
        told, self._fresh = self._fresh, []
        return tuple(told)
