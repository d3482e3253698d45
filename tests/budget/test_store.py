"""The ledger and its store: facts are kept, whatever the disk does."""

import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import log
from agentkv.budget import ledger as ledger_module
from agentkv.budget.ledger import (
    Ledger,
    ModelCall,
    MoveFact,
    TaskFact,
    ToolCallFact,
    fact_from_json,
    fact_to_json,
)
from agentkv.budget.store import Store, default_path, open_ledger, read_ledger
from agentkv.core.usage import Timing, Usage
from agentkv.errors import ConfigError, LedgerError


def call(task="t", i=0, **more):
    return ModelCall(
        task=task, session="s", node=f"n{i}", at_ms=1000 + i, model="m",
        usage=Usage(input_tokens=10 + i, cached_tokens=i, output_tokens=3, calls=1), timing=Timing(ttft_s=0.5), **more
    )  # fmt: skip


FACTS = [
    TaskFact(task="t", at_ms=1),
    call(),
    call(i=1, status="aborted", estimated=True, visible=False),
    ToolCallFact(task="t", tool="bash", command="pytest", predicted_p50_s=1.5, actual_s=2.0, status="failed"),
    MoveFact(task="t", session="s", action="demote", to="host", blocks=3, size_bytes=9, reason="expected wait 7 s"),
    TaskFact(task="t", at_ms=9, event="finished", final=True),
]


def url_of(path):
    return f"sqlite:///{path}"


@pytest.fixture
def store(tmp_path):
    opened = Store(url_of(tmp_path / "ledger.sqlite"), interval_s=0.02)
    yield opened
    opened.close()


# -- facts and the ledger in memory


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_survives_json(fact):
    """Also with fields of a later program in it."""
    assert fact_from_json(fact.kind, fact_to_json(fact) | {"later": 1}) == fact


names = st.text(max_size=20)


@settings(max_examples=50)
@given(names, names, st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 1e9))
def test_any_names_and_numbers_survive_json(task, node, cached, fresh, seconds):
    """Lone surrogates, line ends, zero: all come back."""
    import json

    fact = ModelCall(
        task=task, node=node, usage=Usage(input_tokens=cached + fresh, cached_tokens=cached),
        timing=Timing(total_s=seconds),
    )  # fmt: skip
    assert fact_from_json("model_call", json.loads(json.dumps(fact_to_json(fact)))) == fact


def test_the_ledger_keeps_the_facts_of_each_task_in_order():
    """Unknown tasks have none; nobody is billed for another."""
    ledger = Ledger()
    for i in range(3):
        ledger.append(call("a", i))
        ledger.append(call("b", i))
    assert [fact.node for fact in ledger.rows("a")] == ["n0", "n1", "n2"]
    assert ledger.rows("c") == []
    assert ledger.tasks() == ["a", "b"]


def test_a_store_that_raises_costs_a_counter_and_no_call():
    """append never raises."""

    class Broken:
        def put(self, fact):
            raise OSError("gone")

        def close(self):
            return None

    before = log.counters["ledger_append_failed"]
    ledger = Ledger(Broken())
    ledger.append(call())
    assert log.counters["ledger_append_failed"] == before + 1
    assert len(ledger.rows("t")) == 1


def test_finished_tasks_leave_the_memory_when_there_are_too_many(monkeypatch):
    """Ten thousand tasks do not grow a process; running ones stay."""
    monkeypatch.setattr(ledger_module, "MAX_TASKS", 10)
    ledger = Ledger()
    ledger.append(call("running"))
    for i in range(100):
        ledger.append(TaskFact(task=f"t{i}"))
        ledger.append(TaskFact(task=f"t{i}", event="finished"))
    assert len(ledger.tasks()) <= 10
    assert "running" in ledger.tasks()
    assert "t99" in ledger.tasks()


# -- the store


def test_facts_come_back_from_the_database_as_they_went_in(store):
    """All kinds, in order, after a flush."""
    for fact in FACTS:
        store.put(fact)
    assert store.flush()
    assert store.unsaved == 0
    assert store.load("t") == FACTS
    assert store.load("unknown") == []
    assert store.tasks() == ["t"]


def test_a_fact_is_on_disk_within_half_a_second_without_a_flush(tmp_path):
    """At the default interval, a crash loses at most that."""
    store = Store(url_of(tmp_path / "l.sqlite"))
    try:
        store.put(call())
        deadline_s = time.monotonic() + 5
        while store.unsaved and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert store.unsaved == 0
        assert time.monotonic() < deadline_s - 3.5
    finally:
        store.close()


