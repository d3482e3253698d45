"""Budgets: nothing is spent that does not fit, whoever asks at the same time."""

import asyncio
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from agentkv.budget.account import Account
from agentkv.budget.limits import Budget, Spent
from agentkv.clock import ManualClock
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded, ConfigError


def used(tokens, calls=1):
    return Usage(input_tokens=tokens, calls=calls)


def test_without_a_budget_nothing_is_refused():
    """None is no limit; counting goes on."""
    account = Account("t")
    account.reserve(10**12, calls=1000).settle(used(10**12, 1000))
    account.tool_call(1000)
    assert (account.used.tokens, account.used.model_calls, account.used.tool_calls) == (10**12, 1000, 1000)
    assert account.left_tokens is None


@pytest.mark.parametrize("limit", ["tokens", "model_calls", "tool_calls", "seconds"])
def test_zero_is_a_limit_and_stops_the_first_step(limit):
    """A budget of 0 is not "no budget"."""
    account = Account("t", Budget(**{limit: 0}), ManualClock())
    with pytest.raises(BudgetExceeded, match=limit):
        account.tool_call() if limit == "tool_calls" else account.reserve(0)
    assert account.used == Spent()
    account.check()


@pytest.mark.parametrize(
    "bad", [{"tokens": -1}, {"seconds": math.nan}, {"tokens": 1.5}, {"tool_calls": True}, {"model_calls": "3"}]
)
def test_a_budget_that_cannot_be_is_refused(bad):
    """Negative, fractional or textual limits name the field."""
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Budget(**bad)


def test_the_error_carries_the_numbers_and_nothing_was_set_aside():
    """What was allowed, what is used or reserved, what was asked."""
    account = Account("task-1", Budget(tokens=1000))
    account.reserve(300).settle(used(250))
    account.reserve(400)
    with pytest.raises(BudgetExceeded, match="1,000 tokens: 650 are used or reserved") as caught:
        account.reserve(351)
    error = caught.value
    assert (error.task, error.limit, error.allowed, error.used, error.asked) == ("task-1", "tokens", 1000, 650, 351)
    assert isinstance(error, RuntimeError)
    assert account.reserved.tokens == 400
    account.reserve(350)
    account.check()


def test_settling_replaces_the_worst_case_by_what_was_used():
    """The rest is free again; an engine that used more is believed, and the next call is refused."""
    account = Account("t", Budget(tokens=1000))
    account.reserve(800).settle(used(100))
    assert account.left_tokens == 900
    account.reserve(900).settle(used(1200))
    assert account.left_tokens == 0
    with pytest.raises(BudgetExceeded):
        account.reserve(1)


def test_only_the_first_end_of_a_reservation_counts():
    """Settle and release may be called twice, in any order."""
    account = Account("t", Budget(tokens=100))
    settled, released = account.reserve(10), account.reserve(10)
    settled.settle(used(5))
    settled.settle(used(5))
    settled.release()
    released.release()
    released.settle(used(9))
    assert (account.used.tokens, account.used.model_calls, account.reserved.tokens) == (5, 1, 0)
    account.check()


def test_leaving_the_block_gives_back_what_was_not_settled():
    """A call that failed before it started costs neither tokens nor a call."""
    account = Account("t", Budget(tokens=100, model_calls=1))
    with pytest.raises(ValueError), account.reserve(100):
        raise ValueError("no such model")
    with account.reserve(100) as reservation:
        reservation.settle(used(60))
    assert (account.used.tokens, account.used.model_calls) == (60, 1)


def test_equal_shares_use_the_budget_exactly():
    """Eleven elevenths fit, a twelfth does not."""
    account = Account("t", Budget(tokens=1100, model_calls=11))
    for _ in range(11):
        account.reserve(100).settle(used(100))
    assert account.left_tokens == 0
    with pytest.raises(BudgetExceeded):
        account.reserve(1)


def test_parallel_tool_calls_are_counted_before_they_start():
    """Eight asked, six allowed: six start."""
    account = Account("t", Budget(tool_calls=6))
    started = 0
    for _ in range(8):
        try:
            account.tool_call()
            started += 1
        except BudgetExceeded:
            continue
    assert started == 6


