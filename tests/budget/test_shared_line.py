"""Who waits for a shared budget in several processes: nobody is overtaken, and a dead process does not block for ever."""

from __future__ import annotations

import threading
import time

import pytest

from agentkv.budget.account import Account
from agentkv.budget.database import Database, sqlite_url
from agentkv.budget.limits import Budget
from agentkv.budget.shared import SharedPurses
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded, LedgerError

LIMITS = Budget(tokens=0, on_exceeded="queue", shared=True)


class Time:
    """The database's clock, moved by hand; each look is a moment later."""

    def __init__(self):
        self.ms = 1_000_000

    def __call__(self):
        self.ms += 1
        return self.ms


@pytest.fixture(params=["sqlite", "postgres"])
def accounts(request, tmp_path):
    """Opens one task's account as one process each would."""
    url = sqlite_url(tmp_path / "l.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    made, clock = [], Time()

    def new():
        made.append(SharedPurses(Database(url, create=True), now_ms=clock))
        return Account("t", purse=made[-1].of("t", LIMITS))

    new.clock = clock
    yield new
    for purses in made:
        purses.close()
        purses._database.close()


class Waiters:
    """Calls that wait, each on a thread of its own, in the order in which they were added."""

    def __init__(self):
        self.passed = []
        self._threads = []

    def add(self, account, name, *, tokens=1, priority=0):
        def run():
            def step():
                held = account.reserve(tokens, priority=priority)
                self.passed.append(name)
                return held

            account.wait(step, timeout_s=30, priority=priority).settle(Usage(output_tokens=tokens, calls=1))

        line = account._line("calls")
        before = len(line)
        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        deadline_s = time.monotonic() + 10
        while len(line) == before and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def join(self):
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def test_who_came_first_goes_first_in_whichever_process(accounts):
    """Six calls of three processes, in turns; what is granted in one of them is for all."""
    three, waiters = [accounts() for _ in range(3)], Waiters()
    for number in range(6):
        waiters.add(three[number % 3], number)
    for _ in range(6):
        three[0].grant({"tokens": 1})
    waiters.join()
    assert list(range(6)) == waiters.passed
    with three[0]._purse:
        assert [] == three[0]._purse._purses.run("SELECT id FROM agentkv_budget_wait")


def test_a_newcomer_in_another_process_does_not_overtake(accounts):
    """It would fit, and is told that others wait; one of a higher priority need not wait."""
    one, other, waiters = accounts(), accounts(), Waiters()
    waiters.add(one, "large", tokens=10)
    one.grant({"tokens": 5})
    with pytest.raises(BudgetExceeded, match="others wait in front of it"):
        other.reserve(1)
    other.tool_call()  # that is another line
    other.reserve(1, priority=2).release()
    waiters.add(other, "small")
    assert [] == waiters.passed
    one.grant({"tokens": 6})
    waiters.join()
    assert ["large", "small"] == waiters.passed


def test_a_higher_priority_goes_first_over_processes(accounts):
    """Whoever came first."""
    one, other, waiters = accounts(), accounts(), Waiters()
    waiters.add(one, "step", priority=1)
    waiters.add(other, "person", priority=2)
    waiters.add(one, "batch", priority=0)
    one.grant({"tokens": 3})
    waiters.join()
    assert ["person", "step", "batch"] == waiters.passed


def test_a_dead_process_is_waited_for_until_its_lease_is_over(accounts):
    """Its row is nobody's after that."""
    dead, alive = accounts(), accounts()
    dead._purse.join("calls", 5)
    dead._purse._purses._closed = True  # it renews nothing any more
    alive.grant({"tokens": 5})
    with pytest.raises(BudgetExceeded, match="others wait"):
        alive.reserve(1)
    accounts.clock.ms += 31_000
    alive.wait(lambda: alive.reserve(1), timeout_s=5).release()


def test_limits_of_a_newer_program_are_refused_in_words(accounts):
    """A row that tells of a limit which nobody here can keep."""
    account = accounts()
    account.grant({"tokens": 1})
    with account._purse:
        account._purse._purses.run("UPDATE agentkv_budget SET limits = '[{\"moons\": 3}, {}]'")
    with pytest.raises(LedgerError, match="does not know"):
        account.reserve(1)
