"""Where whole tool outputs are kept, and the tool by which an agent reads them again.

An output is kept once under a handle made from its content and a key of this store, so that nobody who knows a text
can guess its handle. With a folder outputs outlive the process (folder 0700, files 0600, written aside and renamed);
without one they live in memory and the key is fixed, so that the same text has the same handle in every process. A
quota in bytes and an age bound what is kept: the oldest go first. Nothing here raises into an agent.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from agentkv.clock import Clock, SystemClock
from agentkv.context.slim.clean import clean, lines_of
from agentkv.context.slim.jsontext import readable
from agentkv.context.slim.marker import ANSWER_CHARS, READER
from agentkv.errors import ConfigError, DiskUnavailable
from agentkv.log import count, failed

QUOTA_BYTES = 256 * 1024 * 1024
KEEP_S = 14 * 24 * 3600.0

_HANDLE = re.compile(r"k[a-z2-7]{12}")
_SPAN = re.compile(r"\s*(\d{1,12})?\s*(?:([-:])\s*(\d{1,12})?)?\s*")
_MEMORY_KEY = b"agentkv outputs in memory"


class Outputs:
    """A store of whole outputs. Thread-safe; several processes may share a folder.

    `folder`: None keeps them in memory. `quota_bytes` bounds what is kept (a larger text is not kept at all), `keep_s`
    its age. Raises ConfigError for a quota or an age below zero and for a folder that cannot be used.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        quota_bytes: int = QUOTA_BYTES,
        keep_s: float = KEEP_S,
        clock: Clock | None = None,
    ) -> None:
        if quota_bytes < 0 or keep_s < 0:
            raise ConfigError(f"quota_bytes={quota_bytes} and keep_s={keep_s} must not be negative")
        self._quota_bytes = quota_bytes
        self._keep_s = keep_s
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._memory: OrderedDict[str, tuple[bytes, int]] = OrderedDict()  # name -> data, wall_ms
        self._size_bytes = 0
        self._folder = None if folder is None else Path(folder)
        self._key = _MEMORY_KEY if self._folder is None else _opened(self._folder)
        self.sweep()

    def handle(self, text: str) -> str:
        """The handle under which `text` is or would be kept: pure, the same in every process with this folder."""
        return f"k{self._digest('output', text)[:12]}"

    def put(self, text: str) -> str:
        """Keep `text` and answer its handle. A text that cannot be kept has a handle too; `read` then says so."""
        handle = self.handle(text)
        try:
            self._write(handle, text.encode("utf-8", "surrogatepass"))
        except Exception as error:
            failed("output_not_kept", error=type(error).__name__)
        return handle

    def read(self, handle: str, lines: str = "", pattern: str = "") -> str:
        """Lines of an output, each with its number, at most ANSWER_CHARS characters. Never raises.

        `lines`: "40-80", "40" or "200-" (1-based). `pattern`: only lines that contain it, whatever the case; "a|b" finds
        either, "a.*b" finds b behind a. Neither: the beginning. What is wrong or left out is told in words.
        """
        name = str(handle).strip().strip("\"'`")
        if not _HANDLE.fullmatch(name):
            return f"No output has the handle {name[:60]!r}. Handles stand in lines that begin with [agentkv: ."
        data = self._load(name)
        if data is None:
            return f"The output {name} is not kept any more. Run the tool again if its output is still needed."
        return _answer(_lines(data.decode("utf-8", "surrogatepass")), str(lines or ""), str(pattern or ""))

    def raw(self, handle: str) -> str | None:
        """The whole output as it came, for programs; None if it is not kept."""
        data = self._load(handle) if _HANDLE.fullmatch(handle) else None
        return None if data is None else data.decode("utf-8", "surrogatepass")

    def recall(self, key: str) -> str | None:
        """What `remember` kept under `key`, None if nothing."""
        data = self._load(f"a{self._digest('answer', key)[:24]}")
        return None if data is None else data.decode("utf-8", "surrogatepass")

    def remember(self, key: str, text: str) -> None:
        """Keep a short text under a key of the caller's, in this store's quota. Never raises."""
        try:
            self._write(f"a{self._digest('answer', key)[:24]}", text.encode("utf-8", "surrogatepass"))
        except Exception as error:
            failed("output_not_kept", error=type(error).__name__)

    def sweep(self) -> None:
        """Let go of what is too old, and of the oldest beyond the quota. Never raises."""
        try:
            with self._lock:
                self._sweep()
        except Exception as error:
            failed("outputs_not_swept", error=type(error).__name__)

    @property
    def size_bytes(self) -> int:
        """Bytes kept, as of the last sweep plus what this process has written since."""
        return self._size_bytes

    def check(self) -> None:
        """For tests: the size is the sum of what is there, and within the quota."""
        with self._lock:
            kept = sum(size for _, size, _ in self._kept())
            assert self._size_bytes == kept, (self._size_bytes, kept)
            assert kept <= self._quota_bytes, (kept, self._quota_bytes)

    def _digest(self, kind: str, text: str) -> str:
        data = kind.encode() + b"\0" + text.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(data, key=self._key, digest_size=20).digest()
        return base64.b32encode(digest).decode().lower()

    def _write(self, name: str, data: bytes) -> None:
        if len(data) > self._quota_bytes:
            count("output_over_quota")
            return
        with self._lock:
            now_ms = self._clock.wall_ms()
            if self._folder is None:
                if name not in self._memory:
                    self._size_bytes += len(data)
                self._memory[name] = (data, now_ms)
                self._memory.move_to_end(name)
            elif self._put_file(self._folder / name, data, now_ms):
                self._size_bytes += len(data)
            if self._size_bytes > self._quota_bytes:
                self._sweep()

    def _put_file(self, path: Path, data: bytes, now_ms: int) -> bool:
        """Whether a file was added; one that is there becomes young again."""
        stamp = (now_ms / 1000, now_ms / 1000)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, stamp)
            return False
        aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.utime(aside, stamp)
            aside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        return True

    def _load(self, name: str) -> bytes | None:
        try:
            if self._folder is not None:
                return (self._folder / name).read_bytes()
            with self._lock:
                found = self._memory.get(name)
            return None if found is None else found[0]
        except FileNotFoundError:
            return None
        except OSError as error:
            failed("output_not_read", error=type(error).__name__)
            return None

    def _kept(self) -> list[tuple[int, int, str]]:
        """(wall_ms, bytes, name) of everything that is kept, oldest first."""
        if self._folder is None:
            return sorted((stamp, len(data), name) for name, (data, stamp) in self._memory.items())
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.name != _KEY_FILE and entry.is_file(follow_symlinks=False):
                        state = entry.stat(follow_symlinks=False)
                        found.append((round(state.st_mtime * 1000), state.st_size, entry.name))
        return sorted(found)

    def _sweep(self) -> None:
        kept = self._kept()
        size = sum(bytes_kept for _, bytes_kept, _ in kept)
        oldest_ms = self._clock.wall_ms() - self._keep_s * 1000
        # some room below the quota, so that a full store is not swept at each write
        room = self._quota_bytes if size <= self._quota_bytes else self._quota_bytes * 9 // 10
        for at, (stamp, size_bytes, name) in enumerate(kept):
            if stamp >= oldest_ms and (size <= room or (at == len(kept) - 1 and size_bytes <= self._quota_bytes)):
                break
            if self._folder is None:
                del self._memory[name]
            else:
                (self._folder / name).unlink(missing_ok=True)
            size -= size_bytes
        self._size_bytes = size


