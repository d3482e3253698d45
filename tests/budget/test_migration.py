"""Older ledgers are brought up to date, once, whole or not at all; newer ones are left alone."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from agentkv.budget import ledger as ledger_module
from agentkv.budget import migrations
from agentkv.budget.bill import Bill
from agentkv.budget.database import ALL_RUNS, Database
from agentkv.budget.ledger import ModelCall
from agentkv.budget.schema import VERSION, metadata
from agentkv.budget.store import Store
from agentkv.core.usage import Usage
from agentkv.errors import LedgerError

ROOT = Path(ledger_module.__file__).parents[2]
QUOTED = 'it\'s "quoted" \\ <b>é</b>'


@pytest.fixture(params=["sqlite", "postgres"])
def old_url(request, tmp_path, ledger_v1):
    """A ledger of version 1 in either database."""
    if request.param == "sqlite":
        connection = sqlite3.connect(tmp_path / "old.sqlite")
        connection.executescript(ledger_v1)
        connection.close()
        return f"sqlite:///{tmp_path / 'old.sqlite'}"
    url = request.getfixturevalue("postgres_url")
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        for statement in re.split(r";\n", ledger_v1):
            if statement.strip() and "TRANSACTION" not in statement and statement.strip() != "COMMIT":
                as_written = statement.replace("id INTEGER NOT NULL, \n\trun", "id BIGSERIAL NOT NULL, \n\trun")
                connection.exec_driver_sql(as_written.replace("%", "%%"))
        connection.exec_driver_sql("SELECT setval('agentkv_fact_id_seq', max(id)) FROM agentkv_fact")
    engine.dispose()
    return url


def totals(url, task, run=None):
    store = Store(url, create=False)
    try:
        bill = Bill.from_facts(task, store.load(task, run=run))
    finally:
        store.close()
    return bill.usage, len(bill.tools), bill.moved["host"].size_bytes, bill.shaping.slim_before, bill.finished_ms


def call(i):
    return ModelCall(task="run-7", at_ms=i, usage=Usage(input_tokens=1, calls=1))


def test_a_ledger_of_version_1_keeps_its_totals(old_url):
    """Names, runs and sums are what they were, and what comes later joins them."""
    one_call = Usage(input_tokens=100, cached_tokens=40, output_tokens=7, calls=1)
    two_calls = Usage(input_tokens=201, cached_tokens=80, output_tokens=14, calls=2)
    assert (one_call, 1, 9000, 900, 5999) == totals(old_url, "run-7")
    assert (two_calls, 2, 18000, 900, 1999) == totals(old_url, "run-7", "a" * 32)
    assert (one_call, 1, 9000, 900, 2999) == totals(old_url, QUOTED)
    assert one_call + two_calls == totals(old_url, "run-7", ALL_RUNS)[0]
    store = Store(old_url)
    assert ["run-7", QUOTED] == store.tasks()
    for i in range(3):
        store.put(call(i))
    store.close()
    assert Usage(input_tokens=3, calls=3) == totals(old_url, "run-7")[0]
    assert one_call + two_calls + Usage(input_tokens=3, calls=3) == totals(old_url, "run-7", ALL_RUNS)[0]


def test_the_age_of_old_tasks_is_that_of_their_last_fact(old_url):
    """Version 1 did not say when it saved: a prune after the update must not take what is young."""
    database = Database(old_url, create=True)
    with database.engine.connect() as connection:
        ages = connection.execute(sa.text("SELECT saved_ms FROM agentkv_task ORDER BY saved_ms")).scalars()
        assert [1999, 2999, 5999] == list(ages)
    database.close()


def shape(url):
    """Tables, columns and indices of a database, as its own inspector tells them."""
    database = Database(url, create=True)
    inspector = sa.inspect(database.engine)
    told = {}
    for table in sorted(inspector.get_table_names()):
        columns = {c["name"]: (str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)}
        indices = {i["name"]: (tuple(i["column_names"]), bool(i["unique"])) for i in inspector.get_indexes(table)}
        told[table] = columns, indices, tuple(inspector.get_pk_constraint(table)["constrained_columns"])
    database.close()
    return told


def test_a_migrated_ledger_has_the_shape_of_a_new_one(old_url, tmp_path, request):
    """The steps and today's tables cannot drift apart."""
    new = f"sqlite:///{tmp_path / 'new.sqlite'}"
    if old_url.startswith("postgresql"):
        new = request.getfixturevalue("postgres_server").new_database()
    assert shape(new) == shape(old_url)
    assert sorted(metadata.tables) == sorted(shape(old_url))


