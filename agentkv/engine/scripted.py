"""ScriptedEngine: an engine for users' tests that answers from a script, with bills that look real.

Covers: answers from texts, tool calls, callables and exceptions; several choices, log probabilities; word-by-word
streams; stop, max_tokens, cancel; usage with cached tokens; sessions per branch. Does not cover: a model. A token is a word with the blanks before it,
and its KV is imagined: the cached part of a prompt is its longest common prefix with what the task sent before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentkv.clock import Clock, ManualClock, SystemClock
from agentkv.core.forecast import Forecast
from agentkv.core.residency import Move, Outcome, Receipt, Residency
from agentkv.core.task import Caller
from agentkv.core.usage import Timing, Usage
from agentkv.engine.base import Choice, Chunk, FinishReason, Generation, Request
from agentkv.engine.script import (
    Answer,
    Reply,
    call_tokens,
    common_prefix,
    logprobs_of,
    prompt_tokens,
    replies_of,
    tokens_of,
    until_stop,
)
from agentkv.engine.stream import Stream
from agentkv.errors import Closed, ConfigError, PromptTooLong, RequestInvalid

__all__ = ["Answer", "Reply", "ScriptedEngine"]

_REMEMBERED_PROMPTS = 64  # per task; an older prefix counts as lost


@dataclass(slots=True, eq=False)
class _Call:
    """One call while it runs."""

    request: Request
    answer: Answer
    prompt: list[str]
    session: str
    usage: Usage
    submitted_s: float
    stopped: threading.Event = field(default_factory=threading.Event)
    stream: Stream = field(default_factory=Stream)
    thread: threading.Thread | None = None


@dataclass(slots=True)
class _Task:
    """What one task sent: the tokens of its latest prompts with their answers, and each branch's session."""

    sent: deque[list[str]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_PROMPTS))
    sessions: dict[str, str] = field(default_factory=dict)


