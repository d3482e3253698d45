"""The fake model of all contestants, and the meter on its doorstep: what reaches it is what is measured.

`Brain` plays a loop: it answers the next recorded turn, looks up what the turn relies on if the prompt does not hold
it, and writes a summary (the planted facts that it can see, in sections) when it is asked for one. `Meter` counts, in
characters and tokens, what a prefix cache that forgets nothing would have to compute, and checks each request.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from context_loops import Loop, Need, arguments_of

from agentkv.context.tokens import count_text

BLOCK = 16
NO_USER = "no user message"
SUMMARY_ADVICE = "Work goes on subject by subject: run its test, read the module, change one line, run the test again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One message as it reaches the model. `calls` are (id, name, arguments)."""

    role: str
    content: str
    calls: tuple[tuple[str, str, str], ...] = ()
    call_id: str = ""

    @property
    def text(self) -> str:
        """As a chat template would print it."""
        calls = "".join(f"\n<tool_call>{name} {arguments} {key}</tool_call>" for key, name, arguments in self.calls)
        return f"<|{self.role}|>{self.call_id}\n{self.content}{calls}<|end|>\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model answers: text, and the command of its call (None: it is done, or this is a summary)."""

    text: str
    command: str | None = None


@lru_cache(maxsize=65536)
def tokens(text: str) -> int:
    """Tokens of `text`; the same counter for everybody."""
    return count_text(text)


@dataclass(slots=True)
class Meter:
    """Requests as they come: uncached and largest, in tokens and characters, and what is wrong with them."""

    loop: Loop
    uncached_tokens: int = 0
    uncached_chars: int = 0
    peak_tokens: int = 0
    peak_chars: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    breaks: int = 0
    invalid: list[str] = field(default_factory=list)
    without_request: int = 0
    last_prompt: str = ""
    _seen: list[list[str]] = field(default_factory=list)
    _last_main: list[str] = field(default_factory=list)

    def see(self, messages: Sequence[Sent], tools: str, *, summary: bool) -> None:
        """One request. `tools` is the text of the tools, which stands before everything else."""
        parts = [tools, *(message.text for message in messages)]
        total, chars = sum(map(tokens, parts)), sum(map(len, parts))
        cached_tokens, cached_chars = max((_shared(parts, old) for old in self._seen), default=(0, 0))
        self.uncached_tokens += total - cached_tokens // BLOCK * BLOCK
        self.uncached_chars += chars - cached_chars
        self.prompt_tokens += total
        self.peak_tokens, self.peak_chars = max(self.peak_tokens, total), max(self.peak_chars, chars)
        self.requests += 1
        self._seen.append(parts)
        if not summary:
            self.breaks += bool(self._last_main) and parts[: len(self._last_main)] != self._last_main
            self._last_main = parts
            self.last_prompt = "".join(parts)
            self.invalid += [problem for problem in problems(messages) if problem not in self.invalid]
            self.without_request += self.loop.request not in self.last_prompt

    def facts(self) -> float:
        """The share of the planted facts that the last prompt holds."""
        return sum(fact.text in self.last_prompt for fact in self.loop.facts) / len(self.loop.facts)


def _shared(parts: list[str], old: list[str]) -> tuple[int, int]:
    """Tokens and characters of the common beginning."""
    shared_tokens = shared_chars = 0
    for new, was in zip(parts, old, strict=False):
        if new != was:
            piece = os.path.commonprefix((new, was))  # noqa: RUF071  texts, not paths
            return shared_tokens + (tokens(piece) if piece else 0), shared_chars + len(piece)
        shared_tokens, shared_chars = shared_tokens + tokens(new), shared_chars + len(new)
    return shared_tokens, shared_chars


def problems(messages: Sequence[Sent]) -> list[str]:
    """What a strict OpenAI-compatible server would refuse; empty for a valid request."""
    found, waiting, ids = [], [], set[str]()
    for index, message in enumerate(messages):
        if message.role == "tool":
            if message.call_id not in waiting:
                found.append("a tool result without its call")
            else:
                waiting.remove(message.call_id)
            continue
        if waiting:
            found.append("a call without its result")
            waiting = []
        if message.role == "system" and index and any(m.role != "system" for m in messages[:index]):
            found.append("a system message behind others")
        for key, _, _ in message.calls:
            if key in ids or not key:
                found.append("an id that is empty or used twice")
            ids.add(key)
            waiting.append(key)
    if waiting:
        found.append("a call without its result")
    if not any(message.role == "user" for message in messages):
        found.append(NO_USER)
    return found


