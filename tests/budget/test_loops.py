"""The scope around one round of a loop."""

from __future__ import annotations

import pytest

from agentkv.budget.loops import Round
from agentkv.errors import ConfigError


def round_of(kind="retry", limit=1, left=1):
    """A round, and what it told its owner."""
    told = []

    async def let_in():
        told.append("let in")

    return Round(
        kind,
        limit,
        enter=lambda: told.append("in"),
        leave=lambda _: told.append("out"),
        left=lambda: left,
        let_in=let_in,
    ), told


async def test_a_round_is_entered_and_left_in_sync_and_async_code_alike():
    """Again and again, one inside the other too."""
    loop, told = round_of()
    with loop, loop:
        pass
    async with loop:
        pass
    assert ["in", "in", "out", "out", "let in", "in", "out"] == told


@pytest.mark.parametrize(("left", "allowed"), [(None, True), (1, True), (0, False)])
def test_allowed_tells_whether_one_more_would_pass(left, allowed):
    """None: there is no cap."""
    assert round_of(left=left)[0].allowed is allowed


@pytest.mark.parametrize("bad", [{"kind": ""}, {"kind": 3}, {"limit": -1}, {"limit": True}, {"limit": 1.5}])
def test_a_loop_that_cannot_be_is_refused(bad):
    """Without a name, or with a cap that is no count."""
    with pytest.raises(ConfigError, match="loop"):
        round_of(**bad)
