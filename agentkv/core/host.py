"""Host: what the core needs to know from an agent framework, and may not import it for.

`agentkv_langgraph` provides one through the entry point group `agentkv.hosts`; `PlainHost` is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from agentkv.core.task import Caller


class Host(Protocol):
    """The framework that runs the agent. No method may raise on an object it does not know."""

    name: str

    def caller(self) -> Caller | None:
        """Who is calling right now, by the framework's own context; None outside of it."""
        ...

    def wrap_node(
        self, fn: Callable[..., Any], enter: Callable[[], Any], leave: Callable[[Any, BaseException | None], None]
    ) -> Any:
        """`fn` with `enter()` before and `leave(token, error)` after each run, otherwise indistinguishable.

        Sync and async functions, generators, async generators, callable objects; the framework's own node types.
        """
        ...

    def wrap_tool(self, tool: Any, owner: Any, options: Any) -> Any:
        """A copy of the framework's own tool object whose calls are told to `owner`; None for what is no such object.

        `options.scope(owner, name, args, call_id)` opens the scope of a call. Functions are the runtime's own business.
        """
        ...

    def alive(self) -> None:
        """A tool that runs here told its progress: the framework may put off a time-out for silence."""
        ...

    def attach(self, graph: Any, runtime: Any) -> Any:
        """`graph` with hints and bill from the framework's callbacks alone."""
        ...

    def is_control_flow(self, error: BaseException) -> bool:
        """True for exceptions that steer the framework (interrupts, parent commands) and are no failure."""
        ...

    def is_pause(self, error: BaseException) -> bool:
        """True for those of them after which what was under way here runs again: an interrupt, not a hand-over."""
        ...

    def interrupt(self, question: dict[str, Any], refused: Exception) -> Any:
        """Stop the agent here and ask a person `question` (plain JSON); the answer, once the agent was resumed.

        An answer that this place was given before, because the framework runs it once more, comes back as {}. Raises
        the framework's own control flow to stop, and `refused` where nobody can be asked.
        """
        ...

    def stopping(self, refused: Any) -> Any:
        """The refusal of a budget as the framework lets it through to its caller: `refused`, or one of a kind with it."""
        ...
