"""BehindThought: an answer that is held to a grammar may be thought about first; the grammar begins behind the thought.

Covers: which tokens may come where a thought may begin, in it, and behind it; marks of one token or of several. Does not
cover: the grammar (`grammar.py`, `guide.py`), telling the thought apart from the answer (`thoughts.py` finds the same
borders in the same text).

In a thought the model is free, but for two things. It cannot end the answer: there would be none. And it cannot write the
end of the closing mark and more in one token: that would begin an answer which no grammar has seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from agentkv.engine.local.sampler import Guide
from agentkv.engine.local.thoughts import Marks

_LINE_ENDS = b"\r\n"
_MOST_LINE_ENDS = 2
"""Tokens of line ends between a thought and its answer: models write an empty line there."""


class Held(Guide, Protocol):
    """A guide that can say what it would take."""

    def permits(self, token: int) -> bool:
        """True if `token` may be written now."""
        ...


class MarkTokens:
    """Tokens that begin and end thoughts of one model. `raw`: each token's own bytes; `ends`: tokens that end answers."""

    def __init__(self, marks: Marks, raw: Sequence[bytes], *, ends: Collection[int]) -> None:
        self.raw = raw
        self.opening, self.closing = marks.opening.encode(), marks.closing.encode()
        opens, spoils, line_ends = defaultdict(list), defaultdict(list), []
        for token, text in enumerate(raw):
            if text and not text.strip(_LINE_ENDS):
                line_ends.append(token)
            for begun in range(len(self.opening)):
                left = self.opening[begun:]
                if text and (left.startswith(text) or (text.startswith(left) and not self._answers(text[len(left) :]))):
                    opens[begun].append(token)
            for begun in range(len(self.closing)):
                left = self.closing[begun:]
                begins = text.startswith(left) and text[len(left) :].strip(_LINE_ENDS)
                if begins or (not begun and self._answers(text)):
                    spoils[begun].append(token)
        self._opens = {begun: torch.tensor(tokens) for begun, tokens in opens.items()}
        self._spoils = {begun: torch.tensor(tokens) for begun, tokens in spoils.items()}
        self._ends = torch.tensor(sorted(ends), dtype=torch.long)
        self.line_ends = torch.tensor(line_ends, dtype=torch.long)
        """Tokens of nothing but line ends."""

    def _answers(self, text: bytes) -> bool:
        """True for a piece of a thought that ends it and begins an answer."""
        return bool(text.partition(self.closing)[2].strip(_LINE_ENDS))

    def opens(self, begun: int) -> Tensor:
        """Tokens that go on with the opening mark, of which so many bytes are written."""
        return self._opens.get(begun, torch.tensor([], dtype=torch.long))

    def barred(self, tail: bytes) -> Iterable[Tensor]:
        """Tokens that must not come in a thought that ends with `tail`."""
        yield self._ends
        for begun, tokens in self._spoils.items():
            if tail.endswith(self.closing[:begun]):
                yield tokens

    def is_line_end(self, token: int) -> bool:
        """True for a token of nothing but line ends."""
        text = self.raw[token]
        return bool(text) and not text.strip(_LINE_ENDS)


class BehindThought:
    """One answer: a thought, if the model begins one, and what `made()`, a new guide each time, permits.

    `begun`: the prompt ends inside of the thought. Used by the engine's thread.
    """

    def __init__(self, made: Callable[[], Held], tokens: MarkTokens, *, begun: bool) -> None:
        self._made, self._tokens = made, tokens
        self._held = made()
        self._permitted = True  # the grammar has taken everything so far
        self._state: Literal["before", "thought", "gap", "behind"] = "thought" if begun else "before"
        self._tail = b""  # before: what may become the opening mark; in the thought: its end
        self._gap_tokens = 0

    def mask(self, scores: Tensor) -> Tensor:
        """`scores` [vocabulary] with -inf for what must not come next, in place. ModelError if nothing can."""
        match self._state:
            case "thought":
                for barred in self._tokens.barred(self._tail):
                    scores[barred] = -torch.inf
                return scores
            case "before":
                return self._or(self._tokens.opens(len(self._tail)), scores)
            case "gap" if self._gap_tokens < _MOST_LINE_ENDS:
                return self._or(self._tokens.line_ends, scores)
        return self._held.mask(scores)

    def accept(self, token: int) -> None:
        """This token was written."""
        match self._state:
            case "before":
                self._before(token)
            case "thought":
                self._thought(self._tokens.raw[token])
            case "gap" if self._gap_tokens < _MOST_LINE_ENDS and self._tokens.is_line_end(token):
                self._gap_tokens += 1
            case _:
                self._state = "behind"
                self._held.accept(token)

    def ahead(self, most: int) -> Sequence[int]:
        """Tokens that must come next, at most `most`: only the grammar leaves no choice."""
        return self._held.ahead(most) if self._state == "behind" else ()

    @property
    def ended(self) -> bool:
        """True if nothing may follow any more."""
        return self._state == "behind" and self._held.ended

    def _or(self, others: Tensor, scores: Tensor) -> Tensor:
        """What the grammar permits, and these."""
        kept = scores[others]
        scores = self._held.mask(scores) if self._permitted else scores.fill_(-torch.inf)
        scores[others] = kept
        return scores

    def _before(self, token: int) -> None:
        """A token may go on with the mark and with the answer alike: both are followed until one is left."""
        tail, opening = self._tail + self._tokens.raw[token], self._tokens.opening
        if tail.startswith(opening):
            self._held, self._permitted, self._state = self._made(), True, "thought"
            self._tail = b""
            self._thought(tail[len(opening) :])
            return
        self._tail = tail
        self._permitted = self._permitted and self._held.permits(token)
        if self._permitted:
            self._held.accept(token)
        if not opening.startswith(tail):
            self._state = "behind"

    def _thought(self, text: bytes) -> None:
        closing = self._tokens.closing
        self._tail += text
        if closing in self._tail:
            self._state, self._tail = "gap", b""
        else:
            self._tail = self._tail[1 - len(closing) :]
