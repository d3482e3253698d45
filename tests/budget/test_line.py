"""The line of those that wait for a budget: priority, turns of flows, arrival; nobody overtakes."""

from __future__ import annotations

import threading
import time

import pytest

from agentkv.budget.account import CALLS, TOOLS, Account
from agentkv.budget.limits import Budget
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded


class Waiters:
    """Calls that wait for an account, each on a thread of its own, in the order in which they were added."""

    def __init__(self, account):
        self.account = account
        self.passed = []
        self.failed = []
        self._threads = []

    def add(self, name, *, tokens=1, timeout_s=20.0, **place):
        waiting = len(self.account._line(CALLS))

        def run():
            def step():
                held = self.account.reserve(tokens, priority=place.get("priority", 0))
                self.passed.append(name)  # while it is its turn
                return held

            try:
                self.account.wait(step, timeout_s=timeout_s, **place).settle(Usage(output_tokens=tokens, calls=1))
            except BudgetExceeded as error:
                self.failed.append((name, str(error)))

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        deadline_s = time.monotonic() + 10
        while len(self.account._line(CALLS)) == waiting and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def join(self):
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def waiters():
    """Waiters of an account of nothing."""
    return Waiters(Account("t", Budget(tokens=0, on_exceeded="queue")))


def test_who_came_first_goes_first(waiters):
    """Twelve calls wait; grants for one after the other let them pass in order."""
    for number in range(12):
        waiters.add(number)
    for _ in range(12):
        waiters.account.grant({"tokens": 1})
    waiters.join()
    assert list(range(12)) == waiters.passed


def test_a_higher_priority_goes_before_those_that_came_earlier(waiters):
    """Within a priority it is by arrival."""
    for name, priority in (("step 1", 1), ("batch", 0), ("step 2", 1), ("person", 2)):
        waiters.add(name, priority=priority)
    waiters.account.grant({"tokens": 4})
    waiters.join()
    assert ["person", "step 1", "step 2", "batch"] == waiters.passed


def test_flows_take_turns(waiters):
    """A task with many calls holds up nobody who has one."""
    for number in range(4):
        waiters.add(f"many {number}", flow="many")
    waiters.add("one", flow="one")
    waiters.account.grant({"tokens": 5})
    waiters.join()
    assert ["many 0", "one", "many 1", "many 2", "many 3"] == waiters.passed


def test_a_large_call_is_not_overtaken_by_small_ones(waiters):
    """Grants that would do for the small one wait for the large one, whoever asks."""
    waiters.add("large", tokens=10)
    waiters.add("small", tokens=2)
    waiters.account.grant({"tokens": 5})
    with pytest.raises(BudgetExceeded, match="2 wait for that already"):
        waiters.account.reserve(1)  # it would fit
    assert [] == waiters.passed
    waiters.account.grant({"tokens": 7})
    waiters.join()
    assert ["large", "small"] == waiters.passed


def test_a_newcomer_of_a_higher_priority_need_not_wait(waiters):
    """What fits for it is not kept for those of less priority."""
    waiters.add("large", tokens=10, priority=1)
    waiters.account.grant({"tokens": 5})
    waiters.account.reserve(5, priority=2).release()
    waiters.account.grant({"tokens": 5})
    waiters.join()
    assert ["large"] == waiters.passed


def test_one_that_gives_up_makes_room_for_the_next(waiters):
    """The large call waits for too long; the small one behind it fits then."""
    waiters.add("large", tokens=10, timeout_s=0.3)
    waiters.add("small", tokens=2)
    waiters.account.grant({"tokens": 2})
    waiters.join()
    assert (["small"], ["large"]) == (waiters.passed, [name for name, _ in waiters.failed])
    assert "Waited 0.3 s for more" in waiters.failed[0][1]


def test_lines_are_apart(waiters):
    """Who waits for tokens does not hold up tools."""
    waiters.add("call", timeout_s=0.2)
    waiters.account.tool_call()
    waiters.join()
    assert (1, 0) == (waiters.account.used.tool_calls, len(waiters.account._line(TOOLS)))


def test_a_budget_that_does_not_queue_has_no_line(waiters):
    """What fits is not refused because somebody waits, once the task raises."""
    waiters.add("call", tokens=10, timeout_s=1.0)
    waiters.account.budget = Budget(tokens=5, on_exceeded="raise")
    waiters.account.reserve(5).release()
    waiters.join()


def test_many_that_wait_are_all_served_and_nothing_is_overspent():
    """Sixty threads share what comes back; the sums agree at the end."""
    account = Account("t", Budget(tokens=7, on_exceeded="queue"))
    passed = []

    def call(number):
        with account.wait(lambda: account.reserve(3), timeout_s=20.0) as held:
            assert account.reserved.tokens <= 7
            passed.append(number)
            time.sleep(0.001)
            held.release()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    account.check()
    assert (60, 0, 0) == (len(passed), account.reserved.tokens, len(account._line(CALLS)))
