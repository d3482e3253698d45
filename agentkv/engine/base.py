"""The Engine protocol and its values.

Covers: Chunk, Generation, Engine, TieredEngine. Does not cover: what is asked (`request.py`), how an answer comes
(`stream.py`), any real engine (`local/`, `remote.py`) nor the one for users' tests (`scripted.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from agentkv.core.forecast import Forecast
from agentkv.core.message import ToolCall
from agentkv.core.reported import Reported
from agentkv.core.residency import Move, Receipt, Residency
from agentkv.core.task import Caller
from agentkv.core.usage import Timing, Usage
from agentkv.engine.request import Request, ResponseFormat, Sampling, ToolChoice, changed, refuse_unless

if TYPE_CHECKING:
    from agentkv.engine.stream import Stream

__all__ = [
    "Attempt", "CallDelta", "Choice", "Chunk", "Engine", "FinishReason", "Generation", "Request", "ResponseFormat",
    "Sampling", "TieredEngine", "TokenLogprob", "ToolChoice", "changed", "refuse_unless",
]  # fmt: skip

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of the text with its natural log probability, after bias and penalties, before temperature and top_p.

    `raw` are its own bytes, which need not be whole characters; joined, those of an answer are its text in UTF-8, where
    what is none has become U+FFFD, as `bytes.decode("utf-8", "replace")` has it: end tokens and what a stop string cut off
    have no entry. (A space that a tokenizer puts before the first word of all is in `raw` only.) `top`: the likeliest tokens, best first, as entries of this kind.
    """

    token_id: int
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of a tool call while it is written: the first of an `index` has `id` and `name`; `arguments` add up."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of the answer: never half a character, never part of a stop string.

    `choice` says which of `n` it belongs to. `logprobs` are the entries of the tokens that became certain with it.
    A call that streams has its pieces in `calls`; one that does not is in the Generation only. `reasoning`: a piece of
    what the model thinks before it answers.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of several answers to a request; the fields are a Generation's own."""

    text: str
    raw: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    unfinished: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """`text` is the join of all chunks, `reasoning` that of all thoughts; `raw` is what the model really wrote, tool calls
    and all: send it again so.

    Of several choices (`Request.n`) this is the first and `others` are the rest, in order; `usage` is of them all, with
    the prompt counted once.
    """

    text: str
    raw: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing = field(default_factory=Timing)
    tool_calls: tuple[ToolCall, ...] = ()
    session: str = ""
    model: str = ""
    restored_blocks: int = 0
    """Blocks that came back from host or disk for this call, on demand; `restored_bytes` is their size."""
    restored_bytes: int = 0
    estimated: bool = False
    """True where the usage was counted here because the server reported none, or an impossible one."""
    service_tier: str = ""
    """The tier that a hosted model was served in; "" is the standard one."""
    cached_by: Mapping[str, int] = field(default_factory=dict)
    """The cached tokens by the tier that they came from, where an engine tells."""
    worker: str = ""
    """Which of a router's workers answered, and the share of the prompt that it was believed to hold; where told."""
    expected_hit_rate: float | None = None
    stopped_by: str = ""
    """ "budget": no model was asked, the call did not fit into it."""
    logprobs: tuple[TokenLogprob, ...] = ()
    unfinished: tuple[ToolCall, ...] = ()
    """Calls that streamed until the answer was cut inside of the last one, whose arguments are no valid JSON. Run none
    of them: half of what the model meant is not what it meant. `tool_calls` is empty then.
    """
    reasoning: str = ""
    others: tuple[Choice, ...] = ()
    drafted_tokens: int = 0
    """Output tokens of all choices that were guessed ahead, and how many of them the model then chose (`accepted_tokens`)."""
    accepted_tokens: int = 0

    @property
    def choices(self) -> tuple[Generation | Choice, ...]:
        """All of them, the first one being this."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A try at a call that failed and was repeated: what it used as far as can be known, and why it failed."""

    spent: Reported
    error: str
    seconds: float = 0.0


class Engine(Protocol):
    """Answers model calls. `submit` never blocks on the model; it raises RequestInvalid for a request that cannot be
    answered, before anything is started.
    """

    model: str

    def submit(self, request: Request) -> Stream:
        """Start a call."""
        ...

    def count_tokens(self, request: Request) -> int:
        """Input tokens of a request (exact for the local engine, an estimate elsewhere)."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Counters as plain JSON values."""
        ...

    def close(self) -> None:
        """End every call with Closed, free everything. Idempotent."""
        ...


class TieredEngine(Engine, Protocol):
    """An engine whose KV can be moved between tiers."""

    context_tokens: int

    def last_session(self, caller: Caller) -> str | None:
        """The session that the caller's branch used last; None if it has none."""
        ...

    def residency(self, session: str) -> Residency | None:
        """Where the session's blocks are; None for an unknown session. Cheap (no device work)."""
        ...

    def apply(self, move: Move, on_receipt: Callable[[Receipt], None] | None = None) -> bool:
        """Submit a move inline and return at once: True if copies were submitted. The receipt comes later, from
        another thread (at once when there is nothing to do). Never raises: a failure is a receipt.
        """
        ...

    def expect(
        self, session: str, at_s: float | None, forecast: Forecast | None = None, started_s: float | None = None
    ) -> None:
        """When the session is expected back (monotonic seconds; None = it is back or unknown), and the forecast from which
        that follows, counted from `started_s`: victims are chosen by it.
        """
        ...

    def rank_by(self, rank: Callable[[Any, float], tuple[float, ...]]) -> None:
        """Have a policy's key (policy.evict.EvictKey) say who gives way when memory is short: the greatest first."""
        ...

    def finish_task(self, task: str) -> None:
        """Destroy the task's sessions without writing a byte; blocks shared with others stay."""
        ...

    def finish_sessions(self, sessions: Iterable[str]) -> None:
        """The same for single sessions; unknown ones are no-ops."""
        ...
