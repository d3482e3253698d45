"""A summary without a model: what can be found in the turns by their look, deterministic and in linear time.

Covers the goal (first request), paths, lines with numbers, errors with what follows them, decisions, open items,
questions nobody answered, and commands with their outcome. It knows English marks only; paths, numbers and the goal
are found in any script. Of a very long message only both ends are looked at, and its error lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agentkv.context.summary.parse import Sections
from agentkv.context.summary.record import Summary
from agentkv.context.summary.turns import is_summary
from agentkv.core.message import Message, ToolCall

_END_CHARS = 60_000
_TOTAL_CHARS, _LEAST_CHARS = 1_000_000, 4_000
_LINE_CHARS = 500
_SENTENCE_CHARS = 240
_MOST = {"decisions": 40, "facts": 120, "files": 80, "errors": 40, "open_items": 40}
_FACTS_OF_RESULT = 3
_ERRORS_OF_RESULT = 4
_PATHS_OF_MESSAGE = 20
_GOAL_CHARS = 600
_COMMAND_CHARS = 160

_ERROR = re.compile(
    r"\b\w*(?:error|exception)\b|\b(?:failed|failure|fatal|panic|traceback|denied|refused|not found|cannot|timed out)\b",
    re.IGNORECASE,
)
_CAUSE = re.compile(r"\b(?:because|caused by|due to|root cause|the cause|reason:)", re.IGNORECASE)
_DECISION = re.compile(
    r"\b(?:decided|decision|decide to|(?:will|'ll|shall) (?:use|keep|go with|switch|replace|store|write)|let's use|going with|"
    r"go with|chose|chosen|choose|opted for|settled on|agreed (?:on|to)|instead of)\b",
    re.IGNORECASE,
)
_OPEN = re.compile(
    r"\b(?:todo|fixme|still (?:to|need|needs|has to|have to|missing|open)|next(?: step| up)?:|next,? (?:i|we)\b|remaining|"
    r"not yet|to be done|left to do|pending|follow[- ]up|must not forget|remember to|later we)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d")
_WORD = re.compile(r"[^\W\d_]{2}")
_SPLIT = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_RUN = re.compile(r"[^\s\"'`()<>\[\]{},;|=*]{3,}")
_PATH = re.compile(r"(?:[A-Za-z]:|~|\.{1,2})?[/\\]?[\w.@+-]+(?:[/\\][\w.@+-]+)*[/\\]?")
_POSITION = re.compile(r"(?:::.*|:\d[\d:-]*)$")  # a test in a file, a line in it
_PATH_CHARS = 200
_SUFFIX = re.compile(r"\.[A-Za-z]\w{0,7}$")
_DOTTED = re.compile(
    r"\.(?:py|pyi|ipynb|js|jsx|mjs|ts|tsx|go|rs|c|cc|cpp|h|hpp|cu|java|kt|rb|php|cs|swift|scala|sh|bash|sql|md|rst|txt|log|"
    r"json|jsonl|ya?ml|toml|cfg|ini|lock|xml|html?|css|csv|tsv|parquet|db|sqlite|env|proto|tf|conf|png|jpe?g|svg|pdf|zip|"
    r"tar|gz|whl|gguf|safetensors|diff|patch)$",
    re.IGNORECASE,
)
_COMMAND = re.compile(r'"(?:cmd|command|commands|script|code|query|args)"\s*:\s*"((?:[^"\\]|\\.){1,400})')


def extract(messages: Sequence[Message], previous: Summary | None = None) -> Summary:
    """The Summary of `messages`, behind `previous` if there is one. At most 320 items; never an exception."""
    found: Sections = {name: [] for name in _MOST}
    goal = ""
    calls: dict[str, ToolCall] = {}
    most = min(2 * _END_CHARS, max(_TOTAL_CHARS // max(1, len(messages)), _LEAST_CHARS))
    for place, message in enumerate(messages):
        if message.role == "system" or is_summary(message):
            continue
        text = _ends(message.content, most)
        if message.role == "user" and not goal:
            goal = " ".join(text[:_GOAL_CHARS].split())
        calls |= {call.id: call for call in message.tool_calls}
        _files(found, text)
        for call in message.tool_calls:
            _files(found, _unescaped(call.arguments[:_END_CHARS]))
        if message.role == "tool":
            _result(found, text, calls.get(message.tool_call_id or ""))
        else:
            _said(found, text, answered=_answered(messages, place))
    newest = Summary.of({"goal": [goal], **{name: _some(name, items) for name, items in found.items()}})
    return newest if previous is None else previous.merged(newest)


def _said(found: Sections, text: str, *, answered: bool) -> None:
    """What a person or the model said: sentence by sentence."""
    for sentence in _sentences(text):
        if _DECISION.search(sentence):
            found["decisions"].append(sentence)
        elif _OPEN.search(sentence) or (not answered and sentence.endswith(("?", "\uff1f"))):
            found["open_items"].append(sentence)
        elif _CAUSE.search(sentence) or _ERROR.search(sentence):
            found["errors"].append(sentence)
        elif _NUMBER.search(sentence) and _WORD.search(sentence):
            found["facts"].append(sentence)


def _result(found: Sections, text: str, call: ToolCall | None) -> None:
    """What a tool gave: its command and outcome, error lines, a few lines with numbers from both ends."""
    lines = [line for line in map(_short, text.splitlines()) if line]
    errors = [line for line in lines if _ERROR.search(line)]
    found["errors"] += _both_ends(list(dict.fromkeys(errors)), _ERRORS_OF_RESULT)
    command = _command(call)
    if command and lines:
        found["facts"].append(f"ran {command}: {lines[-1]}"[:_SENTENCE_CHARS])
        lines = lines[:-1]
    numbers = [line for line in lines if _NUMBER.search(line) and _WORD.search(line) and not _ERROR.search(line)]
    found["facts"] += _both_ends(numbers, _FACTS_OF_RESULT)
    found["open_items"] += [line for line in lines if "TODO" in line or "FIXME" in line][:_FACTS_OF_RESULT]


def _command(call: ToolCall | None) -> str:
    """The command line of a shell-like call, else the tool's name."""
    if call is None:
        return ""
    told = _COMMAND.search(call.arguments[:_END_CHARS])
    line = " ".join(_unescaped(told[1]).split())[:_COMMAND_CHARS] if told else ""
    return f"`{line}`" if line else call.name[:_COMMAND_CHARS]


