"""Running a tool: a real program in its own process group, with a deadline, ended at once when the demo is."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_KEPT_BYTES = 64 * 1024  # of a long output's head and of its tail
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_POLL_S = 0.05


class Stopped(Exception):
    """The demo was stopped while a tool ran."""


def run_tool(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float, stop: threading.Event) -> str:
    """The program's output and how it ended. Whatever it started is killed with it.

    Raises Stopped when `stop` is set; the process group is gone by then.
    """
    with tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen(  # noqa: S603  the demo's own work list
                argv, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )  # fmt: skip
        except OSError as error:
            return f"cannot run {argv[0]}: {error.strerror}"
        try:
            ended_in_time = _wait(process, timeout_s, stop)
        finally:
            _kill_group(process)
        text = _text_of(out)
    if not ended_in_time:
        return f"{text}\n(killed after {timeout_s:g} s)"
    return text if process.returncode == 0 else f"{text}\n(exit code {process.returncode})"


def _wait(process: subprocess.Popen[bytes], timeout_s: float, stop: threading.Event) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if stop.is_set():
            raise Stopped
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return True
    return False


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the group outlives its leader while a child of it runs
    else:
        process.kill()
    process.wait()


def _text_of(out: BinaryIO) -> str:
    size = out.seek(0, os.SEEK_END)
    out.seek(0)
    data = out.read(2 * _KEPT_BYTES)
    if size > len(data):
        out.seek(size - _KEPT_BYTES)
        data = data[:_KEPT_BYTES] + b"\n[...]\n" + out.read()
    return _TERMINAL_CODES.sub("", data.decode("utf-8", "replace")).strip()
