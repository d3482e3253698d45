"""`agentkv ledger`: where it is, whether it is sound, taking facts out, forgetting old ones."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import stat
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkv.budget import sqlite
from agentkv.budget.ledger import ContextFact, ModelCall, TaskFact, ToolCallFact
from agentkv.budget.store import Store, default_path
from agentkv.cli import app
from agentkv.core.usage import Timing, Usage
from agentkv.errors import ConfigError, LedgerError

HOSTILE = '=HYPERLINK("http://x")'
DAY_MS = 86_400_000


def run(*argv):
    return CliRunner().invoke(app, ["ledger", *map(str, argv)], env={"COLUMNS": "200"})


def call(task, **more):
    usage = Usage(input_tokens=100, cached_tokens=40, output_tokens=7, calls=1)
    return ModelCall(task=task, at_ms=5000, model="m", usage=usage, cost_usd=Decimal("0.0000001"), **more)


def save(*facts, url=None):
    store = Store(url or f"sqlite:///{default_path()}")
    for fact in facts:
        store.put(fact)
    store.close()
    return store.run


def age(days, task=None):
    """As if what is there had been saved `days` ago."""
    with sqlite3.connect(default_path()) as connection:
        where = "" if task is None else f" WHERE task = '{task}'"
        connection.execute(f"UPDATE agentkv_task SET saved_ms = saved_ms - {int(days * DAY_MS)}{where}")
    connection.close()


@pytest.fixture
def ledger():
    """Two tasks in the default place."""
    return save(
        TaskFact(task="run-7", at_ms=1000), call("run-7"), ToolCallFact(task="run-7", tool="bash", actual_s=2.5),
        call(HOSTILE, node="@cmd"),
    )  # fmt: skip


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


# -- path


def test_path_says_where_the_ledger_is_and_how_large(ledger):
    """Before the first run, it says that too, and makes nothing."""
    shown = run("path")
    assert str(default_path()) in shown.stdout
    assert "KiB" in shown.stdout
    assert json.loads(run("path", "--json").stdout)["exists"] is True


def test_path_makes_nothing():
    """A question must not create the thing it asks for."""
    assert "not there yet" in run("path").stdout
    assert not default_path().exists()


def test_path_hides_a_password():
    """What is printed ends in an issue somewhere."""
    shown = run("path", "--ledger", "postgresql://me:secret@host/agents").stdout
    assert "secret" not in shown
    assert "host/agents" in shown


# -- check


def test_check_finds_no_fault_in_a_sound_ledger(ledger):
    """With the version and what is in it."""
    found = json.loads(run("check", "--json").stdout)
    assert {"version": 2, "tasks": 2, "facts": 4, "unknown": 0, "problems": []} == found
    assert "no fault found" in run("check").stdout


def test_check_names_rows_that_cannot_be_read_and_what_a_newer_program_wrote(ledger):
    """The first is a fault, the second is not."""
    with sqlite3.connect(default_path()) as connection:
        connection.execute("UPDATE agentkv_fact SET body = '{' WHERE kind = 'tool_call'")
        connection.execute("UPDATE agentkv_fact SET kind = 'dream' WHERE kind = 'task'")
        connection.execute("INSERT INTO agentkv_fact VALUES (99, 77, 1, 'task', 0, '{}')")
    connection.close()
    result = run("check")
    assert 1 == result.exit_code
    assert "1 of 4 facts cannot be read" in result.stderr
    assert "1 facts belong to no task" in result.stderr
    assert "1 facts are of a kind that only a newer agentkv knows" in result.stdout


def test_check_finds_a_file_that_was_damaged(ledger):
    """Bytes in the middle of a page."""
    data = bytearray(default_path().read_bytes())
    data[8192 : 8192 + 2000] = b"\xff" * 2000
    default_path().write_bytes(bytes(data))
    result = run("check")
    assert 1 == result.exit_code or isinstance(result.exception, LedgerError)


# -- export


def test_an_export_holds_every_field_of_every_fact_in_order(ledger):
    """Zeros and names too: who reads it need not know our defaults."""
    exported = lines(run("export"))
    assert ["task", "model_call", "tool_call", "model_call"] == [one["kind"] for one in exported]
    model = exported[1]
    assert ("run-7", ledger, 5000, "0.0000001") == (model["task"], model["run"], model["at_ms"], model["cost_usd"])
    assert 40 == model["usage"]["cached_tokens"]
    assert "" == model["error"]
    assert 2.5 == exported[2]["actual_s"]


def test_an_export_of_one_task_has_all_its_runs(ledger):
    """Yesterday's process, and today's."""
    save(call("run-7"))
    exported = lines(run("export", "run-7"))
    assert 4 == len(exported)
    assert {"run-7"} == {one["task"] for one in exported}
    assert 2 == len({one["run"] for one in exported})


def test_an_export_can_begin_at_a_moment(ledger):
    """By the facts' own clock; as an age or a date."""
    assert 3 == len(lines(run("export", "--since", "1970-01-01T00:00:01Z")))
    assert ["model_call"] * 2 == [one["kind"] for one in lines(run("export", "--since", "1970-01-01T00:00:05+00:00"))]
    assert [] == lines(run("export", "--since", "7d"))


