"""Prefix watch: is the new prompt an extension of the last one, and if not, where and why does it break?

Covers comparing two prompts, a name for the cause, and one warning per cause and watch. Does not cover mending it:
`layout.py` builds prompts that do not break. Positions are told in logs, prompt text never.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentkv.context.canonical import tools_text
from agentkv.core.message import Message, ToolSpec
from agentkv.log import count, failed

Cause = Literal[
    "tools changed", "a changing value", "text changed", "role changed", "tool call changed", "messages removed"
]
_CLOCK = re.compile(r"[\d:.,+TZ/ -]*")
_AROUND = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """The first difference that the old prompt cannot be extended over.

    `message` is the index of the message (-1: the tools, which stand before all messages), `character` the position
    in its content. `before` and `after` show a few characters from there on (prompt text: do not log). Everything
    behind this point has to be computed again.
    """

    message: int
    character: int
    role: str
    cause: Cause
    before: str = ""
    after: str = ""


def find_break(
    old: Sequence[Message],
    new: Sequence[Message],
    *,
    old_tools: Sequence[ToolSpec] = (),
    new_tools: Sequence[ToolSpec] = (),
) -> Break | None:
    """Where `new` stops being an extension of `old`; None if it is one.

    Tools count as they are serialised: an appended tool is a break too where the template prints tools first.
    """
    if tools_text(old_tools) != tools_text(new_tools):
        return _text_break(-1, "tools", tools_text(old_tools), tools_text(new_tools), "tools changed")
    for index, was in enumerate(old):
        if index >= len(new):
            return Break(message=index, character=0, role=was.role, cause="messages removed")
        now = new[index]
        if was == now:
            continue
        if was.role != now.role:
            return Break(message=index, character=0, role=was.role, cause="role changed")
        if was.content != now.content:
            cause: Cause = "a changing value" if _is_value(was.content, now.content) else "text changed"
            return _text_break(index, was.role, was.content, now.content, cause)
        return Break(message=index, character=len(was.content), role=was.role, cause="tool call changed")
    return None


class PrefixWatch:
    """Remembers the last prompt of one session and tells when the next one does not extend it.

    Not thread-safe: a session has one call at a time. Each cause is logged once per watch, every break is counted.
    """

    def __init__(self, session: str = "") -> None:
        self.session = session
        self.breaks = 0
        self.last_break: Break | None = None
        self._messages: tuple[Message, ...] = ()
        self._tools: tuple[ToolSpec, ...] = ()
        self._warned: set[tuple[int, Cause]] = set()

    def see(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Break | None:
        """Compare with the prompt seen before, remember this one."""
        found = find_break(self._messages, messages, old_tools=self._tools, new_tools=tools) if self._messages else None
        self._messages, self._tools = tuple(messages), tuple(tools)
        if found is not None:
            self._tell(found)
        return found

    def is_another_prompt(self, messages: Sequence[Message]) -> bool:
        """True if the first message is another one altogether, so that nobody meant to extend the prompt before.

        A first message in which only a value changed (a clock, a counter) is the same prompt, broken.
        """
        if not self._messages or not messages:
            return False
        found = find_break(self._messages[:1], messages[:1])
        return found is not None and found.cause != "a changing value"

    def expect_break(self) -> None:
        """The next prompt starts anew (a declared compaction): nothing is compared with it."""
        self._messages, self._tools = (), ()

    def _tell(self, found: Break) -> None:
        self.breaks += 1
        self.last_break = found
        key = (found.message, found.cause)
        if key in self._warned:
            count("prefix_broken")
            return
        self._warned.add(key)
        failed(
            "prefix_broken",
            session=self.session,
            cause=found.cause,
            message=found.message,
            character=found.character,
            role=found.role,
            advice="put what changes from call to call at the end of the prompt",
        )


def _text_break(index: int, role: str, was: str, now: str, cause: Cause) -> Break:
    at = _first_difference(was, now)
    return Break(
        message=index, character=at, role=role, cause=cause,
        before=was[at : at + _AROUND], after=now[at : at + _AROUND],
    )  # fmt: skip


def _first_difference(was: str, now: str) -> int:
    shorter = min(len(was), len(now))
    low, high = 0, shorter  # was[:low] == now[:low]; compared in halves because prompts are long
    while low < high:
        middle = (low + high + 1) // 2
        if was[low:middle] == now[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_value(was: str, now: str) -> bool:
    """True if the texts differ in digits and date marks alone: a clock, a counter."""
    start = _first_difference(was, now)
    rest_was, rest_now = was[start:], now[start:]
    same = _first_difference(rest_was[::-1], rest_now[::-1])
    changed = rest_was[: len(rest_was) - same] + rest_now[: len(rest_now) - same]
    return bool(_CLOCK.fullmatch(changed)) and any(char.isdigit() for char in changed)
