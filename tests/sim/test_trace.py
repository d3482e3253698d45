"""Traces: the smallest round trip."""

from agentkv.sim.synthetic import synthetic
from agentkv.sim.trace import load, write


def test_what_is_written_is_read_back(tmp_path):
    """`load` gives the waits that `write` was given."""
    trace = synthetic(seed=3, sessions=5)
    write(tmp_path / "t.jsonl", trace.sessions, source="x")
    again = load(tmp_path / "t.jsonl", strict=True)
    assert trace.sessions == again.sessions
    assert len(trace) == again.skipped.used
