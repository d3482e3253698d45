"""Shared budgets: several processes, leases, kills, clocks; on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from contextlib import contextmanager
from decimal import Decimal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from agentkv.budget import shared
from agentkv.budget.account import Account
from agentkv.budget.database import Database, sqlite_url
from agentkv.budget.limits import Budget
from agentkv.budget.shared import SharedPurses
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded, LedgerError

SPAWN = multiprocessing.get_context("spawn")


class Time:
    """The database's clock, moved by hand."""

    def __init__(self):
        self.ms = 1_000_000

    def __call__(self):
        return self.ms


def account_in(purses, budget=None, task="t"):
    return Account(task, purse=purses.of(task, budget))


@contextmanager
def process(url, **options):
    """Shared purses as one process has them."""
    database = Database(url, create=True)
    purses = SharedPurses(database, **options)
    yield purses
    purses.close()
    database.close()


def used(tokens):
    return Usage(input_tokens=tokens, calls=1)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    """A database, of both kinds."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return sqlite_url(tmp_path / "ledger.sqlite")


@pytest.fixture
def opened(url):
    """Opens shared purses as one process each would; closed at the end."""
    made, clock = [], Time()

    def new(lease_s=30.0):
        made.append(SharedPurses(Database(url, create=True), lease_s=lease_s, now_ms=clock))
        return made[-1]

    new.clock = clock
    yield new
    for purses in made:
        purses.close()
        purses._database.close()


def test_two_openers_share_tokens_money_calls_and_grants(opened):
    """What one has set aside or spent the other sees; so are limits and grants, exactly."""
    first = account_in(opened(), Budget(tokens=1000, usd="0.3", model_calls=9, shared=True))
    second = account_in(opened())
    held = first.reserve(600, usd=Decimal("0.1"))
    with pytest.raises(BudgetExceeded, match="600 are used or reserved"):
        second.reserve(500)
    second.reserve(400, usd=Decimal("0.2")).settle(used(300), usd=Decimal("0.2"))
    held.settle(used(100), usd=Decimal("0.1"))
    assert {"tokens": 600, "usd": Decimal("0.0"), "model_calls": 7} == second.left()
    first.grant({"tokens": 5, "usd": "0.1"})
    second.tool_call()
    second.loop("retry")
    assert (1005, Decimal("0.4")) == (second.budget.tokens, second.budget.usd)
    assert (1, 1) == (first.used.tool_calls, first.used.retries)
    first.check()


def test_what_a_dead_process_held_is_given_back_when_its_lease_is_over(opened):
    """Not before, so that nothing is overspent meanwhile; a late settlement counts all the same."""
    dead, alive = account_in(opened(), Budget(tokens=100, shared=True)), account_in(opened())
    reservation = dead.reserve(100)
    opened.clock.ms += 29_999
    with pytest.raises(BudgetExceeded):
        alive.reserve(1)
    opened.clock.ms += 1
    alive.reserve(60).settle(used(60))
    alive.check()
    reservation.settle(used(30))
    assert (90, 0) == (alive.used.tokens, alive.reserved.tokens)
    alive.check()


def test_a_clock_that_is_set_back_frees_nothing_early_and_no_age_is_negative(opened):
    """The database's clock steps back an hour while a call runs, and forth again."""
    account = account_in(opened(), Budget(tokens=100, seconds=10_000.0, shared=True))
    held = account.reserve(60)
    ages_s = []
    for step_ms in (1000, -3_600_000, 1000, 3_600_000):
        opened.clock.ms += step_ms
        account.tool_call()
        ages_s.append(account.used.seconds)
    assert 0 <= ages_s[0] <= ages_s[1] <= ages_s[2] <= ages_s[3]
    held.settle(used(50))
    assert (50, 0) == (account.used.tokens, account.reserved.tokens)
    account.check()


def test_a_process_that_lives_renews_its_leases(opened):
    """However long its calls take."""
    purses = opened()
    slow, other = account_in(purses, Budget(tokens=100, shared=True)), account_in(opened())
    slow.reserve(100)
    for _ in range(5):
        opened.clock.ms += 20_000
        purses.renew()
    with pytest.raises(BudgetExceeded):
        other.reserve(1)


