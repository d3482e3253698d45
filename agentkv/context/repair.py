"""Repair: whatever messages a program holds, the prompt that leaves is one that a strict server takes.

Covers tool calls and their results (every call answered behind its turn, every result behind its call), ids, and what
a text may not hold. Each message is fed once, what was put out is never changed, and a message that is fine passes as
the very same object. The table in docs/prefix.md names the outcome for each kind of fault. Spelled control tokens
stay: the engine guards them. Single messages are mended in `mend.py`.

Why a user's turn ends a group of calls: waiting for a late result would give another prompt to a process that resumes
and reads all messages at once than to the one that had to send the prompt in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from agentkv import log
from agentkv.context.mend import is_valid_id, mended, mended_name
from agentkv.core.message import Message, ToolCall

NO_RESULT = "[No result: the call was cancelled, or was still running when the conversation went on.]"
"""What stands for the result of a call that has none."""
UNKNOWN_TOOL = "unknown_tool"
"""The name in a call that nobody made: one put in front of a result whose own call is not there."""


def repaired(messages: Iterable[Message], *, names: Iterable[str] = ()) -> tuple[Message, ...]:
    """A whole prompt from `messages`, to be sent as it is: all that `Repair` puts out, and what is pending."""
    repair = Repair(names=names)
    out = [message for given in messages for message in repair.feed(given)]
    return (*out, *repair.pending())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A call that waits for its result: the id that the program used, and the call as it was put out."""

    given_id: str
    call: ToolCall


