"""What a node is given: every signature, in every kind that takes one, is injected as into the plain node."""

from __future__ import annotations

import pytest
from conformance_nodes import ASYNC_KINDS, KINDS, OWN_KINDS, SIGNATURES, WITHOUT_INJECTION
from conformance_runs import Cell, observe, params, structure

from agentkv.runtime import identity

CELLS = [
    Cell(
        kind=kind, signature=signature, drive="astream" if kind in ASYNC_KINDS else "stream", modes=("values", "custom")
    )
    for kind in KINDS
    for signature in SIGNATURES
    if not (kind in WITHOUT_INJECTION and signature not in {"bare state", "config"}) and kind not in OWN_KINDS
]


@pytest.mark.parametrize("cell", params(CELLS))
def test_a_decorated_node_is_given_what_the_plain_one_is_given(cell: Cell, shared_kv) -> None:
    """config, runtime, writer, store and previous, positional or by keyword; same results and same input schema."""

    def in_scope() -> bool:
        return identity.wants_as_is(shared_kv)

    plain, _ = observe(cell, lambda node: node, in_scope=in_scope)
    decorated, body = observe(cell, shared_kv.node(context=False), in_scope=in_scope)
    assert (1, []) == (plain.runs, plain.errors)
    assert plain == decorated
    assert [True] == body.scopes
    assert structure(cell, lambda node: node)["nodes"] == structure(cell, shared_kv.node)["nodes"]
    wanted = (
        {"config", "runtime", "writer", "store"} if "everything" in cell.signature else {cell.signature.split()[-1]}
    )
    for name in wanted - {"state", "previous"}:
        assert name in repr(plain.events)
