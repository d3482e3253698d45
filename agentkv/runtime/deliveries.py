"""What only the application knows about a task: what reached the user, how it ended, what agents said to each other.

The bill uses it: for the effective token ratio, for the cost of a completed task of a type, for the price of
communication. Everything is optional, and told for whoever is calling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from agentkv.budget.facts import AgentMessageFact, DeliveryFact, Fact, OutcomeFact
from agentkv.clock import Clock
from agentkv.core.task import UNATTRIBUTED, Caller
from agentkv.engine.base import Engine
from agentkv.errors import ConfigError

MAX_TYPES = 16_384


class Deliveries:
    """`kv.deliver`, `kv.outcome` and `kv.agent_message`. Only misuse raises."""

    def __init__(
        self,
        *,
        append: Callable[[Fact], None],
        clock: Clock,
        caller: Callable[[], Caller],
        engine: Engine,
    ) -> None:
        self._append = append
        self._clock = clock
        self._caller = caller
        self._engine = engine
        self._types: OrderedDict[str, str] = OrderedDict()

    def entered(self, task: str, task_type: str) -> None:
        """A scope of the task opens that says what kind of work it is ("" says nothing)."""
        if task_type:
            self._types[task] = task_type
            self._types.move_to_end(task)
            while len(self._types) > MAX_TYPES:
                self._types.popitem(last=False)

    def deliver(self, what: str | int, *, task: str | None = None) -> int:
        """This text, or so many tokens, reached the user; returns the tokens. The text itself is not kept.

        As soon as something was delivered in a task, its bill counts what was delivered and nothing else as visible.
        """
        tokens = self._tokens(what, "deliver")
        self._append(DeliveryFact(task=self._task(task), at_ms=self._clock.wall_ms(), tokens=tokens))
        return tokens

    def outcome(self, *, completed: bool, task_type: str = "", task: str | None = None) -> None:
        """The task came to its goal, or did not; told again, the last word counts.

        `task_type` names what kind of work it was (by default what `kv.task(type=)` said): `agentkv report --all` tells what a completed task of each type
        costs, with the failed ones charged to it. Raises ConfigError outside of any task.
        """
        key = self._task(task)
        if key == UNATTRIBUTED:
            raise ConfigError('outcome() outside of any task: call it inside `with kv.task("name")`, or give task=')
        kind = str(task_type) or self._types.get(key, "")
        self._append(OutcomeFact(task=key, at_ms=self._clock.wall_ms(), task_type=kind, completed=bool(completed)))

    def agent_message(self, what: str | int, *, to: str, sender: str | None = None, task: str | None = None) -> int:
        """One agent told another this text, or so many tokens; returns the tokens. The sender is the calling node."""
        tokens = self._tokens(what, "agent_message")
        caller = self._caller()
        self._append(
            AgentMessageFact(
                task=self._task(task),
                at_ms=self._clock.wall_ms(),
                sender=(caller.node or caller.branch) if sender is None else sender,
                receiver=to,
                tokens=tokens,
            )
        )
        return tokens

    def _task(self, task: str | None) -> str:
        return self._caller().task if task is None else task

    def _tokens(self, what: str | int, where: str) -> int:
        if isinstance(what, str):
            count: Callable[[str], int] | None = getattr(self._engine, "count_text", None)
            if count is not None:
                return count(what)
            from agentkv.context.tokens import count_text

            return count_text(what, model=self._engine.model)
        if isinstance(what, bool) or not isinstance(what, int) or what < 0:
            raise ConfigError(f"{where}({what!r}): give the text, or how many tokens it has")
        return what
