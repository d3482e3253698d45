"""Asking a model for a summary: prompts out, answers or errors in, one retry, and what counts as no answer.

A generator without I/O, so one body serves sync and async callers. Prompt text is never logged.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from agentkv.context.summary.plan import Proposal
from agentkv.context.summary.prompts import (
    CHUNK_INSTRUCTION,
    INSTRUCTION,
    SHORT_INSTRUCTION,
    chunks,
    closed,
    instructed,
    task_line,
)
from agentkv.context.summary.record import Summary
from agentkv.core.message import Message
from agentkv.errors import BudgetExceeded, Closed, GenerationCancelled, PromptTooLong
from agentkv.log import failed

Prompt = tuple[Message, ...]
MAX_CHUNKS = 64
"""More model calls than this for one summary are refused: that conversation should be folded earlier."""
_LEAST_ROOM = 128
_SLACK_TOKENS = 64
_FINAL = (BudgetExceeded, Closed, GenerationCancelled)  # asking again would meet the same answer


@dataclass(slots=True)
class _Tries:
    """How many more calls may fail."""

    left: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """`count` answers the tokens of a message, `window_tokens` is the summariser's (None: it takes all)."""

    count: Callable[[Message], int]
    window_tokens: int | None
    summary_tokens: int
    redact: Callable[[str], str] | None

    def size(self, text: str) -> int:
        """Tokens of `text` as a message."""
        return self.count(Message(role="user", content=text))

    def summary(
        self, proposal: Proposal, sent: Sequence[Message]
    ) -> Generator[Prompt, str | BaseException, Summary | None]:
        """The summary of what `proposal` folds, or None. `sent` is the prompt that holds that; or () for chunks."""
        try:
            tries, window = _Tries(), self.window_tokens
            prompt = closed(sent)
            if prompt and self._fits(prompt, window, proposal.tools_tokens):
                found = yield from self._asked(
                    (instructed(prompt, INSTRUCTION), instructed(prompt, SHORT_INSTRUCTION)),
                    tries,
                    proposal.replaced_tokens,
                )
                if not isinstance(found, PromptTooLong):
                    return found
                window = min(window or found.limit_tokens, found.limit_tokens)
            return (yield from self._chunked(proposal, window, tries))
        except Exception as error:  # a redactor, a counter
            failed("summary_failed", error=type(error).__name__)
            return None

    def _fits(self, prompt: Prompt, window: int | None, tools_tokens: int) -> bool:
        if window is None:
            return True
        asked = tools_tokens + sum(map(self.count, prompt)) + self.size(INSTRUCTION)
        return asked + self.summary_tokens + _SLACK_TOKENS <= window

    def _chunked(
        self, proposal: Proposal, window: int | None, tries: _Tries
    ) -> Generator[Prompt, str | BaseException, Summary | None]:
        """Each chunk has its own summary; they are merged here, in order, without a further call."""
        start = CHUNK_INSTRUCTION + task_line(proposal.request)
        room = proposal.replaced_tokens + _LEAST_ROOM
        if window is not None:
            room = window - self.summary_tokens - self.size(start) - _SLACK_TOKENS
        if room < _LEAST_ROOM:
            failed("summary_failed", error="the summariser's window is too small", window_tokens=window)
            return None
        texts = list(chunks(proposal.folded, room, self.size))
        if len(texts) > MAX_CHUNKS:
            failed("summary_failed", error="too many chunks", chunks=len(texts), allowed=MAX_CHUNKS)
            return None
        most = max(proposal.replaced_tokens, self.summary_tokens)
        whole = Summary()
        for text in texts:
            prompt = (Message(role="user", content=start + text),)
            found = yield from self._asked((prompt, prompt), tries, most)
            if not isinstance(found, Summary):
                return None
            whole = whole.merged(found)
        return whole or None

    def _asked(
        self, prompts: tuple[Prompt, Prompt], tries: _Tries, most_tokens: int
    ) -> Generator[Prompt, str | BaseException, Summary | PromptTooLong | None]:
        """The answer as a Summary; a second try with the second prompt if one is left."""
        for prompt in prompts:
            answer = yield self._redacted(prompt)
            if isinstance(answer, PromptTooLong):
                return answer
            found = self._read(answer, most_tokens)
            if isinstance(found, Summary):
                return found
            failed("summary_failed", error=found)
            if isinstance(answer, _FINAL) or tries.left == 0:
                return None
            tries.left -= 1
        return None

    def _read(self, answer: str | BaseException, most_tokens: int) -> Summary | str:
        """The Summary in `answer`, or what is wrong with it."""
        if isinstance(answer, BaseException):
            if not isinstance(answer, Exception):
                raise answer
            return type(answer).__name__
        if not isinstance(answer, str) or not answer.strip():
            return "the summary is empty"
        if self.size(answer) >= most_tokens:
            return "the summary is not shorter than what it replaces"
        return Summary.parse(answer) or "the answer has no section of a summary"

    def _redacted(self, prompt: Prompt) -> Prompt:
        redact = self.redact
        if redact is None:
            return prompt
        return tuple(
            replace(
                message,
                content=redact(message.content),
                tool_calls=tuple(replace(call, arguments=redact(call.arguments)) for call in message.tool_calls),
            )
            for message in prompt
        )
