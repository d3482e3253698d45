"""HTTP attempts of the openai package, each noted: it retries in silence, and what failed may have been paid for.

Covers what one attempt came to, and clients for `openai.OpenAI(http_client=...)` that tell, and ask before they try
again. Does not cover attempts of a graph or a fallback: those are calls of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from agentkv.engine.bounded import bound

_ASKED_AGAIN = frozenset({400, 422})
_FOREVER_S = 86_400.0
_STAYS = {"follow_redirects": False}
_NOT_SENT = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol", "ProxyError"})
repeating: ContextVar[Callable[[bool], None] | None] = ContextVar("agentkv_repeating", default=None)
"""Called before a call that was submitted here is tried again (True: the try before may have been paid for); what it
raises ends the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTry:
    """An HTTP request that brought no answer: `error` says why ("429", "ReadTimeout").

    `refused`: the server said no, or never heard of it, so nothing was spent. Otherwise it may have done the work.
    `request` is the library's own object.
    """

    error: str
    refused: bool
    seconds: float = 0.0
    request: Any = None


def noting_async_client(
    note: Callable[[FailedTry], None],
    refuses: Callable[[], str] = str,
    flow: Callable[[Any], Generator[Any, Any, Any] | None] | None = None,
) -> Any:
    """The openai package's own asynchronous HTTP client, which calls `note` for every attempt that fails before its answer.

    For a streamed answer an attempt has succeeded when the headers are there. Before it sends a call again it asks
    `refuses` (on a thread); a text is why not, and the call fails with it. `flow(request)` may take part in each attempt:
    a generator that yields the requests to send instead, is sent their responses, and returns the one that counts. Redirects
    of the requests that it made itself are its own affair.
    """
    import asyncio  # 20 ms that `import agentkv` must not pay

    import openai

    class Noting(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, **options: Any) -> Any:
            if _is_repeated(request) and (why := await asyncio.to_thread(refuses)):
                return _refusal(request, why)
            steps = None if flow is None else flow(request)
            if steps is None:
                return await self._noted(request, **options)
            told = next(steps)
            while True:
                response = await self._noted(told, **(options if told is request else options | _STAYS))
                if response.status_code in _ASKED_AGAIN or response.next_request is not None:
                    await response.aread()
                try:
                    told = steps.send(response)
                except StopIteration as end:
                    return end.value

        async def _noted(self, request: Any, **options: Any) -> Any:
            began_s = time.monotonic()
            within_s = _within_s(request)
            request.headers["accept-encoding"] = "identity"
            try:
                async with asyncio.timeout(within_s):  # a head that drips resets the library's own time-out
                    response = await super().send(request, **options)
                bound(response, within_s=began_s + within_s - time.monotonic())
            except TimeoutError:
                late = _library(request).ReadTimeout(f"no answer had begun after {within_s:g} s", request=request)
                _note(note, late, request, began_s)
                raise late from None
            except BaseException as error:
                _note(note, error, request, began_s)
                raise
            _note(note, response, request, began_s)
            return response

    return Noting()


def noting_client(note: Callable[[FailedTry], None], refuses: Callable[[], str] = str) -> Any:
    """The same for synchronous calls."""
    import openai

    class Noting(openai.DefaultHttpxClient):
        def send(self, request: Any, **options: Any) -> Any:
            if _is_repeated(request) and (why := refuses()):
                return _refusal(request, why)
            began_s = time.monotonic()
            try:
                response = super().send(request, **options)
            except BaseException as error:
                _note(note, error, request, began_s)
                raise
            _note(note, response, request, began_s)
            return response

    return Noting()


def _within_s(request: Any) -> float:
    """The caller's own time-out."""
    within_s = request.extensions.get("timeout", {}).get("read")
    return _FOREVER_S if within_s is None else float(within_s)


def _library(request: Any) -> Any:
    return import_module(type(request).__module__.partition(".")[0])


def _is_repeated(request: Any) -> bool:
    """The openai package numbers its tries."""
    return str(request.headers.get("x-stainless-retry-count", "0")) != "0"


def _refusal(request: Any, why: str) -> Any:
    """An answer after which the openai package does not try again, of whichever HTTP library it uses."""
    library = _library(request)
    told = {"error": {"message": why, "type": "budget_exceeded"}}
    return library.Response(402, headers={"x-should-retry": "false"}, json=told, request=request)


def _note(note: Callable[[FailedTry], None], outcome: Any, request: Any, began_s: float) -> None:
    seconds = time.monotonic() - began_s
    if isinstance(outcome, BaseException):
        if isinstance(outcome, Exception):  # a cancelled call is its own caller's affair
            name = type(outcome).__name__
            note(FailedTry(error=name, refused=name in _NOT_SENT, seconds=seconds, request=request))
    elif outcome.status_code >= 400:  # noqa: PLR2004  HTTP's first error
        note(FailedTry(error=str(outcome.status_code), refused=True, seconds=seconds, request=request))
