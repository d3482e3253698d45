"""Door: the Unix socket at which hints come in, one JSON line each, with one line of answer.

Covers the socket (0600, in a folder of this user), its protocol and its bounds: length of a line, number and patience of
connections, answers that nobody reads. A line is a hint (`agentkv.hint/1`, docs/hints.md) or a question
(`agentkv.ask/1`); the answer is `agentkv.reply/1`. Whatever comes in, no exception goes out. Does not cover what a hint
does (`side.py`). Needs no vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentkv import log
from agentkv.adapters.vllm_door import ASK, REPLY
from agentkv.errors import ConfigError
from agentkv.hints.wire import MOST_BYTES, WireHint, read
from agentkv_vllm.config import private_folder

MOST_CONNECTIONS = 32
IDLE_S = 600.0
_MOST_UNREAD_BYTES = 65_536
_READ_BYTES = 65_536
_SWEEP_S = 30.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(slots=True)
class _Line:
    """One connection: what has come of its next line, and what it has not read of our answers."""

    socket: socket.socket
    heard_s: float
    came: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)


class Door:
    """Listens at `path` on a thread of its own. `hear(hint)` answers (outcome, detail); `state()` is for questions.

    `tick()` is called after every event and when it last said so: it returns in how many seconds to call again (None:
    after the next event). Raises ConfigError where `path` cannot be listened at. `close()` is idempotent.
    """

    def __init__(
        self,
        path: Path,
        *,
        hear: Callable[[WireHint], tuple[str, str]],
        state: Callable[[], Mapping[str, Any]],
        tick: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.path = path
        self._hear = hear
        self._state = state
        self._tick = tick
        self._closed = False
        self._lines: dict[int, _Line] = {}
        self._listener = _listening(path)
        self._inode = path.lstat().st_ino
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="agentkv-door", daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """Have `tick` called soon."""
        with contextlib.suppress(OSError):
            self._ringer.send(b"!", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Stop listening and remove the socket, if it is still ours."""
        if self._closed:
            return
        self._closed = True
        self.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()

    # -- the thread

    def _run(self) -> None:
        swept_s = time.monotonic()
        while not self._closed:
            due_s = self._ticked()
            try:
                events = self._selector.select(_SWEEP_S if due_s is None else min(due_s, _SWEEP_S))
                for key, _ in events:
                    self._event(key.fileobj)
                now_s = time.monotonic()
                if now_s - swept_s > _SWEEP_S:
                    swept_s = now_s
                    for line in [line for line in self._lines.values() if now_s - line.heard_s > IDLE_S]:
                        self._hang_up(line)
            except Exception as error:
                log.failed("vllm_door_failed", error=repr(error))
                time.sleep(0.1)
        for line in list(self._lines.values()):
            self._hang_up(line)
        self._selector.close()
        for end in (self._listener, self._bell, self._ringer):
            end.close()

    def _ticked(self) -> float | None:
        try:
            return self._tick()
        except Exception as error:
            log.failed("vllm_tick_failed", error=repr(error))
            return 1.0

    def _event(self, end: Any) -> None:
        if end is self._listener:
            self._open()
        elif end is self._bell:
            with contextlib.suppress(OSError):
                self._bell.recv(_READ_BYTES)
        else:
            line = self._lines.get(end.fileno())
            if line is not None:
                self._serve(line)

    def _open(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:
            return
        end.setblocking(False)
        _, uid, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in (os.getuid(), 0):
            log.count("vllm_door_stranger")
            end.close()
            return
        if len(self._lines) >= MOST_CONNECTIONS:
            log.count("vllm_door_full")
            self._hang_up(min(self._lines.values(), key=lambda line: line.heard_s))
        self._lines[end.fileno()] = _Line(end, time.monotonic())
        self._selector.register(end, selectors.EVENT_READ)

    def _serve(self, line: _Line) -> None:
        """Read what is there, answer whole lines; a connection that is over, or sends no lines, is closed."""
        try:
            came = line.socket.recv(_READ_BYTES)
        except BlockingIOError:
            came = None
        except OSError:
            came = b""
        if came == b"":
            self._hang_up(line)
            return
        line.heard_s = time.monotonic()
        line.came += came or b""
        while (end := line.came.find(b"\n")) >= 0:
            text = bytes(line.came[:end])
            del line.came[: end + 1]
            if text.strip():
                line.unread += self._answer(text)
        self._flush(line)
        if len(line.came) > MOST_BYTES:
            line.unread += _reply("", "failed", f"a line is at most {MOST_BYTES} bytes long")
            self._flush(line)
            self._hang_up(line)
        elif len(line.unread) > _MOST_UNREAD_BYTES:
            log.count("vllm_door_unread")
            self._hang_up(line)

    def _flush(self, line: _Line) -> None:
        with contextlib.suppress(OSError):
            while line.unread:
                sent = line.socket.send(line.unread, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del line.unread[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unread else 0)
        if self._selector.get_key(line.socket).events != wanted:
            self._selector.modify(line.socket, wanted)

    def _answer(self, text: bytes) -> bytes:
        try:
            body = json.loads(text) if len(text) <= MOST_BYTES else None
        except (ValueError, RecursionError):
            body = None
        try:
            if isinstance(body, dict) and body.get("v") == ASK:
                return _reply("", "applied", "", state=dict(self._state()))
            hint = read(body)
            if hint is None:
                return _reply("", "failed", "no hint that version 1 can read")
            return _reply(hint.id, *self._hear(hint))
        except Exception as error:
            log.failed("vllm_hint_failed", error=repr(error))
            return _reply("", "failed", type(error).__name__)

    def _hang_up(self, line: _Line) -> None:
        number = line.socket.fileno()
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        self._lines.pop(number, None)
        line.socket.close()


def _reply(name: str, outcome: str, detail: str, **more: Any) -> bytes:
    body = {"v": REPLY, "id": name, "outcome": outcome, "detail": detail, **more}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def _listening(path: Path) -> socket.socket:
    """A listening socket that only this user can open. A dead one's file is taken over, a living one's is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        private_folder(path.parent)
        _make_way(path)
        listener.bind(str(path))
        path.chmod(0o600)  # until then strangers are turned away one by one
        listener.listen(MOST_CONNECTIONS)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _make_way(path: Path) -> None:
    """Remove a socket that nobody listens at. Raises ConfigError for anything else that is there."""
    if not path.is_symlink() and not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"{path} is there already and no socket; name another one")
    if _lives(path):
        raise ConfigError(f"another engine listens at {path}; give each its own socket")
    path.unlink()


def _lives(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(str(path))
        except OSError:
            return False
        return True
