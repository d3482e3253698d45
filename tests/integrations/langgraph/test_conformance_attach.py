"""`kv.attach(graph)` changes nothing either: the plain graph with our callback shows what it shows without."""

from __future__ import annotations

import pytest
from conformance_runs import MODES, Cell, observe, params

OUTCOMES = (
    "return", "nothing", "goto", "parent", "send", "interrupt", "raise", "retry", "cancel", "timeout", "cache", "model"
)  # fmt: skip
CELLS = [
    Cell(kind=kind, outcome=outcome, drive=drive, modes=MODES if "stream" in drive and "events" not in drive else None)
    for kind, drives in (
        ("function", ("invoke", "stream")),
        ("async function", ("ainvoke", "astream", "astream_events")),
        ("subgraph", ("invoke", "astream")),
    )
    for drive in drives
    for outcome in OUTCOMES
    if outcome != "cancel" or drive.startswith("a")
]


@pytest.mark.parametrize("cell", params(CELLS))
def test_an_attached_graph_shows_what_the_plain_one_shows(cell: Cell, shared_kv) -> None:
    """Same states, events, callbacks of others and exceptions."""
    plain, _ = observe(cell, lambda node: node, in_scope=bool)
    attached, _ = observe(cell, lambda node: node, in_scope=bool, attach=shared_kv.attach)
    assert plain == attached
    assert plain.events or plain.errors
