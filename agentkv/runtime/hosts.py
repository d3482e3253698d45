"""Hosts: the plain-Python one, and finding the framework's through the entry point group `agentkv.hosts`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator
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
    """`fn` with `enter` before and `leave` after each run: functions, coroutines, generators, callable objects.

    `functools.wraps` keeps name, signature and annotations, which is what frameworks inject by. What the body
    raises passes through unchanged.
    """
    target = _code_behind(fn)
    if inspect.isasyncgenfunction(target):
        return _wrap_asyncgen(fn, enter, leave)
    if inspect.isgeneratorfunction(target):
        return _wrap_generator(fn, enter, leave)
    if inspect.iscoroutinefunction(target):
        return _wrap_coroutine(fn, enter, leave)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = enter()
        error: BaseException | None = None
        try:
            return fn(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            leave(token, error)

    return run


def _code_behind(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.isroutine(fn) or inspect.isclass(fn):
        return fn
    return type(fn).__call__


def _wrap_coroutine(fn: Callable[..., Any], enter: Enter, leave: Leave) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def run(*args: Any, **kwargs: Any) -> Any:
        token = enter()
        error: BaseException | None = None
        try:
            return await fn(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            leave(token, error)

    return run


def _wrap_generator(fn: Callable[..., Any], enter: Enter, leave: Leave) -> Callable[..., Any]:
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        token = enter()
        error: BaseException | None = None
        try:
            return (yield from fn(*args, **kwargs))
        except BaseException as raised:
            error = raised
            raise
        finally:
            leave(token, error)

    return run


def _wrap_asyncgen(fn: Callable[..., Any], enter: Enter, leave: Leave) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def run(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        token = enter()
        error: BaseException | None = None
        inner = fn(*args, **kwargs)
        try:
            async for item in inner:
                yield item
        except BaseException as raised:
            error = raised
            raise
        finally:
            await inner.aclose()
            leave(token, error)

    return run
