"""Nodes with hooks around each run, in every form that LangGraph accepts.

Functions keep their signature and hints through `functools.wraps`, which is what LangGraph reads for injection, edges
of `Command[Literal[...]]` and input schemas. Methods stay methods and partials stay partials; callable objects become
a stand-in, Runnables (compiled graphs among them) a twin of a subclass of their own, which shares their state, so that
`isinstance` checks, drawing and subgraph discovery still see them. A sequence gets the hooks around each of its steps, because LangGraph
takes a node that is one apart.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from langchain_core.runnables import Runnable, RunnableParallel, RunnableSequence

from agentkv.runtime.hosts import Enter, Leave, wrap_function
from agentkv_langgraph.twins import share, twin

_ENTRIES = ("invoke", "ainvoke", "stream", "astream", "transform", "atransform", "batch", "abatch")


def wrap(fn: Any, enter: Enter, leave: Leave) -> Any:
    """`fn` with `enter()` before and `leave(token, error)` after each run, whatever kind of node it is."""
    if isinstance(fn, Mapping):
        fn = RunnableParallel(fn)
    if isinstance(fn, Runnable):
        return _wrap_runnable(fn, enter, leave)
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(wrap(fn.__func__, enter, leave))
    if isinstance(fn, functools.partial):
        return _wrap_partial(fn, enter, leave)
    if isinstance(fn, MethodType) and isinstance(fn.__func__, FunctionType):
        return MethodType(wrap_function(fn.__func__, fn.__func__, enter, leave), fn.__self__)
    if inspect.isroutine(fn) or inspect.isclass(fn):
        return wrap_function(fn, fn, enter, leave)
    if callable(fn):
        return _wrap_object(fn, enter, leave)
    raise TypeError(f"a node is a function, a callable object or a Runnable, not {type(fn).__name__}")


def _wrap_partial(fn: Any, enter: Enter, leave: Leave) -> Any:
    """A partial of the wrapped function: LangGraph names, draws and caches it as it would the original."""
    wrapped = type(fn)(wrap(fn.func, enter, leave), *fn.args, **fn.keywords)
    wrapped.__dict__.update(fn.__dict__)
    return wrapped


def _wrap_object(fn: Any, enter: Enter, leave: Leave) -> Any:
    """A stand-in for the callable object `fn`: its attributes, its class for `isinstance`, its `__call__` with hooks."""
    namespace = {
        "__call__": _call_of(fn, enter, leave),
        "__class__": property(lambda _self: type(fn)),
        "__getattr__": lambda _self, name: getattr(fn, name),
        "__setattr__": lambda _self, name, value: setattr(fn, name, value),
        "__delattr__": lambda _self, name: delattr(fn, name),
        "__repr__": lambda _self: repr(fn),
        "__doc__": type(fn).__doc__,
        "__module__": type(fn).__module__,
    }
    stand_in: Any = type(type(fn).__name__, (), namespace)
    return stand_in()


def _call_of(fn: Any, enter: Enter, leave: Leave) -> Any:
    """`__call__` for the stand-in of `fn`, bound as in its class: to the object, to the class or to nothing."""
    declared = inspect.getattr_static(type(fn), "__call__")
    if isinstance(declared, staticmethod):
        return staticmethod(wrap(declared.__func__, enter, leave))
    is_of_class = isinstance(declared, classmethod)
    call = declared.__func__ if is_of_class else type(fn).__call__

    @functools.wraps(call)
    def on_original(_bound_to: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    bound = declared.__get__(fn, type(fn)) if hasattr(declared, "__get__") else declared
    wrapped = wrap_function(on_original, _innermost(bound), enter, leave)
    return classmethod(wrapped) if is_of_class else wrapped


def _innermost(fn: Any) -> Any:
    """The function behind partials, bound methods and callable objects: what tells whether it is async."""
    while not inspect.isfunction(fn):
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        elif inspect.isroutine(fn) or inspect.isclass(fn):
            break
        else:
            fn = type(fn).__call__
    return fn


def _wrap_runnable(fn: Any, enter: Enter, leave: Leave) -> Any:
    """A twin of `fn` in a subclass of its own class, which overrides what the class itself overrides.

    The other entries come down to these, as they do in the original. Each runs on `fn` itself, so that what it keeps
    from run to run is kept, and `invoke` may be made of `stream` or the other way round without the hooks running twice.
    A copy of the twin is decorated too, with an original of its own.
    """
    steps = _steps(fn)
    if steps is not None:
        return _with_steps(fn, [wrap(step, enter, leave) for step in steps])
    original = type(fn)
    wrapped: Any = None

    def left(token: Any, error: BaseException | None) -> None:
        leave(token, error)
        share(fn, wrapped)  # pydantic may have made a new `__dict__`

    def undecorated(one: Any) -> Any:
        """`fn`; for another object of the subclass, such as a graph with another config, one of the original class."""
        return fn if one is wrapped else twin(one, original)

    def entry(name: str) -> Callable[..., Any]:
        method = getattr(original, name)

        @functools.wraps(method)
        def on_original(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(undecorated(self), *args, **kwargs)

        return wrap_function(on_original, getattr(Runnable, name), enter, left)

    def copied(self: Any, made: Any) -> Any:
        return wrap(made, enter, leave) if self is wrapped else twin(made, type(self))

    def set_on(self: Any, name: str, value: Any) -> None:
        one = undecorated(self)
        setattr(one, name, value)
        share(one, self)

    def delete_on(self: Any, name: str) -> None:
        one = undecorated(self)
        delattr(one, name)
        share(one, self)

    own = [name for name in _ENTRIES if getattr(original, name) is not getattr(Runnable, name)]
    namespace: dict[str, Any] = {name: entry(name) for name in own}
    namespace["__copy__"] = lambda self: copied(self, copy.copy(undecorated(self)))
    namespace["__deepcopy__"] = lambda self, memo=None: copied(self, copy.deepcopy(undecorated(self), memo))
    namespace["__setattr__"] = set_on
    namespace["__delattr__"] = delete_on
    namespace["__module__"] = original.__module__
    namespace["__doc__"] = original.__doc__
    make_class: Any = type(original)  # pydantic's metaclass for pydantic's classes
    wrapped = twin(fn, make_class(original.__name__, (original,), namespace))
    return wrapped


def _steps(fn: Any) -> list[Any] | None:
    """The steps of a sequence, LangChain's or LangGraph's own; None for anything else."""
    if isinstance(fn, RunnableSequence) or type(fn).__name__ == "RunnableSeq":
        return list(fn.steps)
    return None


def _with_steps(fn: Any, steps: list[Any]) -> Any:
    wrapped = copy.copy(fn)
    if isinstance(fn, RunnableSequence):
        return fn.model_copy(update={"first": steps[0], "middle": steps[1:-1], "last": steps[-1]})
    wrapped.steps = steps
    return wrapped
