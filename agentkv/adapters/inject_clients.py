"""Clients that inject: for `openai.OpenAI(http_client=...)`, ChatOpenAI's `http_client` and `http_async_client`, and their like.

Covers sync and async HTTP clients whose requests go through an `Injector`, and that it hears when each is over, whatever
became of it: answered, cancelled while it waited for its turn, or dropped unread. Does not cover what is added (`inject.py`).
Built on whatever HTTP library the installed openai package builds on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from agentkv.adapters.base import Extra
from agentkv.adapters.watched import Once, watched

if TYPE_CHECKING:
    from agentkv.adapters.inject import Injector

_WAYS = ("proxy", "proxies", "transport", "mounts", "cert")
_STAYS = {"follow_redirects": False}
"""The HTTP library would take what was added to another server."""


def is_direct(options: Mapping[str, Any]) -> bool:
    """Whether a client with these options reaches servers as anybody does; not through what its user chose for it."""
    return options.get("verify", True) is True and all(options.get(name) is None for name in _WAYS)


def injecting_client(injector: Injector, **options: Any) -> Any:
    """An HTTP client for `openai.OpenAI(http_client=...)` and its like; `options` are the HTTP library's own."""
    import openai

    from agentkv.adapters.inject import REFUSED

    class Injecting(openai.DefaultHttpxClient):
        def send(self, request: Any, **how: Any) -> Any:
            extra = injector.asked(request)
            if extra is None:
                return super().send(request, **how)
            over = Once(partial(injector.ended, request, extra))
            try:
                flow = injector.flow(request, extra, follows=_follows(self, how))
                told = next(flow)
                while True:
                    response = super().send(told, **(how if told is request else how | _STAYS))
                    if response.status_code in REFUSED or response.next_request is not None:
                        response.read()
                    try:
                        told = flow.send(response)
                    except StopIteration as end:
                        return watched(end.value, over)
            except BaseException:
                over()
                raise

    return Injecting(**options)


def injecting_async_client(injector: Injector, **options: Any) -> Any:
    """The same for `openai.AsyncOpenAI`."""
    import openai

    from agentkv.adapters.inject import REFUSED

    class Injecting(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, **how: Any) -> Any:
            extra = await _asked(injector, request) if injector.may_wait(request) else injector.asked(request)
            if extra is None:
                return await super().send(request, **how)
            over = Once(partial(injector.ended, request, extra))
            try:
                flow = injector.flow(request, extra, follows=_follows(self, how))
                told = next(flow)
                while True:
                    response = await super().send(told, **(how if told is request else how | _STAYS))
                    if response.status_code in REFUSED or response.next_request is not None:
                        await response.aread()
                    try:
                        told = flow.send(response)
                    except StopIteration as end:
                        return watched(end.value, over)
            except BaseException:
                over()
                raise

    return Injecting(**options)


def _follows(client: Any, how: Mapping[str, Any]) -> bool:
    """Whether redirects of a request that is sent so are followed."""
    said = how.get("follow_redirects")
    return said if isinstance(said, bool) else bool(client.follow_redirects)


async def _asked(injector: Injector, request: Any) -> Extra | None:
    """What the request is to carry, asked on a thread. A call that is cancelled meanwhile leaves nothing taken behind."""
    import anyio.to_thread

    asking = _Asking(injector, request)
    try:
        await anyio.to_thread.run_sync(asking.run, abandon_on_cancel=True)
    except BaseException:
        asking.give_up()
        raise
    return asking.extra


class _Asking:
    """The thread's side may come to its end before or after the caller has given up: whichever is later gives back."""

    def __init__(self, injector: Injector, request: Any) -> None:
        self._injector = injector
        self._request = request
        self._lock = threading.Lock()
        self._given_up = False
        self.extra: Extra | None = None

    def run(self) -> None:
        extra = self._injector.asked(self._request)
        with self._lock:
            self.extra, nobodys = extra, self._given_up
        if nobodys:
            self._injector.ended(self._request, extra)

    def give_up(self) -> None:
        with self._lock:
            self._given_up, extra = True, self.extra
        self._injector.ended(self._request, extra)
