"""A budget of a task that a program left unfinished goes on in the next one; a finished task begins anew."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from decimal import Decimal

import pytest

from agentkv import AgentKV, Budget, BudgetExceeded, Caller, Request, Sampling, ScriptedEngine
from agentkv.budget.database import sqlite_url
from agentkv.budget.prices import Price, PriceTable, Rates
from agentkv.core.usage import Usage
from agentkv.errors import LedgerError

CENT_A_TOKEN = PriceTable([Price(model="scripted", rates=Rates(input=Decimal(10_000), output=Decimal(10_000)))])
ASK = Request(prompt="why", sampling=Sampling(max_tokens=2))


@pytest.fixture(params=["sqlite", "postgres"])
def ledger(request, tmp_path):
    """A database, of both kinds."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return sqlite_url(tmp_path / "ledger.sqlite")


def program(ledger, **options):
    """A program with a ledger of its own run."""
    return AgentKV.with_engine(ScriptedEngine(itertools.repeat("yes")), ledger=ledger, **options)


def test_an_unfinished_task_goes_on_with_what_earlier_programs_spent(ledger):
    """Calls, tokens, money and tools of two programs count in the third."""
    for _ in range(2):
        with program(ledger, prices=CENT_A_TOKEN) as kv, kv.task("t", budget=Budget(tokens=1000), final=False):
            kv.submit(ASK).result(20)
            with kv.tool("look"):
                pass
    with program(ledger, prices=CENT_A_TOKEN) as kv, kv.task("t", budget=Budget(model_calls=3), final=False):
        used = kv._books.account("t").used
        assert (2, 2) == (used.model_calls, used.tool_calls)
        assert (used.tokens * Decimal("0.01"), True) == (used.usd, used.tokens > 0)
        kv.submit(ASK).result(20)
        with pytest.raises(BudgetExceeded, match="model_calls"):
            kv.submit(ASK)


def test_what_comes_after_the_end_of_a_task_counts_for_no_later_one(ledger):
    """A call that was cancelled with its task has its fact behind the end: the next program's budget is untouched."""
    for _ in range(2):
        with program(ledger) as kv:
            with kv.task("t", budget=Budget(model_calls=1)):
                kv.submit(ASK).result(20)
            kv._books.foreign_call(
                caller=Caller(task="t"), model="scripted", usage=Usage(input_tokens=1, calls=1), total_s=0.0
            )


def test_a_finished_task_begins_anew(ledger):
    """In the same program, and in the next one."""
    for _ in range(2):
        with program(ledger) as kv:
            for _ in range(2):
                with kv.task("t", budget=Budget(model_calls=1)):
                    kv.submit(ASK).result(20)


def test_what_a_program_spent_before_its_task_had_a_budget_counts_once(ledger):
    """Limits may come late; the calls of this run are there already, those of an earlier one are added."""
    with program(ledger) as kv, kv.task("t", final=False):
        kv.submit(ASK).result(20)
    with program(ledger) as kv:
        with kv.task("t", final=False):
            kv.submit(ASK).result(20)
            assert 1 == kv._books.account("t").used.model_calls  # no budget, no look
        kv._books._ledger.store.flush()
        for _ in range(2):
            with kv.task("t", budget=Budget(model_calls=5), final=False):
                assert {"model_calls": 3} == kv.budgets.left()


def test_a_task_that_failed_in_python_is_finished(ledger):
    """An error that leaves the block ends the task: only a program that ended leaves it open."""
    with program(ledger) as kv, pytest.raises(ValueError, match="mine"), kv.task("t", budget=Budget(model_calls=1)):
        kv.submit(ASK).result(20)
        raise ValueError("mine")
    with program(ledger) as kv, kv.task("t", budget=Budget(model_calls=1)):
        kv.submit(ASK).result(20)


def test_a_killed_program_leaves_what_it_had_saved(tmp_path):
    """SIGKILL in the middle of the task: the next program goes on with what was spent until then."""
    url = sqlite_url(tmp_path / "ledger.sqlite")
    script = f"""
import itertools, time
from agentkv import *
kv = AgentKV.with_engine(ScriptedEngine(itertools.repeat("yes")), ledger={url!r})
with kv.task("t", budget=Budget(model_calls=3)):
    for _ in range(2):
        kv.submit(Request(prompt="why", sampling=Sampling(max_tokens=2))).result(20)
    while kv._books._ledger.unsaved:
        time.sleep(0.01)
    print("saved", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as killed:
        assert "saved\n" == killed.stdout.readline()
        os.kill(killed.pid, signal.SIGKILL)
    with program(url) as kv, kv.task("t", budget=Budget(model_calls=3)):
        assert {"model_calls": 1} == kv.budgets.left()


def test_only_the_time_in_which_programs_had_the_task_counts(tmp_path, monkeypatch):
    """A clock that was set back between two programs changes nothing, and neither do the hours in between."""
    url = sqlite_url(tmp_path / "ledger.sqlite")
    for wall_s in (1_000_000, 10, 2_000_000):
        monkeypatch.setattr("time.time_ns", lambda start=wall_s: start * 10**9)
        with program(url) as kv, kv.task("t", budget=Budget(seconds=60.0), final=False):
            kv.submit(ASK).result(20)
            assert 0 <= kv._books.account("t").used.seconds < 20


def test_a_ledger_that_cannot_be_read_begins_anew_with_a_warning(tmp_path, monkeypatch):
    """The agent is not held up."""
    url = sqlite_url(tmp_path / "ledger.sqlite")

    def broken(*_, **__):
        raise LedgerError("gone")

    monkeypatch.setattr("agentkv.budget.resumed.Earlier.spent", broken)
    with program(url) as kv, kv.task("t", budget=Budget(model_calls=1)):
        kv.submit(ASK).result(20)


@pytest.mark.parametrize("key", ["x" * 4096, "'; DROP TABLE agentkv_task; --", "<script>", "\x00\ud800"], ids=len)
def test_a_task_of_any_name_goes_on(tmp_path, key):
    """Names are looked up by digest."""
    url = sqlite_url(tmp_path / "ledger.sqlite")
    for left in (2, 1):
        with program(url) as kv, kv.task(key, budget=Budget(model_calls=2), final=False):
            assert {"model_calls": left} == kv.budgets.left()
            kv.submit(ASK).result(20)
