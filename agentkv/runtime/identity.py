"""Who is calling: an explicit `with kv.task(...)`, else the host's own context, else "unattributed".

Context variables carry explicit scopes only as far as Python does (not into a user's own threads); a caller
that nothing is known about is never guessed to be another task.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any

from agentkv.core.host import Host
from agentkv.core.task import Caller

_UNKNOWN = Caller()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One `with kv.task(...)` or one run of a decorated node; `owner` is the AgentKV it belongs to."""

    owner: Any
    task: str | None = None
    node: str | None = None
    outer: Scope | None = None


_scope: ContextVar[Scope | None] = ContextVar("agentkv_scope", default=None)


def push(*, owner: Any, task: str | None = None, node: str | None = None) -> Token[Scope | None]:
    """Open a scope in this context; `pop` closes it."""
    return _scope.set(Scope(owner=owner, task=task, node=node, outer=_scope.get()))


def pop(token: Token[Scope | None]) -> None:
    """Close a scope. A generator that was started in one context and closed in another leaves nothing to undo."""
    try:
        _scope.reset(token)
    except ValueError:
        return


def resolve(owner: Any, host: Host) -> Caller:
    """The caller as seen from here."""
    task = node = None
    scope = _scope.get()
    while scope is not None and (task is None or node is None):
        if scope.owner is owner:
            task = task if task is not None else scope.task
            node = node if node is not None else scope.node
        scope = scope.outer
    caller = host.caller() or _UNKNOWN
    if task is not None and task != caller.task:
        caller = replace(caller, task=task)
    if node is not None and not caller.node:
        caller = replace(caller, node=node)
    return caller
