"""The endpoints that no other server has in this form: health, metrics, hints, and the document that describes them all.

GET /health, /metrics, /openapi.json; POST /v1/agentkv/hints, /v1/tokencake/events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from agentkv.hints.wire import WireHint, read
from agentkv.server.admission import KEY_STATE, Life
from agentkv.server.fields import Fields, refuse
from agentkv.server.openapi import document
from agentkv.server.refusals import error_body
from agentkv.server.stalls import Stalls, read_hints

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LONGEST_NAME = 256
MOST_ESTIMATE_S = 1e6
Endpoint = Callable[[HttpRequest], Awaitable[Response]]


class Rest:
    """The endpoints; `body` reads a request's JSON."""

    def __init__(
        self,
        *,
        model: str,
        life: Life,
        stalls: Stalls | None,
        metrics: Callable[[], str] | None,
        body: Callable[[HttpRequest], Awaitable[Any]],
    ) -> None:
        self._model = model
        self._life = life
        self._stalls = stalls
        self._metrics = metrics
        self._body = body

    def routes(self) -> Iterator[tuple[str, str, Endpoint]]:
        """(method, path, endpoint) of what there is."""
        yield "GET", "/health", self.health
        yield "GET", "/openapi.json", self.openapi
        if self._metrics is not None:
            yield "GET", "/metrics", self.metrics
        if self._stalls is not None:
            yield "POST", "/v1/agentkv/hints", self.hints
            yield "POST", "/v1/tokencake/events", self.events

    async def health(self, _: HttpRequest) -> Response:
        status = "draining" if self._life.draining else "ok"
        body = {"status": status, "model": self._model, "calls": self._life.active}
        return JSONResponse(body, status_code=503 if self._life.draining else 200)

    async def openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(document(self._model))

    async def metrics(self, _: HttpRequest) -> Response:
        assert self._metrics is not None
        return PlainTextResponse(await asyncio.to_thread(self._metrics), headers={"content-type": METRICS_TYPE})

    async def hints(self, http: HttpRequest) -> Response:
        hints = read_hints(await self._body(http))
        return JSONResponse({"receipts": await asyncio.to_thread(self._received, http, hints)})

    def _received(self, http: HttpRequest, hints: list[Any]) -> list[dict[str, Any]]:
        assert self._stalls is not None
        receipts = []
        for given in hints:
            hint = given if isinstance(given, WireHint) else read(given)
            if hint is None:
                receipts.append({"id": None, "outcome": "skipped", "detail": "it is no hint of a version known here"})
            else:
                receipts.append(self._stalls.hint(_key(http), hint))
        return receipts

    async def events(self, http: HttpRequest) -> Response:
        """TokenCake's two events about a call that named a lifecycle."""
        assert self._stalls is not None
        fields = Fields(await self._body(http))
        event, lifecycle = fields.text("event"), fields.text("lifecycle_id")
        if event == "stall_started":
            kind, estimate_s = fields.text("kind", "tool"), _estimate_s(fields)
            fields.end()
            name = kind[:LONGEST_NAME] or "tool"
            outcome = await asyncio.to_thread(self._stalls.started, _key(http), lifecycle, name, estimate_s)
        elif event == "stall_finished":
            fields.end()
            outcome = await asyncio.to_thread(self._stalls.finished, _key(http), lifecycle)
        else:
            refuse("event", f"{event!r:.40} is not one of stall_started, stall_finished")
        if outcome == "applied":
            return JSONResponse({"lifecycle_id": lifecycle, "outcome": outcome})
        told = {"unknown": "is not known here", "conflict": "has a stall that has not finished"}[outcome]
        body = error_body(f"lifecycle_id {lifecycle!r:.80} {told}", "invalid_request_error", "lifecycle_id", outcome)
        return JSONResponse(body, status_code=404 if outcome == "unknown" else 409)


def _estimate_s(fields: Fields) -> float | None:
    value = fields.any("estimated_duration_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_ESTIMATE_S:
        refuse("estimated_duration_s", f"is {value!r:.40}; give seconds from 0 on")
    return float(value)


def _key(http: HttpRequest) -> Any:
    return (http.scope.get("state") or {}).get(KEY_STATE)
