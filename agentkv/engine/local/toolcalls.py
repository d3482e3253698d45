"""Tool calls in what a model wrote: found while it streams, never shown half, never lost.

Covers: `TagGate`, our convention, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, which many models know and
the preamble of `chat.py` teaches the others. Does not cover: models with marks of their own (`responses.py`), calls that a
grammar holds (`held.py`), thoughts (`thoughts.py`). What is not a valid call stays text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from agentkv.engine.local.aside import Aside

TAGS = OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)  # models write raw line ends inside strings


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A call that the model asks for; `arguments` is its own JSON text, but for raw line ends inside of strings, which are
    escaped: nobody else would read them. `id` if it has been told already.
    """

    name: str
    arguments: str
    id: str = ""


class Gate(Protocol):
    """Takes the model's text as it comes, passes on what a reader should see."""

    sees_control: bool
    """True if `control` is to be told."""
    waits: bool
    """True if text before a control token may still be shown behind it."""
    aside: Aside
    """What is told beside the text."""
    hides: bool
    """True if the text that is written around the answer is not to be sent again with it: the template writes its own."""

    @property
    def unfinished(self) -> list[Wanted]:
        """Calls that were told, the last of them in part: the answer ended inside of it."""
        ...

    @property
    def inside(self) -> bool:
        """True where no stop text is looked for."""
        ...

    @property
    def thinks(self) -> bool:
        """True while a thought is written."""
        ...

    def feed(self, text: str) -> str:
        """The part that may be shown now."""
        ...

    def control(self, text: str) -> str:
        """The model wrote a control token, spelled `text`; what may be shown now."""
        ...

    def finish(self, *, cut: bool) -> tuple[str, list[Wanted]]:
        """The rest that may be shown, and the calls. `cut`: the model was stopped by max_tokens.

        If that was inside a call, there are no calls: half of what the model meant is not what it meant.
        """
        ...


class OpenGate:
    """Passes everything: for requests without tools."""

    sees_control = False
    waits = True
    inside = False
    thinks = False
    hides = False

    def __init__(self) -> None:
        self.aside = Aside()
        self.unfinished: list[Wanted] = []

    def feed(self, text: str) -> str:
        return text

    def control(self, text: str) -> str:  # noqa: ARG002  control tokens are not text
        return ""

    def finish(self, *, cut: bool) -> tuple[str, list[Wanted]]:  # noqa: ARG002  nothing is held
        return "", []


class TagGate:
    """Our convention. Text before the first call is shown as it comes; from there on it waits for the end.

    In some tokenizers the tags are control tokens.
    """

    sees_control = True
    waits = True
    inside = False  # until it has ended nobody knows that it is a call
    thinks = False
    hides = False

    def __init__(self) -> None:
        self.aside = Aside()
        self.unfinished: list[Wanted] = []
        self._held = ""

    def feed(self, text: str) -> str:
        self._held += text
        at = self._held.find(OPEN)
        if at < 0:
            at = len(self._held) - begun(self._held, OPEN)
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def control(self, text: str) -> str:
        return self.feed(text) if text in TAGS else ""

    def finish(self, *, cut: bool) -> tuple[str, list[Wanted]]:
        held, self._held = self._held, ""
        text, calls = parse(held)
        return (held, []) if cut and OPEN[:-1] in text else (text, calls)


def parse(text: str) -> tuple[str, list[Wanted]]:
    """Text without its valid calls, and these, in order. An invalid or unfinished call stays in the text."""
    calls: list[Wanted] = []
    rest: list[str] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        found = _call(text, start + len(OPEN))
        if found is None:
            rest.append(text[at : start + len(OPEN)])
            at = start + len(OPEN)
        else:
            rest.append(text[at:start])
            wanted, at = found
            calls.append(wanted)
    rest.append(text[at:])
    return ("".join(rest).strip() if calls else text), calls


def _call(text: str, at: int) -> tuple[Wanted, int] | None:
    """The call whose JSON begins at `at`, and where its closing tag ends; None if it is not one."""
    try:
        fields, at = _object(text, _skip(text, at))
        at = _skip(text, at)
    except (ValueError, IndexError, RecursionError):
        return None
    name = fields.get("name", ("", None))[1]
    arguments, value = fields.get("arguments", ("{}", {}))
    if not text.startswith(CLOSE, at) or not isinstance(name, str) or not name or not isinstance(value, dict):
        return None
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        return None  # half a character, which only an escape can hold, is nobody's name
    try:
        json.loads(arguments)
    except ValueError:
        arguments = json.dumps(value)
    return Wanted(name=name, arguments=arguments), at + len(CLOSE)


def _object(text: str, at: int) -> tuple[dict[str, tuple[str, Any]], int]:
    """Top-level fields of a JSON object, each with its own text byte for byte. Raises ValueError."""
    fields: dict[str, tuple[str, Any]] = {}
    if text[at] != "{":
        raise ValueError("not an object")
    at = _skip(text, at + 1)
    while text[at] != "}":
        if text[at] != '"':
            raise ValueError("not a field name")
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if text[at] != ":":
            raise ValueError("a field without a value")
        start = _skip(text, at + 1)
        value, at = _DECODER.raw_decode(text, start)
        fields[name] = (text[start:at], value)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
        elif text[at] != "}":
            raise ValueError("fields without a comma between them")
    return fields, at + 1


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def begun(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` and is not all of it."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
