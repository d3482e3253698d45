"""Injection: what an engine wants to be told, added to requests that somebody else's OpenAI client sends.

Covers what is added to a request, and what happens when a server does not understand: the request goes once more as the
user wrote it, and where that helped, the fields that it named in its 400 or 422 (all of ours, if none) are left out from
then on (`refusals.py`). The user's own values win, field by field and header by header. Does not cover what is
worth saying (`Extra` comes from an adapter) nor the HTTP clients that ask it (`inject_clients.py`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from typing import Any

from agentkv import log
from agentkv.adapters.base import Extra
from agentkv.adapters.heard import Heard
from agentkv.adapters.inject_clients import injecting_async_client, injecting_client
from agentkv.adapters.places import MODEL_CALLS, place_of
from agentkv.adapters.refusals import Place, Refusals, is_about_another, named_in

__all__ = [
    "Extra", "Injector", "Place", "injecting_async_client", "injecting_client", "merged", "named_in", "spliced",
]  # fmt: skip

REFUSED = frozenset({400, 422})
"""What a server answers that does not take a field."""

_FINE = 300
_BYTES_PER_TOKEN = 4
_HEADER = re.compile(r"[A-Za-z0-9-]+")
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\\\]{1,200})"')  # inside a text its quotes would be escaped
_OF_THE_BODY = (b"content-length", b"transfer-encoding")
_MODEL_LOOKS = 8
_MOST_HOPS = 20


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both, deeply; where both say something, theirs."""
    result = dict(ours)
    for name, value in theirs.items():
        mine = result.get(name)
        result[name] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return result


Asked = Callable[[Any], Extra | None]
Shape = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]


class Injector:
    """Adds what `extra(request)` says, which is asked for each request, on the thread or task that sends it. Thread-safe.

    `flow` may be given an Extra of its own instead. `on_refused(place, names)` hears what is not sent there any more,
    `ended(request, extra, tokens, cached_tokens)` when a request that carried something is over: what its answer said of its
    tokens, else about how many its prompt has, and None.
    `may_wait(request)`: whether `extra` may block, so that an event loop must not ask it.
    """

    def __init__(
        self,
        extra: Asked | None = None,
        *,
        on_refused: Callable[[Place, frozenset[str]], None] | None = None,
        ended: Callable[[Any, Extra, int, int | None], None] | None = None,
        may_wait: Callable[[Any], bool] | None = None,
    ) -> None:
        self._extra = extra
        self._on_refused = on_refused
        self._ended = ended
        self._may_wait = may_wait
        self._refusals = Refusals()

    def refused(self, origin: str) -> frozenset[str]:
        """The fields that this server (its `places.place`) was found not to take, for any of its routes and models."""
        return self._refusals.at(origin)

    def refuse(self, origin: str, names: frozenset[str], *, path: str = "", model: str = "") -> None:
        """From now on these fields are left out for this server; or only for this path there, and this model."""
        self._refusals.add(Place(origin, path, model), names)

    def forget(self, origin: str) -> None:
        """Another server is there now: nothing holds of what was found."""
        self._refusals.forget(origin)

    def may_wait(self, request: Any) -> bool:
        """Whether asking what this request is to carry may take longer than an event loop has."""
        return self._may_wait is not None and self._may_wait(request)

    def ended(self, request: Any, extra: Extra | None, heard: Heard | None = None) -> None:
        """The request is over, whatever became of it, with what was heard of its answer. Never raises."""
        if self._ended is None or extra is None:
            return
        try:
            said = None if heard is None else heard.usage()
            if said is None:
                self._ended(request, extra, tokens_of(request), None)
            else:
                self._ended(request, extra, said.tokens, said.cached_tokens)
        except Exception as error:
            log.failed("injection_failed", error=type(error).__name__)

    def flow(self, request: Any, extra: Extra | None, *, follows: bool = True) -> Generator[Any, Any, Any]:
        """Yields requests to send and is sent their responses (a refusal's body already read); returns the one that counts.

        Whoever sends them follows redirects of `request` itself alone, as its user wishes: of the others, this does.
        """
        told, names, place = self._told(request, extra)
        response = yield from _sent(told, request, follows=follows)
        if response is None:
            return (yield request)  # to another server nothing of ours goes: it is sent the user's own request
        fine = response.status_code < _FINE
        if fine:
            self._saw(told, extra)
        if extra is None or place is None or not names or (not fine and response.status_code not in REFUSED):
            return response
        if fine:
            self._refusals.take(place, names, extra.marks)
            return response
        named = named_in(response.text, names)
        if not named and (self._refusals.were_taken(place, names) or is_about_another(response.text)):
            return response  # the user's own mistake
        second = yield request  # a server may name one field at a time: with any other of ours it could refuse once more
        if second.status_code < _FINE:
            self._saw(request, extra)
            self._learn(place, named or names, extra.marks)
            return second
        # that it was us is not proved: a server may name our field only because it repeats the whole request
        return second if named or second.status_code not in REFUSED else response

    def _learn(self, place: Place, names: frozenset[str], marks: frozenset[str]) -> None:
        left_out = self._refusals.learn(place, names, marks)
        if not left_out:
            return
        note = "left out from now on"
        log.warn_once("fields_refused", origin=place.origin, path=place.path, fields=sorted(left_out), note=note)
        if self._on_refused is not None:
            self._on_refused(place, left_out)

    def _saw(self, told: Any, extra: Extra | None) -> None:
        if extra is None or extra.saw is None or not is_model_call(told):
            return
        try:
            extra.saw(told)
        except Exception as error:
            log.failed("injection_failed", error=type(error).__name__)

    def asked(self, request: Any) -> Extra | None:
        """What this request is to carry; may block where `may_wait(request)`. Never raises."""
        if self._extra is None or not is_model_call(request):
            return None
        try:
            return self._extra(request)
        except Exception as error:
            log.failed("injection_failed", error=type(error).__name__)
            return None

    def _told(self, request: Any, extra: Extra | None) -> tuple[Any, frozenset[str], Place | None]:
        """The request with what it is to carry, the body fields that were added, and where it goes; as it was if there are none."""
        as_it_was = request, frozenset[str](), None
        try:
            if extra is None or not is_model_call(request):
                return as_it_was
            if extra.routes and not request.url.path.endswith(extra.routes):
                return as_it_was
            place = Place(place_of(request), request.url.path, model_of(request))
            unwanted = self._refusals.of(place)
            wanted = dict(extra.body)
            for route, fields in extra.paths.items():
                if request.url.path.endswith(route):
                    wanted |= fields
            body = {name: value for name, value in wanted.items() if name not in unwanted}
            if not extra.priority_ok:
                body.pop("priority", None)
            headers = {
                name: value for name, value in extra.headers.items()
                if name not in request.headers and _HEADER.fullmatch(name) and _VALUE.fullmatch(value)
            }  # fmt: skip
            shaped = None if extra.shape is None or extra.marks & unwanted else _shaped(request, extra.shape)
            if not body and not headers and shaped is None:
                return as_it_was
            content = spliced(request.read(), body) if shaped is None else _whole(shaped, body)
            if content is None:
                return as_it_was
            return _made(request, content, headers), frozenset(body) | (extra.marks if shaped else frozenset()), place
        except Exception as error:
            log.failed("injection_failed", error=type(error).__name__)
            return as_it_was


