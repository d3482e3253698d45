"""Where the forecaster's state lives between runs: one JSON file in the user's data folder.

Covers loading, saving (at close and every few minutes, on a thread of its own) and several processes that share the
file: whoever saves adds only what it learnt itself since its last save to what is there, under a lock, replaces the
file in one step, and goes on with the sum. A damaged file, or one of another version, is moved aside, said once, and
learning starts afresh. Never raises: a disk that does not work costs what was learnt, not the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentkv.hints.forecaster import Forecaster, is_state
from agentkv.log import failed, warn_once

SAVE_EVERY_S = 300.0
_LARGEST_BYTES = 1 << 26
_LOCK_WAIT_S = 2.0
_STALE_PART_S = 3600.0


def data_folder() -> Path:
    """$AGENTKV_DATA, else the user's data folder."""
    folder = os.environ.get("AGENTKV_DATA")
    if folder:
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_data_dir("agentkv"))


def default_path() -> Path:
    """forecasts.json in the data folder."""
    return data_folder() / "forecasts.json"


class Learned:
    """The forecaster of one process, and its file; `path` None keeps everything in memory."""

    def __init__(self, path: Path | None, *, now_s: float = 0.0) -> None:
        self._path = path
        self._saved_s = now_s
        self._thread: threading.Thread | None = None
        self._saving = threading.Lock()
        self.forecaster = Forecaster()
        if path is not None:
            try:
                self.forecaster = _read(path) or self.forecaster
            except OSError as error:
                warn_once("forecasts_not_loaded", path=str(path), error=str(error), advice="nothing is saved either")
                self._path = None

    def save_if_due(self, now_s: float) -> None:
        """Save on a side thread if SAVE_EVERY_S have passed (`now_s` is monotonic); cheap enough for every tool end."""
        if self._path is None or now_s - self._saved_s < SAVE_EVERY_S:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._saved_s = now_s
        self._thread = threading.Thread(target=self.save, name="agentkv-learned", daemon=True)
        self._thread.start()

    def save(self) -> bool:
        """Add what was learnt since the last save to the file; False, counted, where that does not work.

        On failure the calls are kept for the next try and the file is as it was.
        """
        if self._path is None:
            return False
        with self._saving:
            state, fresh = self.forecaster.drain()
            if not fresh:
                return True
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with _locked(self._path.with_name(f".{self._path.name}.lock")):
                    there = _read(self._path)
                    if there is None:
                        there = Forecaster.from_json(state)
                    else:
                        there.replay(fresh)
                    _write(self._path, there.to_json())
            except Exception as error:
                self.forecaster.undrain(fresh)
                failed("forecasts_not_saved", path=str(self._path), error=str(error))
                return False
            self.forecaster.adopt(there)
            return True

    def close(self) -> None:
        """Save for the last time. Idempotent."""
        self.save()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _read(path: Path) -> Forecaster | None:
    """The forecaster of the file, None where there is none or what is there had to be moved aside; OSError."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        state = json.loads(data) if len(data) <= _LARGEST_BYTES else None
    except (ValueError, RecursionError):
        state = None
    if is_state(state):
        return Forecaster.from_json(state)
    version = state.get("v") if isinstance(state, dict) else None
    aside = path.with_name(f"{path.name}.aside-{uuid.uuid4().hex[:8]}")
    path.replace(aside)
    warn_once(
        "forecasts_unreadable", path=str(path), version=version, kept_as=str(aside), advice="learning starts afresh"
    )
    return None


def _write(path: Path, state: dict[str, Any]) -> None:
    """Replace the file in one step; only the user may read it (it holds names of commands)."""
    for part in path.parent.glob(f".{path.name}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _STALE_PART_S:
                part.unlink()
    part = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(state, file, separators=(",", ":"))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; TimeoutError after 2 s. Where locks do not work the last one to save wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until_s = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"another process holds {path} for more than {_LOCK_WAIT_S} s") from None
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)
