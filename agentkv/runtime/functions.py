"""`@kv.tool_function`: a function whose calls are told as tool calls. And `kv.current_tool`, the call that runs here.

Covers functions, methods, partials and callable objects, sync and async; a framework's own tool objects through its
host. Does not cover the scope itself (`tools.py`) nor what the desk does with it (`desk.py`).
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from agentkv.core.host import Host
from agentkv.errors import ConfigError
from agentkv.runtime.desk import ToolDesk
from agentkv.runtime.tools import ToolScope, innermost

_INJECTED_TYPES = {
    "BaseStore", "Context", "RunContext", "RunContextWrapper", "RunnableConfig", "Runtime", "StreamWriter",
    "ToolContext", "ToolRuntime",
}  # fmt: skip
"""Names of the types that frameworks inject by: no arguments of the model's, and large."""
_INJECTED_MARK = "Injected"


class Named(Protocol):
    """A framework's own tool object, as far as types go: which ones there are, the host knows."""

    @property
    def name(self) -> str: ...


_Fn = TypeVar("_Fn", bound=Callable[..., Any] | Named)


class Tells(Protocol):
    """Who opens tool scopes; AgentKV is one."""

    host: Host
    _desk: ToolDesk

    def tool(
        self,
        name: str,
        *,
        args: Any = None,
        expect_s: float | None = None,
        timeout_s: float | None = None,
        duration_key: str = "",
        call_id: str | None = None,
    ) -> ToolScope:
        """A scope for one call."""
        ...


@overload
def tool_function(self: Tells, fn: _Fn, /) -> _Fn: ...
@overload
def tool_function(
    self: Tells,
    /,
    *,
    name: str | None = None,
    expect_s: float | None = None,
    timeout_s: float | None = None,
    duration_key: str = "",
    slim: bool = False,
) -> Callable[[_Fn], _Fn]: ...
def tool_function(
    self: Tells,
    fn: Any = None,
    /,
    *,
    name: str | None = None,
    expect_s: float | None = None,
    timeout_s: float | None = None,
    duration_key: str = "",
    slim: bool = False,
) -> Any:
    """Decorate a tool: each of its calls is told, forecast and billed as one tool call. Its behaviour is unchanged.

    It stands above or below a framework's own decorator (`@tool`), and keeps name, signature, types, docstring and
    injected parameters. `expect_s`, `timeout_s` and `duration_key` are as in `kv.tool`; with slim=True an answer that is
    a text is shortened as by `kv.context.slim`.

    Raises ConfigError for what is no tool, and for generators: their work is done while somebody reads them.
    """
    options = Options(name=name, expect_s=expect_s, timeout_s=timeout_s, duration_key=duration_key, slim=slim)
    if fn is None:
        return lambda one: _decorated(self, one, options)
    return _decorated(self, fn, options)