def reader(outputs: Outputs) -> Callable[..., str]:
    """The tool `read_output` for a model: a plain function with a docstring that tells it what to do."""

    def read_output(handle: str, lines: str = "", pattern: str = "") -> str:
        """Read parts of a long tool output that was shortened.

        A shortened output ends with a line such as [agentkv: 812 of 900 lines left out; read_output("k3f9...")].
        Ask for the lines you need; each comes with its number.

        Args:
            handle: The handle in that line, for example "k3f9...".
            lines: Which lines, for example "40-80", "12" or "200-". A gap is shown as "... lines 40-80".
            pattern: Only lines that contain this text; "a|b" finds either, "a.*b" finds b somewhere after a.
        """
        return outputs.read(handle, lines=lines, pattern=pattern)

    assert read_output.__name__ == READER
    return read_output


_KEY_FILE = ".key"
_KEY_BYTES = 32


def _opened(folder: Path) -> bytes:
    """The folder's key; makes folder and key where there are none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        path = folder / _KEY_FILE
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                key = path.read_bytes()
                if len(key) == _KEY_BYTES:
                    return key
                failed("outputs_key_damaged", advice="handles given out before cannot be read any more")
                path.unlink(missing_ok=True)
            aside = folder / f"{_KEY_FILE}.{os.getpid()}.{secrets.token_hex(4)}"
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was first: its key counts
                os.link(aside, path)
            aside.unlink()
        return path.read_bytes()
    except OSError as error:
        raise DiskUnavailable(f"outputs cannot be kept in {folder}: {error.strerror or error}") from error


def _lines(raw: str) -> list[str]:
    whole = clean(raw)
    return lines_of(readable(whole) or whole)


def _answer(lines: list[str], span: str, pattern: str) -> str:
    first, last, note = _span(span, len(lines))
    if pattern:
        chosen = [at for at in range(first - 1, last) if _found(lines[at], pattern)]
        if not chosen:
            return f"{note}No line of {first}-{last} contains {pattern[:80]!r} (of {len(lines)} lines in all)."
        note += f"{len(chosen)} of {len(lines)} lines contain {pattern[:80]!r}.\n"
    else:
        chosen = list(range(first - 1, last))
    told: list[str] = []
    left = ANSWER_CHARS
    for at in chosen:
        told.append(f"{at + 1}: {lines[at]}")
        left -= len(told[-1]) + 1
        if left < 0:
            told.pop()
            break
    rest = "" if len(told) == len(chosen) else _rest(chosen, len(told), pattern)
    if not (span or pattern) and len(chosen) < len(lines):
        rest = f"\n(of {len(lines)} lines; ask for others by number or pattern)"
    return note + "\n".join(told) + rest


def _rest(chosen: list[int], told: int, pattern: str) -> str:
    more = f"lines={chosen[told] + 1}-{chosen[-1] + 1}" + (" with the same pattern" if pattern else "")
    return f"\n({len(chosen) - told} more lines; go on with {more})"


def _span(span: str, total: int) -> tuple[int, int, str]:
    """First and last line, 1-based and both there, and a word about what was wrong with `span`."""
    if not span.strip():
        return 1, total, ""
    found = _SPAN.fullmatch(span.replace("\u2013", "-").replace("lines", ""))
    if found is None or not (found[1] or found[3]):
        return 1, total, f'lines={span[:40]!r} is no range such as "40-80"; from the beginning:\n'
    first = int(found[1] or 1)
    last = first if found[2] is None else int(found[3] or total)
    if first > last:
        first, last = last, first
    if first > total:
        return max(1, total - 20), total, f"There are only {total} lines; the last ones:\n"
    return max(1, first), min(max(1, last), total), ""


def _found(line: str, pattern: str) -> bool:
    """Whether one of the alternatives is in `line`: parts in order. No regular expression, so no slow one."""
    folded = line.casefold()
    for alternative in pattern.casefold().split("|"):
        at = 0
        for part in alternative.replace("\\", "").split(".*"):
            at = folded.find(part, at)
            if at < 0:
                break
            at += len(part)
        else:
            return True
    return False
