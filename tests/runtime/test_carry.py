"""What earlier segments of a task left, and how much of it is told."""

from __future__ import annotations

from agentkv.core.task import Caller
from agentkv.runtime.carry import Carry


def test_what_many_segments_left_is_bounded() -> None:
    """The newest are told, and how many are not."""
    carry = Carry()
    for number in range(100):
        carry.add("t", f"part {number}", f"{number:04} " * 200)
    told = carry.text(Caller(task="t", branch="segment=next"))
    assert len(told) < 17_000
    assert "[From the segment 'part 99']" in told
    assert told.startswith("[85 earlier segments are not told any more]")
    carry.add("u", "large", "x" * 50_000)
    assert 50_000 < len(carry.text(Caller(task="u", branch="segment=next")))
