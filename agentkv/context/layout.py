"""Layout: a prompt that is built once and then only grows, so that the KV of its beginning is used again.

Covers the order of places, append-only history, canonical tools, and noticing what breaks the prefix. Does not cover
shortening the history (`summary.py`), nor prompts that somebody else built: watch those with `prefix.PrefixWatch`.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentkv.context.canonical import canonical_tools
from agentkv.context.prefix import Break, PrefixWatch
from agentkv.context.segment import STABLE, Place, Segment, arrange
from agentkv.core.message import Message, ToolSpec
from agentkv.errors import ConfigError


class Layout:
    """One session's prompt. Not thread-safe: a session has one call at a time.

    The stable places (template, system, tools, summary) are set at the start; history is appended to; recalled
    memories and the tail belong to one call and stand at its end, where they cost no prefix.
    """

    def __init__(self, session: str = "") -> None:
        self._watch = PrefixWatch(session)
        self._stable: dict[Place, tuple[Message, ...]] = {}
        self._tools: tuple[ToolSpec, ...] = ()

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools in their fixed form and order."""
        return self._tools

    @property
    def history(self) -> tuple[Message, ...]:
        """What was appended so far, or put in its place by `compact`."""
        return self._stable.get(Place.HISTORY, ())

    @property
    def breaks(self) -> int:
        """How often a prompt did not extend the one before; declared compactions do not count."""
        return self._watch.breaks

    @property
    def last_break(self) -> Break | None:
        """The last of them."""
        return self._watch.last_break

    def put(self, place: Place, messages: Iterable[Message]) -> None:
        """Set the template, system, tools or summary place. Setting it again is allowed and noticed as a break."""
        if place not in STABLE or place is Place.HISTORY:
            raise ConfigError(
                f"put({place.name}): history is appended with append(), recalled and tail are given to arrange()"
            )
        self._stable[place] = tuple(messages)

    def put_tools(self, tools: Iterable[ToolSpec]) -> None:
        """Offer these tools. Known ones keep their place, new ones come last, those left out leave (a break)."""
        self._tools = canonical_tools(tools, known=self._tools)

    def append(self, *messages: Message) -> None:
        """Add turns to the history."""
        self._stable[Place.HISTORY] = (*self.history, *messages)

    def compact(self, *, summary: Iterable[Message], history: Iterable[Message]) -> None:
        """Replace summary and history at once: the declared point at which the prefix changes, hence no break."""
        self._stable[Place.SUMMARY] = tuple(summary)
        self._stable[Place.HISTORY] = tuple(history)
        self._watch.expect_break()

    def arrange(self, *, recalled: Iterable[Message] = (), tail: Iterable[Message] = ()) -> list[Message]:
        """The whole prompt of the next call. What broke the prefix since the last one is in `last_break`."""
        segments = [Segment(place=place, messages=messages) for place, messages in self._stable.items()]
        self._watch.see(arrange(segments), self._tools)
        segments.append(Segment(place=Place.RECALLED, messages=tuple(recalled)))
        segments.append(Segment(place=Place.TAIL, messages=tuple(tail)))
        return arrange(segments)
