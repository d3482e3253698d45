"""Budgets: nothing is spent that does not fit, whoever asks at the same time."""

import asyncio
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, Inexact, localcontext

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
    assert account.left().get("tokens") is None


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


@pytest.mark.parametrize(
    "bad", ["$5", "5 USD", "5,00", -1, "-0.01", math.nan, "NaN", math.inf, "Infinity", True, "", [5]]
)
def test_money_that_is_none_is_refused(bad):
    """Currency signs and words, commas, what is negative or no number: each names the field."""
    with pytest.raises(ConfigError, match="usd"):
        Budget(usd=bad)


@pytest.mark.parametrize(
    "bad", [{"soft": 0}, {"soft": 1.5}, {"soft": math.nan}, {"on_exceeded": "stop"}, {"retries": -1}, {"device_seconds": math.inf}, {"wait_s": None}]
)  # fmt: skip
def test_other_options_that_cannot_be_are_refused(bad):
    """A share outside of (0, 1], an unknown way, endless times."""
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Budget(**bad)


@pytest.mark.parametrize("amount", ["0.3", 0.3, Decimal("0.3")])
def test_money_is_exact_in_every_spelling(amount):
    """Three tenths are three times one tenth, and a millionth more is too much."""
    account = Account("t", Budget(usd=amount))
    for _ in range(3):
        account.reserve(1, usd=Decimal("0.1")).settle(used(1), usd=Decimal("0.1"))
    assert account.left()["usd"] == 0
    with pytest.raises(BudgetExceeded, match="usd"):
        account.reserve(1, usd=Decimal("0.000001"))


def test_a_money_budget_of_zero_stops_what_costs_and_nothing_else():
    """A free local model passes."""
    account = Account("t", Budget(usd=0))
    account.reserve(1000).settle(used(1000), usd=Decimal(0))
    with pytest.raises(BudgetExceeded, match="usd"):
        account.reserve(1, usd=Decimal("1E-12"))


def test_a_call_without_a_limit_of_its_own_gets_what_the_money_is_worth():
    """At a tenth of a cent for each token, one dollar is a thousand of them, the prompt included."""
    account = Account("t", Budget(usd=1))
    reservation = account.reserve_rest(100, 5000, cost=lambda tokens: tokens * Decimal("0.001"))
    assert (1000, Decimal("1.000")) == (reservation.tokens, reservation.usd)


def test_device_seconds_stop_the_call_that_would_be_too_long():
    """A call sets aside as much as the longest so far took."""
    account = Account("t", Budget(device_seconds=10))
    for _ in range(2):
        account.reserve(1).settle(used(1), device_seconds=4)
    with pytest.raises(BudgetExceeded, match="device_seconds"):
        account.reserve(1)


def test_a_grant_adds_to_the_limits_and_stays():
    """Also when the same budget is given again; a limit that is not there stays none."""
    account = Account("t", Budget(tokens=10))
    account.grant({"tokens": 5, "usd": "1"})
    account.budget = Budget(tokens=10)
    assert {"tokens": 15} == account.left()
    with pytest.raises(ConfigError, match="tokens"):
        account.grant({"tokens": -1})


@pytest.mark.parametrize("typo", ["tokns", "token", "tool_call", "model_cals", "second", "device_second"])
def test_a_grant_of_a_misspelt_limit_is_refused(typo):
    """It would have been taken for the name of a loop, and nothing would have been granted."""
    account = Account("t", Budget(tokens=5))
    with pytest.raises(ConfigError, match="meant"):
        account.grant({typo: 5})
    account.grant({"retry": 1, "reflection": 2, "polish": 3})


def test_loops_have_caps_of_their_own():
    """Over the whole task; retries are also the budget's."""
    account = Account("t", Budget(retries=1))
    assert [1, 2] == [account.loop("reflection", 2) for _ in range(2)]
    with pytest.raises(BudgetExceeded, match="reflection"):
        account.loop("reflection", 2)
    account.grant({"reflection": 1})
    assert (3, 0) == (account.loop("reflection", 2), account.rounds_left("reflection", 2))
    account.loop("retry")
    with pytest.raises(BudgetExceeded, match="retries"):
        account.loop("retry")


