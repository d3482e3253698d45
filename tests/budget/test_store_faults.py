"""The ledger in a bad world: databases that fill, vanish or are locked, programs that are killed, names that bite."""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import AgentKV, Budget, Message, Request, ScriptedEngine, log
from agentkv.budget import ledger as ledger_module
from agentkv.budget import sqlite
from agentkv.budget import store as store_module
from agentkv.budget.check import check
from agentkv.budget.database import ALL_RUNS, Database, Row
from agentkv.budget.export import lines
from agentkv.budget.ledger import Ledger, ModelCall, MoveFact, TaskFact
from agentkv.budget.prune import prune
from agentkv.budget.readbills import bills
from agentkv.budget.schema import name_of, text_of
from agentkv.budget.store import Store, default_path
from agentkv.core.usage import Usage
from agentkv.errors import ExtraMissing, LedgerError

ROOT = Path(ledger_module.__file__).parents[2]
LONG = "".join(random.Random(1).choice("0123456789abcdefghijklmnopqrstuvwxyz") for _ in range(4096))
NAMES = [
    "",
    "run-7",
    LONG,
    LONG + "x",
    "a\0b",
    "a\\u0000b",
    "\ud800",
    "\\",
    '"',
    "é中🙂",
    "'; DROP TABLE agentkv_fact; --",
    "<script>alert(1)</script>",
    "%s %(task)s :task ?",
    "line\nend",
]


def call(task="t", i=0, **more):
    return ModelCall(task=task, at_ms=i, usage=Usage(input_tokens=10, output_tokens=1, calls=1), **more)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    """An empty place in either database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'l.sqlite'}"
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def store(url):
    opened = Store(url, interval_s=0.01)
    yield opened
    opened.close()


def numbers(store, task="t"):
    return [fact.at_ms for fact in store.load(task)]


# -- names and order


def test_every_name_is_kept_as_it_is_and_found_again(store):
    """NUL, which PostgreSQL refuses, and a lone surrogate, which nobody takes, are kept as JSON writes them."""
    for name in NAMES:
        store.put(call(name, node=name))
    assert store.flush(10)
    assert NAMES == store.tasks()[::-1]
    for name in NAMES:
        assert [(name, name)] == [(fact.task, fact.node) for fact in store.load(name)]
    assert () == check(store.database).problems


@settings(max_examples=200)
@given(st.text(st.characters(), max_size=30))
def test_a_name_and_its_text_are_one_to_one(name):
    """Any text of any characters, surrogates included; the text is what every database takes."""
    assert name == name_of(text_of(name))
    assert "\0" not in text_of(name)
    text_of(name).encode()


def test_facts_are_in_the_order_of_writing_whatever_the_clocks_say(store):
    """A clock that goes backwards moves no fact."""
    for at_ms in (5000, 1000, 9000, 0, -3):
        store.put(call(i=at_ms))
    assert store.flush(10)
    assert [5000, 1000, 9000, 0, -3] == numbers(store)
    other = Store(store.database.engine.url.render_as_string(hide_password=False))
    other.put(call(i=-7_000_000))  # a machine that believes it is 1969
    other.close()
    assert [-7_000_000] == numbers(store)
    assert [5000, 1000, 9000, 0, -3, -7_000_000] == [fact.at_ms for fact in store.load("t", run=ALL_RUNS)]


def test_prune_goes_by_the_database_and_not_by_the_clocks_of_facts(store):
    """What was saved just now is young, though its machine lives in 1970."""
    store.put(call(i=1))
    assert store.flush(10)
    assert 0 == prune(store.database, older_than_s=60).tasks
    assert 1 == prune(store.database, older_than_s=-60).tasks
    assert [] == store.load("t")


def test_a_task_that_speaks_while_it_is_pruned_stays(store, monkeypatch):
    """It was chosen as old, and is not any more when its turn comes."""
    from agentkv.budget import prune as prune_module

    store.put(call())
    assert store.flush(10)
    with store.database.engine.begin() as connection:
        connection.execute(sa.text("UPDATE agentkv_task SET saved_ms = 0"))
    forget = prune_module._forget

    def speak_first(*args, **more):
        store.put(call(i=1))
        assert store.flush(10)
        return forget(*args, **more)

    monkeypatch.setattr(prune_module, "_forget", speak_first)
    gone = prune(store.database, older_than_s=60)
    assert (0, 0) == (gone.tasks, gone.facts)
    assert [0, 1] == numbers(store)


def test_a_program_may_forget_old_tasks_by_itself_and_keeps_their_bills(url, monkeypatch):
    """Once a day, in the thread that writes; a failure costs a counter."""
    old = Store(url)
    old.put(call("old"))
    old.close()
    database = Database(url, create=False)
    with database.engine.begin() as connection:
        connection.execute(sa.text("UPDATE agentkv_task SET saved_ms = saved_ms - 7200000"))
    database.close()
    pruned, before = threading.Event(), log.counters["ledger_prune_failed"]

    def prune_and_tell(*args, **more):
        prune(*args, **more)
        pruned.set()
        raise OSError("afterwards")

    monkeypatch.setattr("agentkv.budget.prune.prune", prune_and_tell)
    store = Store(url, interval_s=0.01, keep_s=3600)
    store.put(call("young"))
    assert pruned.wait(10)
    store.put(call("young", 1))
    assert store.flush(10)
    assert ([], [0, 1]) == (store.load("old"), numbers(store, "young"))
    assert 11 == store.kept_bill("old")["total_tokens"]
    store.close()
    assert before + 1 == log.counters["ledger_prune_failed"]


def test_facts_are_saved_where_no_thread_can_be_started(url, monkeypatch):
    """While an interpreter ends, for instance: closing saves them."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = Store(url)
    ledger = Ledger(store)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ledger.append(call(i=1))
    ledger.append(call(i=2))
    ledger.close()
    assert 0 == ledger.unsaved
    reader = Store(url, create=False)
    assert [1, 2] == numbers(reader)
    reader.close()


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_an_export_reads_either_database(store, form):
    """The same lines from both."""
    for i in range(3):
        store.put(call("a", i))
        store.put(call("b", i))
    assert store.flush(10)
    written = list(lines(store.database, task=None, since_ms=1, form=form))
    assert (5 if form == "csv" else 4) == sum(len(line.splitlines()) for line in written)
    one = list(lines(store.database, task="b", since_ms=None, form="jsonl"))
    assert [("b", 0), ("b", 1), ("b", 2)] == [(row["task"], row["at_ms"]) for row in map(json.loads, one)]


