"""`kv.context`: what users can do with the context themselves.

Covers slimming by hand, reading raw outputs back, why a prompt broke. The view of each model call is made in `shape.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentkv.clock import Clock
from agentkv.core.task import Caller
from agentkv.hints.features import command_words
from agentkv.runtime.books import Books
from agentkv.runtime.prefixes import Prefixes

if TYPE_CHECKING:
    from agentkv.context.explain import Explanation
    from agentkv.context.memory import Memory
    from agentkv.context.options import Context
    from agentkv.context.outputs import Outputs
    from agentkv.context.view import Stages
    from agentkv.core.forecast import Forecast
    from agentkv.runtime.shape import Ask, Shaper


class Contexts:
    """The context of one AgentKV, for its users. Thread-safe. With `context=None` nothing is changed."""

    def __init__(
        self,
        *,
        options: Context | None,
        stages: Stages | None,
        books: Books,
        clock: Clock,
        prefixes: Prefixes,
        caller: Callable[[], Caller],
        ask: Ask,
    ) -> None:
        self.options = options
        self.shaper: Shaper | None = None
        """Makes what each model call sends; part of the runtime, not for users."""
        if options is not None and stages is not None:
            from agentkv.runtime.shape import Shaper

            self.shaper = Shaper(stages=stages, context=options, books=books, clock=clock, ask=ask)
        self._stages = stages
        self._books = books
        self._caller = caller
        self._prefixes = prefixes

    @property
    def memory(self) -> Memory | None:
        """The memories that are recalled from, if any."""
        return None if self.options is None else self.options.memory

    @property
    def outputs(self) -> Outputs | None:
        """The store of raw tool outputs: the slimmer's own; None where slimming is off or keeps none."""
        from agentkv.context.outputs import Outputs

        slimmer = None if self._stages is None else self._stages.slimmer
        kept = None if slimmer is None else slimmer.outputs
        return kept if isinstance(kept, Outputs) else None

    def slim(self, text: str, *, tool: str = "", args: Any = None, command: str = "") -> str:
        """A tool's output as it may enter the context: the same text always gives the same bytes. Never raises.

        What was left out can be read again through the handle in the text; see `reader`. The bill of whoever is
        calling shows what it saved.
        """
        slimmer = None if self._stages is None else self._stages.slimmer
        if slimmer is None:
            return text
        done = slimmer.slim(text, tool=tool, command=command or command_words(args))
        if done.text != text:
            self._books.context_event(
                self._caller().task, "slim", before=done.raw_tokens, after=done.kept_tokens, cause=done.rule, name=tool
            )
        return done.text

    def tool_waits(self, caller: Caller, forecast: Forecast | None) -> None:
        """A tool of this caller runs now; see `Shaper.tool_waits`."""
        if self.shaper is not None:
            self.shaper.tool_waits(caller, forecast)

    def forget(self, task: str) -> None:
        """The task is over."""
        if self.shaper is not None:
            self.shaper.forget(task)

    def close_segment(self, task: str, name: str, *, carry: bool) -> str:
        """A segment is over; what is left of it as text, and with `carry` told to later segments."""
        return "" if self.shaper is None else self.shaper.close_segment(task, name, carry=carry)

    def close(self) -> None:
        """Let go of files. Idempotent."""
        if self._stages is not None:
            self._stages.notebook.close()

    def explain(self, task: str) -> dict[str, tuple[Explanation, ...]]:
        """Call by call, where each open session's prompt stopped extending the one before, why, and what that cost.

        Printing an Explanation says it in a sentence; its `advice` says what to do.
        """
        return self._prefixes.explain(task)

    def reader(self) -> Callable[..., str]:
        """A tool for the agent, `read_output(handle, lines="", pattern="")`: a plain function with a docstring."""
        from agentkv.context.outputs import Outputs, reader

        outputs = self.outputs
        return reader(Outputs(None) if outputs is None else outputs)