def current_tool(self: Tells) -> ToolScope:
    """The tool call that runs here, whoever opened it: `kv.current_tool().progress(0.4)`.

    Outside of any call it is a scope that nobody hears, so that a tool can be called in a test.
    """
    found = innermost(self._desk)
    return found or ToolScope(self._desk, tool="", command="", expect_s=None, call_id="", session=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the decorator was told about a tool; None and "" where it was told nothing."""

    name: str | None = None
    expect_s: float | None = None
    timeout_s: float | None = None
    duration_key: str = ""
    slim: bool = False

    def scope(self, owner: Tells, name: str, args: Any, call_id: str | None) -> ToolScope:
        """The scope of one call."""
        return owner.tool(
            self.name or name,
            args=args,
            expect_s=self.expect_s,
            timeout_s=self.timeout_s,
            duration_key=self.duration_key,
            call_id=call_id,
        )


def _decorated(owner: Tells, fn: Any, options: Options) -> Any:
    kind = _kind_of(fn)
    if kind is None:
        wrapped = owner.host.wrap_tool(fn, owner, options)
        if wrapped is None:
            raise ConfigError(
                f"tool_function needs a function or a tool of {owner.host.name}, not a {type(fn).__name__}; "
                "put @kv.tool_function below the decorator that makes one"
            )
        return wrapped
    if inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind):
        raise ConfigError(f"{_name_of(fn)} is a generator: open `with kv.tool(...)` around the work inside it")
    shell = _around_coroutine if inspect.iscoroutinefunction(kind) else _around_call
    wrapped = shell(owner, fn, options, _Parameters(fn))
    wrapped.__annotations__ = {}  # ours would mislead a framework; `wraps` brings those of `fn` where it has any
    functools.update_wrapper(wrapped, fn)
    wrapped.__name__ = _name_of(fn)
    return wrapped


def _around_call(owner: Tells, fn: Callable[..., Any], options: Options, parameters: _Parameters) -> Any:
    name = _name_of(fn)

    def tool(*args: Any, **kwargs: Any) -> Any:
        scope = options.scope(owner, name, *parameters.told(args, kwargs)).announce()
        try:
            value = fn(*args, **kwargs)
        except BaseException as error:
            scope.__exit__(type(error), error, None)
            raise
        scope.__exit__(None, None, None)
        return scope.slim(value) if options.slim and isinstance(value, str) else value

    return tool


def _around_coroutine(owner: Tells, fn: Callable[..., Any], options: Options, parameters: _Parameters) -> Any:
    name = _name_of(fn)

    async def tool(*args: Any, **kwargs: Any) -> Any:
        scope = await options.scope(owner, name, *parameters.told(args, kwargs)).announce_async()
        try:
            value = await fn(*args, **kwargs)
        except BaseException as error:
            scope.__exit__(type(error), error, None)
            raise
        scope.__exit__(None, None, None)
        return scope.slim(value) if options.slim and isinstance(value, str) else value

    return tool


class _Parameters:
    """Which arguments of a tool are the model's, and which a framework puts in."""

    __slots__ = ("_injected", "_names")

    def __init__(self, fn: Callable[..., Any]) -> None:
        try:
            names = tuple(inspect.signature(_called(fn)).parameters)
        except (TypeError, ValueError):
            names = ()
        hints = _hints_of(fn)
        self._names = names
        self._injected = frozenset(name for name in names if _is_injected(hints.get(name)))

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The model's arguments by name, and the call's id where a framework put it in."""
        given = dict(zip(self._names, args, strict=False)) | kwargs if args else kwargs
        if not self._injected:
            return given, None
        injected = [given[name] for name in self._injected if name in given]
        ids = (value if isinstance(value, str) else getattr(value, "tool_call_id", None) for value in injected)
        own = {name: value for name, value in given.items() if name not in self._injected}
        return own, next((one for one in ids if isinstance(one, str)), None)


def _called(fn: Any) -> Any:
    """What is called when `fn` is; of an object its bound `__call__`, which may be a static or a class method."""
    return fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else fn.__call__


def _hints_of(fn: Any) -> dict[str, Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not inspect.isroutine(fn):
        fn = type(fn).__call__
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except Exception:  # a name that cannot be resolved; the text of the annotation has to do
        return dict(getattr(fn, "__annotations__", {}))


def _is_injected(hint: Any) -> bool:
    if hint is None:
        return False
    if isinstance(hint, str):
        head = hint.partition("[")[0].rpartition(".")[2]
        return head in _INJECTED_TYPES or (head == "Annotated" and _INJECTED_MARK in hint)
    for mark in getattr(hint, "__metadata__", ()):
        if getattr(mark, "__name__", type(mark).__name__).startswith(_INJECTED_MARK):
            return True
    bare = typing.get_origin(hint) or hint
    if bare is typing.Annotated:
        bare = hint.__origin__
    return getattr(bare, "__name__", "") in _INJECTED_TYPES


def _kind_of(fn: Any) -> Any:
    """What tells whether `fn` is async or a generator; None where it is no function, but an object of a framework."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.isroutine(fn):
        return fn
    if inspect.isclass(fn) or hasattr(fn, "invoke") or hasattr(fn, "on_invoke_tool"):
        return None
    return getattr(type(fn), "__call__", None)  # noqa: B004  the method itself, not whether there is one


def _name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name: str = getattr(fn, "__name__", type(fn).__name__)
    return name