# -- exactly once


def test_a_batch_that_is_sent_twice_is_there_once(store):
    """Nobody knows whether a commit arrived when its connection broke; the writer's numbers tell."""
    rows = [Row("t", seq, "model_call", seq, "{}") for seq in range(1, 4)]
    store.database.insert("r", rows)
    store.database.insert("r", [*rows, Row("t", 4, "model_call", 4, "{}")])
    assert [1, 2, 3, 4] == [fact.at_ms for fact in store.load("t", run="r")]


def test_a_commit_that_arrived_though_it_failed_is_not_counted_twice(store, monkeypatch):
    """The database answers with an error after it has saved."""
    insert, failures = store.database.insert, [1]

    def saved_and_failed(run, rows):
        insert(run, rows)
        if failures:
            failures.pop()
            raise LedgerError("the connection broke")

    monkeypatch.setattr(store.database, "insert", saved_and_failed)
    for i in range(20):
        store.put(call(i=i))
    assert store.flush(10)
    assert list(range(20)) == numbers(store)


# -- facts that cannot be saved


@pytest.mark.parametrize("odd", [{"session": object()}, {"at_ms": 1 << 70}, {"at_ms": "soon"}, {"node": {1, 2}}])
def test_a_fact_that_no_database_takes_is_lost_alone(store, odd):
    """It is counted, and those around it are saved."""
    before = log.counters["ledger_fact_lost"]
    for i in range(5):
        store.put(call(i=i))
    store.put(ModelCall(task="t", **odd))
    store.put(call(i=5))
    assert store.flush(10)
    assert list(range(6)) == numbers(store)
    assert before + 1 == log.counters["ledger_fact_lost"]


