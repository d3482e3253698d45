"""From token ids to text, as they come: whole characters only, stop strings held back until they are certain.

Covers: `Detokeniser` (ids -> text) and `StopGate` (text -> text that may be shown). Does not cover: tool calls in
the text (`toolcalls.py`), end tokens (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT_TOKENS = 4
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER_TOKENS = 8
"""A character has at most 4 bytes, hence 4 byte tokens; after more than this a replacement character is meant."""


class Detokeniser:
    """Text of generated ids, piece by piece; the join of all pieces equals decoding all ids at once.

    `decode` maps ids to text; `prompt_ids` gives the first token its left neighbours (SentencePiece drops a leading
    space that has none).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_ids[-_CONTEXT_TOKENS:])
        if self._window and decode(self._window).endswith(_REPLACEMENT):
            self._window = []  # half a character, shown as such already: what completes it is no part of that
        self._told = len(self._window)  # window[:told] is out

    def feed(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        self._window.append(token_id)
        return self._release(final=len(self._window) - self._told > _LONGEST_CHARACTER_TOKENS)

    def finish(self) -> str:
        """What is still held; an incomplete character becomes U+FFFD, once."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        before = self._decode(self._window[: self._told])
        text = self._decode(self._window)
        if not final and (len(text) <= len(before) or text.endswith(_REPLACEMENT)):
            return ""
        # The last piece is the context of the next: it begins and ends at whole characters.
        self._window = self._window[self._told :] or self._window
        self._told = len(self._window)
        return text[len(before) :]


class StopGate:
    """Passes text on until a stop string appears; what might be the beginning of one waits.

    `hit` is the stop string found. Text from it on is never passed. Of several, the one that begins first counts.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.hit: str | None = None

    @property
    def looks(self) -> bool:
        """True if there is a stop string."""
        return bool(self._stop)

    def feed(self, text: str) -> str:
        """What may be shown now."""
        if not self._stop or self.hit is not None:
            return "" if self.hit is not None else text
        self._held += text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def finish(self) -> str:
        """The held text, which was no stop string after all."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
