"""Hints that travel with a model call: which endpoint takes which, merged under what the user set, taken back when refused.

Covers endpoints of OpenAI-compatible chat models. Nothing is sent to an endpoint that nobody named. How a hint travels
is in `hinted.py`; does not cover hints that go beside the call (`agentkv/adapters`).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableBinding

from agentkv import log
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
        if not url and getattr(model, "_llm_type", "agentkv") != "agentkv":  # our own takes hints beside its calls
            log.warn_once("hint_address_unknown", model=type(model).__name__)
        kind = self._kinds.get(url)
        return None if kind is None or url in self._refused else kind(caller)

    def has_refused(self, model: Any) -> bool:
        """Whether this model's endpoint has said that it does not take them."""
        return url_of(model) in self._refused

    def refused(self, model: Any) -> None:
        """This model's endpoint does not take them."""
        with self._lock:
            self._refused.add(url_of(model))


def url_of(model: Any) -> str:
    """The address that a chat model calls, with options bound to it or not; "" where it does not tell."""
    while isinstance(model, RunnableBinding):
        model = model.bound
    if not isinstance(model, BaseChatModel):  # several in one, such as `with_fallbacks`
        return ""
    for name in ("openai_api_base", "base_url", "endpoint"):
        url = getattr(model, name, None)
        if isinstance(url, str) and url:
            return _key(url)
    for name in (
        "root_client",
        "root_async_client",
    ):  # what the openai package found in the environment, or its default
        url = getattr(getattr(model, name, None), "base_url", None)
        if url:
            return _key(str(url))
    return ""


def chosen(model: Any) -> Any:
    """The model that a run's config chooses, of LangChain's `init_chat_model(configurable_fields=...)`; or `model`."""
    return model._model() if type(model).__name__ == "_ConfigurableModel" else model


def _key(url: str) -> str:
    return url.rstrip("/").lower()


def is_refusal(error: BaseException) -> bool:
    """Whether an error may mean that a field of the request was not known."""
    if isinstance(error, TypeError):
        return "unexpected keyword" in str(error)
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status in _REFUSALS
