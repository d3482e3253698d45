"""What loses nothing: an output as a terminal would finally show it, in characters that any store can hold.

Covers colours and other escape codes, carriage returns and backspaces, lines that a cursor movement overwrote, control
characters, lone surrogates, blanks at line ends. A text that was overwritten but tells of a failure stays as a line.
`clean` of a clean text is the same text, so that line numbers mean the same to whoever slims and to whoever reads.
"""

from __future__ import annotations

import re

from agentkv.context.slim.alarm import COARSE, hits

MAX_LINE = 1_000
"""A longer line is treated, and read again, as several lines."""
_MANY_LINES = 20_000
_LAST_DRAWN = 40
"""How many of a line's overwritten states are looked at from the end."""

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]{0,60}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,500}(?:\x07|\x1b\\)|[PX^_][^\x1b\n]{0,500}\x1b\\|[ -/]?[0-~])"
)
_ERASE = re.compile(r"\x1b\[[012]?[KJ]")
_UP = re.compile(r"\x1b\[(\d{0,3})[AF]")
_COARSE = re.compile("|".join(map(re.escape, COARSE)))
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]+")
_SURROGATE = re.compile("[\ud800-\udfff]+")
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_GLANCE = 64
_OVERWRITTEN = re.compile(r"(?m)^[^\n]*\r")


def storable(text: str) -> str:
    """`text` with surrogate pairs joined and lone ones as U+FFFD: what UTF-8 and every checkpoint can hold."""
    if text.isascii() or _SURROGATE.search(text) is None:
        return text
    if _PAIR.search(text) is not None:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _SURROGATE.sub(lambda found: "\ufffd" * len(found[0]), text)


def clean(text: str) -> str:
    """What a terminal would finally show of `text`. Linear in its length; never raises; a clean text stays as it is."""
    text = storable(text)
    if "\r" in text and _json_like(text) and "\x1b" not in text and "\b" not in text:
        text = text.replace("\r", "\n")  # in JSON a carriage return is a blank
    if "\x1b" in text or "\r" in text or "\b" in text:
        text = _screen(text)
    text = _CONTROL.sub("", text)
    return "\n".join(map(str.rstrip, text.split("\n"))).rstrip("\n")


def _json_like(text: str) -> bool:
    return text[:_GLANCE].lstrip()[:1] in {"{", "["} and text[-_GLANCE:].rstrip()[-1:] in {"}", "]"}


def lines_of(clean_text: str) -> list[str]:
    """The lines of a clean text; one of more than MAX_LINE characters comes as several."""
    lines = clean_text.split("\n")
    if len(clean_text) <= MAX_LINE or max(map(len, lines)) <= MAX_LINE:
        return lines
    return [piece for line in lines for piece in _pieces(line)]


def _pieces(line: str) -> list[str]:
    if len(line) <= MAX_LINE:
        return [line]
    return [line[start : start + MAX_LINE] for start in range(0, len(line), MAX_LINE)]


def _screen(text: str) -> str:
    lines = [line.strip("\r") for line in text.split("\n")]
    if len(lines) <= _MANY_LINES * 5 and _UP.search(text) is not None:
        lines = _redrawn(lines, alarming=any(word in text for word in COARSE))
    text = "\n".join(lines)
    if "\r" in text:
        if text.count("\r") > _MANY_LINES < len(lines):
            text = _OVERWRITTEN.sub("", text)
        else:
            text = "\n".join(_overdrawn(line) if "\r" in line else line for line in lines)
    if "\b" in text:
        text = re.sub(r"[^\n\x08]\x08", "", text)
    return _ESCAPE.sub("", text)


def _redrawn(lines: list[str], *, alarming: bool) -> list[str]:
    """Lines that a later line went back up to are gone, unless they tell of a failure."""
    shown: list[str] = []
    for line in lines:
        up = _UP.search(line) if "\x1b" in line else None
        if up is not None:
            above = min(int(up[1] or 1), len(shown))
            kept = [old for old in shown[len(shown) - above :] if _COARSE.search(old)] if alarming else []
            shown[len(shown) - above :] = kept
        shown.append(line)
    return shown


def _overdrawn(line: str) -> str:
    """What is left to see of a line that was drawn again and again, after whatever told of a failure."""
    drawn = [state for state in line.rsplit("\r", _LAST_DRAWN) if state]
    seen = ""
    for state in reversed(drawn[1:] if len(drawn) > _LAST_DRAWN else drawn):
        text = _ESCAPE.sub("", state)
        if len(text) > len(seen):
            seen += text[len(seen) :]
        if _ERASE.search(state) is not None:
            break
    alarms = dict.fromkeys(
        _ESCAPE.sub("", line[line.rfind("\r", 0, at) + 1 : (line.find("\r", at) + 1 or len(line) + 1) - 1])
        for at in sorted(hits(line, each=8))
    )
    return "\n".join([*(alarm for alarm in alarms if alarm not in seen), seen])