def test_csv_is_one_table_for_all_kinds(ledger):
    """Parts have columns of their own; what a spreadsheet would run is harmless."""
    table = list(csv.DictReader(io.StringIO(run("export", "--format", "csv").stdout)))
    assert 4 == len(table)
    assert ("40", "0.0000001", "") == (table[1]["usage.cached_tokens"], table[1]["cost_usd"], table[1]["tool"])
    assert ("bash", "2.5") == (table[2]["tool"], table[2]["actual_s"])
    assert ("'" + HOSTILE, "'@cmd") == (table[3]["task"], table[3]["node"])


def test_csv_of_an_empty_ledger_has_its_head():
    """So that a reader finds the columns."""
    save()
    assert run("export", "--format", "csv").stdout.startswith("task,run,kind,at_ms,session,")


def test_a_file_is_for_its_owner_and_whole_or_not_there(ledger, tmp_path, monkeypatch):
    """Mode 0600; what was there before stays when the export fails half-way."""
    out = tmp_path / "out.jsonl"
    assert "4 lines" in run("export", "-o", out).stderr
    assert 4 == len(out.read_text().splitlines())
    assert 0o600 == stat.S_IMODE(out.stat().st_mode)

    def broken(*args, **more):
        yield "{}\n"
        raise LedgerError("the disk went away")

    monkeypatch.setattr("agentkv.budget.export.lines", broken)
    assert isinstance(run("export", "-o", out).exception, LedgerError)
    assert 4 == len(out.read_text().splitlines())
    assert [out] == list(tmp_path.glob("*out*"))


def test_a_file_that_cannot_be_written_is_one_sentence(ledger, tmp_path):
    """With its reason."""
    result = run("export", "-o", tmp_path / "no" / "such" / "folder.csv")
    assert isinstance(result.exception, ConfigError)
    assert "cannot be written" in str(result.exception)


def test_difficult_names_are_exported_as_they_are(tmp_path):
    """NUL, a lone surrogate, 4 kB, markup."""
    names = ["a\0b", "\ud800", "x" * 4096, "<script>'; DROP TABLE agentkv_fact; --", 'q"\\n', "é中🙂"]
    save(*(call(name) for name in names))
    assert names == [one["task"] for one in lines(run("export"))]
    for form in ("csv", "jsonl"):
        assert 0 == run("export", "--format", form, "-o", tmp_path / form).exit_code
    assert 7 == len((tmp_path / "csv").read_text().splitlines())
    for name in names:
        if "\0" not in name and "\ud800" not in name:
            assert [name] == [one["task"] for one in lines(run("export", name))]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_an_export_to_a_console_that_cannot_say_a_name_goes_on(form):
    """A lone surrogate, or a terminal of the last century."""
    save(call("\ud800"), call("é中"))
    command = [sys.executable, "-m", "agentkv.cli", "ledger", "export", "--format", form]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True, timeout=60
    )
    assert 2 + (form == "csv") == len(done.stdout.splitlines())


