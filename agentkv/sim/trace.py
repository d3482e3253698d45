"""Traces: what agents waited for, in the order in which they waited, and what of a file could not be used.

Covers the nouns, `load` and `write`. What a line of which format means is `formats.py`; made-up traces are
`synthetic.py`; the formats are described in docs/traces.md. Seconds and tokens throughout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentkv.errors import ConfigError

VERSION = "agentkv.trace/1"
"""The first field of a file in our own format."""

Kind = Literal["tool", "human", "mixed"]
KINDS: tuple[Kind, ...] = ("tool", "human", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A model call and the wait that followed it, until the session's next model call.

    `start_s`: when the wait began, in seconds since the session's first model call began. `llm_s`: how long the model
    call took where it was recorded, 0 if that is not known. `reuse_tokens`: the part of this prompt that the next one
    begins with. `censored`: ended by a time-out or cancelled: it would have taken longer than `duration_s`.
    `parallel`: how many calls the session waited for; `duration_s` is until the last of them ended and `tool`,
    `command` and `arg_bytes` are that one's; `calls` are all of them, empty where there was one.
    `next_prompt_tokens` 0: no further model call is known: nothing was waited for.
    """

    session: str
    step: int
    kind: Kind
    tool: str = ""
    command: str = ""
    start_s: float
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    next_prompt_tokens: int
    reuse_tokens: int
    llm_s: float = 0.0
    censored: bool = False
    timeout_s: float | None = None
    parallel: int = 1
    arg_bytes: int = 0
    calls: tuple[Wait, ...] = ()

    @property
    def ends(self) -> bool:
        """Whether the session's last model call is all that this tells: there was no wait."""
        return self.next_prompt_tokens == 0 and self.prompt_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Skips:
    """What became of a file's records. `records` = `used` + `skipped`, always.

    `reasons`: skipped records by reason; `first_lines`: the first line number of each reason, from 1.
    `notes`: what was normalised, by how often.
    """

    records: int = 0
    used: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    first_lines: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)

    @property
    def skipped(self) -> int:
        """Records that were not used."""
        return sum(self.reasons.values())

    def summary(self) -> str:
        """One line for people: "48561 records, 48559 used, 2 skipped: 2 x negative duration (first in line 12)"."""
        words = f"{self.records} records, {self.used} used, {self.skipped} skipped"
        if self.reasons:
            each = (f"{n} x {why} (first in line {self.first_lines[why]})" for why, n in self.reasons.items())
            words += ": " + ", ".join(each)
        if self.notes:
            words += "; " + ", ".join(f"{n} x {what}" for what, n in self.notes.items())
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Sessions of waits, each in step order.

    `arrivals_s`: when each session began, in seconds since the first did; empty where the source does not say it.
    """

    sessions: tuple[tuple[Wait, ...], ...]
    skipped: Skips = field(default_factory=Skips)
    source: str = ""
    arrivals_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.arrivals_s and len(self.arrivals_s) != len(self.sessions):
            raise ConfigError(f"{len(self.arrivals_s)} arrivals for {len(self.sessions)} sessions: give one for each")

    def waits(self) -> Iterator[Wait]:
        """Every single call that was waited for, session by session: parallel ones one by one, ends left out."""
        for session in self.sessions:
            for wait in session:
                if wait.calls:
                    yield from wait.calls
                elif not wait.ends:
                    yield wait

    def __len__(self) -> int:
        """How many waits there are, parallel calls counted as one."""
        return sum(not wait.ends for session in self.sessions for wait in session)


def load(
    path: str | Path,
    *,
    format: str = "auto",  # noqa: A002 - the word that users look for
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a trace: our JSON lines, the project's two trace files, TraceLab's or Mooncake's, plain or `.gz`.

    What cannot be used is skipped and counted in `Trace.skipped`; with `strict` the first such record raises ConfigError
    with its line number. `progress(bytes_read, bytes_in_all)` is called about every 10,000 lines. Raises ConfigError on
    a file that cannot be read, an unknown `format`, and a newer version of our own.
    Memory: about 0.6 KB for each wait (they are grouped by session); the file itself is never held. `reader.Stream` has a bound.
    """
    from agentkv.sim.reader import read

    return read(path, format=format, strict=strict, progress=progress)


def write(
    path: str | Path, sessions: Iterable[Iterable[Wait]], *, source: str = "", arrivals_s: Iterable[float] = ()
) -> None:
    """Write a trace in our own format; `load` gives the same waits back. Replaces `path` only when all is written."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    arrivals = iter(arrivals_s)
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"v": VERSION, "source": source}) + "\n")
            for session in sessions:
                arrival_s = next(arrivals, None)
                for wait in session:
                    for call in wait.calls or (wait,):
                        file.write(json.dumps(to_json(call, arrival_s=arrival_s)) + "\n")
                        arrival_s = None
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def to_json(wait: Wait, *, arrival_s: float | None = None) -> dict[str, Any]:
    """One line of our format: the fields of Wait, those left out that have their default."""
    told: dict[str, Any] = {
        "session": wait.session,
        "step": wait.step,
        "kind": wait.kind,
        "start_s": wait.start_s,
        "duration_s": wait.duration_s,
        "prompt_tokens": wait.prompt_tokens,
        "output_tokens": wait.output_tokens,
        "next_prompt_tokens": wait.next_prompt_tokens,
        "reuse_tokens": wait.reuse_tokens,
        "llm_s": wait.llm_s,
    }
    optional = {
        "tool": (wait.tool, ""),
        "command": (wait.command, ""),
        "censored": (wait.censored, False),
        "timeout_s": (wait.timeout_s, None),
        "parallel": (wait.parallel, 1),
        "arg_bytes": (wait.arg_bytes, 0),
        "arrival_s": (arrival_s, None),
    }
    return told | {name: value for name, (value, default) in optional.items() if value != default}
