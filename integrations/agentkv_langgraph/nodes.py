"""Nodes with hooks around each run, in every form that LangGraph accepts.

Functions keep their signature and hints through `functools.wraps`, which is what LangGraph reads for injection, edges
of `Command[Literal[...]]` and input schemas. Callable objects become a proxy, Runnables (compiled graphs among
them) a copy of a subclass of their own, so that `isinstance` checks, drawing and subgraph discovery still see them.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from langchain_core.runnables import Runnable

from agentkv.runtime.hosts import Enter, Leave, wrap_function


def wrap(fn: Any, enter: Enter, leave: Leave) -> Any:
    """`fn` with `enter()` before and `leave(token, error)` after each run, whatever kind of node it is."""
    if isinstance(fn, Runnable):
        return _wrap_runnable(fn, enter, leave)
    if inspect.isroutine(fn) or inspect.isclass(fn) or isinstance(fn, functools.partial):
        return wrap_function(fn, fn, enter, leave)
    if callable(fn):
        return _wrap_object(fn, enter, leave)
    raise TypeError(f"a node is a function, a callable object or a Runnable, not {type(fn).__name__}")


def _wrap_object(fn: Any, enter: Enter, leave: Leave) -> Any:
    """A stand-in for the callable object `fn`: its attributes, its class's name, its `__call__` with the hooks."""
    call = type(fn).__call__

    @functools.wraps(call)
    def on_original(_stand_in: Any, *args: Any, **kwargs: Any) -> Any:
        return call(fn, *args, **kwargs)

    namespace = {
        "__call__": wrap_function(on_original, call, enter, leave),
        "__getattr__": lambda _self, name: getattr(fn, name),
        "__setattr__": lambda _self, name, value: setattr(fn, name, value),
        "__doc__": type(fn).__doc__,
        "__module__": type(fn).__module__,
    }
    stand_in: Any = type(type(fn).__name__, (), namespace)
    return stand_in()


def _wrap_runnable(fn: Any, enter: Enter, leave: Leave) -> Any:
    """A copy of `fn` in a subclass of its own class.

    Each entry runs on a view of the copy in the original class: there `invoke` may be made of `stream` or the other
    way round without the hooks running twice, and a copy made by `with_config` keeps them.
    """
    original = type(fn)

    def entry(name: str) -> Callable[..., Any]:
        method = getattr(original, name)

        @functools.wraps(method)
        def on_view(self: Any, *args: Any, **kwargs: Any) -> Any:
            view = copy.copy(self)
            object.__setattr__(view, "__class__", original)
            return method(view, *args, **kwargs)

        return wrap_function(on_view, getattr(Runnable, name), enter, leave)

    namespace: dict[str, Any] = {name: entry(name) for name in ("invoke", "ainvoke", "stream", "astream")}
    namespace["__module__"] = original.__module__
    namespace["__doc__"] = original.__doc__
    wrapped = copy.copy(fn)
    make_class: Any = type(original)  # pydantic's metaclass for pydantic's classes
    object.__setattr__(wrapped, "__class__", make_class(original.__name__, (original,), namespace))
    return wrapped