def _shaped(request: Any, shape: Shape) -> Mapping[str, Any] | None:
    """The body that the adapter makes of the user's; None where it changes nothing."""
    theirs = json.loads(request.read())
    return shape(request.url.path, theirs) if isinstance(theirs, dict) else None


def _whole(shaped: Mapping[str, Any], ours: Mapping[str, Any]) -> bytes:
    """A body that was parsed anyway, with our fields behind it: written once."""
    whole = dict(shaped)
    for name, value in ours.items():
        whole[name] = merged({name: value}, {name: whole[name]})[name] if name in whole else value
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()


def _made(request: Any, content: bytes, headers: Mapping[str, str]) -> Any:
    """The request with another body and more headers. By its stream: the library would read all headers a second time."""
    kept = [(name, value) for name, value in request.headers.raw if name.lower() not in _OF_THE_BODY]
    kept += [(name.encode(), value.encode()) for name, value in headers.items()]
    kept.append((b"Content-Length", b"%d" % len(content)))
    library = sys.modules[type(request).__module__.partition(".")[0]]
    made = type(request)(
        request.method, request.url, headers=kept, stream=library.ByteStream(content), extensions=request.extensions
    )
    made.read()
    return made


def spliced(content: bytes, ours: Mapping[str, Any]) -> bytes | None:
    """A JSON object's text with our fields in it; None for what is no JSON object.

    Usually none of our names stands in it, and they are put behind its last field without reading the rest, which may
    be a megabyte of messages. (Inside a string a quoted name has a backslash before its quotes.) Looked for from the end:
    that is four times as fast, since a name begins with a quote, and texts have few.
    """
    if not ours:
        return content
    text = content.strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        return None
    named = any(not name.isascii() or text.rfind(_quoted(name)) >= 0 for name in ours)
    if not named and (text[1:64].strip() not in (b"", b"}") or text[1:-1].strip()):
        return b"".join((memoryview(text)[:-1], b",", json.dumps(ours, separators=(",", ":")).encode()[1:]))
    theirs = json.loads(text)
    return json.dumps(merged(ours, theirs), separators=(",", ":"), ensure_ascii=False).encode()


@lru_cache(maxsize=256)
def _quoted(name: str) -> bytes:
    return json.dumps(name).encode()


def _sent(told: Any, request: Any, *, follows: bool) -> Generator[Any, Any, Any]:
    """Yields `told`, and sends it on where its server redirects it to itself; None where another server is to have it."""
    response = yield told
    if told is request or not follows:
        return response
    for _ in range(_MOST_HOPS):
        onward = getattr(response, "next_request", None)
        if onward is None:
            return response
        if origin_of(onward) != origin_of(request):
            break
        response = yield onward
    return None


def is_model_call(request: Any) -> bool:
    """Whether it goes to a route that we know: not to everything that ends in "messages", such as a thread's."""
    return request.method == "POST" and bool(request.url.path.endswith(MODEL_CALLS))


def model_of(request: Any) -> str:
    """The model that a request names; "" where that cannot be seen at once.

    It stands in front, or behind the messages, which may hold such a field of their own: looked for from the end.
    """
    content = request.read()
    found = _MODEL.match(content, 1)
    end = len(content)
    for _ in range(_MODEL_LOOKS):
        if found is not None:
            return found.group(1).decode("utf-8", "replace")
        end = content.rfind(b'"model"', 0, end)
        if end < 0:
            break
        found = _MODEL.match(content, end)
    return ""


def tokens_of(request: Any) -> int:
    """About how many tokens its prompt has."""
    return len(request.read()) // _BYTES_PER_TOKEN


def within_s(request: Any) -> float | None:
    """The caller's own time-out: so long nothing of an answer may come; None for ever."""
    read_s = request.extensions.get("timeout", {}).get("read")
    return None if read_s is None else float(read_s)


def origin_of(request: Any) -> str:
    """Where a request goes: scheme, host and port."""
    url = request.url
    return f"{url.scheme}://{url.host}:{url.port or ''}"
