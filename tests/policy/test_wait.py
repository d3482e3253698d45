"""The ladder: one rule per test, then what holds for every input."""

import inspect
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.core.forecast import Forecast
from agentkv.core.residency import Action, Residency, Tier
from agentkv.errors import ConfigError
from agentkv.policy import POLICIES, keep, ladder, make_policy
from agentkv.policy.wait import MIN_AHEAD_S


def forecast(*points):
    return Forecast(remaining_s=points, n=len(points), source="history")


def resident(**changes):
    """100 blocks of a 20,000-token context on the device, host and disk there, nothing written yet."""
    facts = {
        "session": "s", "tokens": 20_000, "block_bytes": 1000, "total_blocks": 100, "device_blocks": 100,
        "unwritten_blocks": 100, "restore_host_s": 0.1, "restore_disk_s": 0.5, "recompute_s": 4.0, "has_disk": True,
    }  # fmt: skip
    return Residency(**(facts | changes))


def on_host(**changes):
    return resident(**({"device_blocks": 0, "host_blocks": 100, "unwritten_blocks": 0} | changes))


def only_move(decision):
    (move,) = decision.moves
    assert move.reason
    assert move.session == "s"
    return move


def test_a_short_wait_stays_on_the_device():
    """Below keep_s nothing moves; the ladder asks again at keep_s, when the wait may have become a long one."""
    decision = ladder()(resident(), forecast(1.0, 2.0, 3.0), 100.0, 100.0)
    assert decision.moves == ()
    assert decision.ask_again_s == 105.0


def test_a_short_wait_that_outlives_its_forecast_goes_to_host_at_keep_s():
    """Expected 2 s, still running after 5: from now on it counts as a long one."""
    move = only_move(ladder()(resident(), forecast(1.0, 2.0, 3.0), 100.0, 105.0))
    assert (move.action, move.to) == (Action.DEMOTE, Tier.HOST)


def test_a_middle_wait_goes_to_host():
    """5 s to 2 min: host, and the next question is the prefetch, restore time plus margin before the early end."""
    decision = ladder()(resident(), forecast(20.0, 30.0, 40.0), 100.0, 100.0)
    move = only_move(decision)
    assert (move.action, move.to, move.not_before_s) == (Action.DEMOTE, Tier.HOST, 100.0)
    assert decision.ask_again_s == pytest.approx(100.0 + 22.0 - 0.1 - 0.3)


def test_a_long_wait_goes_to_disk():
    """More than host_s expected."""
    move = only_move(ladder()(resident(), forecast(200.0, 300.0, 400.0), 0.0, 0.0))
    assert (move.action, move.to) == (Action.DEMOTE, Tier.DISK)


def test_a_wait_that_grows_sinks_from_host_to_disk():
    """After 100 s only the long points are left: the blocks on host go deeper, at the moment named before."""
    points = forecast(*[60.0] * 5, *[1000.0] * 5)
    first = ladder()(resident(), points, 0.0, 0.0)
    assert only_move(first).to is Tier.DISK  # the median lies between
    points = forecast(*[60.0] * 6, *[1000.0] * 4)
    first = ladder()(resident(), points, 0.0, 0.0)
    assert only_move(first).to is Tier.HOST
    later = ladder()(on_host(), points, 0.0, 60.0)
    assert only_move(later).to is Tier.DISK


def test_a_background_branch_goes_to_disk_whatever_it_waits_for_and_is_not_called_back():
    """Nobody waits for it."""
    decision = ladder()(resident(background=True), forecast(2.0, 3.0), 0.0, 0.0)
    assert only_move(decision).to is Tier.DISK
    away = resident(background=True, device_blocks=0, disk_blocks=100, unwritten_blocks=0)
    assert ladder()(away, forecast(2.0, 3.0), 0.0, 1.9).moves == ()


@pytest.mark.parametrize(
    ("has_host", "has_disk", "long", "tier"),
    [(True, False, True, Tier.HOST), (False, True, False, Tier.DISK), (False, False, True, None)],
)
def test_where_a_tier_is_missing_the_other_serves(has_host, has_disk, long, tier):
    """No disk: host. No host: disk. Neither: nothing moves, and nothing is asked."""
    points = forecast(300.0) if long else forecast(30.0)
    decision = ladder()(resident(has_host=has_host, has_disk=has_disk), points, 0.0, 0.0)
    assert [move.to for move in decision.moves] == ([] if tier is None else [tier])
    assert (decision.ask_again_s is None) == (tier is None)


def test_a_small_context_is_dropped_instead_of_demoted():
    """Below drop_tokens, with or without other tiers, once the wait is longer than the recompute."""
    small = resident(tokens=8191, recompute_s=1.0)
    decision = ladder()(small, forecast(30.0), 0.0, 0.0)
    assert (only_move(decision).action, decision.moves[0].to) == (Action.DROP, None)
    alone = resident(tokens=100, recompute_s=0.1, has_host=False, has_disk=False)
    assert only_move(ladder()(alone, forecast(30.0), 0.0, 0.0)).action is Action.DROP
    assert only_move(ladder(drop_tokens=0)(small, forecast(30.0), 0.0, 0.0)).action is Action.DEMOTE


