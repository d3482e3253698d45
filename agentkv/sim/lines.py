"""Reading a file of JSON lines that may be damaged: one pass, one line in memory, and a count of what became of each.

Covers compression, encodings, cut and oversized lines, and the tally. What a record means is `formats.py`.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from agentkv.errors import ConfigError
from agentkv.sim.trace import Skips

LONGEST_LINE_BYTES = 1 << 26
_PROGRESS_LINES = 10_000
_WIDE = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Tally:
    """Counts records by what became of them. `strict`: the first skip raises ConfigError with its line number."""

    def __init__(self, path: Path, *, strict: bool) -> None:
        self._path = path
        self._strict = strict
        self.records = 0
        self.reasons: Counter[str] = Counter()
        self.first_lines: dict[str, int] = {}
        self.notes: Counter[str] = Counter()

    def skip(self, line: int, reason: str) -> None:
        """A record that cannot be used."""
        if self._strict:
            raise ConfigError(f"{self._path}, line {line}: {reason}")
        self.reasons[reason] += 1
        self.first_lines[reason] = min(line, self.first_lines.get(reason, line))

    def note(self, what: str) -> None:
        """A record that was used after a correction, or something to know."""
        self.notes[what] += 1

    def skips(self) -> Skips:
        """The counts so far."""
        return Skips(
            records=self.records,
            used=self.records - self.reasons.total(),
            reasons=dict(self.reasons),
            first_lines=dict(self.first_lines),
            notes=dict(self.notes),
        )


def records(
    path: Path, tally: Tally, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, JSON object) for each usable line; all others are in `tally`.

    Raises ConfigError where there is no such file or it cannot be opened. A file that grows is read to where it is.
    """
    try:
        size_bytes = path.stat().st_size
        raw = path.open("rb")
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror or error}") from error
    with raw:
        number = 0
        for number, line, whole in _lines(raw, tally):
            if progress is not None and number % _PROGRESS_LINES == 0:
                progress(min(raw.tell(), size_bytes) if raw.seekable() else 0, size_bytes)
            text = line.strip()
            if not text:
                tally.note("blank line")
                continue
            tally.records += 1
            found = _object(text, whole=whole)
            if isinstance(found, str):
                tally.skip(number, found)
            else:
                yield number, found
        if progress is not None:
            progress(size_bytes, size_bytes)


def _object(text: bytes, *, whole: bool) -> dict[str, Any] | str:
    """The JSON object of a line, or why there is none."""
    try:
        found = json.loads(text.decode())
    except UnicodeDecodeError:
        return "not UTF-8"
    except RecursionError:
        return "nested too deeply"
    except ValueError:
        return "not JSON" if whole else "cut last line"
    return found if isinstance(found, dict) else "not a JSON object"


def _lines(raw: BufferedReader, tally: Tally) -> Iterator[tuple[int, bytes, bool]]:
    """(number, bytes, whether its end of line was there), in UTF-8 whatever the file's encoding."""
    number = 0
    try:
        with contextlib.closing(_decoded(raw)) as stream:
            for number, line in enumerate(_split(stream), start=1):
                if len(line) > LONGEST_LINE_BYTES:
                    tally.records += 1
                    tally.skip(number, f"longer than {LONGEST_LINE_BYTES >> 20} MiB")
                else:
                    yield number, line, line.endswith((b"\n", b"\r"))
    except (EOFError, zlib.error, gzip.BadGzipFile):
        tally.records += 1
        tally.skip(number + 1, "cut or damaged compression")
    except OSError as error:
        tally.records += 1
        tally.skip(number + 1, f"reading failed: {error.strerror or error}")


class _Recoded:
    """A stream in a wide encoding, read as UTF-8: `readline` counts characters, and only a line feed ends a line."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        self._text = TextIOWrapper(stream, encoding=encoding, errors="replace", newline="\n")

    def readline(self, size: int) -> bytes:
        return self._text.readline(size).encode("utf-8", "replace")

    def close(self) -> None:
        self._text.close()


def _split(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines of at most LONGEST_LINE_BYTES + 1 bytes; of a longer one only its beginning is given, once."""
    while line := stream.readline(LONGEST_LINE_BYTES + 1):
        yield line
        if len(line) > LONGEST_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = stream.readline(LONGEST_LINE_BYTES)


def _decoded(raw: BufferedReader) -> Any:
    stream: Any = raw
    if raw.peek(2)[:2] == b"\x1f\x8b":
        stream = gzip.open(raw, "rb")  # noqa: SIM115 - closed with the raw file
    start = stream.peek(4)[:4]
    for bom, encoding in _WIDE:
        if start.startswith(bom):
            return _Recoded(stream, encoding)
    if start.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream
