"""The notebook: folds and notes by digest, first come first kept, over restarts, damage and full disks."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import log
from agentkv.context.notebook import Fold, Notebook, chain
from agentkv.core.message import Message, ToolCall
from agentkv.errors import ConfigError


def digest(number):
    return number.to_bytes(16, "big")


def fold(number, text="Goal: x", k=3, pinned=(0,)):
    return Fold(digest=digest(number), k=k, text=text, pinned=pinned)


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir())


fields = st.text(max_size=4)
calls = st.builds(ToolCall, id=fields, name=fields, arguments=fields)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=fields,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=st.none() | fields,
    name=st.none() | fields,
)


@settings(deadline=None)
@given(messages, messages)
def test_two_messages_share_a_digest_only_if_they_are_equal(one, other):
    """No field runs into the next: "a" + "bc" is not "ab" + "c", None is not ""."""
    assert (one == other) == (chain(b"", one) == chain(b"", other))


def test_a_digest_covers_all_messages_before():
    """The same message after another one has another digest."""
    message = Message(role="user", content="go")
    assert chain(b"", message) != chain(chain(b"", message), message)
    assert 16 == len(chain(b"", message))


def test_a_digest_is_the_same_in_every_process():
    """A fixed value: neither the hash seed nor the machine has a part in it, and a new version would be noticed."""
    message = Message(role="assistant", content="\ud800 é", tool_calls=(ToolCall(id="1", name="t", arguments="{}"),))
    assert "65b28fd8ffbf0c8998a46fe9b266014f" == chain(b"", message).hex()


def test_the_first_fold_of_a_digest_stays():
    """Whoever comes second is told what counts."""
    with Notebook() as notebook:
        assert fold(1) == notebook.put_fold(fold(1))
        assert fold(1) == notebook.put_fold(fold(1, text="another"))
        assert fold(1) == notebook.fold(digest(1))
        assert notebook.fold(digest(2)) is None
        notebook.check()


def test_a_note_can_be_replaced():
    """Notes and folds of one digest do not meet."""
    with Notebook() as notebook:
        notebook.put_fold(fold(1))
        notebook.put_note(digest(1), "a")
        notebook.put_note(digest(1), "b")
        assert "b" == notebook.note(digest(1))
        assert notebook.fold(digest(1)) is not None
        notebook.check()


def test_above_the_bound_the_longest_unused_goes():
    """What is read stays."""
    with Notebook(max_entries=2) as notebook:
        notebook.put_fold(fold(1))
        notebook.put_fold(fold(2))
        notebook.fold(digest(1))
        notebook.put_fold(fold(3))
        assert [True, False, True] == [notebook.fold(digest(n)) is not None for n in (1, 2, 3)]
        notebook.check()


@pytest.mark.parametrize("pinned", [(3,), (-1,)])
def test_a_pinned_message_behind_the_fold_is_refused(pinned):
    """It would stand in the prompt twice."""
    with Notebook() as notebook, pytest.raises(ConfigError):
        notebook.put_fold(fold(1, pinned=pinned))


def test_a_bound_of_nothing_is_refused():
    """A notebook of no entries would lose every fold in silence."""
    with pytest.raises(ConfigError):
        Notebook(max_entries=0)


def test_entries_survive_a_restart(tmp_path):
    """Text of any kind, and the last note."""
    text = "Goal: \ud800 \x00 日本\nFacts:\n- 1"
    with Notebook(tmp_path) as notebook:
        notebook.put_fold(fold(1, text=text))
        notebook.put_note(digest(1), "a")
        notebook.put_note(digest(1), "b")
    with Notebook(tmp_path) as notebook:
        assert fold(1, text=text) == notebook.fold(digest(1))
        assert "b" == notebook.note(digest(1))


def test_files_are_for_their_owner_only(tmp_path):
    """A summary is prompt content."""
    with Notebook(tmp_path / "deep" / "notes") as notebook:
        notebook.put_fold(fold(1))
        folder = tmp_path / "deep" / "notes"
        assert 0o700 == stat.S_IMODE(folder.stat().st_mode)
        assert [0o600] == [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()]


def test_without_an_entry_there_is_no_file(tmp_path):
    """Opening writes nothing."""
    with Notebook(tmp_path / "notes"):
        assert not (tmp_path / "notes").exists()


def test_two_notebooks_write_two_files_and_read_both(tmp_path):
    """One writer per file; `refresh` reads what the other wrote since."""
    with Notebook(tmp_path) as one, Notebook(tmp_path) as two:
        one.put_fold(fold(1))
        two.put_fold(fold(2))
        assert 2 == len(files(tmp_path))
        assert two.fold(digest(1)) is None
        two.refresh()
        assert fold(1) == two.fold(digest(1))
        one.put_fold(fold(3))
        two.refresh()
        assert fold(3) == two.fold(digest(3))


def test_files_of_ended_writers_are_joined(tmp_path):
    """Ten runs do not leave ten files, and nothing is lost."""
    for number in range(10):
        with Notebook(tmp_path) as notebook:
            notebook.put_fold(fold(number))
    assert 3 > len(files(tmp_path))
    with Notebook(tmp_path) as notebook:
        assert [fold(n) for n in range(10)] == [notebook.fold(digest(n)) for n in range(10)]


def test_the_file_of_a_living_writer_is_left_alone(tmp_path):
    """Others read it but neither join nor remove it."""
    with Notebook(tmp_path) as living:
        living.put_fold(fold(1))
        mine = files(tmp_path)[0]
        for number in range(2, 5):
            with Notebook(tmp_path) as other:
                other.put_fold(fold(number))
        assert mine in files(tmp_path)
        living.put_fold(fold(9))
        with Notebook(tmp_path) as other:
            assert fold(9) == other.fold(digest(9))


def test_a_file_is_written_anew_when_it_has_grown(tmp_path):
    """Notes that were replaced a thousand times take no thousand lines."""
    with Notebook(tmp_path, max_entries=10) as notebook:
        for number in range(1_000):
            notebook.put_note(digest(number % 3), str(number))
        assert 1 == len(files(tmp_path))
        assert 31 > len((tmp_path / files(tmp_path)[0]).read_bytes().splitlines())
    with Notebook(tmp_path) as notebook:
        assert ["999", "997", "998"] == [notebook.note(digest(n)) for n in range(3)]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_costs_only_itself(tmp_path, cut):
    """A process that was killed while it wrote is no damage."""
    with Notebook(tmp_path) as notebook:
        notebook.put_fold(fold(1))
        notebook.put_fold(fold(2))
    path = next(tmp_path.iterdir())
    os.truncate(path, path.stat().st_size - cut)
    before = log.counters["notebook_damaged"]
    with Notebook(tmp_path) as notebook:
        assert (fold(1), None) == (notebook.fold(digest(1)), notebook.fold(digest(2)))
    assert before == log.counters["notebook_damaged"]


@pytest.mark.parametrize("damage", [b"not json\n", b"\xff\xfe\x00\n", b'0123456789abcdef ["fold","00","x",1,[]]\n'])
def test_a_damaged_file_is_put_aside_and_its_good_lines_are_used(tmp_path, damage):
    """The checksum tells which; the good ones outlive the next restart too."""
    with Notebook(tmp_path) as notebook:
        notebook.put_fold(fold(1))
        notebook.put_fold(fold(2))
    path = next(tmp_path.iterdir())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage + lines[1])
    for _ in range(2):
        with Notebook(tmp_path) as notebook:
            assert [fold(1), fold(2)] == [notebook.fold(digest(n)) for n in (1, 2)]
            notebook.check()
    assert 1 == sum(name.endswith(".damaged") for name in files(tmp_path))


def test_a_changed_byte_in_a_summary_is_noticed(tmp_path):
    """Another text than the one that was sent would be another prompt."""
    with Notebook(tmp_path) as notebook:
        notebook.put_fold(fold(1, text="port 8080"))
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes().replace(b"8080", b"8081"))
    with Notebook(tmp_path) as notebook:
        assert notebook.fold(digest(1)) is None


def test_a_row_of_another_version_is_left_out(tmp_path):
    """Neither an exception nor damage."""
    from agentkv.context import notefiles

    rows = [
        ["fold", "00", "x", 1],
        ["fold", "00", "x", 1, [5]],
        ["rule", "00"],
        ["note", "zz", "x"],
        ["note", "01", "y"],
    ]
    (tmp_path / "0.jsonl").write_bytes(b"".join(map(notefiles._line, rows)))
    with Notebook(tmp_path) as notebook:
        assert 1 == len(notebook)
        assert "y" == notebook.note(b"\x01")


def test_a_full_disk_costs_the_file_and_not_the_entry(tmp_path, monkeypatch):
    """In memory it goes on."""

    def full(_descriptor, _data):
        raise OSError(errno.ENOSPC, "no space left")

    with Notebook(tmp_path) as notebook:
        monkeypatch.setattr("agentkv.context.notefiles.os.write", full)
        notebook.put_fold(fold(1))
        assert fold(1) == notebook.fold(digest(1))


def test_a_folder_that_is_a_file_costs_no_exception(tmp_path):
    """Neither when opened nor when written."""
    (tmp_path / "notes").write_text("x")
    with Notebook(tmp_path / "notes") as notebook:
        notebook.put_fold(fold(1))
        notebook.refresh()
        assert fold(1) == notebook.fold(digest(1))


def test_after_close_entries_are_read_and_kept_in_memory(tmp_path):
    """close() is idempotent."""
    notebook = Notebook(tmp_path)
    notebook.put_fold(fold(1))
    notebook.close()
    notebook.close()
    notebook.put_fold(fold(2))
    assert [fold(1), fold(2)] == [notebook.fold(digest(n)) for n in (1, 2)]


def test_threads_agree_on_one_fold(tmp_path):
    """Eight threads record other folds for the same digests; all are told the same ones."""
    told = [[] for _ in range(8)]
    with Notebook(tmp_path) as notebook:

        def record(place):
            told[place] = [notebook.put_fold(fold(n, text=f"{place}")).text for n in range(50)]

        threads = [threading.Thread(target=record, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert 1 == len({tuple(texts) for texts in told})
        notebook.check()
    with Notebook(tmp_path) as notebook:
        assert told[0] == [notebook.fold(digest(n)).text for n in range(50)]


def test_a_forked_child_writes_a_file_of_its_own(tmp_path):
    """Two writers never share a file."""
    program = f"""
import os
from agentkv.context.notebook import Fold, Notebook
notebook = Notebook({str(tmp_path)!r})
notebook.put_fold(Fold(digest=b"1", k=1, text="parent"))
pid = os.fork()
notebook.put_fold(Fold(digest=b"%d" % (pid == 0), k=1, text="child" if pid == 0 else "parent"))
notebook.put_fold(Fold(digest=b"x%d" % (pid == 0), k=1, text="child" if pid == 0 else "parent"))
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
    assert 2 == len(files(tmp_path))
    with Notebook(tmp_path) as notebook:
        assert ("child", "parent") == (notebook.fold(b"x1").text, notebook.fold(b"x0").text)
