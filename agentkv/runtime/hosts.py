"""Hosts: the plain-Python one, and finding the framework's through the entry point group `agentkv.hosts`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from agentkv import log
from agentkv.core.host import Host
from agentkv.core.task import Caller
from agentkv.errors import ConfigError
from agentkv.runtime.identity import resume, suspend

Enter = Callable[[], Any]
Leave = Callable[[Any, BaseException | None], None]


class PlainHost:
    """No framework: nodes are callables, nobody is known to be calling, no exception is control flow."""

    name = "plain"

    def caller(self) -> Caller | None:
        return None

    def wrap_node(self, fn: Callable[..., Any], enter: Enter, leave: Leave) -> Any:
        return wrap_callable(fn, enter, leave)

    def wrap_tool(self, tool: Any, owner: Any, options: Any) -> Any:  # noqa: ARG002  the protocol
        return None

    def alive(self) -> None: ...

    def attach(self, graph: Any, runtime: Any) -> Any:  # noqa: ARG002  the protocol
        raise ConfigError(f"no framework that knows a {type(graph).__name__} is installed; install langgraph")

    def is_control_flow(self, error: BaseException) -> bool:  # noqa: ARG002  the protocol
        return False

    def is_pause(self, error: BaseException) -> bool:  # noqa: ARG002  the protocol
        return False

    def interrupt(self, question: dict[str, Any], refused: Exception) -> Any:  # noqa: ARG002  the protocol
        raise refused

    def stopping(self, refused: Any) -> Any:
        return refused


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
    # Frameworks that look into a function for what it refers to unwrap it once: they shall find what they found in `fn`.
    shell.__wrapped__ = getattr(fn, "__wrapped__", fn)  # type: ignore[attr-defined]
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
            items = fn(*args, **kwargs)
            item = next(items)
            while True:
                suspend(token)
                try:
                    sent = yield item
                except GeneratorExit:
                    resume(token)
                    getattr(items, "close", _nothing)()
                    raise
                except BaseException as error:
                    resume(token)
                    if not hasattr(items, "throw"):
                        raise
                    item = items.throw(error)
                else:
                    resume(token)
                    item = next(items) if sent is None else items.send(sent)
        except StopIteration as end:
            leave(token, None)
            return end.value
        except BaseException as error:
            leave(token, error)
            raise

    return shell


def _around_asyncgen(fn: Callable[..., Any], enter: Enter, leave: Leave) -> Callable[..., Any]:
    async def shell(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        token = enter()
        try:
            items = fn(*args, **kwargs)
            item = await anext(items)
            while True:
                suspend(token)
                try:
                    sent = yield item
                except GeneratorExit:
                    resume(token)
                    await getattr(items, "aclose", _nothing_async)()
                    raise
                except BaseException as error:
                    resume(token)
                    if not hasattr(items, "athrow"):
                        raise
                    item = await items.athrow(error)
                else:
                    resume(token)
                    item = await (anext(items) if sent is None else items.asend(sent))
        except StopAsyncIteration:
            leave(token, None)
        except BaseException as error:
            leave(token, error)
            raise

    return shell


def _nothing() -> None: ...


async def _nothing_async() -> None: ...
