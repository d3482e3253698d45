"""From token ids to text, as they come: whole characters only, stop strings held back until they are certain.

Covers: `Utf8` (bytes -> text), `Detokeniser` (ids -> text) and `StopGate` (text -> text that may be shown). Does not cover: tool calls in
the text (`toolcalls.py`), end tokens (`engine.py`).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence

_CONTEXT_TOKENS = 4
_BROKEN_CONTEXT_TOKENS = 16
_MOST_WAITING_TOKENS = 32
_REPLACEMENT = "\ufffd"


class Utf8:
    """Bytes as they come to text as `bytes.decode("utf-8", "replace")` has it: at most one character is held."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def held(self) -> bytes:
        """The beginning of a character."""
        return self._decoder.getstate()[0]

    def read(self, raw: bytes) -> str:
        """What is certain now."""
        text = self._decoder.decode(raw)
        held = self.held  # of half a surrogate Python waits for the end, though no end makes it a character
        return text + self.rest() if held[:1] == b"\xed" and held[1:] >= b"\xa0" else text

    def rest(self) -> str:
        """No byte follows: what is held is broken."""
        return self._decoder.decode(b"", final=True)


class Detokeniser:
    """Text of generated ids, piece by piece. No piece is ever taken back, and at most one character is held.

    The join of all pieces is what `decode` makes of the prompt's ids and these, behind what it makes of the prompt's, with
    one rule for bytes that are no UTF-8, whatever the tokenizer: good characters stay, the longest beginning of a character
    that is not gone on with becomes one U+FFFD, and so does each byte that neither begins nor goes on with one (as
    `bytes.decode("utf-8", "replace")` has it). No character reaches from the prompt into the answer, or across `finish`.

    `prompt_ids` give the first token its left neighbours: SentencePiece drops a leading space that has none. `byte_ids`
    (id -> byte) are the tokens that stand for a byte each, of tokenizers that fall back to them. Their own decoders make
    a U+FFFD of every byte in a run of such tokens if one of them is wrong, so `decode` is given whole characters only:
    what is broken is put in as the bytes of U+FFFD. All others (byte-level ones) are trusted with broken bytes.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int] = (),
        byte_ids: Mapping[int, int] | None = None,
    ) -> None:
        self._decode = decode
        self._bytes = byte_ids or {}
        self._ids = {byte: id_ for id_, byte in self._bytes.items()}
        self._utf8 = Utf8()
        self._window: list[int] = []
        self._told = self._shown = 0  # tokens of the window that are out, characters of its text that are
        self._begin(self._neighbours(prompt_ids))
        self.whole = True
        """False while a part of a character is held."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        self._window += self._mended(token_id)
        return self._release(final=False)

    def finish(self) -> str:
        """What is still held; an incomplete character becomes U+FFFD, once."""
        self._window += self._rest()
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        text = self._decode(self._window)
        half = not self._bytes and text.endswith(_REPLACEMENT)  # or a U+FFFD that was meant: the next token tells
        end = len(text) - (half and not final)
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        self.whole = not self._utf8.held and (final or not half)
        if half and final:
            self._begin(self._closed(self._window))
        elif piece and not half:  # the last piece is the context of the next: it begins and ends at whole characters
            self._begin(self._window[self._told :] or self._window)
        elif len(self._window) - self._told > _MOST_WAITING_TOKENS:
            self._shorten(half=half)
        return piece

    def _begin(self, window: list[int]) -> None:
        """All of `window` is out, and ends with a whole character."""
        self._window = window
        self._told = len(window)
        self._shown = len(self._decode(window))

    def _shorten(self, *, half: bool) -> None:
        """Nothing but broken bytes for long (or tokens without text): a few are enough to know what the last one is."""
        window = self._window[-_BROKEN_CONTEXT_TOKENS:]
        text = self._decode(window)
        if not half:
            self._begin(window)
        elif len(text) > _CONTEXT_TOKENS:  # more than one character has bytes: wherever it begins, it ends the same way
            self._window, self._told, self._shown = window, 0, len(text) - 1

    def _neighbours(self, ids: Sequence[int]) -> list[int]:
        """The last of `ids` that have any text."""
        count = _CONTEXT_TOKENS
        while True:
            window = [one for id_ in ids[-count:] for one in self._mended(id_)] + self._rest()
            if count >= len(ids) or self._decode(window):
                return window if self._bytes else self._closed(window)
            count *= 2

    def _closed(self, ids: list[int]) -> list[int]:
        """`ids` without half a character at their end, which is shown as U+FFFD already: nothing completes it."""
        while ids and self._decode(ids).endswith(_REPLACEMENT):
            ids = ids[:-1]
        return ids

    def _mended(self, token_id: int) -> list[int]:
        """The ids that are known with this one; bytes wait until they are a character, or can be none."""
        byte = self._bytes.get(token_id)
        return [*self._rest(), token_id] if byte is None else self._spelled(self._utf8.read(bytes([byte])))

    def _rest(self) -> list[int]:
        return self._spelled(self._utf8.rest())

    def _spelled(self, text: str) -> list[int]:
        return [self._ids[byte] for byte in text.encode()]


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
