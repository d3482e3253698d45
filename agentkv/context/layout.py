"""Layout: a prompt that is built once and then only grows, so that the KV of its beginning is used again.

Covers the order of places, append-only history, canonical tools, values that change moved to the tail, and telling
what broke the prefix. Does not cover shortening the history (`summary/`), mending it (`repair.py`), nor prompts that
somebody else built: watch those with `prefix.PrefixWatch`.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentkv.context.canonical import canonical_tools
from agentkv.context.explain import Count, Explanation, message_text
from agentkv.context.prefix import Break, PrefixWatch
from agentkv.context.segment import STABLE, Place
from agentkv.context.volatile import steady
from agentkv.core.message import Message, ToolSpec
from agentkv.errors import ConfigError


class Layout:
    """One session's prompt. Not thread-safe: a session has one call at a time.

    The stable places (template, system, tools, summary) are set at the start; history is appended to; recalled
    memories and the tail belong to one call and stand at its end, where they cost no prefix. What `volatile` matches
    (names of `volatile.NAMED`, or regular expressions) is taken out of system messages and told in the tail. A call
    costs what is new, and two copies of the list of messages. `count` counts tokens for `explain`.
    """

    def __init__(self, session: str = "", *, volatile: Iterable[str] = (), count: Count | None = None) -> None:
        self._watch = PrefixWatch(session, count=count)
        self._volatile = (volatile,) if isinstance(volatile, str) else tuple(volatile)
        steady((), self._volatile)  # a pattern that cannot work is refused now
        self._head: dict[Place, tuple[Message, ...]] = {}  # as given
        self._told = ""
        self._stable: list[Message] = []  # head and history, as they stand in the prompt
        self._head_length = 0
        self._tools: tuple[ToolSpec, ...] = ()
        self._template = ""

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools in their fixed form and order."""
        return self._tools

    @property
    def history(self) -> tuple[Message, ...]:
        """What was appended so far, or put in its place by `compact`."""
        return tuple(self._stable[self._head_length :])

    @property
    def breaks(self) -> int:
        """How often a prompt did not extend the one before; declared compactions do not count."""
        return self._watch.breaks

    @property
    def last_break(self) -> Break | None:
        """The last of them."""
        return self._watch.last_break

    def explain(self) -> tuple[Explanation, ...]:
        """For each of the last calls: where its prompt first differs from the one before, why, and what that cost."""
        return self._watch.explain()

    def put(self, place: Place, messages: Iterable[Message]) -> None:
        """Set the template, system, tools or summary place. Setting it again is allowed and noticed as a break."""
        if place not in STABLE or place is Place.HISTORY:
            raise ConfigError(
                f"put({place.name}): history is appended with append(), recalled and tail are given to arrange()"
            )
        self._head[place] = tuple(messages)
        self._lay(self.history)

    def put_tools(self, tools: Iterable[ToolSpec]) -> None:
        """Offer these tools. Known ones keep their place, new ones come last, those left out leave (a break)."""
        self._tools = canonical_tools(tools, known=self._tools)

    def append(self, *messages: Message) -> None:
        """Add turns to the history."""
        self._stable.extend(messages)

    def compact(self, *, summary: Iterable[Message], history: Iterable[Message]) -> None:
        """Replace summary and history at once: the declared point at which the prefix changes, hence no break."""
        self._head[Place.SUMMARY] = tuple(summary)
        self._lay(tuple(history))
        self._watch.expect_break("fold")

    def arrange(self, *, recalled: Iterable[Message] = (), tail: Iterable[Message] = ()) -> list[Message]:
        """The whole prompt of the next call. What broke the prefix since the last one is in `last_break`."""
        self._watch.see(self._stable, self._tools, template=self._template)
        values = [Message(role="user", content=self._told)] if self._told else []
        return [*self._stable, *recalled, *tail, *values]

    def _lay(self, history: tuple[Message, ...]) -> None:
        given = [message for place in sorted(self._head) for message in self._head[place]]
        head, self._told = steady(given, self._volatile)
        self._template = "\n".join([message_text(one) for one in head[: len(self._head.get(Place.TEMPLATE, ()))]])
        self._head_length = len(head)
        self._stable = [*head, *history]
