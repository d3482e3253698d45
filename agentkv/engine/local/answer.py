"""Answer: what one call has written so far, and whether it has ended.

Covers: end tokens, max_tokens, stop strings, forced tokens, the visible text, tool calls. Does not cover: where tokens
come from (`sampler.py`), who computes when (`batch.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from agentkv.core.message import ToolCall
from agentkv.engine.base import FinishReason, TokenLogprob
from agentkv.engine.local.aside import Aside
from agentkv.engine.local.detokenise import Detokeniser, StopGate
from agentkv.engine.local.entries import Entries
from agentkv.engine.local.thoughts import SPELLED
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.engine.local.toolcalls import TAGS, Gate, Wanted


class Answer:
    """Takes tokens one by one. `reason` is set with the last one; then `finish()` once.

    Forced tokens are emitted as they are: an end token among them does not end the call, their end does.
    """

    def __init__(
        self,
        tokeniser: Tokeniser,
        *,
        prompt_ids: Sequence[int],
        eos_ids: frozenset[int],
        max_tokens: int,
        stop: Sequence[str] = (),
        forced_ids: Sequence[int] | None = None,
        gate: Gate,
        most_calls: int | None = None,
    ) -> None:
        self._tokeniser = tokeniser
        self._detokeniser = Detokeniser(tokeniser.decode, prompt_ids, tokeniser.byte_ids)
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self._forced_ids = forced_ids
        self._stop = StopGate(stop)
        self._gate = gate
        self._most_calls = most_calls
        self._written: list[str] = []  # control tokens and ordinary text, as a template would render them
        self._plain = ""
        self._text_bytes = 0  # of `_written` and `_plain` without control tokens and marks
        self._entries = Entries()
        self.token_ids: list[int] = []
        self.reasoning_tokens = 0
        self.text = ""
        self.raw = ""
        self.unfinished: tuple[ToolCall, ...] = ()
        """Calls that were told until the answer was cut inside of the last one."""
        self.reason: FinishReason | None = None

    @property
    def aside(self) -> Aside:
        """What is told beside the text, between two chunks."""
        return self._gate.aside

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """The entries of the text that was shown."""
        return self._entries.all

    @property
    def next_forced(self) -> int | None:
        """The token that must come next; None if the model is free."""
        return None if self._forced_ids is None else self._forced_ids[len(self.token_ids)]

    @property
    def left_tokens(self) -> int:
        """How many more may come."""
        return self._max_tokens - len(self.token_ids)

    @property
    def written(self) -> str:
        """All that was written with control tokens as their text, spelled ones marked: what a transcript holds."""
        return "".join(self._written) + self._tokeniser.guard(self._plain)

    def add(self, token_id: int, logprob: TokenLogprob | None = None) -> str:
        """The text that may be shown now that this token is known."""
        self.token_ids.append(token_id)
        thought = self._gate.thinks
        control = self._tokeniser.control(token_id)
        if control is None:
            if logprob is not None:
                self._entries.wait(logprob)
            piece = self._spell(self._detokeniser.feed(token_id))
        else:
            piece = self._spell(self._detokeniser.finish())
            self._written += [self._tokeniser.guard(self._plain), control]
            self._plain = ""
        shown = self._show(piece)
        if control is not None and self._stop.hit is None:
            shown += self._mark(control)
        self.reasoning_tokens += thought or self._gate.thinks
        self.reason = self._end(token_id)
        return shown

    def _spell(self, piece: str) -> str:
        """More of the text, whether it will be shown or not."""
        self._plain += piece
        self._text_bytes += len(piece.encode())
        if self._detokeniser.whole:
            self._entries.settle(self._text_bytes)
        return piece

    def _show(self, piece: str) -> str:
        """Stop texts are looked for letter by letter: whether they count may change with each."""
        shown = "".join(map(self._pass, piece if self._stop.looks else [piece]))
        self.text += shown
        return shown

    def _pass(self, piece: str) -> str:
        if self._stop.hit is not None:
            return ""
        safe = self._stop.finish() + piece if self._gate.inside else self._stop.feed(piece)
        self.raw += safe
        shown = self._gate.feed(safe)
        self._certain(shown)
        return shown

    def _mark(self, control: str) -> str:
        """A control token is no text, but may say what the text around it is."""
        if not self._gate.sees_control:
            return ""
        held = self._stop.finish()  # no stop text goes across a control token
        self.raw += held
        if control in TAGS or control in SPELLED:
            self.raw += control
        shown = self._gate.feed(held) + self._gate.control(control)
        self.text += shown
        self._certain(shown)
        if not self._gate.waits:  # what is not shown by now is a call or a thought
            self._entries.skip()
        return shown

    def _certain(self, shown: str) -> None:
        """Log probabilities go with the text: those of tokens that are shown to their last byte."""
        aside = self._gate.aside
        hidden, aside.hidden_bytes = aside.hidden_bytes, 0
        self._entries.show(shown, hidden=hidden, called=aside.called)

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Entries of what was shown since this was asked last."""
        return self._entries.take()

    def _end(self, token_id: int) -> FinishReason | None:
        if self._stop.hit is not None:
            return "stop"
        if self._forced_ids is not None and len(self.token_ids) == len(self._forced_ids):
            return "stop"
        if self._forced_ids is None and token_id in self._eos_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self._max_tokens else None

    def complete(self) -> None:
        """Nothing may follow. A model with end tokens says so by one; for any other the answer ends here."""
        if not self._eos_ids:
            self.reason = "stop"

    def flush(self) -> None:
        """No token follows: half a character that is held becomes U+FFFD in `written`, so that it spells all ids."""
        self._spell(self._detokeniser.finish())

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The text that was held until the end, and the tool calls; `reason`, `text` and `raw` are final then."""
        shown = self._show(self._spell(self._detokeniser.finish()))
        rest = self._stop.finish()
        self.raw += rest
        tail = self._gate.feed(rest)
        held, wanted = self._gate.finish(cut=self.reason == "length" and self._stop.hit is None)
        wanted = wanted[: self._most_calls]
        self.text += tail + held
        if not wanted:
            self._certain(tail + held)
        if self._stop.hit is not None:
            self.reason = "stop"
        if wanted:
            self.reason = "tool_calls"
        if self._gate.hides and not wanted:
            self.raw = self.text
        self.unfinished = _calls(self._gate.unfinished)
        return shown + tail + held, _calls(wanted)


def _calls(wanted: Sequence[Wanted]) -> tuple[ToolCall, ...]:
    made = (ToolCall(id=w.id or f"call_{secrets.token_hex(12)}", name=w.name, arguments=w.arguments) for w in wanted)
    return tuple(made)