def test_a_small_context_whose_recompute_outlasts_the_wait_stays():
    """Dropping what will be needed before it could be computed again only costs."""
    assert ladder()(resident(tokens=100, recompute_s=40.0), forecast(30.0), 0.0, 0.0).moves == ()


def test_blocks_are_called_back_restore_time_and_margin_before_the_early_end():
    """The 10 % quantile decides first, later durations after it, and the move says by when it is needed."""
    points = forecast(10.0, 20.0, 30.0)  # 10 % quantile: 12 s
    policy = ladder(margin_s=0.3)
    early = policy(on_host(), points, 0.0, 10.5)
    assert early.moves == ()
    assert early.ask_again_s == pytest.approx(11.6)
    move = only_move(policy(on_host(), points, 0.0, 11.6))
    assert (move.action, move.to) == (Action.PREFETCH, Tier.DEVICE)
    assert move.needed_by_s == pytest.approx(12.0)


def test_the_way_back_is_that_of_the_tier_where_the_blocks_are():
    """From disk the call starts earlier than from host."""
    points = forecast(12.0)
    on_disk = resident(device_blocks=0, disk_blocks=100, unwritten_blocks=0)
    assert ladder()(on_host(), points, 0.0, 0.0).ask_again_s == pytest.approx(12.0 - 0.4)
    assert ladder()(on_disk, points, 0.0, 0.0).ask_again_s == pytest.approx(12.0 - 0.8)


def test_what_is_on_the_device_already_is_not_called():
    """Clean blocks that nobody evicted need no copy back."""
    clean = resident(host_blocks=100, unwritten_blocks=0)
    assert ladder()(clean, forecast(12.0), 0.0, 11.9).moves == ()


def test_nothing_is_demoted_that_would_be_called_back_at_once():
    """Expected 6 s, but one call in five ends within 0.3 s: it is written ahead, and stays until that is past."""
    points = forecast(0.3, 0.3, *[6.0] * 8)
    policy = ladder()
    decision = policy(resident(), points, 0.0, 0.0)
    assert (Action.WRITE, Tier.HOST) == (only_move(decision).action, only_move(decision).to)
    assert policy(resident(unwritten_blocks=0), points, 0.0, 0.0).moves == ()
    assert policy(resident(has_host=False), points, 0.0, 0.0).moves == ()
    assert decision.ask_again_s == pytest.approx(0.3)
    assert only_move(policy(resident(), points, 0.0, 0.3)).to is Tier.HOST


def test_between_the_durations_of_a_broad_history_the_context_stays():
    """Called back at the early end; the next known duration is a second away, several ways back are not."""
    points = forecast(*[20.0 + i for i in range(21)])
    back = resident(host_blocks=100, unwritten_blocks=0)
    assert ladder()(back, points, 0.0, 23.0).moves == ()
    gap = forecast(20.0, 21.0, 60.0, 60.0, 60.0, 60.0)
    assert only_move(ladder()(back, gap, 0.0, 23.0)).action is Action.DEMOTE


def test_a_wait_that_is_barely_late_is_not_given_up():
    """Called back for 30 s, still running at 31: the blocks stay; at 40 s they leave."""
    points = forecast(*[30.0] * 9)
    back = resident(host_blocks=100, unwritten_blocks=0)
    late = ladder()(back, points, 0.0, 31.0)
    assert late.moves == ()
    assert late.ask_again_s == pytest.approx(37.5)
    assert only_move(ladder()(back, points, 0.0, 40.0)).action is Action.DEMOTE


def test_an_overdue_wait_is_asked_about_ever_more_rarely():
    """A tool that never returns costs a handful of questions a day."""
    now_s, asked = 10.0, 0
    while now_s < 86_400:
        again = ladder()(on_host(), forecast(1.0, 2.0), 0.0, now_s).ask_again_s
        assert again is not None
        now_s, asked = again, asked + 1
    assert asked < 30


def test_an_empty_session_needs_nothing():
    """No block, no move, no question."""
    empty = resident(device_blocks=0, total_blocks=0, unwritten_blocks=0)
    lost = resident(device_blocks=0, missing_blocks=100, unwritten_blocks=0)
    for residency in (empty, lost):
        decision = ladder()(residency, forecast(30.0), 0.0, 0.0)
        assert (decision.moves, decision.ask_again_s) == ((), None)


def test_keep_never_moves_anything():
    """The baseline."""
    decision = keep()(resident(), forecast(1000.0), 0.0, 500.0)
    assert (decision.moves, decision.ask_again_s) == ((), None)


def test_policies_are_made_by_name_with_their_options():
    """The demo's scaled ladder, for instance."""
    policy = make_policy("ladder", keep_s=0.5, host_s=4, drop_tokens=256)
    assert only_move(policy(resident(tokens=300), forecast(2.0), 0.0, 0.0)).to is Tier.HOST
    assert sorted(POLICIES) == ["keep", "ladder"]