def test_close_saves_what_is_left_and_may_be_called_twice(tmp_path):
    """Closing right after many facts loses none of them; later facts are counted."""
    url = url_of(tmp_path / "l.sqlite")
    store = Store(url, interval_s=30)
    for i in range(500):
        store.put(call(i=i))
    store.close()
    store.close()
    before = log.counters["ledger_closed"]
    store.put(call())
    assert log.counters["ledger_closed"] == before + 1
    again = Store(url, create=False)
    assert [fact.node for fact in again.load("t")] == [f"n{i}" for i in range(500)]
    again.close()


def test_appending_costs_microseconds_while_the_database_is_locked(tmp_path):
    """The agent does not wait for the disk; when the lock goes, the facts are saved."""
    path = tmp_path / "l.sqlite"
    store = Store(url_of(path), interval_s=0.01)
    try:
        store.put(call())
        assert store.flush()
        locker = sqlite3.connect(path)
        locker.execute("BEGIN IMMEDIATE")
        start_s = time.perf_counter()
        for i in range(200):
            store.put(call(i=i))
        assert time.perf_counter() - start_s < 2
        assert not store.flush(timeout_s=0.1)
        assert store.unsaved == 200
        locker.rollback()
        locker.close()
        assert store.flush(timeout_s=10)
        assert len(store.load("t")) == 201
    finally:
        store.close()


class FailingDisk:
    """A Database whose disk is full until told otherwise."""

    name = "sqlite:///full"

    def __init__(self, failures=10**9):
        self.failures, self.saved = failures, []

    def insert(self, run, rows):
        if self.failures > 0:
            self.failures -= 1
            raise LedgerError("the ledger could not be written: database or disk is full")
        self.saved.extend(rows)

    def close(self):
        return None


def test_a_full_disk_keeps_facts_in_memory_and_catches_up(tmp_path, monkeypatch):
    """In order, without loss, with one warning."""
    monkeypatch.setattr(log, "_warned", set())
    store = Store(url_of(tmp_path / "l.sqlite"), interval_s=0.01)
    disk = FailingDisk()
    store.database.close()
    store.database = disk
    for i in range(50):
        store.put(call(i=i))
    assert not store.flush(timeout_s=0.5)
    assert store.unsaved == 50
    disk.failures = 0
    assert store.flush(timeout_s=10)
    assert [row.at_ms for row in disk.saved] == [1000 + i for i in range(50)]
    assert log.counters["ledger_not_saved"] >= 1
    store.close()


@pytest.mark.parametrize("failures", [1, 2])
def test_facts_that_had_to_wait_keep_their_order(tmp_path, failures):
    """After one or two refusals they are saved as they were appended."""
    store = Store(url_of(tmp_path / "l.sqlite"), interval_s=0.05)
    store.database.close()
    store.database = disk = FailingDisk(failures)
    for i in range(20):
        store.put(call(i=i))
    assert store.flush(timeout_s=10)
    store.close()
    assert [row.at_ms for row in disk.saved] == [1000 + i for i in range(20)]


def test_closing_on_a_full_disk_says_how_much_is_lost(tmp_path):
    """It ends, in bounded time, and the number is still there to be told."""
    store = Store(url_of(tmp_path / "l.sqlite"), interval_s=0.01)
    store.database.close()
    store.database = FailingDisk()
    store.put(call())
    store.close(timeout_s=5)
    assert store.unsaved == 1


