"""A chat model whose calls carry a hint, and which leaves it out where the endpoint refuses it.

Both happen inside of the model, below LangChain's cache, callbacks and whatever middleware stands around it: a refusal
costs one call to the endpoint, and nobody else hears of it. Which endpoint takes which hint is in `endpoints.py`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableBinding

from agentkv_langgraph.endpoints import BODY, HEADERS, Extra, is_refusal, merged
from agentkv_langgraph.twins import twin

_SLOT = "agentkv_told"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What one hinted model knows."""

    model: Any
    """The user's own, on which everything runs; None in a copy that somebody made of the hinted one."""
    hint: Callable[[], Extra | None]
    took_back: Callable[[], None]
    bound: Mapping[str, Any]


def with_hint(
    model: Any,
    hint: Callable[[], Extra | None],
    took_back: Callable[[], None],
    bound: Mapping[str, Any] | None = None,
) -> Any:
    """A twin of `model` whose calls carry what `hint()` says, under everything that the user set.

    Where the endpoint answers that it does not know a field, the call is made once more as the user wrote it; if that
    works, `took_back` is called. Options that are bound to the model stay bound. What is no chat model stays as it is.
    """
    if isinstance(model, RunnableBinding):
        own = {part: merged(model.kwargs.get(part), (bound or {}).get(part)) for part in (BODY, HEADERS)}
        return model.model_copy(update={"bound": with_hint(model.bound, hint, took_back, own)})
    if not isinstance(model, BaseChatModel):
        return model
    made = twin(model, _hinted_class(type(model)))
    object.__setattr__(made, _SLOT, _Told(model=model, hint=hint, took_back=took_back, bound=bound or {}))
    return made


def _options(told: _Told, model: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call's options with the hint; None where there is nothing to send, or the model could not send it."""
    extra = told.hint()
    if extra is None:
        return None
    fields = type(model).model_fields
    of_model = {BODY: getattr(model, BODY, None), HEADERS: (getattr(model, "model_kwargs", None) or {}).get(HEADERS)}
    known = {BODY: BODY in fields, HEADERS: "model_kwargs" in fields}
    added = {
        part: merged(extra[part], of_model[part], told.bound.get(part), given.get(part))
        for part in (BODY, HEADERS)
        if extra.get(part) and (known[part] or given.get(part))
    }
    return {**given, **added} if added else None


@functools.lru_cache(maxsize=64)
def _hinted_class(original: Any) -> Any:
    """A subclass of a chat model's class, with the hint in those of its methods that the class itself provides."""
    namespace: dict[str, Any] = {
        name: functools.wraps(getattr(original, name))(shell(original, getattr(original, name)))
        for name, shell in _SHELLS.items()
        if getattr(original, name, None) is not getattr(BaseChatModel, name, None)
    }
    namespace["__slots__"] = (_SLOT,)
    namespace["__copy__"] = lambda self: _carried(self, original.__copy__(self))
    namespace["__deepcopy__"] = lambda self, memo=None: _carried(self, original.__deepcopy__(self, memo))
    namespace["__module__"] = original.__module__
    namespace["__doc__"] = original.__doc__
    return type(original)(original.__name__, (original,), namespace)


def _carried(one: Any, made: Any) -> Any:
    """A copy that tells the same hint, and runs on itself."""
    told = getattr(one, _SLOT, None)
    if told is not None:
        object.__setattr__(made, _SLOT, replace(told, model=None))
    return made


def _started(one: Any, original: type, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None, _Told | None]:
    """The model to run on, its options with the hint, and what the hinted one knows."""
    told: _Told | None = getattr(one, _SLOT, None)
    model = twin(one, original) if told is None or told.model is None else told.model
    return model, None if told is None else _options(told, model, given), told


def _around_call(original: type, method: Any) -> Any:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        model, options, told = _started(self, original, kwargs)
        if options is None or told is None:
            return method(model, *args, **kwargs)
        try:
            return method(model, *args, **options)
        except Exception as error:
            if not is_refusal(error):
                raise
        answer = method(model, *args, **kwargs)
        told.took_back()
        return answer

    return generate


def _around_coroutine(original: type, method: Any) -> Any:
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        model, options, told = _started(self, original, kwargs)
        if options is None or told is None:
            return await method(model, *args, **kwargs)
        try:
            return await method(model, *args, **options)
        except Exception as error:
            if not is_refusal(error):
                raise
        answer = await method(model, *args, **kwargs)
        told.took_back()
        return answer

    return generate


def _around_stream(original: type, method: Any) -> Any:
    def stream(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        model, options, told = _started(self, original, kwargs)
        if options is not None and told is not None:
            began = False
            try:
                for item in method(model, *args, **options):
                    began = True
                    yield item
            except Exception as error:
                if began or not is_refusal(error):
                    raise
            else:
                return
        for item in method(model, *args, **kwargs):
            if options is not None and told is not None:
                told.took_back()
                options = None
            yield item

    return stream


def _around_async_stream(original: type, method: Any) -> Any:
    async def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        model, options, told = _started(self, original, kwargs)
        if options is not None and told is not None:
            began = False
            try:
                async for item in method(model, *args, **options):
                    began = True
                    yield item
            except Exception as error:
                if began or not is_refusal(error):
                    raise
            else:
                return
        async for item in method(model, *args, **kwargs):
            if options is not None and told is not None:
                told.took_back()
                options = None
            yield item

    return stream


_SHELLS: dict[str, Callable[[type, Any], Any]] = {
    "_generate": _around_call,
    "_agenerate": _around_coroutine,
    "_stream": _around_stream,
    "_astream": _around_async_stream,
    "_stream_chat_model_events": _around_stream,
    "_astream_chat_model_events": _around_async_stream,
}
"""What a chat model's class may provide; LangChain looks at the class for which of them it does."""