def test_a_duration_that_is_no_number_is_exported_as_json():
    """NaN is none, and a strict reader would refuse the whole line."""
    odd = float("nan")
    save(
        call("t", timing=Timing(total_s=odd)), ToolCallFact(task="t", actual_s=odd), ContextFact(task="t", seconds=odd)
    )
    assert "NaN" not in run("export").stdout
    assert [0.0, 0.0] == [one["actual_s" if "actual_s" in one else "seconds"] for one in lines(run("export"))[1:]]


def test_an_unknown_task_is_told_and_exits_1(ledger):
    """As `report` does."""
    result = run("export", "nobody")
    assert (1, "") == (result.exit_code, result.stdout)
    assert "No task 'nobody'" in result.stderr


def test_facts_of_a_newer_kind_are_exported_with_what_is_there(ledger):
    """Nothing is left out of an export."""
    with sqlite3.connect(default_path()) as connection:
        connection.execute("UPDATE agentkv_fact SET kind = 'dream', body = '{\"depth\":3}' WHERE kind = 'task'")
    connection.close()
    assert {"kind": "dream", "body": '{"depth":3}'}.items() <= lines(run("export"))[0].items()


# -- prune


def test_a_dry_run_counts_and_leaves_everything(ledger):
    """The default way to be careful."""
    age(40)
    assert "2 tasks with 4 facts would be forgotten." in run("prune", "--older-than", "30d", "--dry-run").stdout
    assert 4 == len(lines(run("export")))


def test_old_tasks_go_as_a_whole_and_young_ones_stay(ledger):
    """Age is the time of the last saving."""
    age(40, "run-7")
    assert "1 tasks with 3 facts forgotten." in run("prune", "--older-than", "30d").stdout
    assert [HOSTILE] == [one["task"] for one in lines(run("export"))]
    assert "0 tasks with 0 facts forgotten." in run("prune", "--older-than", "30d").stdout


def test_bills_can_be_kept(ledger):
    """The totals stay, are exported, and go with a later prune that does not keep them."""
    age(40)
    assert "; their totals are kept." in run("prune", "--older-than", "30d", "--keep-bills").stdout
    kept = {one["task"]: one for one in lines(run("export"))}
    assert {"kept_bill"} == {one["kind"] for one in kept.values()}
    assert (107, 1) == (kept["run-7"]["totals"]["total_tokens"], kept["run-7"]["totals"]["model_calls"])
    reader = Store(f"sqlite:///{default_path()}", create=False)
    assert ["run-7", HOSTILE] == sorted(reader.tasks(), reverse=True)
    assert 107 == reader.kept_bill("run-7")["total_tokens"]
    assert reader.kept_bill("nobody") is None
    reader.close()
    again = json.loads(run("prune", "--older-than", "30d", "--keep-bills", "--json").stdout)
    assert (0, 0) == (again["tasks"], again["facts"])
    assert "2 tasks with 0 facts forgotten." in run("prune", "--older-than", "30d").stdout
    assert [] == lines(run("export"))


def test_the_file_becomes_smaller(ledger):
    """Space of deleted rows goes back to the disk."""
    save(*(call(f"t{i % 50}", node="n" * 50) for i in range(5000)))
    before = default_path().stat().st_size
    age(40)
    told = json.loads(run("prune", "--older-than", "30d", "--json").stdout)
    assert default_path().stat().st_size < before / 4
    assert (52, 5004, False, None) == (told["tasks"], told["facts"], told["dry_run"], told["not_shrunk"])


def test_a_file_of_an_older_program_becomes_smaller_too(tmp_path):
    """It is written anew once, and can be shrunk in small steps from then on."""
    path = tmp_path / "old.sqlite"
    connection = sqlite3.connect(path)
    script = (Path(__file__).parents[1] / "budget" / "ledger_v1.sql").read_text(encoding="utf-8")
    connection.executescript(script)
    connection.execute("PRAGMA auto_vacuum")
    connection.close()
    save(*(call(f"t{i % 50}", node="n" * 50) for i in range(3000)), url=f"sqlite:///{path}")
    before = path.stat().st_size
    assert 0 == run("prune", "--older-than", "0s", "--ledger", f"sqlite:///{path}").exit_code
    assert path.stat().st_size < before / 4
    with sqlite3.connect(path) as connection:
        assert (2,) == connection.execute("PRAGMA auto_vacuum").fetchone()
    connection.close()


