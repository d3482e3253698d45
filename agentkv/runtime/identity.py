"""Who is calling: an explicit `with kv.task(...)`, else the host's own context, else "unattributed".

Context variables carry explicit scopes only as far as Python does (not into a user's own threads); a caller
that nothing is known about is never guessed to be another task.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentkv.core.host import Host
from agentkv.core.task import Caller

_Fn = TypeVar("_Fn")
_UNKNOWN = Caller()
SEGMENT = "segment="
"""How the part of a branch begins that names a segment of a task."""


@dataclass(slots=True, kw_only=True, eq=False)
class Scope:
    """One `with kv.task(...)` or one run of a decorated node; `owner` is the AgentKV it belongs to.

    `node` is for callers whose host knows none, and for the one that it calls `instead_of`.
    `outside`: no framework was at work where it was opened, so it stands around whole runs of one.
    `open` ends with the scope, also where another context still refers to it (a generator, a thread's copy): what
    is over speaks for nobody any more.
    """

    owner: Any
    task: str | None = None
    node: str | None = None
    instead_of: str | None = None
    segment: str | None = None
    as_is: bool = False
    outside: bool = False
    outer: Scope | None = None
    open: bool = True


_scope: ContextVar[Scope | None] = ContextVar("agentkv_scope", default=None)


def push(
    *,
    owner: Any,
    task: str | None = None,
    node: str | None = None,
    instead_of: str | None = None,
    segment: str | None = None,
    as_is: bool = False,
    outside: bool = False,
) -> Scope:
    """Open a scope in this context; `pop` closes it."""
    scope = Scope(
        owner=owner, task=task, node=node, instead_of=instead_of, segment=segment, as_is=as_is, outside=outside,
        outer=_scope.get(),
    )  # fmt: skip
    _scope.set(scope)
    return scope


def pop(scope: Scope) -> None:
    """Close a scope, in whatever order scopes are closed and whichever context this is."""
    scope.open = False
    current = _scope.get()
    while current is not None and not current.open:
        current = current.outer
    _scope.set(current)


def suspend(scope: Any) -> None:
    """The scope's generator hands out an item: whoever takes it runs in the same context, and is somebody else."""
    if _scope.get() is scope and isinstance(scope, Scope):
        _scope.set(scope.outer)


def resume(scope: Any) -> None:
    """The scope's generator goes on, in whichever context this is. Whatever is no scope is ignored, as in `suspend`."""
    if not isinstance(scope, Scope):
        return
    current = _scope.get()
    while current is not None and current is not scope:
        current = current.outer
    if current is None:
        scope.outer = _scope.get()
        _scope.set(scope)


def carried(fn: _Fn) -> _Fn:
    """`kv.carry(fn)`: `fn` for another thread, pool or event loop, where it runs for whoever is calling here and now.

    It sees the context variables of this place, the framework's among them, and what it sets itself stays its own. It
    may be called often and side by side. A task that has ended by then is not spoken for any more.
    """
    here = copy_context()
    call: Any = fn
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(call)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            import asyncio  # 20 ms that `import agentkv` must not pay

            return await asyncio.create_task(call(*args, **kwargs), context=here.copy())

        return run_async  # type: ignore[return-value]

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        return here.copy().run(call, *args, **kwargs)

    return run  # type: ignore[return-value]


def wants_as_is(owner: Any) -> bool:
    """True inside a node whose model calls are to be sent as they are."""
    scope = _scope.get()
    while scope is not None:
        if scope.open and scope.owner is owner and scope.as_is:
            return True
        scope = scope.outer
    return False


def scope_of(owner: Any) -> str | None:
    """The task of the innermost `with kv.task(...)` of `owner` here."""
    return next((scope.task for scope in _open_tasks() if scope.owner is owner), None)


def around_runs() -> Iterator[tuple[Any, str]]:
    """Owner and task of each scope here that a framework's whole run lies in, the innermost first."""
    return ((scope.owner, scope.task) for scope in _open_tasks() if scope.outside and scope.task is not None)


def _open_tasks() -> Iterator[Scope]:
    scope = _scope.get()
    while scope is not None:
        if scope.open and scope.task is not None:
            yield scope
        scope = scope.outer


def resolve(owner: Any, host: Host) -> Caller:
    """The caller as seen from here."""
    task = node = segment = instead_of = None
    scope = _scope.get()
    while scope is not None:
        if scope.open and scope.owner is owner:
            if node is None:
                node, instead_of = scope.node, scope.instead_of
            if task is None:  # a segment belongs to the task that it was opened in
                task = scope.task
                segment = scope.segment
        scope = scope.outer
    caller = host.caller()
    if caller is None:  # no framework is at work
        return _caller(
            _UNKNOWN.task if task is None else task, "" if segment is None else SEGMENT + segment, node or ""
        )
    if task is not None and task != caller.task:
        caller = replace(caller, task=task)
    if node is not None and caller.node in {"", instead_of}:
        caller = replace(caller, node=node)
    if segment is not None:
        caller = replace(caller, branch=f"{caller.branch}|{SEGMENT}{segment}" if caller.branch else SEGMENT + segment)
    return caller


@functools.lru_cache(maxsize=256)
def _caller(task: str, branch: str, node: str) -> Caller:
    return Caller(task=task, branch=branch, node=node)


def segment_of(branch: str) -> str | None:
    """The segment that a branch lies in; None outside of segments."""
    return next((part[len(SEGMENT) :] for part in branch.split("|") if part.startswith(SEGMENT)), None)
