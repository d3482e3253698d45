"""Formats: what one record of each kind of trace file says, as a Call; which format a file is in.

Covers our own format, the two files of facts that the project calibrates with, TraceLab's rounds and Mooncake's
requests. Reading lines is `lines.py`; ordering, clocks, duplicates and parallel calls are `grouping.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentkv.errors import ConfigError
from agentkv.sim.grouping import Call, Session, sessions_of
from agentkv.sim.lines import Tally, records
from agentkv.sim.trace import KINDS, VERSION, Trace

LONGEST_S = 30 * 86_400.0
"""A wait above this is taken for a clock that jumped, not for a wait."""

MOST_TOKENS = 1_000_000_000


class Unusable(ValueError):
    """A record that cannot be used; its text is the reason that is counted."""


def read(
    path: Path,
    *,
    format: str,  # noqa: A002 - as `load`
    strict: bool,
    progress: Callable[[int, int], None] | None,
) -> Trace:
    """`trace.load`."""
    if format not in ("auto", *FORMATS):
        raise ConfigError(f"format={format!r} is unknown; choose one of {['auto', *FORMATS]}")
    tally = Tally(path, strict=strict)
    parse = None if format == "auto" else FORMATS[format]
    groups: dict[str, Session] = {}
    source = ""
    for line, record in records(path, tally, progress):
        if "v" in record and "session" not in record:
            source = _header(record, path, line) or source
            tally.records -= 1
            continue
        try:
            parse = parse or FORMATS[detect(record)]
            for call in parse(record, line):
                groups.setdefault(call.session, []).append(call)
        except Unusable as reason:
            tally.skip(line, str(reason))
    sessions, arrivals_s = sessions_of(groups, tally)
    return Trace(sessions=sessions, skipped=tally.skips(), source=source or path.name, arrivals_s=arrivals_s)


def detect(record: dict[str, Any]) -> str:
    """The name of the format that `record` is in; raises Unusable where it is none of ours."""
    if "duration_s" in record and "session" in record:
        return "agentkv"
    if "dur" in record and "prompt_tok" in record:
        return "weka"
    if "dur" in record and "arg" in record:
        return "local_tools"
    raise Unusable("no known format")


def _header(record: dict[str, Any], path: Path, line: int) -> str:
    if record["v"] != VERSION:
        raise ConfigError(f"{path}, line {line}: version {record['v']!r}, this program reads {VERSION!r}")
    return str(record.get("source", ""))


def from_agentkv(record: dict[str, Any], line: int) -> list[Call]:
    """A line of our own format (docs/traces.md)."""
    kind = record.get("kind", "tool")
    if kind not in KINDS:
        raise Unusable("unknown kind of wait")
    return [
        Call(
            line=line,
            session=_name(record, "session"),
            step=_whole(record, "step"),
            kind=kind,
            tool=_word(record, "tool"),
            command=_word(record, "command"),
            start=_start(record, "start_s"),
            duration_s=_duration_s(record, "duration_s"),
            prompt_tokens=_tokens(record, "prompt_tokens", default=0),
            output_tokens=_tokens(record, "output_tokens", default=0),
            next_prompt_tokens=_maybe_tokens(record, "next_prompt_tokens"),
            reuse_tokens=_maybe_tokens(record, "reuse_tokens"),
            llm_s=_seconds(record, "llm_s") or 0.0,
            censored=_flag(record, "censored"),
            timeout_s=_seconds(record, "timeout_s"),
            parallel=max(1, _whole(record, "parallel") or 1),
            arg_bytes=_tokens(record, "arg_bytes", default=0),
            arrival_s=_seconds(record, "arrival_s"),
        )
    ]


def from_weka(record: dict[str, Any], line: int) -> list[Call]:
    """A line of weka_claude_code.jsonl: a wait with its kind, no tool name; seconds since the session's start."""
    kind = record.get("tool", "tool")
    if kind not in KINDS:
        raise Unusable("unknown kind of wait")
    return [
        Call(
            line=line,
            session=_name(record, "session"),
            step=_whole(record, "step"),
            kind=kind,
            start=_start(record, "start"),
            duration_s=_duration_s(record, "dur"),
            prompt_tokens=_tokens(record, "prompt_tok"),
            output_tokens=_tokens(record, "out_tok", default=0),
            next_prompt_tokens=_maybe_tokens(record, "next_prompt_tok"),
            reuse_tokens=_maybe_tokens(record, "reuse_tok"),
            llm_s=_seconds(record, "llm_s") or 0.0,
        )
    ]


def from_local_tools(record: dict[str, Any], line: int) -> list[Call]:
    """A line of local_tools.jsonl: a measured tool call with its command; no tokens."""
    return [
        Call(
            line=line,
            session=_name(record, "session"),
            step=_whole(record, "step"),
            kind="tool",
            tool=_word(record, "tool"),
            command=_word(record, "arg"),
            start=_start(record, "start"),
            duration_s=_duration_s(record, "dur"),
            prompt_tokens=0,
            output_tokens=0,
            next_prompt_tokens=0,
            reuse_tokens=0,
            censored=_flag(record, "censored"),
            timeout_s=_seconds(record, "timeout_s"),
            parallel=max(1, _whole(record, "n_par") or 1),
            arg_bytes=_tokens(record, "arg_bytes", default=0),
        )
    ]


FORMATS: dict[str, Callable[[dict[str, Any], int], list[Call]]] = {
    "agentkv": from_agentkv,
    "weka": from_weka,
    "local_tools": from_local_tools,
}


def _number(record: dict[str, Any], name: str) -> float | None:
    """A finite number, None where the field is missing or null."""
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable(f"{name} is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise Unusable(f"{name} is not finite") from None
    if not math.isfinite(number):
        raise Unusable(f"{name} is not finite")
    return number


def _seconds(record: dict[str, Any], name: str) -> float | None:
    seconds = _number(record, name)
    if seconds is not None and seconds < 0:
        raise Unusable(f"{name} is negative")
    if seconds is not None and seconds > LONGEST_S:
        raise Unusable(f"{name} is above 30 days")
    return seconds


def _duration_s(record: dict[str, Any], name: str) -> float:
    seconds = _seconds(record, name)
    if seconds is None:
        raise Unusable(f"{name} is missing")
    return seconds


def _start(record: dict[str, Any], name: str) -> float | None:
    start = _number(record, name)
    if start is not None and start < 0:
        raise Unusable(f"{name} is negative")
    return start


def _maybe_tokens(record: dict[str, Any], name: str) -> int | None:
    number = _number(record, name)
    if number is None:
        return None
    if not 0 <= number <= MOST_TOKENS:
        raise Unusable(f"{name} is out of range")
    return int(number)


def _tokens(record: dict[str, Any], name: str, *, default: int | None = None) -> int:
    found = _maybe_tokens(record, name)
    found = default if found is None else found
    if found is None:
        raise Unusable(f"{name} is missing")
    return found


def _whole(record: dict[str, Any], name: str) -> int | None:
    number = _number(record, name)
    if number is not None and not 0 <= number <= MOST_TOKENS:
        raise Unusable(f"{name} is out of range")
    return None if number is None else int(number)


def _flag(record: dict[str, Any], name: str) -> bool:
    value = record.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise Unusable(f"{name} is not true or false")
    return value


def _word(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Unusable(f"{name} is not a text")
    return value.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be printed


def _name(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    word = _word(record, name)
    if not word:
        raise Unusable(f"{name} is missing")
    return word
