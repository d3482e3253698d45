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
        self._detokeniser = Detokeniser(tokeniser.decode, prompt_ids)
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self._forced_ids = forced_ids
        self._stop = StopGate(stop)
        self._gate = gate
        self._most_calls = most_calls
        self._written: list[str] = []  # control tokens and ordinary text, as a template would render them
        self._plain = ""
        self._waiting: list[tuple[int, TokenLogprob]] = []  # (where its bytes end, entry)
        self._spelled_bytes = self._shown_bytes = 0
        self._told: list[TokenLogprob] = []
        self._called = False
        self.token_ids: list[int] = []
        self.reasoning_tokens = 0
        self.logprobs: list[TokenLogprob] = []
        """The entries of the text that was shown."""
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
                self._spelled_bytes += len(logprob.raw)
                self._waiting.append((self._spelled_bytes, logprob))
            piece = self._detokeniser.feed(token_id)
            self._plain += piece
        else:
            piece = self._detokeniser.finish()
            self._written += [self._tokeniser.guard(self._plain + piece), control]
            self._plain = ""
        shown = self._show(piece)
        if control is not None and self._stop.hit is None:
            shown += self._mark(control)
        self.reasoning_tokens += thought or self._gate.thinks
        self.reason = self._end(token_id)
        return shown

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
            self._waiting.clear()
            self._shown_bytes = self._spelled_bytes
        return shown

    def _certain(self, shown: str) -> None:
        """Log probabilities go with the text: those of tokens that are shown to their last byte."""
        hidden, self._gate.aside.hidden_bytes = self._gate.aside.hidden_bytes, 0
        if hidden:  # it stood before what is shown now
            self._shown_bytes += hidden
            self._waiting = [one for one in self._waiting if one[0] - len(one[1].raw) >= self._shown_bytes]
        if not self._waiting:
            return
        self._shown_bytes += len(shown.encode())
        count = sum(end <= self._shown_bytes for end, _ in self._waiting)
        fresh, self._waiting = [entry for _, entry in self._waiting[:count]], self._waiting[count:]
        if self._called:
            return
        self._told += fresh
        self.logprobs += fresh
        self._called = self._gate.aside.called  # from here on the text is no longer in one piece

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Entries of what was shown since this was asked last."""
        told, self._told = self._told, []
        return tuple(told)

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
        self._plain += self._detokeniser.finish()

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The text that was held until the end, and the tool calls; `reason`, `text` and `raw` are final then."""
        piece = self._detokeniser.finish()
        self._plain += piece
        shown = self._show(piece)
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