def test_a_program_that_reads_meanwhile_does_not_make_a_prune_fail(ledger, monkeypatch):
    """The rows are gone; the room is used by what comes, or given back by the next prune."""
    monkeypatch.setattr("agentkv.budget.sqlite.LOCK_WAIT_S", 0.1)
    age(40)
    reader = sqlite3.connect(default_path())
    reader.execute("BEGIN")
    assert (4,) == reader.execute("SELECT count(*) FROM agentkv_fact").fetchone()
    pruned = run("prune", "--older-than", "30d")
    assert "2 tasks with 4 facts forgotten." in pruned.stdout
    assert "could not be made smaller (another program is reading it)" in pruned.stderr
    reader.close()
    assert [] == lines(run("export"))


def test_a_prune_beside_a_reader_does_not_let_the_log_grow_and_the_next_one_shrinks_the_file(ledger, monkeypatch):
    """Giving space back goes through the log, which cannot be emptied while somebody reads."""
    monkeypatch.setattr("agentkv.budget.sqlite.LOCK_WAIT_S", 0.1)
    monkeypatch.setattr("agentkv.budget.sqlite._WAL_KEPT_BYTES", 100_000)
    save(*(call(f"t{i % 50}", node="n" * 50) for i in range(20_000)))
    reader = sqlite3.connect(default_path())
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM agentkv_fact").fetchone()
    age(40)
    before = default_path().stat().st_size
    log = default_path().with_name(f"{default_path().name}-wal")
    deleted = []
    give_back = sqlite.give_back
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "give_back", lambda path: deleted.append(log.stat().st_size) or give_back(path))
        told = json.loads(run("prune", "--older-than", "30d", "--json").stdout)
    assert "another program is reading it" == told["not_shrunk"]
    assert deleted == [log.stat().st_size]
    reader.close()
    told = json.loads(run("prune", "--older-than", "30d", "--json").stdout)
    assert (0, None) == (told["tasks"], told["not_shrunk"])
    assert default_path().stat().st_size < before / 4


@pytest.mark.parametrize("text", ["7x", "yesterday", "2026-13-01", "99999-01-01"])
def test_a_moment_that_is_none_is_told_with_examples(ledger, text):
    """A typo does not export everything."""
    result = run("export", "--since", text)
    assert (2, "") == (result.exit_code, result.stdout)
    assert "12h, 7d, 2026-11-01" in result.stderr


@pytest.mark.parametrize("text", ["30", "30 days", "-1d", "d", "1e3d", "٣d"])
def test_an_age_that_is_none_is_told_with_examples(ledger, text):
    """Nothing is deleted on a guess."""
    result = run("prune", f"--older-than={text}")
    assert 2 == result.exit_code
    assert "30m, 12h, 7d or 2w" in result.stderr
    assert 4 == len(lines(run("export")))


def test_prune_wants_to_be_told_how_old(ledger):
    """There is no age that is right for everybody."""
    assert 2 == run("prune").exit_code


# -- all of them


def test_a_ledger_that_is_not_there_is_one_sentence_and_exit_code_1():
    """No traceback, and nothing is made."""
    command = [sys.executable, "-m", "agentkv.cli", "ledger", "export"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (1, "") == (result.returncode, result.stdout)
    assert result.stderr.startswith("agentkv: there is no ledger at ")
    assert 1 == len(result.stderr.splitlines())
    for other in (["check"], ["prune", "--older-than", "1d"]):
        assert isinstance(run(*other).exception, LedgerError)
    assert not default_path().exists()


@pytest.mark.parametrize("command", ["path", "check", "export", "prune"])
def test_help_teaches(command):
    """What it does, with an example where there is something to say."""
    shown = run(command, "--help").stdout
    assert "--ledger" in shown
    assert (f"`agentkv ledger {command}" in shown) == (command in {"export", "prune"})
