"""HTTP attempts of the openai package, each noted: it retries in silence, and what failed may have been paid for.

Covers what one attempt came to, and clients for `openai.OpenAI(http_client=...)` that tell. Does not cover attempts of
a graph or a fallback: those are calls of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_NOT_SENT = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol", "ProxyError"})


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


def noting_async_client(note: Callable[[FailedTry], None]) -> Any:
    """The openai package's own asynchronous HTTP client, which calls `note` for every attempt that fails before its answer.

    For a streamed answer an attempt has succeeded when the headers are there.
    """
    import openai

    class Noting(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, **options: Any) -> Any:
            began_s = time.monotonic()
            try:
                response = await super().send(request, **options)
            except BaseException as error:
                _note(note, error, request, began_s)
                raise
            _note(note, response, request, began_s)
            return response

    return Noting()


def noting_client(note: Callable[[FailedTry], None]) -> Any:
    """The same for synchronous calls."""
    import openai

    class Noting(openai.DefaultHttpxClient):
        def send(self, request: Any, **options: Any) -> Any:
            began_s = time.monotonic()
            try:
                response = super().send(request, **options)
            except BaseException as error:
                _note(note, error, request, began_s)
                raise
            _note(note, response, request, began_s)
            return response

    return Noting()


def _note(note: Callable[[FailedTry], None], outcome: Any, request: Any, began_s: float) -> None:
    seconds = time.monotonic() - began_s
    if isinstance(outcome, BaseException):
        if isinstance(outcome, Exception):  # a cancelled call is its own caller's affair
            name = type(outcome).__name__
            note(FailedTry(error=name, refused=name in _NOT_SENT, seconds=seconds, request=request))
    elif outcome.status_code >= 400:  # noqa: PLR2004  HTTP's first error
        note(FailedTry(error=str(outcome.status_code), refused=True, seconds=seconds, request=request))
