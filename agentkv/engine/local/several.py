"""Several devices: an embedded engine on each, over one host arena and one disk, so that a task can wake on another one.

Covers where a task lives, moving it with its sessions, and one face for all engines. Does not cover: sharing slots
(`kv/family.py`), computing (`engine.py`). A task lives on one device at a time, so its calls find its blocks; it moves
only between calls, when its own device is crowded and another one is not. What had been written to host or disk goes
along without a byte copied; the rest is computed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Move, Receipt, Residency
from agentkv.core.task import Caller
from agentkv.engine.base import Request
from agentkv.engine.local.archive import disk_tier
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import LoadedModel
from agentkv.engine.stream import Stream
from agentkv.errors import ConfigError
from agentkv.kv.family import hand_over, make_family
from agentkv.kv.index import root_key

CROWD = 4
"""So many calls on a device make a task leave it, if another one has at most half as many."""


class LocalEngines:
    """One LocalEngine per model in `models` (one and the same model, loaded on each device); see engine/base.py.

    `device_memory` is per device, the rest is shared and means what it means for LocalEngine; `options` go to each
    engine. A context manager. Raises ConfigError on sizes that cannot work, or different models.
    """

    sends_own_text = True  # of earlier turns

    def __init__(
        self,
        models: Sequence[LoadedModel],
        *,
        device_memory: int,
        host_memory: int,
        disk: Path | None = None,
        disk_memory: int = 0,
        salt: str = "",
        persist: bool = False,
        at_close: Callable[[Mapping[str, Any]], None] | None = None,
        **options: Any,
    ) -> None:
        first = models[0]
        if len({model.fingerprint for model in models}) != 1:
            raise ConfigError("several devices need one and the same model on each")
        store = root_key(fingerprint=first.fingerprint, salt=salt).hex() if persist else None
        slab, disk_off = disk_tier(disk, disk_memory, first.geometry.block_bytes, store)
        try:
            family = make_family(first.geometry, device=str(first.device), host_bytes=host_memory, slab=slab)
        except BaseException:
            if slab is not None:
                slab.close()
            raise
        self.model = first.name
        self.engines: list[LocalEngine] = []
        self._at_close = at_close
        self._lock = threading.Lock()
        self._homes: dict[str, LocalEngine] = {}
        self._moved = 0
        try:
            for model in models:
                engine = LocalEngine(
                    model,
                    device_memory=device_memory,
                    family=family,
                    disk_off=disk_off,
                    salt=salt,
                    persist=persist,
                    **options,
                )
                self.engines.append(engine)
        except BaseException:
            self.close()
            raise
        self.context_tokens = min(engine.context_tokens for engine in self.engines)
        self.count_text = self.engines[0].count_text
        self.text_ids = self.engines[0].text_ids
        self._homes.update(dict.fromkeys(self.engines[0]._sessions.tasks(), self.engines[0]))

    # -- where a task lives

    def _home(self, task: str) -> LocalEngine:
        """The engine for the task's next call. Correctness never depends on it."""
        with self._lock:
            home = self._homes.get(task)
            calm = min(self.engines, key=_calls)
            if home is None:
                self._homes[task] = calm
                return calm
            if _calls(home) < CROWD or 2 * _calls(calm) > _calls(home):
                return home
            if not _take_over(task, source=home, to=calm):
                return home
            self._homes[task] = calm
            self._moved += 1
            return calm

    def _of_session(self, session: str) -> LocalEngine:
        known = (engine for engine in self.engines if engine.residency(session) is not None)
        return next(known, self.engines[0])

    # -- one face

    def submit(self, request: Request) -> Stream:
        return self._home(request.caller.task).submit(request)

    def count_tokens(self, request: Request) -> int:
        return self._home(request.caller.task).count_tokens(request)

    def last_session(self, caller: Caller) -> str | None:
        with self._lock:
            home = self._homes.get(caller.task)
        return None if home is None else home.last_session(caller)

    def residency(self, session: str) -> Residency | None:
        return self._of_session(session).residency(session)

    def apply(self, move: Move, on_receipt: Callable[[Receipt], None] | None = None) -> bool:
        return self._of_session(move.session).apply(move, on_receipt)

    def expect(
        self, session: str, at_s: float | None, forecast: Forecast | None = None, started_s: float | None = None
    ) -> None:
        self._of_session(session).expect(session, at_s, forecast, started_s)

    def rank_by(self, rank: Callable[[Any, float], tuple[float, ...]]) -> None:
        for engine in self.engines:
            engine.rank_by(rank)

    def finish_task(self, task: str) -> None:
        with self._lock:
            self._homes.pop(task, None)
        for engine in self.engines:
            engine.finish_task(task)

    def finish_sessions(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            self._of_session(session).finish_sessions((session,))

    def stats(self) -> Mapping[str, Any]:
        """What each device says, and the sums of what can be added."""
        each = [engine.stats() for engine in self.engines]
        summed = {name: sum(one[name] for one in each) for name in each[0] if isinstance(each[0][name], int)}
        return {**summed, "moved_tasks": self._moved, "model": each[0]["model"], "kv": each[0]["kv"], "devices": each}

    def close(self) -> None:
        at_close, self._at_close = self._at_close, None
        if at_close is not None and self.engines:
            at_close(self.engines[0].stats())
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _calls(engine: LocalEngine) -> int:
    """Calls under way."""
    return len(engine._arrived) + len(engine._batch.everyone())


def _take_over(task: str, *, source: LocalEngine, to: LocalEngine) -> bool:
    """Have the task live there from now on, with all its sessions. False if a call of it is under way."""
    sessions = source._sessions.take_out(task)
    for session in sessions or ():
        source._forget(*session.others)
        session.others = {}
        to._sessions.revive(session)
        hand_over(session.key, source=source.tiers, to=to.tiers)
        source._batch.admission.hand_over(session.key, to._batch.admission)
    return sessions is not None
