"""HeldGate: calls of an answer that is held to a grammar are told while they are written.

The grammar (`grammar.py`) leaves no choice: behind the opening tag stands a call of one of the tools, in one spelling. So
what is written is a call before it is complete. Does not cover: calls of models that are free (`toolcalls.py`,
`responses.py`), which are known for calls only at their end.

A call that is cut can never be read as a whole one: the last brace of its arguments is told only with the closing tag.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Literal

from agentkv.core.message import ToolSpec
from agentkv.engine.base import CallDelta
from agentkv.engine.local.aside import Aside
from agentkv.engine.local.toolcalls import CLOSE, OPEN, Wanted, begun
from agentkv.errors import ModelError

Among = Literal["calls", "value", "text"]
"""What an answer may be: calls only; calls or a JSON value; text with calls in it."""
_END = "}}" + CLOSE
_BLANKS = " \t\r\n"


def head_of(name: str) -> str:
    """How a held call of this tool begins, up to its arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


class HeldGate:
    """Text around the calls is shown. Raises ModelError for a call that does not keep its grammar."""

    sees_control = False
    waits = True
    thinks = False
    hides = False

    def __init__(self, tools: Sequence[ToolSpec], *, among: Among) -> None:
        self._heads = {head_of(tool.name): tool.name for tool in tools}
        self.aside = Aside()
        self.unfinished: list[Wanted] = []
        self._among: Among | None = among  # None: no call can come any more
        self._calls: list[Wanted] = []
        self._held = ""
        self._state: Literal["outside", "head", "arguments", "end"] = "outside"
        self._depth = 0
        self._quoted = self._escaped = False
        self._blank = ""  # behind a call: may be the text's end, which is stripped
        self._spoke = False  # there was text behind a call

    @property
    def inside(self) -> bool:
        """True where no stop text is looked for: in a call, and where there is nothing but calls."""
        return self._state != "outside" or self._among == "calls"

    def feed(self, text: str) -> str:
        """The part that may be shown now."""
        self._held += text
        shown = ""
        while True:
            said, more = self._step()
            shown += said
            if not more:
                return shown

    def control(self, text: str) -> str:  # noqa: ARG002  no grammar has a place for one but the end
        """Nothing: control tokens are no text."""
        return ""

    def finish(self, *, cut: bool) -> tuple[str, list[Wanted]]:
        """The rest that may be shown, and the calls; none if the last is not complete: these are `unfinished`."""
        held, self._held = self._held, ""
        if self._state != "outside" or (cut and held and self._among == "calls"):
            self.unfinished, self._calls = self._calls, []
            return "", []
        said = self._say(held) if self._among != "calls" else ""
        return said, self._calls

    def _step(self) -> tuple[str, bool]:
        """(what may be shown, whether more of what is held can be read)."""
        match self._state:
            case "outside":
                return self._outside()
            case "head":
                return self._head()
            case "arguments":
                return "", self._arguments()
            case "end":
                return "", self._end()

    def _outside(self) -> tuple[str, bool]:
        held = self._held
        at = -1 if self._among is None else held.find(OPEN)
        if self._among == "value" and at != 0:
            if OPEN.startswith(held):
                return "", False
            self._among, at = None, -1
        if at < 0:
            keep = 0 if self._among is None else len(held) if self._among == "calls" else begun(held, OPEN)
            said, self._held = held[: len(held) - keep], held[len(held) - keep :]
            return self._say(said), False
        said, self._held = held[:at], held[at + len(OPEN) :]
        self._state = "head"
        self._among = "calls" if self._among == "value" else self._among
        return self._say(said) if self._among != "calls" else "", True

    def _head(self) -> tuple[str, bool]:
        for head, name in self._heads.items():
            if self._held.startswith(head):
                self._held = self._held[len(head) :]
                call = Wanted(name=name, arguments="", id=f"call_{secrets.token_hex(12)}")
                self._calls.append(call)
                self.aside.call(CallDelta(index=len(self._calls) - 1, id=call.id, name=name))
                self._state = "arguments"
                return "", True
        if not any(head.startswith(self._held) for head in self._heads):
            raise ModelError(f"a held call begins with {self._held!r:.80}, as no tool of this answer does")
        return "", False

    def _arguments(self) -> bool:
        """Tell what came of them, but for their last brace."""
        for at, letter in enumerate(self._held):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self._argue(self._held[:at])
                    self._held, self._state = self._held[at:], "end"
                    return True
        self._argue(self._held)
        self._held = ""
        return False

    def _argue(self, text: str) -> None:
        if text:
            call = self._calls[-1]
            self._calls[-1] = Wanted(name=call.name, arguments=call.arguments + text, id=call.id)
            self.aside.call(CallDelta(index=len(self._calls) - 1, arguments=text))

    def _end(self) -> bool:
        if self._held.startswith(_END):
            self._argue("}")
            self._held, self._state = self._held[len(_END) :], "outside"
            return True
        if not _END.startswith(self._held):
            raise ModelError(f"a held call ends with {self._held!r:.80} and not with {_END!r}")
        return False

    def _say(self, text: str) -> str:
        """Text around calls: as it is before the first, without blanks at its ends behind it."""
        if not self._calls:
            return text
        text = self._blank + text
        said = text.rstrip(_BLANKS)
        self._blank = text[len(said) :]
        said, self._spoke = (said if self._spoke else said.lstrip(_BLANKS)), self._spoke or bool(said)
        self._blank = self._blank if self._spoke else ""
        return said
