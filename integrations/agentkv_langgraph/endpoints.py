"""Hints that travel with a model call: which endpoint takes which, merged under what the user set, taken back when refused.

Covers endpoints of OpenAI-compatible chat models. Nothing is sent to an endpoint that nobody named. Does not cover
hints that go beside the call (`agentkv/adapters`).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.runnables import RunnableBinding

from agentkv.core.hint import HintKind
from agentkv.core.task import UNATTRIBUTED, Caller
from agentkv.errors import ConfigError
from agentkv.hints.wire import WireHint, safe

BODY, HEADERS = "extra_body", "extra_headers"
Extra = Mapping[str, Mapping[str, Any]]
"""What is added to a call: `{"extra_body": {...}, "extra_headers": {...}}`, either part may be missing."""
Kind = str | Callable[[Caller], Extra]
_REFUSALS = (400, 422)


def agentkv_extra(caller: Caller) -> Extra:
    """For our own server: whose call it is."""
    return {HEADERS: {"x-agentkv-task": safe(caller.task)}}


def neutral_extra(caller: Caller) -> Extra:
    """The neutral hint as one field of the body, `agentkv_hint`: for plug-ins and proxies that read it."""
    hint = WireHint(
        id=f"turn-{uuid.uuid4().hex[:16]}",
        kind=HintKind.TURN_START,
        ts_ms=time.time_ns() // 1_000_000,
        session=safe(f"{caller.task}:{caller.branch}" if caller.branch else caller.task),
        parent=safe(caller.task) if caller.branch else "",
    )
    return {BODY: {"agentkv_hint": hint.to_json()}}


KINDS: dict[str, Callable[[Caller], Extra]] = {"agentkv": agentkv_extra, "neutral": neutral_extra}


def merged(*layers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Mappings over one another, deeply; where two say something else, the later one stands."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in (layer or {}).items():
            known = result.get(key)
            both = isinstance(known, Mapping) and isinstance(value, Mapping)
            result[key] = merged(known, value) if both else value
    return result


class Endpoints:
    """Which endpoints take hints, and of what kind. Thread-safe; an endpoint that refused them gets none any more."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        for url, kind in kinds.items():
            if not callable(kind) and kind not in KINDS:
                raise ConfigError(
                    f"hints[{url!r}] = {kind!r}: a kind is {', '.join(KINDS)}, or a function of the caller"
                )
        self._kinds = {_key(url): KINDS[kind] if isinstance(kind, str) else kind for url, kind in kinds.items()}
        self._refused: set[str] = set()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def hint_for(self, model: Any, caller: Caller) -> Extra | None:
        """What to add to a call of `model`; None where nothing is to be sent."""
        if caller.task == UNATTRIBUTED:
            return None
        url = url_of(model)
        kind = self._kinds.get(url)
        return None if kind is None or url in self._refused else kind(caller)

    def refused(self, model: Any) -> None:
        """This model's endpoint does not take them."""
        with self._lock:
            self._refused.add(url_of(model))


def url_of(model: Any) -> str:
    """The address that a chat model calls, with options bound to it or not; "" where it does not tell."""
    while isinstance(model, RunnableBinding):
        model = model.bound
    for name in ("openai_api_base", "base_url", "endpoint"):
        url = getattr(model, name, None)
        if isinstance(url, str) and url:
            return _key(url)
    return ""


def _key(url: str) -> str:
    return url.rstrip("/").lower()


def hinted(request: Any, extra: Extra) -> Any:
    """The model request with `extra` under everything that the user set.

    It goes into a copy of the model, so that a fallback to another model leaves it behind; and also into what is bound
    to the model and into the call's own settings where there are such, because they replace the model's.
    """
    model, own = _hinted_model(request.model, extra)
    settings = dict(request.model_settings)
    for part in (BODY, HEADERS):
        if extra.get(part) and settings.get(part):
            settings[part] = merged(own[part], settings[part])
    changes: dict[str, Any] = {"model_settings": settings} if settings != request.model_settings else {}
    if model is not request.model:
        changes["model"] = model
    return request.override(**changes) if changes else request


def _hinted_model(model: Any, extra: Extra) -> tuple[Any, dict[str, dict[str, Any]]]:
    """A copy of `model` that sends `extra` under its own, and the two merged: what a later layer would replace."""
    if isinstance(model, RunnableBinding):
        bound, own = _hinted_model(model.bound, extra)
        kwargs = {**model.kwargs}
        for part in (BODY, HEADERS):
            if extra.get(part) and kwargs.get(part):
                own[part] = kwargs[part] = merged(own[part], kwargs[part])
        return model.model_copy(update={"bound": bound, "kwargs": kwargs}), own
    fields = type(model).model_fields
    of_model = {BODY: getattr(model, BODY, None), HEADERS: (getattr(model, "model_kwargs", None) or {}).get(HEADERS)}
    own = {part: merged(extra.get(part), of_model[part]) for part in (BODY, HEADERS)}
    update: dict[str, Any] = {}
    if extra.get(BODY) and BODY in fields:
        update[BODY] = own[BODY]
    if extra.get(HEADERS) and "model_kwargs" in fields:
        update["model_kwargs"] = {**(model.model_kwargs or {}), HEADERS: own[HEADERS]}
    return (model.model_copy(update=update) if update else model), own


def is_refusal(error: BaseException) -> bool:
    """Whether an error may mean that a field of the request was not known."""
    if isinstance(error, TypeError):
        return "unexpected keyword" in str(error)
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status in _REFUSALS