def test_numbers_of_other_libraries_are_numbers(store):
    """numpy's, for instance, which json does not know."""
    import numpy as np

    store.put(ModelCall(task="t", attempt=np.int64(3), device_s=np.float32(0.5)))
    assert store.flush(10)
    assert [(3, 0.5)] == [(fact.attempt, fact.device_s) for fact in store.load("t")]


# -- databases that fail for a while


def test_memory_has_a_bound_while_a_database_takes_nothing(store, monkeypatch):
    """Beyond it facts are counted, with one warning that says what that means for bills."""
    monkeypatch.setattr(store_module, "MAX_UNSAVED", 50)
    monkeypatch.setattr(log, "_warned", set())
    before = log.counters["ledger_fact_lost"]
    blocked = threading.Event()
    monkeypatch.setattr(store.database, "insert", lambda run, rows: blocked.wait(20))
    store.put(call(i=-1))
    with store._state:
        store._state.wait_for(lambda: store._batch, 10)
    for i in range(80):
        store.put(call(i=i))
    lost = log.counters["ledger_fact_lost"] - before
    assert 30 <= lost <= 31
    assert store.unsaved <= 51
    blocked.set()
    assert store.flush(10)


def test_tables_that_vanish_are_made_anew(store):
    """Somebody dropped them; later facts are saved, and what waited too."""
    store.put(call(i=0))
    assert store.flush(10)
    with store.database.engine.begin() as connection:
        for table in ("agentkv_fact", "agentkv_task", "agentkv_schema"):
            connection.execute(sa.text(f"DROP TABLE {table}"))
    store.put(call(i=1))
    assert store.flush(10)
    assert [1] == numbers(store)


def test_a_file_that_is_deleted_is_made_anew_for_its_owner_alone(tmp_path):
    """What comes after is saved, instead of going into a file that nobody can see."""
    path = tmp_path / "l.sqlite"
    store = Store(f"sqlite:///{path}", interval_s=0.01)
    store.put(call(i=0))
    assert store.flush(10)
    for file in tmp_path.glob("l.sqlite*"):
        file.unlink()
    store.put(call(i=1))
    assert store.flush(10)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert [1] == numbers(store)
    store.close()


def test_a_relative_path_means_the_folder_in_which_it_was_given(tmp_path, monkeypatch):
    """Agents change folders; their ledger does not, not even when it has to be made anew."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    store = Store("sqlite:///l.sqlite", interval_s=0.01)
    monkeypatch.chdir(tmp_path / "second")
    store.put(call(i=0))
    assert store.flush(10)
    (tmp_path / "first" / "l.sqlite").unlink()
    store.put(call(i=1))
    assert store.flush(10)
    assert [1] == numbers(store)
    store.close()
    assert [] == list((tmp_path / "second").iterdir())


@pytest.mark.parametrize(
    "url", ["sqlite:///file:x.sqlite?uri=true", "sqlite:///:memory:?cache=shared", "sqlite://?x=1"]
)
def test_what_is_no_file_is_refused(url, tmp_path, monkeypatch):
    """And no file with such a name is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LedgerError, match="is not the path of a file"):
        Store(url)
    assert [] == [one for one in tmp_path.iterdir() if one.name != "agentkv-data"]


def test_a_folder_that_goes_away_and_comes_back(tmp_path, monkeypatch):
    """As a disk that is unplugged: nothing is written in its place, and all is there when it is back."""
    monkeypatch.setattr(store_module, "MAX_RETRY_S", 0.05)
    folder = tmp_path / "disk"
    folder.mkdir()
    store = Store(f"sqlite:///{folder / 'l.sqlite'}", interval_s=0.01)
    store.put(call(i=0))
    assert store.flush(10)
    folder.rename(tmp_path / "unplugged")
    store.put(call(i=1))
    assert not store.flush(0.3)
    assert not folder.exists()
    (tmp_path / "unplugged").rename(folder)
    assert store.flush(10)
    assert [0, 1] == numbers(store)
    store.close()