def test_programs_that_migrate_at_the_same_moment_do_it_once(old_url):
    """The second waits and finds it done."""
    barrier, errors = threading.Barrier(4), []

    def open_it():
        barrier.wait()
        try:
            Database(old_url, create=True).close()
        except LedgerError as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == errors
    assert 2 == totals(old_url, "run-7", "a" * 32)[0].calls


OPENER = """
import sys
from agentkv.budget.database import Database
Database(sys.argv[1], create=True).close()
"""


def test_processes_that_migrate_at_the_same_moment_do_it_once(old_url):
    """The same with processes, which share no lock of ours."""
    programs = [
        subprocess.Popen([sys.executable, "-c", OPENER, old_url], cwd=ROOT, stderr=subprocess.PIPE) for _ in range(2)
    ]
    assert [b"", b""] == [program.communicate(timeout=200)[1] for program in programs]
    assert 2 == totals(old_url, "run-7", "a" * 32)[0].calls


KILLED = """
import os, signal, sys
from agentkv.budget import migrations
from agentkv.budget.database import Database
from agentkv.budget.migrations import v2

def die(op, upgrade=v2.upgrade):
    upgrade(op)
    os.kill(os.getpid(), signal.SIGKILL)

v2.upgrade = die
Database(sys.argv[1], create=True)
"""


def test_a_program_killed_while_it_migrates_leaves_the_old_ledger(old_url):
    """All steps are one transaction; the next program starts over."""
    killed = subprocess.run([sys.executable, "-c", KILLED, old_url], cwd=ROOT, check=False, timeout=200)
    assert -signal.SIGKILL == killed.returncode
    assert 2 == totals(old_url, "run-7", "a" * 32)[0].calls


def test_a_step_that_fails_leaves_the_old_ledger_and_says_so(old_url, monkeypatch):
    """Nothing of a half-made schema stays."""

    def fail(connection, *, version, to):
        migrations.migrate(connection, version=version, to=to)
        raise sa.exc.OperationalError("CREATE INDEX", {}, OSError("disk is full"))

    monkeypatch.setattr("agentkv.budget.database.migrate", fail)
    with pytest.raises(LedgerError, match="could not be opened: disk is full"):
        Database(old_url, create=True)
    monkeypatch.undo()
    assert 2 == totals(old_url, "run-7", "a" * 32)[0].calls


def test_a_newer_ledger_is_refused_in_either_database(old_url):
    """Also by a program that opened it while it was its own."""
    store = Store(old_url, interval_s=0.01)
    with store.database.engine.begin() as connection:
        connection.execute(sa.text("UPDATE agentkv_schema SET version = 999"))
    with pytest.raises(LedgerError, match=rf"999.*knows {VERSION}"):
        Database(old_url, create=True)
    store.put(call(0))
    assert not store.flush(0.3)
    with store.database.engine.begin() as connection:
        assert (
            0
            == connection.execute(
                sa.text("SELECT count(*) FROM agentkv_task WHERE run = :run"), {"run": store.run}
            ).scalar()
        )
        connection.execute(sa.text("UPDATE agentkv_schema SET version = :v"), {"v": VERSION})
    assert store.flush(10)
    store.close()


def test_the_version_1_file_in_the_tests_is_one(ledger_v1):
    """Or the tests above would test nothing."""
    assert 'INSERT INTO "agentkv_schema" VALUES(1,1)' in ledger_v1
    assert os.linesep == "\n" or "\r" not in ledger_v1