class ScriptedEngine:
    """Answers calls in the order in which they are submitted, one answer each.

    `answers` is consumed lazily, so `itertools.repeat("ok")` never ends; a call past the end is refused.
    `latency_s` passes before each word: really, or on a ManualClock by advancing it. `before_chunk(request, index)`
    runs on the call's thread before each chunk: block in it to hold a stream there. `requests` holds every request
    accepted, `cancelled` those whose stream was cancelled. Thread-safe.
    """

    sends_own_text = True  # of earlier turns

    def __init__(
        self,
        answers: Iterable[Answer],
        *,
        model: str = "scripted",
        context_tokens: int = 128_000,
        latency_s: float = 0.0,
        before_chunk: Callable[[Request, int], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if isinstance(answers, str) or callable(answers):
            raise ConfigError('answers must be a list such as ["hello"]; for one answer to all, itertools.repeat(it)')
        if context_tokens < 1 or latency_s < 0:
            raise ConfigError(f"context_tokens={context_tokens} and latency_s={latency_s} must not be negative")
        self.model = model
        self.context_tokens = context_tokens
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []
        self._answers = iter(answers)
        self._latency_s = latency_s
        self._before_chunk = before_chunk
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._tasks: dict[str, _Task] = {}
        self._running: list[_Call] = []
        self._ids: dict[str, int] = {}
        self._used = Usage()
        self._closed = False

    # -- Engine

    def submit(self, request: Request) -> Stream:
        if request.forced_ids is not None:
            raise RequestInvalid("a scripted engine cannot force tokens; script the text", param="forced_ids")
        prompt = prompt_tokens(request)
        wanted = len(prompt) + (request.sampling.max_tokens or 1)
        if wanted > self.context_tokens:
            raise PromptTooLong(
                f"{len(prompt)} prompt tokens and the output need {wanted}, the context holds {self.context_tokens}",
                needed_tokens=wanted,
                limit_tokens=self.context_tokens,
                param="prompt" if request.messages is None else "messages",
            )
        with self._lock:
            if self._closed:
                raise Closed("this ScriptedEngine is closed")
            answer = self._next_answer()
            session, usage = self._account(request, prompt)
            call = _Call(
                request=request,
                answer=answer,
                prompt=prompt,
                session=session,
                usage=usage,
                submitted_s=self._clock.now_s(),
            )
            call.stream = Stream(on_cancel=lambda: self._cancelled(call))
            call.thread = threading.Thread(target=self._run, args=(call,), name="agentkv-scripted", daemon=True)
            self.requests.append(request)
            self._running.append(call)
            call.thread.start()
        return call.stream

    def count_tokens(self, request: Request) -> int:
        return len(prompt_tokens(request))

    def stats(self) -> Mapping[str, Any]:
        with self._lock:
            return {
                "calls": len(self.requests),
                "running": len(self._running),
                "cancelled": len(self.cancelled),
                "input_tokens": self._used.input_tokens,
                "cached_tokens": self._used.cached_tokens,
                "output_tokens": self._used.output_tokens,
            }

    def close(self) -> None:
        with self._lock:
            self._closed = True
            calls = list(self._running)
        for call in calls:
            call.stream.fail(Closed("the ScriptedEngine was closed"))
            call.stopped.set()
        for call in calls:
            if call.thread is not None and call.thread is not threading.current_thread():
                call.thread.join(timeout=5)

    # -- TieredEngine, as an engine that has no tiers

    def last_session(self, caller: Caller) -> str | None:
        with self._lock:
            task = self._tasks.get(caller.task)
            return None if task is None else task.sessions.get(caller.branch)

    def residency(self, session: str) -> Residency | None:  # noqa: ARG002  there are no blocks anywhere
        return None

    def apply(self, move: Move, on_receipt: Callable[[Receipt], None] | None = None) -> bool:
        if on_receipt is not None:
            now_s = self._clock.now_s()
            detail = "a scripted engine has no blocks"
            on_receipt(Receipt(move=move, outcome=Outcome.NOTHING, submitted_s=now_s, finished_s=now_s, detail=detail))
        return False

    def expect(
        self, session: str, at_s: float | None, forecast: Forecast | None = None, started_s: float | None = None
    ) -> None:
        """Nothing is ever evicted, so nothing is noted."""

    def rank_by(self, rank: Callable[[Any, float], tuple[float, ...]]) -> None:
        """Nor does anybody give way."""

    def finish_task(self, task: str) -> None:
        with self._lock:
            self._tasks.pop(task, None)

    # -- a call: its start, under the lock

    def _next_answer(self) -> Answer:
        answer = next(self._answers, None)
        if answer is None:
            call = len(self.requests) + 1
            raise RequestInvalid(f"the script has ended: call {call} has no answer", code="script_ended")
        if isinstance(answer, RequestInvalid):
            raise answer
        return answer

    def _account(self, request: Request, prompt: list[str]) -> tuple[str, Usage]:
        caller = request.caller
        task = self._tasks.setdefault(caller.task, _Task())
        known = task.sessions.get(caller.branch)
        session = request.session or known or f"{caller.task}#{len(set(task.sessions.values())) + 1}"
        task.sessions[caller.branch] = session
        common = max((common_prefix(prompt, sent) for sent in task.sent), default=0)
        cached = max(0, min(common, len(prompt) - 1))  # the last token is always computed: it yields the first output
        task.sent.append(prompt)
        return session, Usage(input_tokens=len(prompt), cached_tokens=cached, calls=1)

    def _cancelled(self, call: _Call) -> None:
        with self._lock:
            self.cancelled.append(call.request)
        call.stopped.set()

    # -- a call: its own thread

    def _run(self, call: _Call) -> None:
        try:
            generation = self._generate(call)
        except BaseException as error:  # an answer may be any exception, a KeyboardInterrupt too
            call.stream.fail(error)
        else:
            if generation is not None:
                call.stream.finish(generation)
        finally:
            with self._lock:
                self._running.remove(call)

    def _generate(self, call: _Call) -> Generation | None:
        """The whole answer, its chunks pushed on the way; None if the call was stopped before its end."""
        told = [self._said(reply, call.request) for reply in replies_of(call.answer, call.request)]
        said = [choice for choice, _ in told]
        words = sorted(
            (index, number, word) for number, one in enumerate(said) for index, word in enumerate(_spoken(one))
        )  # the choices grow side by side
        first_s = None
        for count, (index, number, word) in enumerate(words):
            if not self._may_go_on(call, count):
                return None
            first_s = self._clock.now_s() if first_s is None else first_s
            one, here = said[number], slice(index, index + 1)
            thought = len(tokens_of(one.reasoning))
            ids = one.token_ids[here]
            if index < thought:
                call.stream.push(Chunk(text="", token_ids=ids, choice=number, reasoning=word))
                continue
            entries = one.logprobs[index - thought : index - thought + 1]
            call.stream.push(Chunk(text=word, token_ids=ids, choice=number, logprobs=entries))
        first = said[0]
        return Generation(
            text=first.text,
            raw=first.raw,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            usage=self._settle(call, told),
            timing=self._timing(call, first_s),
            tool_calls=first.tool_calls,
            session=call.session,
            model=self.model,
            logprobs=first.logprobs,
            reasoning=first.reasoning,
            others=tuple(said[1:]),
        )

    def _said(self, reply: Reply, request: Request) -> tuple[Choice, list[str]]:
        """A reply as far as stop strings and `max_tokens` let it come, and all of its words."""
        sampling = request.sampling
        text, stopped_early = until_stop(reply.text, sampling.stop)
        calls = () if stopped_early or request.tool_choice.mode == "none" else reply.tool_calls
        thought, spoken = tokens_of(reply.reasoning), tokens_of(text)
        written = thought + spoken + call_tokens(calls)
        finish: FinishReason = "tool_calls" if calls else "stop"
        if sampling.max_tokens is not None and len(written) > sampling.max_tokens:
            written, calls, finish = written[: sampling.max_tokens], (), "length"
            thought = thought[: len(written)]
            spoken = spoken[: len(written) - len(thought)]
        choice = Choice(
            text="".join(spoken),
            raw="".join(written),
            token_ids=self._numbers(written),
            finish_reason=finish,
            tool_calls=calls,
            logprobs=logprobs_of(reply, spoken, request.logprobs),
            reasoning="".join(thought),
        )
        return choice, written

    def _may_go_on(self, call: _Call, index: int) -> bool:
        """Wait as long as a word takes; False once the call is stopped."""
        if self._before_chunk is not None:
            self._before_chunk(call.request, index)
        if isinstance(self._clock, ManualClock):
            self._clock.advance(self._latency_s)
            return not call.stopped.is_set()
        return not call.stopped.wait(self._latency_s)

    def _numbers(self, tokens: list[str]) -> tuple[int, ...]:
        """Token ids: each new word gets the next number."""
        with self._lock:
            return tuple(self._ids.setdefault(token, len(self._ids)) for token in tokens)

    def _settle(self, call: _Call, choices: list[tuple[Choice, list[str]]]) -> Usage:
        """`choices`: each with its words; the next turn goes on from those of the first."""
        thoughts = sum(len(tokens_of(choice.reasoning)) for choice, _ in choices)
        usage = call.usage + Usage(output_tokens=sum(len(words) for _, words in choices), reasoning_tokens=thoughts)
        with self._lock:
            self._used += usage
            task = self._tasks.get(call.request.caller.task)
            if task is not None:
                task.sent.append(call.prompt + choices[0][1])
        return usage

    def _timing(self, call: _Call, first_s: float | None) -> Timing:
        now_s = self._clock.now_s()
        ttft_s = (now_s if first_s is None else first_s) - call.submitted_s
        total_s = now_s - call.submitted_s
        return Timing(prefill_s=ttft_s, decode_s=total_s - ttft_s, ttft_s=ttft_s, total_s=total_s)


def _spoken(choice: Choice) -> list[str]:
    """The words of a choice that stream: thoughts, then text."""
    return tokens_of(choice.reasoning) + tokens_of(choice.text)
