"""The ladder over a manual clock: moves are carried out, time passes, the tool returns."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentkv.clock import ManualClock
from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Residency, Tier
from agentkv.policy import ladder

RESTORE_HOST_S, RESTORE_DISK_S, MARGIN_S = 0.2, 1.5, 0.3


class Waiting:
    """One session whose moves are carried out at once, under pressure: what is demoted is evicted."""

    def __init__(self, policy, points, *, tokens=20_000):
        self.clock = ManualClock(1000.0)
        self.policy = policy
        self.points = Forecast(remaining_s=tuple(points), n=9, source="history")
        self.moves = []
        self.residency = Residency(
            session="s", tokens=tokens, block_bytes=1, total_blocks=10, device_blocks=10, unwritten_blocks=10,
            restore_host_s=RESTORE_HOST_S, restore_disk_s=RESTORE_DISK_S, recompute_s=1.0, has_disk=True,
        )  # fmt: skip

    def run(self, duration_s):
        """Ask at the start and whenever the policy wants to be asked, until the tool returns."""
        started_s = self.clock.now_s()
        while True:
            decision = self.policy(self.residency, self.points, started_s, self.clock.now_s())
            for move in decision.moves:
                self.moves.append((self.clock.now_s() - started_s, move))
                self.carry_out(move)
            if decision.ask_again_s is None or decision.ask_again_s >= started_s + duration_s:
                return self
            self.clock.advance(decision.ask_again_s - self.clock.now_s())

    def carry_out(self, move):
        if move.action is Action.DROP:
            self.residency = replace(self.residency, device_blocks=0, missing_blocks=10, unwritten_blocks=0)
        elif move.action is Action.PREFETCH:
            self.residency = replace(self.residency, device_blocks=10)
        elif move.to is Tier.HOST:
            self.residency = replace(self.residency, device_blocks=0, host_blocks=10, unwritten_blocks=0)
        else:
            self.residency = replace(self.residency, device_blocks=0, host_blocks=0, disk_blocks=10, unwritten_blocks=0)

    def actions(self):
        return [(move.action, move.to) for _, move in self.moves]


@settings(max_examples=200, deadline=None)
@given(st.floats(1.0, 600.0), st.floats(1.0, 3.0))
def test_a_predicted_tool_finds_its_context_back(p50_s, width):
    """Whatever the length, a tool that ends between the 10 % point and the last finds all blocks on the device."""
    points = [p50_s / width, *[p50_s] * 5, p50_s * width]
    wait = Waiting(ladder(margin_s=MARGIN_S), points).run(p50_s)
    assert wait.residency.device_blocks == 10
    if wait.moves:
        when_s, last = wait.moves[-1]
        assert last.action is Action.PREFETCH
        sent = [move.to for _, move in wait.moves if move.action is Action.DEMOTE]
        way_back_s = RESTORE_DISK_S if sent[-1] is Tier.DISK else RESTORE_HOST_S
        assert when_s + way_back_s + MARGIN_S <= p50_s + 0.05 + 1e-6


def test_the_ladder_rung_by_rung():
    """2 s stays; 60 s goes to host and comes back; 300 s goes to disk and comes back."""
    there_and_back = [(Action.PREFETCH, Tier.DEVICE)]
    assert Waiting(ladder(), [2.0] * 5).run(2.0).actions() == []
    assert Waiting(ladder(), [60.0] * 5).run(60.0).actions() == [(Action.DEMOTE, Tier.HOST), *there_and_back]
    assert Waiting(ladder(), [300.0] * 5).run(300.0).actions() == [(Action.DEMOTE, Tier.DISK), *there_and_back]


def test_a_bimodal_tool_is_kept_then_demoted_then_called_back():
    """Either 1 s or 50 s: after the first second it must be the long one."""
    wait = Waiting(ladder(), [*[1.0] * 6, *[50.0] * 5]).run(50.0)
    assert wait.actions() == [(Action.DEMOTE, Tier.HOST), (Action.PREFETCH, Tier.DEVICE)]
    assert wait.moves[0][0] == pytest.approx(1.0)
    assert wait.moves[1][0] == pytest.approx(50.0 - RESTORE_HOST_S - MARGIN_S)


def test_a_hung_tool_sinks_rung_by_rung_and_is_left_there():
    """Expected 2 s, never returns: device, then host, then disk, and no copying to and fro."""
    wait = Waiting(ladder(), [1.0, 2.0, 2.0, 2.5]).run(100_000.0)
    assert wait.actions() == [(Action.DEMOTE, Tier.HOST), (Action.DEMOTE, Tier.DISK)]
    assert wait.moves[0][0] == pytest.approx(5.0)
    assert 120.0 <= wait.moves[1][0] < 200.0


def test_an_early_tool_needs_nothing_from_the_policy():
    """It returns before anything was called back: the blocks are where they are, to be loaded on demand."""
    wait = Waiting(ladder(), [60.0] * 5).run(10.0)
    assert wait.actions() == [(Action.DEMOTE, Tier.HOST)]
    assert wait.residency.host_blocks == 10


def test_a_small_context_is_dropped_once_and_forgotten():
    """Below drop_tokens the only move is the drop."""
    assert Waiting(ladder(), [60.0] * 5, tokens=100).run(60.0).actions() == [(Action.DROP, None)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.05, 500.0), min_size=1, max_size=21), st.floats(0.1, 1000.0))
def test_nothing_is_sent_away_right_after_it_was_called_back(points, duration_s):
    """Between a prefetch and the next demotion the next end must have become farther than several ways back."""
    wait = Waiting(ladder(), sorted(points)).run(duration_s)
    for (called_s, called), (sent_s, sent) in zip(wait.moves, wait.moves[1:], strict=False):
        if called.action is Action.PREFETCH and sent.action is Action.DEMOTE:
            assert sent_s > called_s
            later = [point for point in sorted(points) if point > sent_s]
            if later:
                assert later[0] - sent_s > 2 * (RESTORE_HOST_S + MARGIN_S)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1.0, 500.0), min_size=1, max_size=21), st.integers(0, 20))
def test_a_tool_that_takes_as_long_as_a_past_call_is_met_by_its_context(points, index):
    """Unless it is among the earliest tenth, or it belongs to none of the durations known."""
    points = sorted(points)
    duration_s = points[index % len(points)]
    wait = Waiting(ladder(), points)
    assume(duration_s >= wait.points.quantile_s(0.1))
    assert wait.run(duration_s).residency.device_blocks == 10


def test_a_broad_history_is_met_too():
    """Twenty calls between 20 and 40 s: called back at the early end, not sent away between neighbours."""
    wait = Waiting(ladder(), [20.0 + i for i in range(21)]).run(33.3)
    assert wait.actions() == [(Action.DEMOTE, Tier.HOST), (Action.PREFETCH, Tier.DEVICE)]
    assert wait.moves[1][0] == pytest.approx(22.0 - RESTORE_HOST_S - MARGIN_S)
