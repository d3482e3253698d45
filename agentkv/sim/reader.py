"""Reading a whole trace: a session is given as soon as the file has left it, so that memory has a bound.

What lines, records and sessions are is `lines.py`, `formats.py` and `grouping.py`; `trace.load` is the front door.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from agentkv.errors import ConfigError
from agentkv.sim.fields import Unusable
from agentkv.sim.formats import detect, header, parser
from agentkv.sim.grouping import Call, Session, session_of
from agentkv.sim.lines import Tally, records
from agentkv.sim.trace import Skips, Trace


class Stream:
    """Sessions of a trace file, one after the other; iterate once. `skipped` and `source` are complete at the end.

    With `open_sessions` at most so many are held: one that the file has not mentioned for longest is given, and
    records of it that still follow are skipped as "session was closed before". None: hold all, give all at the end.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        format: str = "auto",  # noqa: A002 - as `load`
        strict: bool = False,
        open_sessions: int | None = 64,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if open_sessions is not None and open_sessions < 1:
            raise ConfigError(f"open_sessions={open_sessions}: at least 1")
        self._path = Path(path)
        self._parse = None if format == "auto" else parser(format)
        self._tally = Tally(self._path, strict=strict)
        self._open_sessions = open_sessions
        self._progress = progress
        self.source = self._path.name

    @property
    def skipped(self) -> Skips:
        """The counts so far."""
        return self._tally.skips()

    def __iter__(self) -> Iterator[Session]:
        held: dict[str, list[Call]] = {}
        closed: set[int] = set()
        for line, record in records(self._path, self._tally, self._progress):
            source = header(record, f"{self._path}, line {line}")
            if source is not None:
                self.source = source or self.source
                self._tally.records -= 1
                continue
            try:
                self._parse = self._parse or parser(detect(record))
                call = self._parse(record, line)
            except Unusable as reason:
                self._tally.skip(line, str(reason))
                continue
            if hash(call.session) in closed:
                self._tally.skip(line, "session was closed before")
                continue
            calls = held.setdefault(call.session, []) if self._open_sessions is None else held.pop(call.session, [])
            calls.append(call)
            held[call.session] = calls  # the end of a dict is the one used last
            if self._open_sessions is not None and len(held) > self._open_sessions:
                name = next(iter(held))
                closed.add(hash(name))
                yield session_of(held.pop(name), self._tally)
        for name in list(held):
            yield session_of(held.pop(name), self._tally)


def read(
    path: str | Path,
    *,
    format: str,  # noqa: A002 - as `load`
    strict: bool,
    progress: Callable[[int, int], None] | None,
) -> Trace:
    """`trace.load`: all sessions in the order of their first record."""
    stream = Stream(path, format=format, strict=strict, open_sessions=None, progress=progress)
    sessions = [session for session in stream if session.waits]
    told = [session.arrival_s for session in sessions if session.arrival_s is not None]
    first_s = min(told, default=0.0)
    return Trace(
        sessions=tuple(session.waits for session in sessions),
        skipped=stream.skipped,
        source=stream.source,
        arrivals_s=tuple(each - first_s for each in told) if len(told) == len(sessions) else (),
    )