def test_attempts_of_a_node_are_counted_once_each():
    """Two calls in attempt 2 are one retry; the next run of the node begins at attempt 1 again."""
    account = Account("t", Budget(retries=3))
    for number in (1, 2, 2, 3, 1, 2):
        account.attempt("branch", "node", number)
    assert account.used.retries == 3
    with pytest.raises(BudgetExceeded):
        account.attempt("branch", "other", 2)
    free = Account("t")
    free.attempt("branch", "node", 3)  # the first two failed before they called a model
    assert free.used.retries == 2


def test_threads_of_one_attempt_are_one_retry():
    """A node's second attempt makes eight calls at once: that is one retry, not eight."""
    account = Account("t", Budget(retries=1))
    together = threading.Barrier(8)

    def call():
        together.wait()
        account.attempt("branch", "node", 2)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 == account.used.retries


def test_the_soft_mark_is_told_once_for_each_branch():
    """At four fifths, or when the next model call is the last; never without limits."""
    account = Account("t", Budget(tokens=100, model_calls=9))
    assert account.nearing("a") is None
    account.spend(used(80))
    assert ("tokens", 100, 80) == account.nearing("a")
    assert (None, "tokens") == (account.nearing("a"), account.nearing("b")[0])
    last = Account("t", Budget(model_calls=2))
    last.spend(used(1))
    assert ("model_calls", 2, 1) == last.nearing("")
    assert Account("t").nearing("") is None


def test_waiting_goes_on_with_what_another_call_gives_back():
    """A thread that waits gets it; one whose stream is gone gets nothing; one that waits too long is refused."""
    account = Account("t", Budget(tokens=100))
    first, got = account.reserve(100), []
    thread = threading.Thread(target=lambda: got.append(account.wait(lambda: account.reserve(60), timeout_s=30)))
    thread.start()
    first.settle(used(40))
    thread.join(30)
    assert [60] == [one.tokens for one in got]
    assert account.wait(lambda: account.reserve(60), timeout_s=30, gone=lambda: True) is None
    with pytest.raises(BudgetExceeded, match=r"Waited 0\.01 s"):
        account.wait(lambda: account.reserve(60), timeout_s=0.01)


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
    assert account.left().get("tokens") == 900
    account.reserve(900).settle(used(1200))
    assert account.left().get("tokens") == 0
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
    assert account.left().get("tokens") == 0
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
    assert account.left().get("tokens") == 50
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
        self.limit = 1000
        self.held = {}

    @rule(target=started, tokens=st.integers(0, 600), calls=st.integers(1, 5))
    def reserve(self, tokens, calls):
        held = sum(t for t, _ in self.held.values()) + self.spent
        held_calls = sum(c for _, c in self.held.values()) + self.spent_calls
        fits = held + max(tokens, 1) <= self.limit and held_calls + calls <= 20
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

    @rule(tokens=st.integers(0, 50))
    def spend(self, tokens):
        self.account.spend(used(tokens))
        self.spent += tokens
        self.spent_calls += 1

    @rule(tokens=st.integers(0, 100))
    def refill(self, tokens):
        self.account.grant({"tokens": tokens})
        self.limit += tokens

    @invariant()
    def sums_agree(self):
        self.account.check()
        assert (self.account.used.tokens, self.account.used.model_calls) == (self.spent, self.spent_calls)
        assert self.account.budget.tokens == self.limit
        assert self.account.reserved.tokens == sum(t for t, _ in self.held.values())


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=60, stateful_step_count=30)


def test_money_is_exact_whatever_the_callers_decimal_context():
    """A thread that rounds to two digits, or that is told of every rounding, does not change what is spent."""
    account = Account("t", Budget(usd="1000"))
    price = Decimal("0.3333333333")
    with localcontext() as context:
        context.prec = 2
        context.traps[Inexact] = True
        for _ in range(7):
            account.reserve(1, usd=price).settle(Usage(output_tokens=1, calls=1), usd=price)
        account.grant({"usd": "0.0000000001"})
        left = account.left()["usd"]
    assert (price * 7, Decimal(0)) == (account.used.usd, account.reserved.usd)
    assert Decimal("1000.0000000001") - price * 7 == left
