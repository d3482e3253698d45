"""Injection: what an engine wants to be told, added to requests that somebody else's OpenAI client sends.

Covers sync and async HTTP clients for `openai.OpenAI(http_client=...)`, ChatOpenAI's `http_client` and `http_async_client`, and
what happens when a server does not understand: fields that it names in a 400 or 422, or that it cannot do with, are left
out for this server from then on, and the request is sent once more. The user's own values win, field by field and header
by header. Does not cover what is worth saying (`Extra` comes from an adapter). Built on whatever HTTP library the
installed openai package builds on.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentkv import log

_REFUSED = frozenset({400, 422})
_FINE = 300
_HEADER = re.compile(r"[A-Za-z0-9-]+")
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_MODEL_CALLS = ("/chat/completions", "/completions", "/responses", "/messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What a request is to carry beside what the user wrote. `priority` goes out only where `priority_ok` says so:
    elsewhere a stock server refuses the whole request.
    """

    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    priority_ok: bool = False


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both, deeply; where both say something, theirs."""
    result = dict(ours)
    for name, value in theirs.items():
        mine = result.get(name)
        result[name] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return result


class Injector:
    """Adds what `extra()` says, which is asked for each request, on the thread or task that sends it. Thread-safe."""

    def __init__(self, extra: Callable[[], Extra | None]) -> None:
        self._extra = extra
        self._lock = threading.Lock()
        self._refused: dict[str, frozenset[str]] = {}
        self._accepted: set[tuple[str, frozenset[str]]] = set()

    def refused(self, origin: str) -> frozenset[str]:
        """The fields that this server (`http://host:port`) was found not to take."""
        return self._refused.get(origin, frozenset())

    def flow(self, request: Any) -> Generator[Any, Any, Any]:
        """Yields requests to send and is sent their responses (a refusal's body already read); returns the one that counts."""
        told, names = self._told(request)
        response = yield told
        if not names:
            return response
        origin = _origin(request)
        if response.status_code < _FINE:
            self._accepted.add((origin, names))
            return response
        if response.status_code not in _REFUSED:
            return response
        named = frozenset(name for name in names if name in response.text)
        if not named and (origin, names) in self._accepted:
            return response  # these it has taken before: the user's own mistake
        left_out = named or names
        again, _ = self._told(request, without=left_out)
        second = yield again
        if named or second.status_code < _FINE:
            with self._lock:
                self._refused[origin] = self.refused(origin) | left_out
            log.warn_once("fields_refused", origin=origin, fields=sorted(left_out), note="left out from now on")
            return second
        return response  # it was not us: the first answer speaks of the user's whole request

    def _told(self, request: Any, *, without: frozenset[str] = frozenset()) -> tuple[Any, frozenset[str]]:
        """The request with what it is to carry, and the body fields that were added; as it was if there are none."""
        try:
            if request.method != "POST" or not request.url.path.endswith(_MODEL_CALLS):
                return request, frozenset()
            extra = self._extra()
            if extra is None:
                return request, frozenset()
            unwanted = self.refused(_origin(request)) | without
            body = {name: value for name, value in extra.body.items() if name not in unwanted}
            if not extra.priority_ok:
                body.pop("priority", None)
            headers = {
                name: value for name, value in extra.headers.items()
                if name not in request.headers and _HEADER.fullmatch(name) and _VALUE.fullmatch(value)
            }  # fmt: skip
            if not body and not headers:
                return request, frozenset()
            content = spliced(request.read(), body)
            if content is None:
                return request, frozenset()
            for name in ("content-length", "transfer-encoding"):
                headers.setdefault(name, "")
            kept = [(name, value) for name, value in request.headers.raw if name.lower().decode() not in headers]
            kept += [(name.encode(), value.encode()) for name, value in headers.items() if value]
            made = type(request)(
                request.method, request.url, headers=kept, content=content, extensions=request.extensions
            )
            return made, frozenset(body)
        except Exception as error:
            log.failed("injection_failed", error=type(error).__name__)
            return request, frozenset()


def spliced(content: bytes, ours: Mapping[str, Any]) -> bytes | None:
    """A JSON object's text with our fields in it; None for what is no JSON object.

    Usually none of our names stands in it, and they are put behind its last field without reading the rest, which may
    be a megabyte of messages. (Inside a string a quoted name has a backslash before its quotes.)
    """
    if not ours:
        return content
    text = content.strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        return None
    plain = all(name.isascii() for name in ours)
    if plain and text[1:-1].strip() and not any(json.dumps(name).encode() in text for name in ours):
        return text[:-1] + b"," + json.dumps(ours, separators=(",", ":")).encode()[1:]
    theirs = json.loads(text)
    return json.dumps(merged(ours, theirs), separators=(",", ":"), ensure_ascii=False).encode()


def injecting_client(injector: Injector, **options: Any) -> Any:
    """An HTTP client for `openai.OpenAI(http_client=...)`; `options` are the HTTP library's own."""
    import openai

    class Injecting(openai.DefaultHttpxClient):
        def send(self, request: Any, **how: Any) -> Any:
            flow = injector.flow(request)
            told = next(flow)
            while True:
                response = super().send(told, **how)
                if response.status_code in _REFUSED:
                    response.read()
                try:
                    told = flow.send(response)
                except StopIteration as end:
                    return end.value

    return Injecting(**options)


def injecting_async_client(injector: Injector, **options: Any) -> Any:
    """The same for `openai.AsyncOpenAI`."""
    import openai

    class Injecting(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, **how: Any) -> Any:
            flow = injector.flow(request)
            told = next(flow)
            while True:
                response = await super().send(told, **how)
                if response.status_code in _REFUSED:
                    await response.aread()
                try:
                    told = flow.send(response)
                except StopIteration as end:
                    return end.value

    return Injecting(**options)


def _origin(request: Any) -> str:
    url = request.url
    return f"{url.scheme}://{url.host}:{url.port or ''}"
