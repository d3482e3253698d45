"""The same checkpoints, whoever keeps them: nobody, SQLite, PostgreSQL (memory is in the other parts of the matrix)."""

from __future__ import annotations

import pytest
from conformance_nodes import KINDS, SYNC_KINDS
from conformance_runs import Cell, observe, params
from conformance_savers import nowhere, postgres, sqlite

from agentkv.runtime import identity

CELLS = [
    Cell(kind=kind, outcome=outcome, drive=drive)
    for kind in KINDS
    for drive in ("invoke", "ainvoke")
    for outcome in ("goto", "raise", "interrupt", "parent")
    if drive == "ainvoke" or kind in SYNC_KINDS
]


def compare(cell: Cell, kv, savers) -> None:
    def in_scope() -> bool:
        return identity.wants_as_is(kv)

    plain, _ = observe(cell, lambda node: node, in_scope=in_scope, savers=savers)
    decorated, body = observe(cell, kv.node(context=False), in_scope=in_scope, savers=savers)
    assert plain.runs > 0
    assert plain == decorated
    assert all(body.scopes)
    assert bool(plain.states) is (savers is not nowhere)


@pytest.mark.parametrize("cell", params(CELLS))
def test_without_a_checkpointer(cell: Cell, shared_kv) -> None:
    """An interrupt fails as it does in the plain graph."""
    compare(cell, shared_kv, nowhere)


@pytest.mark.parametrize("cell", params(CELLS))
def test_in_sqlite(cell: Cell, shared_kv) -> None:
    """Same state, history, tasks and interrupts."""
    pytest.importorskip("langgraph.checkpoint.sqlite", reason="pip install langgraph-checkpoint-sqlite")
    compare(cell, shared_kv, sqlite(cell.drive))


@pytest.mark.slow
@pytest.mark.parametrize("cell", params(CELLS))
def test_in_postgres(cell: Cell, shared_kv, postgres_url) -> None:
    """On a real server."""
    pytest.importorskip("langgraph.checkpoint.postgres", reason="pip install langgraph-checkpoint-postgres")
    compare(cell, shared_kv, postgres(cell.drive, postgres_url))
