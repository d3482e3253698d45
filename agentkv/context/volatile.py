"""Values that change from call to call, taken out of the stable part of the prompt and told at its end instead.

Covers the leading system messages, by named patterns or regular expressions. Does not cover finding out that a value
changes: `prefix.PrefixWatch` does that and names the pattern that would take it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from agentkv.core.message import Message
from agentkv.errors import ConfigError

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_WHOLE_DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_TIME = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp][Mm]\b)?(?: ?(?:Z|UTC|GMT)\b)?(?: ?[+-]\d\d:?\d\d\b)?"
_DATE = (
    rf"(?:\b{_DAY},? )?(?:\b\d{{4}}[-/.]\d\d?[-/.]\d\d?|\b\d\d?[/.]\d\d?[/.]\d{{2,4}}"
    rf"|\b{_MONTH} \d\d?(?:st|nd|rd|th)?\b(?:,? \d{{4}})?|\b\d\d? {_MONTH},? \d{{4}}|\b{_WHOLE_DAY}\b)"
)

NAMED = {
    "clock": rf"(?:{_DATE}(?:(?:[T ]|, | at ){_TIME})?|\b{_TIME}|\b1[5-9]\d{{8}}(?:\d{{3}})?(?:\.\d+)?)(?!\d)",
    "uuid": r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b[0-9a-fA-F]{32}\b",
    "counter": (
        r"(?i:\b(?:step|turn|round|iteration|attempt|try|request|call|run|message)s?\s*"
        r"(?:(?:#|no\.?|number|count|left|so far)\s*)?[:=#]?\s*(?P<value>\d+))"
    ),
}
"""Patterns with a name: dates, times of day and seconds since 1970; ids; a number behind "step", "turn", "attempt" ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    start: int
    end: int
    name: str


class Volatile:
    """Takes what `patterns` match out of leading system messages. Feed each message of a prompt once, in order.

    A pattern is a name of NAMED or a regular expression; where it has a group called `value`, only that is taken. In
    the text stays a mark, `[clock 1: see the end]`, and the text for the tail says `[clock 1] 12:03`. Raises
    ConfigError for a pattern that does not compile or matches nothing at all.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        if isinstance(patterns, str):
            raise ConfigError(f"volatile={patterns!r}: give several, as in volatile=({patterns!r},)")
        self._patterns = [(given if given in NAMED else "value", _compiled(given)) for given in patterns]
        self._leading = True
        self._taken: dict[str, int] = {}

    def feed(self, message: Message) -> tuple[Message, str]:
        """The message without its changing values, and what the tail has to say of them ("" for nothing).

        The very same message where nothing was taken, so from the first one on that is not a system message.
        """
        self._leading = self._leading and message.role == "system"
        if not self._leading or not self._patterns:
            return message, ""
        found = self._found(message.content)
        if not found:
            return message, ""
        kept, told, at = [], [], 0
        for one in found:
            number = self._taken[one.name] = self._taken.get(one.name, 0) + 1
            kept += [message.content[at : one.start], f"[{one.name} {number}: see the end]"]
            told.append(f"[{one.name} {number}] {message.content[one.start : one.end]}")
            at = one.end
        kept.append(message.content[at:])
        return replace(message, content="".join(kept)), "\n".join(told)

    def _found(self, text: str) -> list[_Found]:
        """What to take, in order; of two that overlap the earlier, then the one of the pattern given first."""
        every: list[_Found] = []
        for name, pattern in self._patterns:
            group = "value" if "value" in pattern.groupindex else 0
            for match in pattern.finditer(text):
                start, end = match.span(group)
                if 0 <= start < end:
                    every.append(_Found(start=start, end=end, name=name))
        chosen: list[_Found] = []
        for one in sorted(every, key=lambda found: found.start):
            if not chosen or one.start >= chosen[-1].end:
                chosen.append(one)
        return chosen


def steady(messages: Sequence[Message], patterns: Iterable[str]) -> tuple[tuple[Message, ...], str]:
    """All of `messages` without changing values, and the text for the tail. Costs what the leading system messages do."""
    volatile = Volatile(patterns)
    rest = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    fed = [volatile.feed(message) for message in messages[:rest]]
    told = "\n".join(text for _, text in fed if text)
    return (*(message for message, _ in fed), *messages[rest:]), told


_TOLD = re.compile(rf"(?m)^\[(?:{'|'.join(NAMED)}|value) [1-9]\d*\] ")


def values_in(note: str) -> str:
    """The part of a note that tells of changing values, which is its end; "" where it tells of none."""
    found = _TOLD.search(note)
    return "" if found is None else note[found.start() :]


_VALUES = {
    "clock": NAMED["clock"],
    "uuid": NAMED["uuid"],
    "id": r"\b(?=\w*\d)(?=\w*[A-Za-z])[0-9A-Za-z_-]{6,}",
    "counter": r"\d[\d.,_]*",
}


def changed_value(was: str, now: str) -> str:
    """Which kind of value alone makes two texts differ: "clock", "uuid", "id" or "counter"; "" if more than such does.

    Where several kinds changed, the first of them in this order.
    """
    first = ""
    for kind, pattern in _VALUES.items():
        if not first and re.findall(pattern, was) != re.findall(pattern, now):
            first = kind
        was, now = re.sub(pattern, "\0", was), re.sub(pattern, "\0", now)
        if first and was == now:
            return first
    return ""


def _compiled(given: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(NAMED.get(given, given))
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"volatile={given!r:.200} is no pattern: {error}; give a regular expression or one of {', '.join(NAMED)}"
        ) from error
    if not given:
        raise ConfigError("volatile='' matches nothing; give a regular expression")
    return pattern