def _files(found: Sections, text: str) -> None:
    paths: dict[str, None] = {}
    for run in _RUN.finditer(text):
        word = run[0].rstrip(".:!?")
        if len(word) > _PATH_CHARS or "://" in word or not ("." in word or "/" in word or "\\" in word):
            continue
        word = _POSITION.sub("", word)
        if _PATH.fullmatch(word) and (_DOTTED.search(word) or _looks_like_path(word)):
            paths[word] = None
            if len(paths) >= _PATHS_OF_MESSAGE:
                break
    found["files"] += paths


def _looks_like_path(word: str) -> bool:
    """True for an absolute or relative path without a known ending; not for "and/or", 3/4 or a version."""
    if not _WORD.search(word):
        return False
    inner = word.strip("/\\")
    deep = len(re.split(r"[/\\]", inner))
    rooted = word.startswith(("/", "./", "../", "~/", "\\")) or word[1:2] == ":"
    return (rooted and bool(inner)) or deep >= 3 or (deep == 2 and bool(_SUFFIX.search(inner)))  # noqa: PLR2004


def _answered(messages: Sequence[Message], place: int) -> bool:
    """True if somebody else speaks after this message."""
    asker = messages[place].role
    after = (message.role for message in messages[place + 1 : place + 4] if message.role in {"user", "assistant"})
    return any(role != asker for role in after)


def _sentences(text: str) -> Iterator[str]:
    for part in _SPLIT.split(text):
        line = _short(part)
        if line:
            yield line[:_SENTENCE_CHARS]


def _short(line: str) -> str:
    return " ".join(line[:_LINE_CHARS].split()).lstrip("-*# ")


def _both_ends(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: most // 2], *lines[len(lines) - (most - most // 2) :]]


def _some(name: str, items: list[str]) -> list[str]:
    """At most `_MOST[name]` different items: the first half and the last."""
    return _both_ends(list(dict.fromkeys(items)), _MOST[name])


def _ends(text: str, most: int) -> str:
    """`text`, or its two ends, `most` characters, with the error lines between them."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 2], text[len(text) - most // 2 :]
    lines: list[str] = []
    at, end = len(head), len(text) - len(tail)
    for word in ("Error", "error:", "FAILED", "Exception", "fatal"):
        start = at
        while len(lines) < _MOST["errors"] and (start := text.find(word, start, end)) >= 0:
            left = max(text.rfind("\n", max(at, start - _LINE_CHARS), start) + 1, start - _LINE_CHARS // 2)
            right = text.find("\n", start, min(end, start + _LINE_CHARS))
            lines.append(text[left : right if right >= 0 else start + _LINE_CHARS // 2])
            start = right if right >= 0 else start + _LINE_CHARS
    return "\n".join([head, *lines, tail])


def _unescaped(arguments: str) -> str:
    return arguments.replace("\\n", "\n").replace("\\t", " ").replace('\\"', '"').replace("\\\\", "\\")