def test_a_full_disk_is_waited_for(tmp_path, monkeypatch):
    """SQLite's own error for it: memory keeps the facts, one warning, and nothing is lost when there is room."""
    monkeypatch.setattr(store_module, "MAX_RETRY_S", 0.05)
    monkeypatch.setattr(log, "_warned", set())
    store = Store(f"sqlite:///{tmp_path / 'l.sqlite'}", interval_s=0.01)
    pages = [12]
    sa.event.listen(
        store.database.engine, "connect", lambda c, _: c.execute(f"PRAGMA max_page_count={pages[0]}").close()
    )
    for i in range(2000):
        store.put(call(i=i, node="n" * 40))
    assert not store.flush(0.5)
    assert store.unsaved == 2000
    assert log.counters["ledger_not_saved"] >= 1
    pages[0] = 100_000
    assert store.flush(20)
    assert list(range(2000)) == numbers(store)
    store.close()


def test_a_write_does_not_fail_because_a_reader_is_slow(tmp_path):
    """In WAL mode a long read holds up nobody."""
    path = tmp_path / "l.sqlite"
    store = Store(f"sqlite:///{path}", interval_s=0.01)
    store.put(call(i=0))
    assert store.flush(10)
    reader = sqlite3.connect(path)
    reader.execute("BEGIN")
    assert (1,) == reader.execute("SELECT count(*) FROM agentkv_fact").fetchone()
    store.put(call(i=1))
    assert store.flush(5)
    assert (1,) == reader.execute("SELECT count(*) FROM agentkv_fact").fetchone()
    reader.rollback()
    reader.close()
    assert [0, 1] == numbers(store)
    store.close()


def test_an_export_that_is_read_slowly_does_not_let_the_log_grow(tmp_path):
    """Each page is a read of its own, so SQLite can empty its log between them."""
    path = tmp_path / "l.sqlite"
    store = Store(f"sqlite:///{path}", interval_s=0.001)
    for i in range(4000):
        store.put(call(i=i))
    assert store.flush(20)
    pages = store.database.pages(None, None)
    assert 2000 == len(next(pages))
    for i in range(6000):
        store.put(call("other", i, node="n" * 400))
        if i % 500 == 0:
            assert store.flush(20)
    assert store.flush(20)
    log_bytes = path.with_name("l.sqlite-wal").stat().st_size if path.with_name("l.sqlite-wal").exists() else 0
    assert log_bytes < path.stat().st_size / 2
    assert 2000 == len(next(pages))
    store.close()


class FileSystemWithoutWal:
    """A connection on a network mount: SQLite stays in its old mode."""

    def __init__(self, path):
        self.said, self.path = [], path

    def cursor(self):
        return self

    def execute(self, statement):
        self.said.append(statement)
        return self

    def fetchone(self):
        return ("delete",) if "journal_mode" in self.said[-1] else (0, "main", str(self.path))

    def close(self):
        return None


def test_without_wal_commits_are_made_safe_and_one_warning_says_why_it_is_slow(tmp_path, monkeypatch):
    """The mode really in force is looked at, not the one that was asked for."""
    monkeypatch.setattr(log, "_warned", set())
    before = log.counters["ledger_without_wal"]
    connection = FileSystemWithoutWal(tmp_path)
    sqlite.prepare(connection)
    assert "PRAGMA synchronous=FULL" in connection.said
    assert before + 1 == log.counters["ledger_without_wal"]


# -- PostgreSQL


def test_connections_that_the_server_ends_are_made_anew(postgres_url):
    """A restart, a timeout in between: the next batch finds a new one."""
    store = Store(postgres_url, interval_s=0.01)
    store.put(call(i=0))
    assert store.flush(10)
    other = Database(postgres_url, create=False)
    with other.engine.connect() as connection:
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(sa.text(ended))
    other.close()
    store.put(call(i=1))
    assert store.flush(10)
    assert [0, 1] == numbers(store)
    store.close()


def test_a_server_that_is_gone_is_waited_for(own_postgres_server, monkeypatch):
    """Stopped and started again: what was appended meanwhile is saved, in order and once."""
    monkeypatch.setattr(store_module, "MAX_RETRY_S", 0.1)
    server = own_postgres_server
    url = server.new_database()
    store = Store(url, interval_s=0.01)
    store.put(call(i=0))
    assert store.flush(10)
    server.stop()
    for i in range(1, 100):
        store.put(call(i=i))
    assert not store.flush(0.3)
    assert 99 == store.unsaved
    with pytest.raises(LedgerError, match="could not be read"):
        store.load("t")
    with pytest.raises(LedgerError, match="could not be opened") as refused:
        Store(url)
    assert refused.value.__cause__ is not None
    server.start()
    assert store.flush(20)
    assert list(range(100)) == numbers(store)
    store.close()


