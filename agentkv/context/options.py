"""What a user may say about the context: `AgentKV.local(context=Context(...))`, or `context=None` to leave prompts alone.

Covers the options, their defaults and what cannot work. What they do is in `view.py` and the stages that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentkv.core.message import Message
from agentkv.errors import ConfigError

if TYPE_CHECKING:
    from agentkv.context.memory import Memory
    from agentkv.context.slim import Slimmer

Summarise = Callable[[Sequence[Message]], str]
MIN_SLIM_TOKENS = 64
UNKNOWN_WINDOW_TOKENS = 90_000
"""What a window is taken to be where nobody says: hosted models have more, but long prompts cost by the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """How prompts are kept short and steady. Every part can be switched off by itself."""

    slim: bool | Slimmer = True
    """Tool outputs are made shorter once, when they first appear; a `Slimmer` of your own, or False."""
    slim_tokens: int = 1500
    """The most that one tool output may keep."""
    volatile: tuple[str, ...] = ()
    """Regular expressions for values in system messages that change from call to call (a clock): they are told behind
    the newest message instead, so that the beginning stays the same. "clock" and "uuid" name common ones."""
    summarise: Literal["model", "extract"] | Summarise | None = "model"
    """Who writes the rolling summary: the engine's own model, a deterministic extract without a model, a function of
    yours (it gets the messages, it may take its time), or None: nothing is ever folded."""
    soft_mark: float = 0.7
    """Above this many tokens of prompt (a number up to 1: this share of the window) old turns are folded if it pays."""
    window_tokens: int | None = None
    """The model's context window; None: what the engine says."""
    low_share: float = 0.3
    """A fold goes down to this share of the mark, so that the next one is far away."""
    keep_last: int = 4
    """So many of the last messages stay word for word."""
    max_payback_calls: float = 4.0
    """A fold breaks the prefix. It must have paid for that after so many calls."""
    fallback: Literal["extract"] | None = None
    """What stands in where the summariser fails; None: the history stays as it is and is tried again later."""
    summary_tokens: int = 600
    """The most that a summary may have."""
    summary_timeout_s: float = 120.0
    """After that the summariser is taken to have failed."""
    redact: Callable[[str], str] | None = None
    """Applied to what the summariser reads. It then reads another prompt, so nothing of that is cached."""
    memory: Memory | None = None
    """Where memories are recalled from; what is worth its tokens is told behind the newest user message."""
    memory_namespace: Callable[[str], str] | None = None
    """Whose a task's memories are, made of its key; None: all tasks share the memory's own namespace, so give this one
    where tasks of several people run."""
    memory_tokens: int = 400
    """The most that is told of them in one call."""
    remember_tasks: bool = True
    """What a finished task was asked and what it concluded becomes an episodic memory, if there is a `memory`."""
    folder: str | Path | None = None
    """Where raw outputs and folds are kept (files only you may read); None: the user's data folder, or nowhere with a
    ledger in memory."""
    quota_bytes: int = 256 * 1024 * 1024
    """Raw outputs beyond this are removed, the oldest first."""
    keep_days: float = 7.0
    """Raw outputs older than this are removed."""

    def __post_init__(self) -> None:
        if (
            self.slim_tokens < MIN_SLIM_TOKENS
            or self.summary_tokens < 1
            or self.memory_tokens < 0
            or self.keep_last < 0
        ):
            raise ConfigError(
                f"Context: slim_tokens={self.slim_tokens}, summary_tokens={self.summary_tokens}, "
                f"memory_tokens={self.memory_tokens}, keep_last={self.keep_last}: slim_tokens from {MIN_SLIM_TOKENS} on, the others from 1 and 0 on"
            )
        if not self.soft_mark > 0 or not self.max_payback_calls > 0 or not self.summary_timeout_s > 0:
            raise ConfigError(
                f"Context: soft_mark={self.soft_mark}, max_payback_calls={self.max_payback_calls}, "
                f"summary_timeout_s={self.summary_timeout_s} must be greater than 0"
            )
        if not 0 < self.low_share <= 1:
            raise ConfigError(f"Context: low_share={self.low_share} must be a share of the mark, above 0 and up to 1")
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ConfigError(f"Context: window_tokens={self.window_tokens} is no window; give 1 or more")
        if isinstance(self.summarise, str) and self.summarise not in ("model", "extract"):
            raise ConfigError(f'Context: summarise={self.summarise!r}; say "model", "extract", a function or None')
        if self.fallback not in ("extract", None):
            raise ConfigError(f'Context: fallback={self.fallback!r}; say "extract" or None')
        if isinstance(self.volatile, str):
            raise ConfigError(f"Context: volatile is a tuple of expressions; write volatile=({self.volatile!r},)")
        if self.volatile:
            from agentkv.context.volatile import Volatile  # 2 ms that `import agentkv` must not pay

            Volatile(self.volatile)  # refuses an expression that does not compile

    def window(self, engine_tokens: int | None) -> int:
        """The window in tokens, given what the engine says of it."""
        return self.window_tokens or engine_tokens or UNKNOWN_WINDOW_TOKENS

    def soft_tokens(self, engine_tokens: int | None) -> int:
        """The soft mark in tokens."""
        return round(self.soft_mark * self.window(engine_tokens)) if self.soft_mark <= 1 else round(self.soft_mark)
