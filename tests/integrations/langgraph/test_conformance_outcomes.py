"""A decorated graph behaves exactly like the plain one: kinds of nodes x ways to run x outcomes."""

from __future__ import annotations

import pytest
from conformance_nodes import ASYNC_KINDS, KINDS, SYNC_KINDS
from conformance_runs import MODES, Cell, observe, params, structure

from agentkv.runtime import identity

OUTCOMES = ("return", "nothing", "goto", "parent", "send", "interrupt", "raise", "retry", "cancel", "timeout", "cache")


def cells() -> list[Cell]:
    """Every kind under every outcome; what cannot be cancelled, or is async in a sync graph, is asked for once."""
    made = [
        Cell(kind=kind, outcome=outcome, drive=drive, modes=MODES if drive in {"stream", "astream"} else None)
        for kind in KINDS
        for outcome in OUTCOMES
        for drive in ("invoke", "ainvoke", "stream", "astream")
    ]
    return [
        cell
        for cell in made
        if cell.drive.startswith("a")
        or (cell.kind in SYNC_KINDS and cell.outcome != "cancel")
        or (cell.kind in ASYNC_KINDS and cell.outcome == "return")
    ]


def expected(cell: Cell) -> tuple[int, str | None]:  # noqa: PLR0911  one for each outcome
    """How often the body runs, and the first error that the caller sees: so that no cell compares nothing."""
    if cell.kind in ASYNC_KINDS and not cell.drive.startswith("a"):
        return 0, "TypeError"
    match cell.outcome:
        case "timeout" if not cell.drive.startswith("a"):
            return 0, "ValueError"  # refused: a sync node cannot be stopped
        case "timeout" if cell.kind == "subgraph":
            return 1, None  # taken for async, and quick
        case "timeout" if cell.kind in SYNC_KINDS and cell.kind != "two-colour runnable":
            return 0, "ValueError"
        case "timeout":
            return 1, "NodeTimeoutError"
        case "raise":
            return 1, "ValueError"
        case "cancel":
            return 1, "CancelledError"
        case "interrupt" if cell.kind == "stateful sequence":
            return 3, "RuntimeError"  # LangGraph gives a class of a user's no context behind the first step
        case "interrupt" | "retry":
            return 3, None
    return 1, None


@pytest.mark.parametrize("cell", params(cells()))
def test_a_decorated_node_shows_what_the_plain_one_shows(cell: Cell, shared_kv) -> None:
    """Same states, histories, events, callbacks and exceptions; and it does run in our scope."""

    def in_scope() -> bool:
        return identity.wants_as_is(shared_kv)

    plain, _ = observe(cell, lambda node: node, in_scope=in_scope)
    decorated, body = observe(cell, shared_kv.node(context=False), in_scope=in_scope)
    assert expected(cell) == (plain.runs, plain.errors[0][0][0] if plain.errors else None)
    assert plain == decorated
    assert all(body.scopes)
    assert not in_scope()


@pytest.mark.parametrize("outcome", ["return", "goto", "parent"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_decorated_graph_is_drawn_and_described_as_the_plain_one(kind, outcome, shared_kv) -> None:
    """Same edges, pictures, sub-graphs, input schemas, JSON schemas and cache keys."""
    cell = Cell(kind=kind, outcome=outcome)
    plain = structure(cell, lambda node: node)
    assert plain == structure(cell, shared_kv.node)
    if outcome == "goto" and "runnable" not in kind and "generator" not in kind and "sequence" not in kind:
        assert "right" in plain["picture"] or "subgraph" in kind
