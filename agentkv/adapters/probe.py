"""Probe: what answers at an address, and what it can take, asked once and remembered with an age.

Covers identity (quick GETs that any server may refuse), the one request that asks whether a server takes a `priority`
(only where the user allows it), neither at a public host unless the user says so, and the file in which both are kept.
Does not cover what is then said to an engine. What is remembered holds for the same engine of the same version with the
same models, for a day.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentkv import log
from agentkv.adapters.base import Unreachable
from agentkv.adapters.http import Endpoint
from agentkv.adapters.places import is_own, place

PROBE_S = 1.0
PRIORITY_S = 20.0
"""How long the request that asks for a priority may take: a busy server answers late."""
KEPT_S = 86_400.0
MOST_ENDPOINTS = 256
MOST_REFUSED = 64
"""Fields of one endpoint that it refused, each for a route and a model; the oldest is asked again."""
SCHEMA = "agentkv.endpoints/2"
_NOT_YET = (502, 503, 504)
"""A server that loads its model, or whose gateway has none yet."""
_LARGEST_BYTES = 1 << 18
PROVIDERS = {"openai.com": "openai", "anthropic.com": "anthropic"}
"""Hosts of which the address says what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of an endpoint: `priority` None where it was not asked; `refused` (path, model, field) are not sent again."""

    engine: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    priority: bool | None = None
    refused: tuple[tuple[str, str, str], ...] = ()
    at_s: float = 0.0

    def same(self, other: Known) -> bool:
        """The same server, as far as it says."""
        return (self.engine, self.version, self.models) == (other.engine, other.version, other.models)


def provider(base_url: str) -> str | None:
    """The hosted provider at this address: its name, "" for any other public host, None for the user's own (`is_own`).

    A public host is never asked, nor sent anything of ours, unless the user says what it is: whose it is nobody knows.
    """
    try:
        host = (urlsplit(base_url).hostname or "").rstrip(".")
    except ValueError:
        return ""
    for known, name in PROVIDERS.items():
        if host == known or host.endswith(f".{known}"):
            return name
    return None if is_own(base_url) else ""


def identify(base_url: str, *, api_key: str = "", within_s: float = PROBE_S, anyway: bool = False) -> Known:
    """What answers at `base_url`, in at most `within_s` together. Raises Unreachable where nothing does, or not yet.

    A public host is not asked, but `anyway`.
    """
    named = None if anyway else provider(base_url)
    if named is not None:
        return Known(engine=named)
    server = Endpoint(base_url, api_key=api_key)
    ends_s = time.monotonic() + within_s
    busy = ""

    def ask(path: str) -> Any:
        nonlocal busy
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise Unreachable(f"{path}: no time left")
        try:
            return server.get(path, left_s)
        except Unreachable as error:
            if error.status is None:
                raise
            if error.status in _NOT_YET:
                busy = str(error)
            return None  # it answered, and has no such route

    try:
        engine, version = _identity(ask)
        if busy and not engine:
            raise Unreachable(busy)
        listed = ask("/v1/models") if engine else None
    finally:
        server.close()
    data = listed.get("data") if isinstance(listed, Mapping) else None
    models = (
        [str(one["id"]) for one in data if isinstance(one, Mapping) and "id" in one] if isinstance(data, list) else []
    )
    return Known(engine=engine, version=version, models=tuple(sorted(models)[:8]))


def _identity(ask: Callable[[str], Any]) -> tuple[str, str]:
    """Engine and version by its own words: routes that only this engine has."""
    props = ask("/props")
    if isinstance(props, Mapping) and "total_slots" in props:
        return "llama.cpp", str(props.get("build_info", ""))[:64]
    version = ask("/version")
    if isinstance(version, Mapping) and isinstance(version.get("version"), str):
        return "vllm", version["version"][:64]
    health = ask("/health")
    if isinstance(health, Mapping) and ("endpoints" in health or "instances" in health):
        return "dynamo", ""
    info = ask("/server_info")
    if isinstance(info, Mapping) and "radix_eviction_policy" in info:
        return "sglang", str(info.get("version", ""))[:64]
    return "", ""


def takes_priority(base_url: str, *, api_key: str, model: str, within_s: float = PRIORITY_S) -> bool:
    """Ask with one request of one token that carries a priority. Raises Unreachable where the answer says neither."""
    server = Endpoint(base_url, api_key=api_key)
    body = {
        "model": model, "messages": [{"role": "user", "content": "ok"}], "max_tokens": 1, "stream": False, "priority": 1,
    }  # fmt: skip
    try:
        server.post("/v1/chat/completions", body, within_s)
    except Unreachable as error:
        if error.status in (400, 422, 501):
            return False
        raise
    finally:
        server.close()
    return True


class Endpoints:
    """What was learnt of endpoints, in `folder` (None: only here). Thread-safe; a file that is broken is started anew."""

    def __init__(self, folder: Path | None, *, now_s: Callable[[], float] = time.time) -> None:
        self._path = None if folder is None else folder / "endpoints.json"
        self._now_s = now_s
        self._lock = threading.Lock()
        self._known: dict[str, Known] | None = None

    def learned(
        self,
        base_url: str,
        known: Known,
        *,
        api_key: str | None = None,
        probe_priority: bool = False,
        anyway: bool = False,
    ) -> Known:
        """`known` with what is remembered of the same server; asks for the priority where that is allowed and open.

        A public host is not asked, but `anyway`.
        """
        where = place(base_url)
        with self._lock:
            before = self._all().get(where)
        if before is not None and before.same(known) and 0 <= self._now_s() - before.at_s < KEPT_S:
            known = before
        is_open = known.engine and known.models and known.priority is None and probe_priority
        if is_open and (anyway or provider(base_url) is None):
            try:
                taken = takes_priority(base_url, api_key=api_key or "", model=known.models[0])
            except Unreachable as error:
                log.warn_once("priority_not_probed", origin=where, error=str(error))
            else:
                known = replace(known, priority=taken, at_s=self._now_s())
                self._put(where, known)
        return known

    def refused(self, base_url: str, known: Known, names: frozenset[str], *, path: str = "", model: str = "") -> None:
        """The server does not take these fields, for this path and model."""
        if not known.engine:
            return  # of a server that says nothing of itself nothing holds tomorrow
        where = place(base_url)
        with self._lock:
            before = self._all().get(where)
        base = before if before is not None and before.same(known) else known
        refused = dict.fromkeys([*base.refused, *((path, model, name) for name in sorted(names))])
        self._put(where, replace(base, refused=tuple(refused)[-MOST_REFUSED:], at_s=self._now_s()))

    def _put(self, where: str, known: Known) -> None:
        with self._lock:
            entries = self._all()
            entries[where] = known
            while len(entries) > MOST_ENDPOINTS:
                del entries[min(entries, key=lambda one: entries[one].at_s)]
            self._write(entries)

    def _all(self) -> dict[str, Known]:
        if self._known is None:
            self._known = {} if self._path is None else _read(self._path)
        return self._known

    def _write(self, entries: Mapping[str, Known]) -> None:
        if self._path is None:
            return
        text = json.dumps({"schema": SCHEMA, "endpoints": {where: asdict(known) for where, known in entries.items()}})
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            part.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            log.warn_once("endpoints_not_kept", error=str(error))


def _read(path: Path) -> dict[str, Known]:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            return {}
        body = json.loads(path.read_text(encoding="utf-8"))
        if body.get("schema") != SCHEMA:
            return {}
        return {str(where): _known(entry) for where, entry in body["endpoints"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warn_once("endpoints_unreadable", error=type(error).__name__, note="asked anew")
        return {}


def _known(entry: Mapping[str, Any]) -> Known:
    priority = entry.get("priority")
    return Known(
        engine=str(entry["engine"]), version=str(entry["version"]), models=tuple(map(str, entry["models"])),
        priority=priority if isinstance(priority, bool) else None, refused=tuple((str(path), str(model), str(name)) for path, model, name in entry["refused"]),
        at_s=float(entry["at_s"]),
    )  # fmt: skip
