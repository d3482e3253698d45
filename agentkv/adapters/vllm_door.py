"""The plug-in's door in vLLM, seen from outside: where it is, and one line of answer for one line of hint.

Covers the address, a kept connection, deadlines, whether the plug-in serves there and for which server, and that nobody
else's process is told anything. What the plug-in does with a hint is its own affair (`integrations/agentkv_vllm`).
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentkv.adapters.base import Unreachable
from agentkv.clock import Clock

SOCKET_VARIABLE = "AGENTKV_VLLM_SOCKET"
ASK = "agentkv.ask/1"
REPLY = "agentkv.reply/1"
MOST_BYTES = 1 << 18
LOOK_S = 0.2
"""How long the question may take whether anybody serves there; a call may wait for it."""
_FIRST_AGAIN_S = 1.0
_MOST_AGAIN_S = 30.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def default_socket() -> Path:
    """Where the plug-in listens unless told otherwise: $AGENTKV_VLLM_SOCKET, else a folder of this user's alone."""
    given = os.environ.get(SOCKET_VARIABLE)
    if given:
        return Path(given)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "agentkv" if runtime else Path(tempfile.gettempdir()) / f"agentkv-{os.getuid()}"
    return folder / "vllm.sock"


class DoorCaller:
    """One connection to the door at `path`, made when it is needed. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._line: socket.socket | None = None
        self._came = b""

    def is_there(self) -> bool:
        """Whether there is a door at all, open or not."""
        return self.path.is_socket()

    def say(self, line: str, within_s: float) -> Mapping[str, Any]:
        """The answer to one line. Unreachable where there is none in time; a kept connection that is over is no failure."""
        ends_s = time.monotonic() + within_s
        for kept in (self._line is not None, False):
            try:
                return self._said(line, ends_s)
            except (OSError, ValueError) as error:
                self.close()
                if not kept or time.monotonic() >= ends_s:
                    raise Unreachable(f"{self.path}: {str(error) or type(error).__name__}") from None
        raise AssertionError("two tries at most")

    def state(self, within_s: float = 1.0) -> Mapping[str, Any]:
        """What the plug-in counts. Raises Unreachable."""
        state = self.say(json.dumps({"v": ASK}), within_s).get("state")
        return state if isinstance(state, Mapping) else {}

    def close(self) -> None:
        """Hang up. Idempotent; a later line opens anew."""
        line, self._line = self._line, None
        self._came = b""
        if line is not None:
            line.close()

    def _said(self, text: str, ends_s: float) -> Mapping[str, Any]:
        line = self._opened(ends_s)
        line.settimeout(max(1e-3, ends_s - time.monotonic()))
        line.sendall(text.encode() + b"\n")
        while b"\n" not in self._came:
            line.settimeout(max(1e-3, ends_s - time.monotonic()))
            came = line.recv(65_536)
            if not came:
                raise ConnectionError("hung up")
            self._came += came
            if len(self._came) > MOST_BYTES:
                raise ValueError("the answer does not end")
        answer, _, self._came = self._came.partition(b"\n")
        body = json.loads(answer)
        if not isinstance(body, Mapping) or body.get("v") != REPLY:
            raise ValueError("no answer that version 1 can read")
        return body

    def _opened(self, ends_s: float) -> socket.socket:
        if self._line is None:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                line.settimeout(max(1e-3, ends_s - time.monotonic()))
                line.connect(str(self.path))
                _check_owner(line)
            except BaseException:
                line.close()
                raise
            self._line = line
        return self._line


class Plug:
    """Whether our plug-in serves at `path`, for the server at `port` (None: for whichever). Thread-safe.

    A socket's file says neither: it outlives an engine that was killed, and may be that of another engine of this user. So
    the door is asked when its file is new; where it did not answer, or for another server, again later and later.
    """

    def __init__(self, path: Path, *, port: int | None, clock: Clock) -> None:
        self._path = path
        self._port = port
        self._clock = clock
        self._lock = threading.Lock()
        self._file: tuple[int, int] | None = None
        self._serves = False
        self._again_s = 0.0
        self._pause_s = _FIRST_AGAIN_S

    def serves(self) -> bool:
        """As far as is known; asks, in LOOK_S at most, where that may have changed. Without a file it costs nothing."""
        file = self._there()
        if file is None:
            return False
        if file == self._file and (self._serves or self._clock.now_s() < self._again_s):
            return self._serves
        if self._lock.acquire(blocking=False):  # else somebody asks just now
            try:
                self._look(file)
            finally:
                self._lock.release()
        return self._serves

    def doubt(self) -> None:
        """Somebody was not answered there: ask now."""
        file = self._there()
        if file is not None:
            with self._lock:
                self._look(file)

    def forget(self) -> None:
        """Ask when next somebody wants to know."""
        self._file = None

    def _there(self) -> tuple[int, int] | None:
        try:
            facts = self._path.stat()
        except OSError:
            facts = None
        if facts is None or not stat.S_ISSOCK(facts.st_mode):
            self._file, self._serves = None, False
            return None
        return facts.st_ino, facts.st_mtime_ns

    def _look(self, file: tuple[int, int]) -> None:
        caller = DoorCaller(self._path)
        try:
            serves = _is_for(self._port, caller.state(LOOK_S).get("ports"))
        except Unreachable:
            serves = False
        finally:
            caller.close()
        if serves or file != self._file:
            self._pause_s = _FIRST_AGAIN_S
        self._file, self._serves = file, serves
        self._again_s = self._clock.now_s() + self._pause_s
        if not serves:
            self._pause_s = min(2 * self._pause_s, _MOST_AGAIN_S)


def _is_for(port: int | None, ports: Any) -> bool:
    """Whether a plug-in whose server has these ports is that of the server at `port`; one that does not know is believed."""
    return port is None or not isinstance(ports, list) or not ports or port in ports


def _check_owner(line: socket.socket) -> None:
    """Only this user's own engine, or root's, is told who waits for what."""
    _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid not in (os.getuid(), 0):
        raise PermissionError("somebody else's process listens there")
