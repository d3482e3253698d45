"""Accounts of shared budgets that nobody needs any more go with a prune; nobody loses a limit by that."""

from __future__ import annotations

import itertools

import pytest

from agentkv import AgentKV, Budget, BudgetExceeded, Request, Sampling, ScriptedEngine
from agentkv.budget.account import Account
from agentkv.budget.accounts import forget_accounts
from agentkv.budget.database import Database, sqlite_url
from agentkv.budget.prune import prune
from agentkv.budget.shared import SharedPurses
from agentkv.core.usage import Usage
from agentkv.errors import LedgerError

LIMITS = Budget(model_calls=5, shared=True)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    """A database, of both kinds."""
    return sqlite_url(tmp_path / "l.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def database(url):
    made = Database(url, create=True)
    yield made
    made.close()


@pytest.fixture
def purses(database):
    made = SharedPurses(database)
    yield made
    made.close()


def accounts_in(purses):
    with purses.of("look", None):
        rows = purses.run("SELECT task FROM agentkv_budget WHERE task <> 'look' ORDER BY task")
    return [row[0] for row in rows]


def used(purses, task, calls=2):
    """An account of the task that has spent so many calls."""
    account = Account(task, purse=purses.of(task, LIMITS))
    for _ in range(calls):
        account.reserve(1).settle(Usage(output_tokens=1, calls=1))
    return account


def test_a_prune_takes_accounts_of_which_the_ledger_knows_nothing(url, database, purses):
    """Not those with facts, nor those in which something is set aside or for which somebody waits."""
    with AgentKV.with_engine(ScriptedEngine(itertools.repeat("y")), ledger=url) as kv, kv.task("facts", budget=LIMITS):
        kv.submit(Request(prompt="why", sampling=Sampling(max_tokens=2))).result(20)
    used(purses, "gone")
    used(purses, "held").reserve(1)
    used(purses, "waited for")._purse.join("calls", 1)
    assert 0 == forget_accounts(database, older_than_s=3600)  # all were used a moment ago
    assert 1 == forget_accounts(database, older_than_s=-1)
    assert ["facts", "held", "waited for"] == accounts_in(purses)


def test_no_prune_gives_an_api_key_its_budget_back(database, purses):
    """What it spent is spent, in its day or month or for ever; a task of nearly that name is a task."""
    names = ["key:alice", "key:alice in 2026-11 (Europe/Berlin)", "key:alice in 2026-11-30 (UTC)", "keys"]
    for name in names:
        used(purses, name)
    assert 1 == forget_accounts(database, older_than_s=-1)
    assert names[:-1] == accounts_in(purses)


def test_pruning_the_ledger_prunes_its_accounts(url, database, purses):
    """An account goes with its task's facts, whether the bill is kept or not."""
    with AgentKV.with_engine(ScriptedEngine(itertools.repeat("y")), ledger=url) as kv, kv.task("t", budget=LIMITS):
        kv.submit(Request(prompt="why", sampling=Sampling(max_tokens=2))).result(20)
    assert ["t"] == accounts_in(purses)
    prune(database, older_than_s=-3600, keep_bills=True)
    assert [] == accounts_in(purses)


def test_a_program_whose_account_was_pruned_keeps_its_limits_and_what_it_spent(database, purses):
    """It had the account all the time and did nothing: the row comes back as it was known."""
    account = used(purses, "t", calls=4)
    account.grant({"model_calls": 1})
    assert 1 == forget_accounts(database, older_than_s=-1)
    account.reserve(1).settle(Usage(output_tokens=1, calls=1))
    account.reserve(1).settle(Usage(output_tokens=1, calls=1))
    with pytest.raises(BudgetExceeded, match="may spend 6 model_calls: 6 are used"):
        account.reserve(1)


def test_a_ledger_without_shared_budgets_has_nothing_to_forget(database):
    """Their tables are made by the first one."""
    assert 0 == forget_accounts(database, older_than_s=0)


def test_a_newer_program_that_took_the_ledger_over_is_noticed(database, purses):
    """No step is made in tables that this program does not know any more."""
    account = used(purses, "t")
    with purses.of("look", None):
        purses.run("UPDATE agentkv_schema SET version = 999")
    with pytest.raises(LedgerError, match="schema version 999"):
        account.reserve(1)
    with database.writing() as connection:
        connection.exec_driver_sql("UPDATE agentkv_schema SET version = 2")
    account.reserve(1)