def test_without_psycopg_the_message_holds_the_pip_command(monkeypatch):
    """An extra that is not installed is no riddle."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'agentkv-sdk\[postgres\]'"):
        Store("postgresql://me:secret@localhost/agents")


def test_a_database_of_another_kind_is_refused_at_once():
    """Not at the first write."""
    with pytest.raises(LedgerError, match="neither sqlite nor postgresql"):
        Store("mysql://me:secret@host/db")


def test_a_server_that_nobody_answers_at_is_an_error_without_its_password(tmp_path):
    """At the start, in bounded time."""
    with pytest.raises(LedgerError, match="could not be opened") as refused:
        Store(f"postgresql://me:secret@/agents?host={tmp_path}")
    assert "secret" not in str(refused.value)


# -- processes

WRITER = """
import sys
from agentkv.budget.ledger import ModelCall
from agentkv.budget.store import Store
store = Store(sys.argv[1], interval_s=0.01)
for i in range(500):
    store.put(ModelCall(task="shared", node=sys.argv[2], at_ms=i))
store.close()
"""


def test_processes_write_one_task_together(postgres_url):
    """On more than one machine, say: nothing is lost or doubled, and each process keeps its order."""
    programs = [
        subprocess.Popen([sys.executable, "-c", WRITER, postgres_url, f"p{n}"], cwd=ROOT, stderr=subprocess.PIPE)
        for n in range(2)
    ]
    assert [b""] * 2 == [program.communicate(timeout=200)[1] for program in programs]
    reader = Store(postgres_url, create=False)
    facts = reader.load("shared", run=ALL_RUNS)
    for n in range(2):
        assert list(range(500)) == [fact.at_ms for fact in facts if fact.node == f"p{n}"]
    assert 500 == len(reader.load("shared"))
    assert () == check(reader.database).problems
    reader.close()


KILLED = """
import os, signal, sys
from agentkv.budget.ledger import ModelCall
from agentkv.budget.store import Store
store = Store(sys.argv[1], interval_s=0.01)
execute = store.database.engine.pool  # so that nothing is imported in the middle
for i in range(100):
    store.put(ModelCall(task="t", at_ms=i))
assert store.flush(20)
import sqlalchemy as sa
seen = []
def die(connection, cursor, statement, *rest):
    if "INTO agentkv_fact" in statement:
        os.kill(os.getpid(), signal.SIGKILL)
sa.event.listen(store.database.engine, "after_cursor_execute", die)
for i in range(100, 200):
    store.put(ModelCall(task="t", at_ms=i))
store.flush(20)
"""


def test_a_program_killed_in_a_transaction_leaves_what_it_had_committed(url):
    """Rows of the batch were already sent: none of them is there, all before are, and nothing is damaged."""
    killed = subprocess.run([sys.executable, "-c", KILLED, url], cwd=ROOT, check=False, timeout=200)
    assert -signal.SIGKILL == killed.returncode
    store = Store(url, interval_s=0.01)
    assert list(range(100)) == numbers(store)
    assert () == check(store.database).problems
    store.put(call(i=7))
    assert store.flush(10)
    assert [7] == numbers(store)
    store.close()


KILLED_WITHOUT_WAL = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode=DELETE")
connection.execute("PRAGMA cache_size=1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE agentkv_fact SET body = body || hex(zeroblob(5000))")
assert os.path.exists(sys.argv[1] + "-journal")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_program_killed_in_a_write_without_wal_leaves_a_ledger_that_opens(tmp_path):
    """On a network mount, or while an old file became one with WAL: what it had begun is taken back before it is read."""
    path = tmp_path / "l.sqlite"
    store = Store(f"sqlite:///{path}", interval_s=0.01)
    for i in range(100):
        store.put(call(i=i))
    store.close()
    killed = subprocess.run([sys.executable, "-c", KILLED_WITHOUT_WAL, path], cwd=ROOT, check=False, timeout=200)
    assert -signal.SIGKILL == killed.returncode
    reader = Store(f"sqlite:///{path}", create=False)
    assert list(range(100)) == numbers(reader)
    assert () == check(reader.database).problems
    reader.close()


KILLED_WHILE_BUSY = """
import sys, time
from agentkv.budget.ledger import ModelCall
from agentkv.budget.store import Store
store = Store(sys.argv[1])
i = 0
while True:
    store.put(ModelCall(task="t", at_ms=i))
    if i % 100 == 0:
        print(i, flush=True)
        time.sleep(0.01)
    i += 1
