"""Records: a trace of a run that really happened, with each call's own times and the engine's sizes.

Covers reading what `agentkv demo --record` wrote (docs/validation.md) and what was measured in it. Writing is the
demo's; the plain trace inside is read by `trace.load` as well; replaying is `replay.py`. Seconds and tokens.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from agentkv.errors import ConfigError
from agentkv.sim.trace import VERSION

_MOST = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One model call as it was, and the wait after it.

    `submitted_s` counts from the run's first call; the parts of its time are those of `core.usage.Timing`. `wait_s`:
    until the session's next call was submitted, None after the last one. `tool`: what ran meanwhile, "" if nothing did.
    `cached_tokens` of the prompt came from some tier; `reuse_tokens`: what of this prompt the next one begins with.
    """

    session: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    reuse_tokens: int
    submitted_s: float
    queued_s: float
    restore_s: float
    recompute_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float
    total_s: float
    wait_s: float | None
    tool: str = ""
    command: str = ""
    tool_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """What it waited for its own old context: queue, restore and recompute."""
        return self.queued_s + self.restore_s + self.recompute_s

    @property
    def first_token_s(self) -> float:
        """When its first token was there, from the run's first call on."""
        return self.submitted_s + self.ttft_s

    @property
    def ended_s(self) -> float:
        """When its last token was there."""
        return self.submitted_s + self.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The engine that was recorded: blocks and bytes of its tiers, and what its lanes did (bytes a second; 0: nothing)."""

    block_tokens: int
    block_bytes: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    shared_tokens: int
    rates_bytes_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A run: its sessions in program order (whose first token came first), each in order; none is empty."""

    sessions: tuple[tuple[Recorded, ...], ...]
    sizes: Sizes
    model: str
    policy: Mapping[str, Any]
    preemptions: int = 0

    def calls(self) -> Iterator[Recorded]:
        """Every call of every session."""
        for session in self.sessions:
            yield from session

    @property
    def stalls_s(self) -> tuple[float, ...]:
        """The stall of every call that came after a tool."""
        return tuple(
            after.stall_s for session in self.sessions for before, after in itertools.pairwise(session) if before.tool
        )

    @property
    def tasks_s(self) -> tuple[float, ...]:
        """How long each session took, from its first call to its last token."""
        return tuple(session[-1].ended_s - session[0].submitted_s for session in self.sessions)


def read(path: str | Path) -> Record:
    """The record at `path`. Raises ConfigError, with the line, for what is no record: half a one proves nothing."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"record {path} cannot be read: {error}") from error
    number = 0
    try:
        told = _header(json.loads(lines[0]), path)
        by_session: dict[str, list[Recorded]] = {}
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007  the error names it
            call = _recorded(json.loads(line))
            by_session.setdefault(call.session, []).append(call)
        number = 1
        return _record(told, by_session)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ConfigError(f"record {path}, line {max(1, number)}: {error!r}") from error


def _header(head: dict[str, Any], path: Path) -> dict[str, Any]:
    if head.get("v") != VERSION or "recorded" not in head:
        raise ConfigError(f"{path} is no record of a run: make one with `agentkv demo --record FILE`")
    recorded: dict[str, Any] = head["recorded"]
    return recorded


def _record(told: dict[str, Any], by_session: dict[str, list[Recorded]]) -> Record:
    if not by_session:
        raise ConfigError("a record without a call says nothing")
    by_session = _joined(by_session)
    for name, calls in by_session.items():
        if any(call.wait_s is None for call in calls[:-1]) or calls[-1].wait_s is not None:
            raise ConfigError(f"session {name!r} does not end with its last call")
    sessions = sorted((tuple(calls) for calls in by_session.values()), key=lambda calls: calls[0].first_token_s)
    sizes = Sizes(
        **{f.name: _count(told[f.name]) for f in fields(Sizes) if f.name != "rates_bytes_s"},
        rates_bytes_s={lane: _seconds(rate) for lane, rate in dict(told["rates_bytes_s"]).items()},
    )
    if min(sizes.block_tokens, sizes.block_bytes, sizes.device_blocks) < 1:
        raise ConfigError(f"an engine of {sizes.device_blocks} blocks of {sizes.block_bytes} B cannot be replayed")
    return Record(
        sessions=tuple(sessions),
        sizes=sizes,
        model=str(told["model"]),
        policy=dict(told["policy"]),
        preemptions=_count(told.get("preemptions", 0)),
    )


def _joined(by_session: Mapping[str, list[Recorded]]) -> dict[str, list[Recorded]]:
    """A task whose history was folded goes on in a session of its own, of which nothing was computed before: its calls are
    one row again, and what they reuse at the seam is nothing.
    """
    joined: dict[str, list[Recorded]] = {}
    unfinished: dict[str, list[Recorded]] = {}
    for name, calls in sorted(by_session.items(), key=lambda item: item[1][0].submitted_s):
        task = name.rpartition("#")[0] or name
        before = unfinished.pop(task, None)
        if before is not None and before[-1].ended_s <= calls[0].submitted_s:
            before[-1] = replace(before[-1], reuse_tokens=0)
            before += calls
        else:
            before = joined[name] = list(calls)
        if before[-1].wait_s is not None:
            unfinished[task] = before
    return joined


def _recorded(line: dict[str, Any]) -> Recorded:
    call: dict[str, Any] = line["call"]
    last = line["next_prompt_tokens"] == 0
    parts = ("queued_s", "restore_s", "recompute_s", "prefill_s", "decode_s", "ttft_s", "total_s", "submitted_s")
    return Recorded(
        session=str(line["session"]),
        prompt_tokens=_count(line["prompt_tokens"]),
        output_tokens=_count(line["output_tokens"]),
        cached_tokens=_count(call["cached_tokens"]),
        reuse_tokens=_count(line["reuse_tokens"]),
        wait_s=None if last else _seconds(line["duration_s"]),
        tool=str(line.get("tool", "")),
        command=str(line.get("command", "")),
        tool_s=_seconds(line.get("tool_s") or 0.0),
        **{name: _seconds(call[name]) for name in parts},
    )


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise ValueError(f"{value!r} is no count")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no finite number >= 0")
    return float(value)
