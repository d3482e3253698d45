"""Streams, mode by mode: a decorated node's events are the plain one's, also where a chat model speaks."""

from __future__ import annotations

import pytest
from conformance_nodes import ASYNC_KINDS, KINDS, SYNC_KINDS
from conformance_runs import MODES, Cell, observe, params

from agentkv.runtime import identity

CELLS = [
    Cell(kind=kind, outcome=outcome, drive=drive, modes=mode)
    for kind in KINDS
    for drive in ("stream", "astream")
    for mode in MODES
    for outcome in (("model",) if mode == "messages" else ("return",))
    if drive == "astream" or kind in SYNC_KINDS
] + [
    Cell(kind=kind, outcome=outcome, drive="astream_events")
    for kind in KINDS
    for outcome in ("return", "model", "raise", "interrupt")
]


@pytest.mark.parametrize("cell", params(CELLS))
def test_a_decorated_node_streams_what_the_plain_one_streams(cell: Cell, shared_kv) -> None:
    """The same chunks in the same order, and something to compare."""

    def in_scope() -> bool:
        return identity.wants_as_is(shared_kv)

    plain, _ = observe(cell, lambda node: node, in_scope=in_scope)
    decorated, body = observe(cell, shared_kv.node(context=False), in_scope=in_scope)
    assert plain.events or cell.modes == "custom"
    assert plain == decorated
    assert all(body.scopes)
    if cell.kind == "generator" and cell.drive == "astream_events":
        assert "TypeError" == plain.errors[0][0][0]  # LangChain refuses to stream a sync generator asynchronously
    elif cell.outcome == "model":
        assert "three" in repr(plain.events)


def test_async_kinds_are_known() -> None:
    """The matrix has both colours."""
    assert {*ASYNC_KINDS, *SYNC_KINDS} == {*KINDS}