def test_a_machine_started_anew_does_not_keep_old_leases_for_ever(opened):
    """The clock began again at 0: what the dead held lapses a lease from the first look on."""
    dead, alive = account_in(opened(), Budget(tokens=100, seconds=1e6, shared=True)), account_in(opened())
    dead.reserve(100)
    opened.clock.ms += 500
    age_s = alive.used.seconds
    alive.tool_call()
    opened.clock.ms = 10
    assert alive.used.seconds >= age_s
    with pytest.raises(BudgetExceeded):
        alive.reserve(1)
    alive._purse._purses.begin(1.0)
    alive._purse._purses.free_lapsed(alive._purse._digest)
    alive._purse._purses.end(well=True)
    opened.clock.ms += 30_001
    alive.reserve(100)


def _holds_and_hangs(url, ready):
    account = account_in(SharedPurses(Database(url, create=True), lease_s=0.3), Budget(tokens=100, shared=True))
    account.reserve(100)
    ready.set()
    threading.Event().wait()


def test_a_killed_process_gives_back_what_it_held(url):
    """SIGKILL between reserve and settle: refused while the lease runs, then free."""
    ready = SPAWN.Event()
    child = SPAWN.Process(target=_holds_and_hangs, args=(url, ready))
    child.start()
    assert ready.wait(60)
    with process(url, lease_s=0.3) as purses:
        account = account_in(purses)
        with pytest.raises(BudgetExceeded):
            account.reserve(1)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        account.wait(lambda: account.reserve(100), timeout_s=30).settle(used(70))
        assert (70, 0) == (account.used.tokens, account.reserved.tokens)
        account.check()


def _spends(url, results):
    purses = SharedPurses(Database(url, create=True))
    account, passed = account_in(purses, Budget(tokens=30 * 100, shared=True)), []

    def branch():
        try:
            reservation = account.reserve(100)
        except BudgetExceeded:
            return
        passed.append(1)
        reservation.settle(used(100))

    threads = [threading.Thread(target=branch) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    purses.close()
    results.put(len(passed))


def test_processes_with_threads_never_overspend_one_budget(url):
    """Three processes of twenty branches each against a budget for thirty calls: thirty pass."""
    results = SPAWN.Queue()
    children = [SPAWN.Process(target=_spends, args=(url, results)) for _ in range(3)]
    for child in children:
        child.start()
    passed = sum(results.get(timeout=90) for _ in children)
    for child in children:
        child.join()
    with process(url) as purses:
        account = account_in(purses)
        assert (30, 3000) == (passed, account.used.tokens)
        account.check()


def _checks_and_records(url, steps, results):
    with process(url) as purses:
        account = account_in(purses, Budget(tokens=10**9, shared=True))
        waits_s = []
        for _ in range(steps):
            began_s = time.monotonic()
            account.reserve(10).settle(used(7))
            waits_s.append(time.monotonic() - began_s)
        results.put(waits_s)


@pytest.mark.slow
def test_eight_processes_and_a_long_reader_lose_nothing(tmp_path):
    """500 steps each on one file: no error, no long wait, and the sums are exact."""
    path = tmp_path / "ledger.sqlite"
    url = sqlite_url(path)
    with process(url) as purses:
        account = account_in(purses, Budget(tokens=10**9, shared=True))
        account.tool_call()
        reader = sqlite3.connect(path)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM agentkv_budget").fetchall()
        results = SPAWN.Queue()
        children = [SPAWN.Process(target=_checks_and_records, args=(url, 500, results)) for _ in range(8)]
        for child in children:
            child.start()
        waits_s = sorted(wait for _ in children for wait in results.get(timeout=200))
        assert 4000 == len(waits_s)
        assert waits_s[3960] < shared.WAIT_S  # of a hundred steps 99 do not come near what would be an error
        for child in children:
            child.join()
        reader.close()
        assert (4000 * 7, 4000, 0) == (account.used.tokens, account.used.model_calls, account.reserved.tokens)
        account.check()


def test_a_step_waits_for_a_writer_and_for_no_reader(tmp_path):
    """A long read holds up nothing; a write lock that stays is an error in words, with nothing set aside."""
    path = tmp_path / "ledger.sqlite"
    purses = SharedPurses(Database(sqlite_url(path), create=True))
    account = account_in(purses, Budget(tokens=100, shared=True))
    account.reserve(10)
    reader = sqlite3.connect(path)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM agentkv_budget").fetchone()
    held = account.reserve(10)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="locked"):
        purses.begin(0.01)
    writer.execute("ROLLBACK")
    held.release()
    assert account.reserved.tokens == 10
    for connection in (reader, writer):
        connection.close()
    purses.close()


