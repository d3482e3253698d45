"""`agentkv sessions`: what waits on disk, and forgetting it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from agentkv.cli import app
from agentkv.errors import ConfigError
from agentkv.kv.lair import StoreBusy
from agentkv.kv.slab import Slab

BLOCK = 4096
DAY_S = 86400


def run(*argv):
    return CliRunner().invoke(app, ["sessions", *map(str, argv)], env={"COLUMNS": "200"})


def leave(root, store="model", **notes):
    """A store with these notes; a dict is written as JSON."""
    with Slab(root, 1 << 20, BLOCK, store=store) as slab:
        for name, note in notes.items():
            slab.note(name, note if isinstance(note, bytes) else json.dumps(note).encode())


def note(session, days=0.0, **more):
    return {
        "session": session,
        "task": "run-7",
        "tokens": 18231,
        "keys": ["00" * 16] * 3,
        "used_at": time.time() - days * DAY_S,
        "model": "smollm2-135m",
        "bytes": 3 * BLOCK,
    } | more


@pytest.fixture
def root(tmp_path):
    leave(tmp_path / "kv", a=note("coder"), b=note("tester", days=9), c=note("reader", days=3))
    return tmp_path / "kv"


def listed(root):
    return [one["session"] for one in json.loads(run("list", "--disk", root, "--json").stdout)]


def test_sessions_are_listed_the_last_used_first(root):
    """With task, model, tokens, size and age; and what the store takes."""
    shown = run("list", "--disk", root).stdout
    lines = shown.splitlines()
    assert ["coder", "reader", "tester"] == [line.split()[0] for line in lines[1:4]]
    assert "run-7" in lines[1]
    assert "smollm2-135m" in lines[1]
    assert "18,231" in lines[1]
    assert "12.0 KiB" in lines[1]
    assert "9 days ago" in lines[3]
    assert str(root / "store-model") in lines[4]
    assert "not in use" in lines[4]


def test_json_has_the_same_and_where(root):
    """For scripts."""
    first = json.loads(run("list", "--disk", root, "--json").stdout)[0]
    told = {key: first[key] for key in ("session", "task", "model", "tokens", "bytes", "store", "held_by")}
    assert {
        "session": "coder",
        "task": "run-7",
        "model": "smollm2-135m",
        "tokens": 18231,
        "bytes": 3 * BLOCK,
        "store": "model",
        "held_by": None,
    } == told


def test_nothing_there_is_said_in_a_sentence(tmp_path):
    """With how it comes to be there."""
    shown = run("list", "--disk", tmp_path)
    assert 0 == shown.exit_code
    assert "persist=True" in shown.stdout
    assert "[]" == run("list", "--disk", tmp_path, "--json").stdout.strip()


@pytest.mark.parametrize(
    "odd",
    [b"", b"\xff\xfe", b"[1]", b"{}", b"[" * 5000, {"tokens": "many", "used_at": None, "keys": 7, "bytes": -1, "task": 3},
     {"used_at": 1e300, "tokens": True}],
)  # fmt: skip
def test_a_note_that_says_little_is_listed_with_what_it_says(tmp_path, odd):
    """And can be dropped."""
    leave(tmp_path, odd=odd)
    assert ["odd"] == listed(tmp_path)
    assert "odd" in run("list", "--disk", tmp_path).stdout
    assert 0 == run("drop", "odd", "--disk", tmp_path).exit_code
    assert [] == listed(tmp_path)


def test_a_name_cannot_steer_the_terminal(tmp_path):
    """Session ids come from outside."""
    leave(tmp_path, x=note("\x1b[31mred\n[bold]b[/bold]" + "y" * 4096))
    shown = run("list", "--disk", tmp_path).stdout
    assert "\x1b" not in shown
    assert "\\x1b[31mred\\x0a[bold]b[/bold]yyy" in shown
    assert "y" * 60 not in shown


def test_named_sessions_are_dropped(root):
    """By the name that the list shows; the others stay."""
    shown = run("drop", "coder", "reader", "--disk", root)
    assert "2 of 3 saved sessions dropped." in shown.stdout
    assert ["tester"] == listed(root)


def test_old_sessions_are_dropped(root):
    """By the time since they were last used; with names, only those of them that are old."""
    assert "0 of 3" in run("drop", "coder", "--older-than", "7d", "--disk", root).stdout
    assert "1 of 3" in run("drop", "--older-than", "7d", "--disk", root).stdout
    assert ["coder", "reader"] == listed(root)
    assert "1 of 2" in run("drop", "--older-than", "60h", "--disk", root).stdout
    assert ["coder"] == listed(root)


def test_all_sessions_are_dropped(root):
    """In all stores, whose files go with their last session."""
    leave(root, store="other", d=note("d"))
    assert "4 of 4" in run("drop", "--all", "--disk", root).stdout
    assert [] == list(root.iterdir())


def test_an_unknown_session_is_an_error_and_nothing_is_dropped(root):
    """A typo among the names must not drop the others."""
    result = run("drop", "coder", "codre", "--disk", root)
    assert isinstance(result.exception, ConfigError)
    assert "codre" in str(result.exception)
    assert 3 == len(listed(root))


@pytest.mark.parametrize("argv", [[], ["--older-than", "yesterday"], ["--older-than", "7"]])
def test_drop_wants_to_know_what(root, argv):
    """No names, no drop; a time that is none is explained."""
    result = run("drop", *argv, "--disk", root)
    assert 2 == result.exit_code
    assert 3 == len(listed(root))


def test_a_store_in_use_is_listed_but_not_touched(root):
    """The error names the process."""
    with Slab(root, 1 << 20, BLOCK, store="model"):
        assert "in use by process" in run("list", "--disk", root).stdout
        result = run("drop", "coder", "--disk", root)
        assert isinstance(result.exception, StoreBusy)
        assert "process" in str(result.exception)
    assert 3 == len(listed(root))


def test_help_teaches():
    """What a saved session is, and an example."""
    assert "persist=True" in run("list", "--help").stdout
    assert "--older-than 7d" in run("drop", "--help").stdout


def test_it_needs_no_torch(root):
    """A list is there in a moment."""
    code = (
        "import sys; from agentkv.cli import app\n"
        f"app(['sessions', 'list', '--disk', {str(root)!r}], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (0, True) == (run.returncode, "coder" in run.stdout)
