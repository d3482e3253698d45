"""Segment: a part of the prompt with a place in it, from what never changes to what always does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from agentkv.core.message import Message


class Place(IntEnum):
    """Where a segment stands; the lower, the earlier in the prompt and the more stable."""

    TEMPLATE = 0
    """Fixed instructions, the same for every task."""
    SYSTEM = 1
    """The agent's own system prompt."""
    TOOLS = 2
    """A preamble that describes the tools, where the model's template does not."""
    SUMMARY = 3
    """What the folded part of the history said."""
    HISTORY = 4
    """Turns and tool results, append only."""
    RECALLED = 5
    """Memories for this call alone."""
    TAIL = 6
    """What changes with every call: the time, a reminder."""


STABLE = tuple(place for place in Place if place <= Place.HISTORY)
"""Places whose content is part of the prefix that the next call extends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Messages that belong to one place."""

    place: Place
    messages: tuple[Message, ...]


def arrange(segments: list[Segment] | tuple[Segment, ...]) -> list[Message]:
    """The messages of `segments`, stable places first; within a place in the order given."""
    ordered = sorted(segments, key=lambda segment: segment.place)
    return [message for segment in ordered for message in segment.messages]