"""


def test_a_program_killed_at_any_moment_loses_its_last_half_second_at_most(tmp_path):
    """And what is there is a beginning without a gap."""
    url = f"sqlite:///{tmp_path / 'l.sqlite'}"
    program = subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_BUSY, url], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    for line in program.stdout:
        if int(line) > 5000:
            break
    program.kill()
    program.communicate()
    reader = Store(url, create=False)
    saved = numbers(reader)
    assert list(range(len(saved))) == saved
    assert len(saved) > 100
    assert () == check(reader.database).problems
    reader.close()


def test_a_forked_child_writes_under_its_own_run_and_the_parent_saves_its_own(tmp_path):
    """What was on its way is saved by the parent, once; the child has numbers of its own."""
    store = Store(f"sqlite:///{tmp_path / 'l.sqlite'}", interval_s=0.3)
    ledger = Ledger(store)
    ledger.append(call(i=1))
    child = os.fork()
    if child == 0:
        try:
            ledger.append(call("child", i=2))
            os._exit(0 if store.flush(10) and store.unsaved == 0 else 1)
        finally:
            os._exit(2)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert store.flush(10)
    assert ([1], [2]) == (numbers(store), numbers(store, "child"))
    assert [] == store.load("child", run=store.run)
    store.close()


READ_ONLY = """
import os, sys
from pathlib import Path
from agentkv.budget import store as store_module
from agentkv.budget.ledger import ModelCall
from agentkv.budget.store import Store, open_ledger, read_ledger
from agentkv.errors import LedgerError
store_module.MAX_RETRY_S = 0.1
warm = Store(f"sqlite:///{os.environ['AGENTKV_DATA']}/warm.sqlite", interval_s=0.01)  # whatever it imports, it imports
warm.put(ModelCall(task="t", node=object()))  # also the log's
warm.put(ModelCall(task="t"))
assert warm.flush(20) and warm.load("t")
warm.close()
folder, file = Path(os.environ["AGENTKV_DATA"]), Path(os.environ["AGENTKV_DATA"], "ledger.sqlite")
if os.getuid() == 0:  # root may write everywhere: from here on somebody else
    for path in (folder, file):
        os.chown(path, 65534, 65534)
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
running = Store(f"sqlite:///{file}", interval_s=0.01)
file.chmod(0o400), folder.chmod(0o500)
running.put(ModelCall(task="t", at_ms=6))
print(running.flush(0.3), running.unsaved)
print([fact.at_ms for fact in read_ledger(None).load("t")])
print(open_ledger(None).store)
for name in ("ledger.sqlite", "new.sqlite"):
    try:
        Store(f"sqlite:///{folder / name}")
    except LedgerError as error:
        print("readonly" in str(error) or "cannot be made: Permission denied" in str(error))