@dataclass(slots=True, kw_only=True)
class _Known:
    """The last call of an id, and what it was answered with (None: NO_RESULT, or nothing yet)."""

    name: str
    arguments: str
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A result that no open call waits for, with the call that is put in front of it if none comes."""

    given_id: str
    result: Message
    carrier: ToolCall

    def pair(self) -> tuple[Message, Message]:
        return (
            Message(role="assistant", tool_calls=(self.carrier,)),
            replace(self.result, tool_call_id=self.carrier.id),
        )


class Repair:
    """One conversation's messages, mended as they come. Not thread-safe. Amortised O(1) per message besides its text.

    `names`: names of the tools on offer. They pass as they are; other names in calls are cut down to the characters
    that every server takes. `as_written`: arguments of calls stay as the model wrote them, for an engine that sends the
    model's own text again and reads no JSON of it. Counters: `prompt_repaired` for each message that was not put out as it came.
    """

    def __init__(self, *, names: Iterable[str] = (), as_written: bool = False) -> None:
        self._as_written = as_written
        self._names = frozenset(names)
        self._used: set[str] = set()
        self._known: dict[str, _Known] = {}
        self._open: dict[int, _Open] = {}
        self._queues: dict[tuple[str, str | None], deque[int]] = {}  # numbers of open calls; some were answered since
        self._held: list[_Held] = []
        self._opened = 0
        self._made = 0
        self.repairs = 0
        """Messages so far that were not put out as they came."""

    def offer(self, names: Iterable[str]) -> None:
        """Tools by these names are on offer from now on."""
        self._names = self._names.union(names)

    def feed(self, message: Message) -> tuple[Message, ...]:
        """The next message of the conversation; answers what is appended to the prompt for it, often just itself."""
        try:
            whole = mended(message, self._names, as_written=self._as_written)
            out = self._result(whole) if whole.role == "tool" else self._turn(whole)
        except Exception as error:  # a value that imitates a Message: the agent must go on without it
            log.failed("repair_failed", error=type(error).__name__)
            out = ()
        if len(out) != 1 or out[0] is not message:
            self.repairs += 1
            log.count("prompt_repaired")
        return out

    def pending(self) -> tuple[Message, ...]:
        """What has to stand behind all that was put out, if the prompt is sent now. Changes nothing."""
        return (
            *(_no_result(one.call) for one in self._open.values()),
            *(part for held in self._held for part in held.pair()),
        )

    # -- turns of people, models and the system

    def _turn(self, message: Message) -> tuple[Message, ...]:
        if message.role == "assistant" and not message.content and not message.tool_calls:
            return ()
        before = [_no_result(one.call) for one in self._open.values()]
        self._open.clear()
        self._queues.clear()
        held, self._held = self._held, []
        early: dict[str, Message] = {}
        asked = {call.id for call in message.tool_calls if call.id}
        for one in held:
            if one.given_id in asked:
                early.setdefault(one.given_id, one.result)
        before += [part for one in held if early.get(one.given_id) is not one.result for part in one.pair()]
        if not message.tool_calls:
            return (*before, message)
        turn, answers = self._calling(message, early)
        return (*before, turn, *answers)

    def _calling(self, message: Message, early: dict[str, Message]) -> tuple[Message, list[Message]]:
        """The turn with ids that nobody else has, and the results that came before it."""
        calls: list[ToolCall] = []
        answers: list[Message] = []
        for given in message.tool_calls:
            call = given if self._takes(given.id) else replace(given, id=self._fresh_id())
            calls.append(call)
            known = _Known(name=call.name, arguments=call.arguments)
            if given.id:
                self._known[given.id] = known
            result = early.pop(given.id, None)
            if result is None:
                self._wait_for(_Open(given_id=given.id, call=call))
                continue
            known.answer = result.content
            answers.append(_under(result, call.id))
        unchanged = all(call is given for call, given in zip(calls, message.tool_calls, strict=True))
        return (message if unchanged else replace(message, tool_calls=tuple(calls))), answers

    # -- results

    def _result(self, message: Message) -> tuple[Message, ...]:
        given_id = message.tool_call_id or ""
        known = self._known.get(given_id)
        waiting = self._answered(given_id, message.name)
        if waiting is not None:
            if known is not None:
                known.answer = message.content
            return (_under(message, waiting.call.id),)
        if known is not None and known.answer == message.content:
            return ()
        if known is None:
            known = _Known(name=mended_name(message.name or "", self._names) or UNKNOWN_TOOL, arguments="{}")
            if given_id:
                self._known[given_id] = known
        known.answer = message.content
        carrier = ToolCall(id=self._fresh_id(), name=known.name, arguments=known.arguments)
        self._held.append(_Held(given_id=given_id, result=message, carrier=carrier))
        return ()

    def _wait_for(self, call: _Open) -> None:
        self._opened += 1
        self._open[self._opened] = call
        self._queues.setdefault((call.given_id, None), deque()).append(self._opened)
        if not call.given_id:
            self._queues.setdefault(("", call.call.name), deque()).append(self._opened)

    def _answered(self, given_id: str, name: str | None) -> _Open | None:
        """The call that a result belongs to, which is open no longer: the first of its id.

        Without an id: the first call without one of that name, else the first without one, else the only open call.
        """
        for key in ((given_id, None),) if given_id else (("", name), ("", None)):
            queue = self._queues.get(key, ())
            while queue:
                found = self._open.pop(queue.popleft(), None)
                if found is not None:
                    return found
        if given_id or len(self._open) != 1:
            return None
        return self._open.popitem()[1]

    # -- ids

    def _takes(self, given_id: str) -> bool:
        """True, and the id is taken, if it can be sent as it is."""
        if not is_valid_id(given_id) or given_id in self._used:
            return False
        self._used.add(given_id)
        return True

    def _fresh_id(self) -> str:
        """The next free id of ours: nine letters and digits, which even the templates take that ask for just that."""
        while True:
            self._made += 1
            made = f"call{self._made:05d}"
            if made not in self._used:
                self._used.add(made)
                return made


def _under(result: Message, call_id: str) -> Message:
    return result if result.tool_call_id == call_id else replace(result, tool_call_id=call_id)


def _no_result(call: ToolCall) -> Message:
    return Message(role="tool", content=NO_RESULT, tool_call_id=call.id)