def test_the_defaults_are_the_four_numbers_of_the_ladder():
    """5 s, 2 min, 8K tokens, 0.3 s margin."""
    defaults = {name: p.default for name, p in inspect.signature(ladder).parameters.items()}
    assert defaults == {"keep_s": 5.0, "host_s": 120.0, "drop_tokens": 8192, "margin_s": 0.3}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("laddr", {}, "keep, ladder"),
        ("ladder", {"keeps": 1}, "keep_s, host_s, drop_tokens, margin_s"),
        ("keep", {"keep_s": 1}, "no options"),
        ("ladder", {"keep_s": -1}, "keep_s=-1"),
        ("ladder", {"keep_s": math.nan}, "keep_s=nan"),
        ("ladder", {"keep_s": "5"}, "keep_s='5'"),
        ("ladder", {"drop_tokens": True}, "drop_tokens=True"),
        ("ladder", {"keep_s": 10, "host_s": 5}, "must not exceed"),
        ("ladder", {"margin_s": math.inf}, "finite"),
    ],
)
def test_a_policy_that_cannot_be_says_what_is_allowed(name, options, said):
    """Unknown names, unknown options and numbers out of order are errors at construction."""
    with pytest.raises(ConfigError, match=said):
        make_policy(name, **options)


# -- what holds for every input

waits = st.lists(st.floats(0, 1e5), min_size=1, max_size=21).map(lambda values: forecast(*sorted(values)))


@st.composite
def residencies(draw):
    total = draw(st.integers(0, 200))
    has_host, has_disk = draw(st.booleans()), draw(st.booleans())
    missing = draw(st.integers(0, total))
    held = total - missing
    device = draw(st.integers(0, held))
    host = draw(st.integers(0, held)) if has_host else 0
    disk = draw(st.integers(0, held)) if has_disk else 0
    return Residency(
        session="s", tokens=draw(st.integers(0, 20_000)), block_bytes=1, total_blocks=total, missing_blocks=missing,
        device_blocks=device, host_blocks=host, disk_blocks=disk, has_host=has_host, has_disk=has_disk,
        restore_host_s=draw(st.floats(0, 10)), restore_disk_s=draw(st.floats(0, 100)),
        recompute_s=draw(st.floats(0, 100)), background=draw(st.booleans()), pressed=draw(st.booleans()),
    )  # fmt: skip


ladders = st.builds(
    lambda keep_s, more_s, drop_tokens, margin_s: (
        ladder(keep_s=keep_s, host_s=keep_s + more_s, drop_tokens=drop_tokens, margin_s=margin_s),
        drop_tokens,
        margin_s,
    ),
    st.floats(0, 100), st.floats(0, 1000), st.integers(0, 20_000), st.floats(0, 5),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(ladders, residencies(), waits, st.floats(-1e6, 1e6), st.floats(-10, 1e6))
def test_no_move_goes_where_nothing_is_and_no_question_comes_too_soon(made, residency, points, started_s, elapsed_s):
    """Missing tiers, dropping, prefetching, hysteresis and the next question, for any facts at any time."""
    policy, drop_tokens, margin_s = made
    now_s = started_s + elapsed_s
    decision = policy(residency, points, started_s, now_s)
    left = points.after(max(0.0, now_s - started_s))
    assert len(decision.moves) <= 1
    assert decision.reason
    if decision.ask_again_s is not None:
        assert now_s + MIN_AHEAD_S <= decision.ask_again_s < math.inf
    held = residency.total_blocks - residency.missing_blocks
    for move in decision.moves:
        assert held > 0
        if move.to is Tier.HOST:
            assert residency.has_host
        if move.to is Tier.DISK:
            assert residency.has_disk
        if move.action is Action.DROP:
            assert residency.tokens < drop_tokens
        if move.action is Action.DEMOTE:
            assert residency.tokens >= drop_tokens
            back_s = residency.restore_host_s if move.to is Tier.HOST else residency.restore_disk_s
            ends = [points.quantile_s(0.1), *points.remaining_s]
            elapsed = max(0.0, now_s - started_s)
            soon_s = min((end - elapsed for end in ends if end > max(elapsed, ends[0] - 1e-9)), default=None)
            assert (left.quantile_s(0.1) if soon_s is None else soon_s) > back_s + margin_s
        if move.action is Action.PREFETCH:
            assert move.to is Tier.DEVICE
            assert residency.device_blocks < held
            assert not residency.background
    assert decision == policy(residency, points, started_s, now_s)


@settings(max_examples=100, deadline=None)
@given(ladders, residencies(), waits)
def test_a_day_of_waiting_costs_a_bounded_number_of_questions(made, residency, points):
    """Following ask_again_s alone, however the residency looks, never becomes a loop."""
    policy, _, _ = made
    now_s, asked = 0.0, 0
    while now_s < 86_400:
        decision = policy(residency, points, 0.0, now_s)
        if decision.ask_again_s is None:
            break
        now_s, asked = decision.ask_again_s, asked + 1
    assert asked <= 3 * len(points.remaining_s) + 60