class Brain:
    """The model: plays `loop` and tells `meter` of every request. One object per run."""

    def __init__(self, loop: Loop, meter: Meter) -> None:
        self.loop = loop
        self.meter = meter
        self.looked_up = 0
        self.summaries = 0
        self._at = 0
        self._tried: set[tuple[int, str]] = set()
        self._outputs: dict[str, str] = {}

    def answer(self, messages: Sequence[Sent], tools: str = "") -> Turn:
        """The answer to a request; asking for a summary is told from its last message, which is then the user's."""
        summary = self._at > 0 and messages[-1].role == "user"
        self.meter.see(messages, tools, summary=summary)
        if summary:
            self.summaries += 1
            return Turn(text=self._summary(messages))
        if self._at >= len(self.loop.steps):
            return Turn(text=self.loop.last)
        step = self.loop.steps[self._at]
        for need in step.needs:
            if (self._at, need.key) not in self._tried and not _holds(messages, need):
                self._tried.add((self._at, need.key))
                self.looked_up += 1
                self._outputs[need.command] = need.output
                return Turn(text="I look that up again, because I do not see it any more.", command=need.command)
        self._at += 1
        self._outputs[step.command] = step.output
        return Turn(text=step.text, command=step.command)

    def output(self, command: str) -> str:
        """What the tool prints for a command that this model asked for."""
        return self._outputs[command]

    def _summary(self, messages: Sequence[Sent]) -> str:
        """What a good summariser writes: everything planted that it can see, each under its heading."""
        seen = "".join(message.text for message in messages)
        lines = {"Decisions": [], "Facts": [], "Files": [], "Errors": [], "Open items": []}
        heading = {"decision": "Decisions", "number": "Facts", "path": "Files", "finding": "Errors"}
        for fact in self.loop.facts:
            if fact.text in seen:
                lines[heading.get(fact.kind, "Open items")].append(f"- {fact.sentence}")
        done = [step.text for step in self.loop.steps[: self._at] if step.text.startswith("All of them pass")]
        lines["Files"] += [f"- {text.split(' is done')[0].split(', ')[-1]} is done" for text in done]
        body = "\n\n".join(f"## {name}\n" + ("\n".join(rows) or "- none") for name, rows in lines.items())
        return f"## Goal\n- Mend the subjects one after the other and report. {SUMMARY_ADVICE}\n\n{body}"


def _holds(messages: Sequence[Sent], need: Need) -> bool:
    if not need.recent:
        return any(need.key in message.content for message in messages)
    newest = [message for message in messages if message.role == "tool"][-3:]
    return any(need.key in message.content for message in newest)


def call_id(turn: Turn, number: int) -> str:
    """The id of a turn's call, as long as those that servers give."""
    return "call_" + hashlib.blake2b(f"{number} {turn.command}".encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one contestant did with one loop."""

    name: str
    loop: str
    setting: str
    uncached_tokens: int = 0
    uncached_chars: int = 0
    peak_tokens: int = 0
    peak_chars: int = 0
    hit: float = 0.0
    requests: int = 0
    summaries: int = 0
    looked_up: int = 0
    breaks: int = 0
    facts: float = 0.0
    problems: tuple[str, ...] = ()
    request_kept: bool = True
    skipped: str = ""

    @property
    def usable(self) -> bool:
        """Calls and results in pairs, all facts known at the end, at most 10 % more calls.

        Prompts without a user's message count as usable: OpenAI takes them, though several chat templates do not.
        """
        calls = self.requests - self.summaries
        wrong = set(self.problems) - {NO_USER}
        return not self.skipped and not wrong and self.facts == 1.0 and self.looked_up <= 0.1 * (calls - self.looked_up)


def result(name: str, setting: str, brain: Brain) -> Run:
    """The figures of a run that is over."""
    meter = brain.meter
    return Run(
        name=name, loop=brain.loop.name, setting=setting,
        uncached_tokens=meter.uncached_tokens, uncached_chars=meter.uncached_chars,
        peak_tokens=meter.peak_tokens, peak_chars=meter.peak_chars,
        hit=1 - meter.uncached_tokens / max(1, meter.prompt_tokens), requests=meter.requests,
        summaries=brain.summaries, looked_up=brain.looked_up, breaks=meter.breaks, facts=meter.facts(),
        problems=tuple(meter.invalid), request_kept=not meter.without_request,
    )  # fmt: skip


def wire_call(turn: Turn, number: int) -> tuple[tuple[str, str, str], ...]:
    """A turn's call as it travels."""
    return () if turn.command is None else ((call_id(turn, number), "bash", arguments_of(turn.command)),)