file.chmod(0o600), folder.chmod(0o700)
print(running.flush(20))
running.close()
print([fact.at_ms for fact in read_ledger(None).load("t")])
"""


def test_a_folder_that_may_only_be_read_is_read_and_breaks_no_agent(monkeypatch):
    """Reports work, a running program keeps its facts until it may write, a new one has memory, or an error."""
    with tempfile.TemporaryDirectory(prefix="agentkv-ro-") as outer:  # pytest's own are closed to everybody else
        Path(outer).chmod(0o755)
        monkeypatch.setenv("AGENTKV_DATA", f"{outer}/data")
        store = Store(f"sqlite:///{default_path()}")
        store.put(call(i=5))
        store.close()
        command = [sys.executable, "-c", READ_ONLY]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert ["False 1", "[5]", "None", "True", "True", "True", "[6]"] == result.stdout.splitlines(), result.stderr
    told = {"ledger_fact_lost", "ledger_not_saved", "ledger_default_unusable", "ledger_caught_up"}
    assert told == set(re.findall(r"ledger_\w+", result.stderr))


# -- ten thousand tasks


def test_ten_thousand_tasks_opened_and_closed_leave_no_more_than_the_bounds(tmp_path):
    """Memory has its share, the database has all, and the first bill is as right as the last."""
    store = Store(f"sqlite:///{tmp_path / 'l.sqlite'}")
    ledger = Ledger(store)
    for i in range(10_000):
        ledger.append(TaskFact(task=f"t{i}"))
        ledger.append(call(f"t{i}", i))
        ledger.append(TaskFact(task=f"t{i}", event="finished"))
        ledger.append(MoveFact(task=f"t{i}", blocks=i))  # a late one
    ledger.check()
    assert len(ledger.tasks()) <= ledger_module.MAX_TASKS
    for i in (0, 1, 5000, 9999):
        assert ["task", "model_call", "task", "move"] == [fact.kind for fact in ledger.rows(f"t{i}")]
        assert [i] == [fact.blocks for fact in ledger.rows(f"t{i}") if isinstance(fact, MoveFact)]
    assert 10_000 == len(store.tasks())
    ledger.close()
    assert 0 == store.unsaved


def test_all_bills_are_read_from_either_database(url):
    """Run by run, the task that spoke last first; also a part of them in time."""
    for start in (0, 1000):
        store = Store(url, interval_s=0.01)
        for task in (*NAMES, "t"):
            store.put(call(task, start))
        store.close()
    reader = Store(url, create=False)
    found = list(bills(reader.database))
    assert [name for name in ("t", *NAMES[::-1]) for _ in range(2)] == [one.task for one in found]
    assert [0, 1000] * (len(NAMES) + 1) == [one.calls[0].at_ms for one in found]
    assert {1000} == {one.calls[0].at_ms for one in bills(reader.database, since_ms=1)}
    assert (2, 1) == (len(reader.database.runs("t")), len(reader.database.runs("t", 1)))
    reader.close()


# -- a disk of its own


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 KB, and the way to change it."""

    def mount(*options):
        subprocess.run(["mount", *options, str(folder)], check=True, capture_output=True)

    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=200k", "tmpfs")
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no file system may be mounted here: {error}")
    yield folder, lambda change: mount("-o", f"remount,{change}")
    subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def test_agents_answer_while_the_ledgers_disk_is_full_or_read_only(small_disk, monkeypatch):
    """One warning, the number of facts that wait, a budget for all processes that refuses; afterwards all is saved."""
    monkeypatch.setattr(store_module, "MAX_RETRY_S", 0.05)
    monkeypatch.setattr(log, "_warned", set())
    folder, remount = small_disk
    ask = Request(messages=(Message(role="user", content="why"),))
    with AgentKV.with_engine(ScriptedEngine(itertools.repeat("ok")), ledger=f"sqlite:///{folder}/l.sqlite") as kv:
        for number in range(600):
            with kv.task(f"task {number} " * 20):
                assert "ok" == kv.submit(ask).result(20).text
        assert not kv._books._ledger.store.flush(0.5)
        assert 0 < kv.stats()["ledger"]["unsaved"]
        assert "ledger_not_saved" in log._warned
        with contextlib.suppress(OSError), (folder / "rest").open("wb", buffering=0) as rest:
            while True:
                rest.write(bytes(4096))
        with kv.task("strict", budget=Budget(tokens=1000, shared=True), final=False), pytest.raises(LedgerError):
            kv.submit(ask)
        for change in ("size=50m", "ro", "rw"):
            remount(change)
            with kv.task(change):
                assert "ok" == kv.submit(ask).result(20).text
            assert (change != "ro") == kv._books._ledger.store.flush(10 if change != "ro" else 0.6)
        assert 0 == kv.stats()["ledger"]["unsaved"]
    reader = Store(f"sqlite:///{folder}/l.sqlite", create=False)
    assert 604 == len(reader.tasks())
    reader.close()
