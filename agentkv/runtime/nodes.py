"""Decorated nodes: what runs inside is attributed to the node. How a node is wrapped is the host's."""

from __future__ import annotations

from functools import partial
from typing import Any

from agentkv import log
from agentkv.core.host import Host
from agentkv.runtime import identity


def decorated(owner: Any, host: Host, fn: Any, *, name: str | None, as_is: bool) -> Any:
    """`fn` with a scope of `owner` around each run; with `as_is` its model calls are sent as they are."""
    inner = fn.func if isinstance(fn, partial) else fn
    label = name or getattr(inner, "__name__", None) or getattr(inner, "name", None) or type(inner).__name__

    def enter() -> Any:
        if owner.budgets.gate.has_stopped:
            owner.budgets.gate.node(owner.caller())
        known = host.caller() if name else None
        return identity.push(owner=owner, node=label, instead_of=known.node if known else None, as_is=as_is)

    def leave(token: Any, error: BaseException | None) -> None:
        identity.pop(token)
        if error is not None and not host.is_control_flow(error):
            log.count("node_failed")

    return host.wrap_node(fn, enter, leave)