def test_seconds_count_from_the_start_of_the_task():
    """The task's age, by the monotonic clock."""
    clock = ManualClock(50.0)
    account = Account("t", Budget(seconds=10), clock)
    clock.advance(9.9)
    account.reserve(1)
    clock.advance(0.1)
    with pytest.raises(BudgetExceeded, match="seconds"):
        account.reserve(1)
    with pytest.raises(BudgetExceeded, match="seconds"):
        account.tool_call()
    account.budget = Budget(seconds=20)
    account.tool_call()


def test_a_larger_budget_lets_the_task_go_on():
    """What is used stays used."""
    account = Account("t", Budget(tokens=100))
    account.reserve(100).settle(used(100))
    account.budget = Budget(tokens=150)
    assert account.left_tokens == 50
    account.reserve(50)


@pytest.mark.parametrize("bad", [{"tokens": -1}, {"tokens": 1, "calls": 0}])
def test_a_reservation_that_cannot_be_is_misuse(bad):
    """Giving oneself tokens back by a negative reservation is refused."""
    with pytest.raises(ConfigError):
        Account("t").reserve(**bad)


def test_fifty_threads_with_a_budget_for_three_calls_never_overspend():
    """Each reserves its worst case first; three pass, and what they use fits."""
    account = Account("t", Budget(tokens=3 * 1000 + 999))
    barrier, passed = threading.Barrier(50), []

    def branch(i):
        barrier.wait()
        try:
            reservation = account.reserve(1000)
        except BudgetExceeded:
            return
        passed.append(reservation)
        assert account.used.tokens + account.reserved.tokens <= 3999

    threads = [threading.Thread(target=branch, args=(i,)) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(passed) == 3
    for reservation in passed:
        reservation.settle(used(1000))
    assert account.used.tokens == 3000
    account.check()


def test_threads_and_coroutines_together_spend_the_budget_and_no_token_more():
    """Random sizes, random ends, thousands of calls: never above the limit, and the counts agree at the end."""
    account = Account("t", Budget(tokens=20_000))
    worst = []

    def spend(seed):
        rng = random.Random(seed)
        for _ in range(300):
            tokens = rng.randrange(1, 200)
            try:
                reservation = account.reserve(tokens)
            except BudgetExceeded:
                continue
            worst.append(account.used.tokens + 0)
            reservation.release() if rng.random() < 0.3 else reservation.settle(used(rng.randrange(tokens + 1)))

    async def coroutines():
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(8) as pool:
            await asyncio.gather(*(loop.run_in_executor(pool, spend, seed) for seed in range(8)))

    asyncio.run(coroutines())
    assert max(worst) <= 20_000
    assert account.used.tokens <= 20_000
    assert account.reserved == Spent()
    account.check()


class Accounting(RuleBasedStateMachine):
    """Reservations made and ended in any order; a plain sum is the specification."""

    started = Bundle("started")

    def __init__(self):
        super().__init__()
        self.account = Account("t", Budget(tokens=1000, model_calls=20), ManualClock())
        self.spent = self.spent_calls = 0
        self.held = {}

    @rule(target=started, tokens=st.integers(0, 600), calls=st.integers(1, 5))
    def reserve(self, tokens, calls):
        held = sum(t for t, _ in self.held.values()) + self.spent
        held_calls = sum(c for _, c in self.held.values()) + self.spent_calls
        fits = held + max(tokens, 1) <= 1000 and held_calls + calls <= 20
        try:
            reservation = self.account.reserve(tokens, calls)
        except BudgetExceeded:
            assert not fits
            return None
        assert fits
        self.held[reservation] = (tokens, calls)
        return reservation

    @rule(reservation=consumes(started), share=st.floats(0, 1), release=st.booleans(), twice=st.booleans())
    def end(self, reservation, share, release, twice):
        if reservation is None:
            return
        tokens, calls = self.held.pop(reservation)
        really = int(tokens * share)
        if release:
            reservation.release()
        else:
            reservation.settle(used(really))
            self.spent += really
            self.spent_calls += calls
        if twice:
            reservation.settle(used(999))

    @invariant()
    def sums_agree(self):
        self.account.check()
        assert self.account.used.tokens == self.spent <= 1000
        assert self.account.used.model_calls == self.spent_calls <= 20
        assert self.account.reserved.tokens == sum(t for t, _ in self.held.values())


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=60, stateful_step_count=30)
