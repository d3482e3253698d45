"""Transcript: a session's token ids with the text they were rendered from, so that nothing is tokenised twice.

Chat templates re-render the whole conversation for every call. If the new text starts with the old one (prompt plus
what was generated), the old ids are kept, generated ones included, and only the tail is tokenised. Otherwise the ids
up to the last safe border inside the common part are kept. Either way the ids spell the new text: a transcript
decides what a call costs, never what it means.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from agentkv.engine.local.tokeniser import Encoded, Tokeniser


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """`ids` spell `text`; `prompt_chars` of it were sent, the rest was generated. `borders` as in Encoded."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    borders: list[tuple[int, int]] = field(default_factory=list)
    prompt_chars: int = 0

    def shared_chars(self, prompt: str) -> int:
        """Length of the part that `prompt` and this transcript have in common."""
        low, high = 0, min(len(prompt), len(self.text))
        while low < high:
            middle = (low + high + 1) // 2
            if prompt[:middle] == self.text[:middle]:
                low = middle
            else:
                high = middle - 1
        return low

    def extended(self, prompt: str, tokeniser: Tokeniser, *, raw: bool) -> tuple[Transcript, int]:
        """The transcript of `prompt`, and how many ids it took over. `raw`: a raw prompt, not a rendered chat.

        Raises RequestInvalid for text that is no valid Unicode.
        """
        chars, tokens = self._kept(prompt, tokeniser)
        tail = prompt[chars:]
        param = "prompt" if raw else "messages"
        whole = raw and chars == 0
        encoded = tokeniser.encode(tail, param=param, whole=whole) if tail else Encoded(ids=[], borders=[])
        count = bisect.bisect_right(self.borders, (chars, tokens))
        borders = self.borders[:count] + [(chars + c, tokens + t) for c, t in encoded.borders]
        ids = self.ids[:tokens] + encoded.ids
        return Transcript(text=prompt, ids=ids, borders=borders, prompt_chars=len(prompt)), tokens

    def _kept(self, prompt: str, tokeniser: Tokeniser) -> tuple[int, int]:
        """(characters, tokens) of this transcript that `prompt` starts with and that can be cut off there."""
        if prompt.startswith(self.text):
            tail = prompt[len(self.text) :]
            ends_well = not self.ids or tokeniser.control(self.ids[-1]) is not None
            if not tail or (ends_well and tokeniser.plain) or tokeniser.starts_with_control(tail):
                return len(self.text), len(self.ids)
            if tokeniser.plain and len(self.text) > self.prompt_chars:
                return len(self.text), len(self.ids)  # never tokenise again what was generated
        shared = self.shared_chars(prompt)
        count = bisect.bisect_right(self.borders, (shared, len(self.ids)))
        while count:
            chars, tokens = self.borders[count - 1]
            if tokeniser.plain or tokeniser.starts_with_control(prompt[chars:]):
                return chars, tokens
            count -= 1
        return 0, 0

    def answered(self, written: str, token_ids: list[int], tokeniser: Tokeniser) -> Transcript:
        """This prompt plus what the model made of it; ids that spell nothing at all are left out."""
        if not written:
            return self
        text, ids = self.text + written, self.ids + token_ids
        ends_well = token_ids and tokeniser.control(token_ids[-1]) is not None
        borders = [*self.borders, (len(text), len(ids))] if ends_well else self.borders
        return Transcript(text=text, ids=ids, borders=borders, prompt_chars=self.prompt_chars)