def test_threads_append_together_and_nothing_is_lost(store):
    """Four threads, one file."""
    ledger = Ledger(store)

    def work(n):
        for i in range(100):
            ledger.append(call(f"t{n}", i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.flush()
    for n in range(4):
        assert store.load(f"t{n}") == ledger.rows(f"t{n}")


def test_the_latest_run_of_a_task_is_loaded_unless_another_is_named(tmp_path):
    """The same task key in yesterday's process is another run."""
    url = url_of(tmp_path / "l.sqlite")
    runs = []
    for i in range(2):
        store = Store(url)
        store.put(call(i=i))
        store.close()
        runs.append(store.run)
    reader = Store(url, create=False)
    assert [fact.node for fact in reader.load("t")] == ["n1"]
    assert [fact.node for fact in reader.load("t", run=runs[0])] == ["n0"]
    reader.close()


def test_the_file_is_for_its_owner_alone_and_in_wal_mode(tmp_path):
    """Mode 0600 in a folder of mode 0700, whatever the umask."""
    umask = os.umask(0)
    try:
        store = Store(url_of(tmp_path / "data" / "l.sqlite"))
        store.put(call())
        store.close()
    finally:
        os.umask(umask)
    path = tmp_path / "data" / "l.sqlite"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_newer_ledger_is_refused_and_not_touched(tmp_path):
    """Version 999: an error with both numbers and what to do, the bytes unchanged; also as the default file."""
    path = default_path()
    store = Store(url_of(path))
    store.put(call())
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE agentkv_schema SET version = 999")
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    before = path.read_bytes()
    for ledger in (url_of(path), None):
        with pytest.raises(LedgerError, match=r"999.*knows 2"):
            open_ledger(ledger)
        with pytest.raises(LedgerError, match="999"):
            read_ledger(ledger)
    assert path.read_bytes() == before


def test_a_file_that_is_no_ledger_is_left_alone(tmp_path):
    """A named file: an error. The default file: memory, one warning, and the file is kept."""
    path = default_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"notes, not a database " * 100)
    with pytest.raises(LedgerError, match="no ledger"):
        open_ledger(url_of(path))
    ledger = open_ledger(None)
    ledger.append(call())
    assert ledger.store is None
    assert len(ledger.rows("t")) == 1
    assert path.read_bytes() == b"notes, not a database " * 100


def test_a_default_place_that_cannot_be_made_means_memory(tmp_path, monkeypatch):
    """A file where the folder should be: the agent runs on; a named place is an error."""
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("AGENTKV_DATA", str(tmp_path / "file" / "below"))
    assert open_ledger(None).store is None
    with pytest.raises(LedgerError, match="cannot be made"):
        open_ledger(url_of(tmp_path / "file" / "below" / "l.sqlite"))


def test_the_default_ledger_is_in_the_data_folder(tmp_path, monkeypatch):
    """AGENTKV_DATA names it; without it the user's data folder."""
    ledger = open_ledger(None)
    ledger.append(call())
    ledger.close()
    assert default_path() == tmp_path / "agentkv-data" / "ledger.sqlite"
    assert default_path().exists()
    monkeypatch.delenv("AGENTKV_DATA")
    assert default_path().parts[-2:] == ("agentkv", "ledger.sqlite")


def test_memory_saves_nothing():
    """No store, no file."""
    ledger = open_ledger("memory")
    ledger.append(call())
    ledger.close()
    assert ledger.store is None
    assert not default_path().exists()


@pytest.mark.parametrize("text", ["memroy", "ledger.sqlite", "", "sqlite://", "sqlite:///:memory:"])
def test_a_text_that_is_neither_memory_nor_a_url_is_an_error(text):
    """A typo is not a file name."""
    with pytest.raises(ConfigError):
        open_ledger(text)


@pytest.mark.parametrize("url", ["nosuchdb://host/db", "mysql+nosuchdriver://u:secret@host/db"])
def test_a_database_that_cannot_be_reached_is_an_error_without_its_password(url):
    """The message may be logged."""
    with pytest.raises(LedgerError) as caught:
        open_ledger(url)
    assert "secret" not in str(caught.value)


def test_reading_a_ledger_that_is_not_there_creates_nothing():
    """`agentkv report` before the first run says so."""
    with pytest.raises(LedgerError, match="there is no ledger"):
        read_ledger(None)
    assert not default_path().exists()


def test_reading_the_default_ledger_back(tmp_path):
    """What `agentkv report` does."""
    ledger = open_ledger(None)
    for fact in FACTS:
        ledger.append(fact)
    ledger.close()
    saved = read_ledger(None)
    assert saved.tasks() == ["t"]
    assert saved.load("t") == FACTS
    saved.close()


def test_threads_that_open_a_new_file_at_the_same_moment_make_one_schema(tmp_path):
    """Whoever comes second waits and finds the tables."""
    errors = []

    def make(url, barrier):
        barrier.wait()
        try:
            Store(url).close()
        except LedgerError as error:
            errors.append(error)

    for i in range(10):
        barrier = threading.Barrier(4)
        threads = [threading.Thread(target=make, args=(url_of(tmp_path / f"{i}.sqlite"), barrier)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


WRITER = """
import sys
from agentkv.budget.ledger import ModelCall
from agentkv.budget.store import Store
store = Store(sys.argv[1], interval_s=0.01)
for i in range(200):
    store.put(ModelCall(task=sys.argv[2], at_ms=i))
store.close()
"""


def test_processes_create_and_write_one_file_together(tmp_path):
    """Four start at the same moment on a file that is not there: no error, no row lost."""
    url = url_of(tmp_path / "l.sqlite")
    root = Path(ledger_module.__file__).parents[2]
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, url, f"t{n}"], cwd=root, stderr=subprocess.PIPE)
        for n in range(4)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert errors == b""
        assert process.returncode == 0
    reader = Store(url, create=False)
    assert [len(reader.load(f"t{n}")) for n in range(4)] == [200] * 4
    reader.close()
