"""Reading a summary out of what a model wrote: headings in many spellings, bullets, or a JSON object.

Linear in the length of the text, never an exception. Text with no known heading holds no summary; neither does one
whose only heading is about errors: that is how a failed call reads.
"""

from __future__ import annotations

import json
import re
from typing import Any

Sections = dict[str, list[str]]

_NAMES: dict[str, tuple[str, ...]] = {
    "goal": ("goal", "goals", "task", "objective", "request"),
    "decisions": ("decisions", "decision", "key decisions", "decisions made", "choices"),
    "facts": ("facts", "fact", "key facts", "facts with numbers and paths", "findings", "results", "known facts"),
    "files": ("files", "file", "files touched", "paths", "files and paths", "file paths"),
    "errors": ("errors", "error", "errors and their causes", "errors and causes", "problems", "failures"),
    "open_items": (
        "open items", "open_items", "open", "open item", "todo", "todos", "to do", "next steps", "next step", "next",
        "remaining", "pending", "open questions", "still to do",
    ),
}  # fmt: skip
_SECTION = {name: section for section, names in _NAMES.items() for name in names}
HINTS = {
    "Goal": "one line",
    "Decisions": "one item per line",
    "Facts": "numbers, names, commands and what came out of them, exactly",
    "Files": "paths that were read or changed",
    "Errors": "the error and its cause",
    "Open items": 'what is still to be done; write "done: X" for an earlier item X that is done',
}
"""What the instruction says under each heading; a model that says it back has said nothing."""
_EMPTY = frozenset({
    "", "none", "none.", "n/a", "na", "nothing", "nothing.", "-", "--", "...", "\u2026", "(none)", "[none]", "no", "empty",
    "none yet", "none so far", "not applicable", "unknown", *(hint.casefold() for hint in HINTS.values()),
})  # fmt: skip
_BULLET = re.compile(r"(?:[-*+\u2022\u00b7]|\d{1,3}[.)])[ \t]+")
_HEADING_CHARS = 60
_ANSWER_CHARS = 200_000
_SECTIONS_OF_OWN = 2


def clean(text: str, max_chars: int) -> str:
    """`text` as one line without control characters, at most `max_chars` long; what is cut shows as "..."."""
    line = " ".join(text[: 8 * max_chars].replace("\x00", " ").split())
    if len(line) <= max_chars:
        return line
    return line[: max(1, max_chars - 3)].rstrip() + "..."


def says_nothing(text: str) -> bool:
    """True for "none", "n/a", "..." and the like, and for what our own instruction says."""
    return text.strip().casefold() in _EMPTY


def parse_sections(text: str, *, own: bool = False) -> Sections | None:
    """The items by section name, or None if `text` is no summary. `own`: we wrote it, so errors alone are one too."""
    text = text.strip()[:_ANSWER_CHARS]
    found = _from_json(text) or _from_lines(text)
    told = {section for section, items in found.items() if items}
    return found if told - {"errors"} or (own and told) else None


def _from_lines(text: str) -> Sections:
    found: Sections = {}
    section: str | None = None
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("```"):
            continue
        bullet = _BULLET.match(line)
        plain = bullet and not line[0].isdigit() and not line[bullet.end() :].startswith("**")
        heading = None if plain else _heading(line)
        if heading is not None:
            section, rest = heading
            found.setdefault(section, [])
            _add(found, section, rest)
        elif section is not None:
            _add(found, section, line[bullet.end() :] if bullet else line)
    return found


def _heading(line: str) -> tuple[str, str] | None:
    """(section, what stands behind the colon) if `line` is a heading."""
    bare = line.lstrip("# \t")
    marked = len(bare) < len(line)
    numbered = _BULLET.match(bare)
    if numbered:
        bare = bare[numbered.end() :]  # "1. Goal: x", "- **Goal:** x"
    name, colon, rest = bare[: _HEADING_CHARS + 1].partition(":")
    rest = bare[len(name) + 1 :] if colon else ""
    bold = name.lstrip().startswith(("**", "__"))
    key = name.strip(" *_`#\t").casefold()
    if key not in _SECTION or not (colon or marked or bold):
        return None
    return _SECTION[key], rest.strip(" *_\t") if bold else rest.strip()


def _add(found: Sections, section: str, text: str) -> None:
    if not says_nothing(text):
        found[section].append(text.strip())


def _from_json(text: str) -> Sections:
    start, end = text.find("{"), text.rfind("}")
    fenced = text.startswith("```")
    if start < 0 or end < start or not (fenced or start == 0):
        return {}
    try:
        value: Any = json.loads(text[start : end + 1])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    found: Sections = {}
    for name, items in value.items():
        section = _SECTION.get(str(name).replace("_", " ").strip().casefold())
        if section is None:
            continue
        found.setdefault(section, [])
        for item in items if isinstance(items, list) else [items]:
            if isinstance(item, str | int | float) and not isinstance(item, bool):
                _add(found, section, str(item))
    return found
