"""Hosts: the plain-Python one, and finding the framework's through the entry point group `agentkv.hosts`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import aclosing
from typing import Any

from agentkv import log
from agentkv.core.host import Host
from agentkv.core.task import Caller
from agentkv.errors import ConfigError

Enter = Callable[[], Any]
Leave = Callable[[Any, BaseException | None], None]


class PlainHost:
    """No framework: nodes are callables, nobody is known to be calling, no exception is control flow."""

    name = "plain"

    def caller(self) -> Caller | None:
        return None

    def wrap_node(self, fn: Callable[..., Any], enter: Enter, leave: Leave) -> Any:
        return wrap_callable(fn, enter, leave)

    def attach(self, graph: Any, runtime: Any) -> Any:  # noqa: ARG002  the protocol
        raise ConfigError(f"no framework that knows a {type(graph).__name__} is installed; install langgraph")

    def is_control_flow(self, error: BaseException) -> bool:  # noqa: ARG002  the protocol
        return False


def find_host() -> Host:
    """The first host whose framework is installed, else the plain one."""
    from importlib.metadata import entry_points

    for point in entry_points(group="agentkv.hosts"):
        try:
            host: Host = point.load()()
        except ImportError:
            continue
        except Exception as error:
            log.failed("host_failed", host=point.name, error=repr(error))
            continue
        return host
    return PlainHost()


def wrap_callable(fn: Callable[..., Any], enter: Enter, leave: Leave) -> Callable[..., Any]:
    """`fn` with the hooks around each run; functions, methods, partials and callable objects, sync or async."""
    kind: Any = fn
    while isinstance(kind, functools.partial):
        kind = kind.func
    if not (inspect.isroutine(kind) or inspect.isclass(kind)):
        kind = type(kind).__call__
    return wrap_function(fn, kind, enter, leave)


def wrap_function(fn: Callable[..., Any], kind: Any, enter: Enter, leave: Leave) -> Callable[..., Any]:
    """A function around `fn`; `kind` is what tells whether it is async or a generator.

    It keeps name, signature and annotations, which is what frameworks inject by, and what the body raises passes
    through unchanged.
    """
    if inspect.isasyncgenfunction(kind):
        shell = _around_asyncgen(fn, enter, leave)
    elif inspect.isgeneratorfunction(kind):
        shell = _around_generator(fn, enter, leave)
    elif inspect.iscoroutinefunction(kind):
        shell = _around_coroutine(fn, enter, leave)
    else:
        shell = _around_call(fn, enter, leave)
    shell.__annotations__ = {}  # ours would mislead a framework; `wraps` brings those of `fn` where it has any
    functools.update_wrapper(shell, fn)
    shell.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return shell


def _around_call(fn: Callable[..., Any], enter: Enter, leave: Leave) -> Callable[..., Any]:
    def shell(*args: Any, **kwargs: Any) -> Any:
        token = enter()
        try:
            value = fn(*args, **kwargs)
        except BaseException as error:
            leave(token, error)
            raise
        leave(token, None)
        return value

    return shell


def _around_coroutine(fn: Callable[..., Any], enter: Enter, leave: Leave) -> Callable[..., Any]:
    async def shell(*args: Any, **kwargs: Any) -> Any:
        token = enter()
        try:
            value = await fn(*args, **kwargs)
        except BaseException as error:
            leave(token, error)
            raise
        leave(token, None)
        return value

    return shell


def _around_generator(fn: Callable[..., Any], enter: Enter, leave: Leave) -> Callable[..., Any]:
    def shell(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        token = enter()
        try:
            value: Any = yield from fn(*args, **kwargs)
        except BaseException as error:
            leave(token, error)
            raise
        leave(token, None)
        return value

    return shell


def _around_asyncgen(fn: Callable[..., Any], enter: Enter, leave: Leave) -> Callable[..., Any]:
    async def shell(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        token = enter()
        try:
            async with aclosing(fn(*args, **kwargs)) as items:
                async for item in items:
                    yield item
        except BaseException as error:
            leave(token, error)
            raise
        leave(token, None)

    return shell
