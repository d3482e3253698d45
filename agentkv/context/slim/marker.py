"""The line by which a slimmed output says so, and by which it is known when it comes again."""

from __future__ import annotations

import re

_MARK = re.compile(r"\[agentkv: [^\n\[\]]{1,300}\][\"\s\]}]*\Z")
_CALL = re.compile(r"""; read_output\(["'][\w-]{1,80}["']\)""")
_TAIL = 700
READER = "read_output"
"""The name of the tool that reads an output again."""
ANSWER_CHARS = 6_000
"""What one answer of it holds at most, a note about the rest aside."""
NOTE_CHARS = 400


def marker(note: str, handle: str | None, *, quote: str = '"') -> str:
    """One line such as [agentkv: 812 of 900 lines left out; read_output("k3f9...")]."""
    call = f"; {READER}({quote}{handle}{quote})" if handle else ""
    return f"[agentkv: {note}{call}]"


def is_marked(text: str) -> bool:
    """Whether `text` ends with a marker, be it inside JSON."""
    return _MARK.search(text, max(0, len(text) - _TAIL)) is not None


def without_reader(text: str) -> str:
    """A marked text whose marker names no tool: for who has none to read an output again."""
    found = _MARK.search(text, max(0, len(text) - _TAIL))
    return text if found is None else text[: found.start()] + _CALL.sub("", found[0])


def with_marker(body: str, note: str, handle: str | None) -> str:
    """`body` with its marker as the last line."""
    return f"{body.rstrip()}\n{marker(note, handle)}" if body.strip() else marker(note, handle)


def with_marker_inside(body: str, note: str, handle: str | None) -> str:
    """A JSON `body` with its marker as the last field, item or words; still JSON. A bare number becomes a string."""
    mark = marker(note, handle, quote="'")
    inner = body[1:-1].strip()
    comma = "," if inner else ""
    if body.startswith("{"):
        return f'{{{inner}{comma}"_agentkv":"{mark}"}}'
    if body.startswith("["):
        return f'[{inner}{comma}"{mark}"]'
    if body.startswith('"'):
        return f'{body[:-1]} {mark}"'
    return f'"{mark}"'