def test_a_settlement_that_cannot_be_written_is_written_later(tmp_path, monkeypatch):
    """Ending a call never raises; what it used is not forgotten."""
    monkeypatch.setattr(shared, "WAIT_S", 0.01)
    path = tmp_path / "ledger.sqlite"
    purses = SharedPurses(Database(sqlite_url(path), create=True), lease_s=3600)
    account = account_in(purses, Budget(tokens=100, shared=True))
    reservation = account.reserve(50)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    reservation.settle(used(20))
    writer.execute("ROLLBACK")
    writer.close()
    purses.renew()
    assert (20, 0) == (account.used.tokens, account.reserved.tokens)
    purses.close()


@pytest.mark.parametrize("task", ["x" * 4096, "'; DROP TABLE agentkv_budget; --", "<b>\x00\ud800</b>"])
def test_a_task_may_have_any_name(opened, task):
    """Four kilobytes, SQL, what no database takes."""
    account_in(opened(), Budget(tokens=9, shared=True), task).reserve(4).settle(used(4))
    assert account_in(opened(), None, task).used.tokens == 4


class SharedAccounting(RuleBasedStateMachine):
    """Two processes that reserve, settle, spend, grant and die in any order; plain sums are the specification."""

    started = Bundle("started")

    def __init__(self):
        super().__init__()
        import tempfile
        from pathlib import Path

        self.folder = tempfile.TemporaryDirectory()
        self.clock = Time()
        self.database = Database(sqlite_url(Path(self.folder.name) / "l.sqlite"), create=True)
        self.purses = [SharedPurses(self.database, now_ms=self.clock) for _ in range(2)]
        self.accounts = [account_in(self.purses[0], Budget(tokens=1000, shared=True)), account_in(self.purses[1])]
        self.accounts[0].budget = Budget(tokens=1000, shared=True)
        self.limit, self.spent, self.held = 1000, 0, {}

    def teardown(self):
        for purses in self.purses:
            purses.close()
        self.database.close()
        self.folder.cleanup()

    @rule(target=started, who=st.integers(0, 1), tokens=st.integers(1, 600))
    def reserve(self, who, tokens):
        fits = self.spent + sum(self.held.values()) + tokens <= self.limit
        try:
            reservation = self.accounts[who].reserve(tokens)
        except BudgetExceeded:
            assert not fits
            return None
        assert fits
        self.held[reservation] = tokens
        return reservation

    @rule(reservation=consumes(started), share=st.floats(0, 1), release=st.booleans())
    def end(self, reservation, share, release):
        if reservation is None or reservation not in self.held:
            return
        tokens = self.held.pop(reservation)
        if release:
            reservation.release()
        else:
            reservation.settle(used(int(tokens * share)))
            self.spent += int(tokens * share)

    @rule(who=st.integers(0, 1), tokens=st.integers(0, 50))
    def spend(self, who, tokens):
        self.accounts[who].spend(used(tokens))
        self.spent += tokens

    @rule(who=st.integers(0, 1), tokens=st.integers(0, 300))
    def refill(self, who, tokens):
        self.accounts[who].grant({"tokens": tokens})
        self.limit += tokens

    @rule(who=st.integers(0, 1))
    def kill(self, who):
        """It holds what it held until its lease is over; then a new process takes its place."""
        mine = [one for one in self.held if one._account is self.accounts[who]]
        self.purses[1 - who].renew()
        self.purses[who]._open.clear()
        self.purses[who].close()
        self.clock.ms += 20_000
        self.purses[1 - who].renew()
        self.clock.ms += 10_000
        self.purses[who] = SharedPurses(self.database, now_ms=self.clock)
        self.accounts[who] = account_in(self.purses[who])
        self.accounts[who]._purse.__enter__()
        self.accounts[who]._purse.free_lapsed()
        self.accounts[who]._purse.__exit__(None, None, None)
        for one in mine:
            del self.held[one]

    @invariant()
    def sums_agree(self):
        for account in self.accounts:
            account.check()
            assert (self.spent, sum(self.held.values())) == (account.used.tokens, account.reserved.tokens)
            assert self.limit == account.budget.tokens


TestSharedAccounting = SharedAccounting.TestCase
TestSharedAccounting.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
