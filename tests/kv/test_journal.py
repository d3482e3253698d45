"""The journal of a store: what it says again after anything that may happen to its file."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentkv import log
from agentkv.kv import records
from agentkv.kv.journal import JOURNAL, Journal, budget_bytes, load
from agentkv.kv.records import Entry, Header, Kind, replay

KIB = 1024


class Folder:
    """A folder whose journal is opened, closed and damaged."""

    def __init__(self, path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.errors = []

    def open(self, **options):
        given = {"block_bytes": 3000, "store": "s", "budget_bytes": 64 * KIB, "retry_s": 0} | options
        return Journal(self.fd, on_error=self.errors.append, **given)

    @property
    def file(self):
        return self.path / JOURNAL


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path)
    yield made
    os.close(made.fd)


def key(i):
    return bytes([i]) * 16


def contents(journal):
    return {place: entry.key for place, entry in journal.entries.items()}


def test_what_was_put_is_there_at_the_next_start(folder):
    """Blocks with their checksums, and notes."""
    journal = folder.open()
    journal.put([(0, key(1), 11), (7, key(2), 22)])
    journal.note("a", b"payload")
    journal.check()
    journal.close()
    again = folder.open()
    assert {0: (key(1), 11), 7: (key(2), 22)} == {p: (e.key, e.checksum) for p, e in again.entries.items()}
    assert {"a": b"payload"} == again.notes
    again.check()
    again.close()


def test_a_kill_loses_nothing_that_was_put(folder):
    """Nothing waits in a buffer of ours."""
    journal = folder.open()
    journal.put([(0, key(1), 11)])
    journal.note("a", b"1")
    assert {0: key(1)} == {place: one.key for place, one in load(folder.fd).entries.items()}
    assert {"a": b"1"} == load(folder.fd).notes
    journal.close()


def test_a_freed_place_is_free_at_the_next_start(folder):
    """And one that was put again holds the later block."""
    journal = folder.open()
    journal.put([(0, key(1), 1), (1, key(2), 2)])
    journal.free([0, 1])
    journal.put([(1, key(3), 3)])
    journal.close()
    again = folder.open()
    assert {1: key(3)} == contents(again)
    again.close()


def test_a_free_is_recorded_before_the_place_is_written_again(folder):
    """`settle` comes before the data, so a crash between the two leaves no block that is not there."""
    journal = folder.open()
    journal.put([(0, key(1), 1)])
    journal.free([0])
    assert 1 == len(load(folder.fd).entries)
    journal.settle()
    assert {} == load(folder.fd).entries
    journal.close()


def test_a_free_of_an_older_generation_is_ignored():
    """It came late, for a block that had gone already."""
    header = Header(1, 5, "s")
    data = records.start(header)
    data += records.puts([(0, Entry(key(1), 1, 1))], epoch=5) + records.puts([(0, Entry(key(2), 2, 2))], epoch=5)
    late = data + records.frees([(0, 1)], epoch=5)
    assert {0: Entry(key(2), 2, 2)} == replay(late).entries
    assert {} == replay(late + records.frees([(0, 2)], epoch=5)).entries


def test_replay_stops_at_every_possible_cut():
    """Whatever the length, what is left says exactly the whole records, and how many bytes were left out."""
    header = Header(1, 5, "s")
    pieces = [
        records.start(header),
        records.puts([(0, Entry(key(1), 1, 1))], epoch=5),
        records.note("a", b"xyz", epoch=5),
        records.frees([(0, 1)], epoch=5),
        records.forget("a", epoch=5),
    ]
    data = b"".join(pieces)
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    for cut in range(len(data) + 1):
        good = max([end for end in ends if end <= cut], default=0)
        found = replay(data[:cut])
        assert (good, cut - good) == (found.good_bytes, found.left_out_bytes)
        assert (cut >= ends[1] and cut < ends[3]) == (0 in found.entries)
        assert (cut >= ends[2] and cut < ends[4]) == ("a" in found.notes)


@given(flip=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_ends_the_replay_before_its_record(flip, bit):
    """Nothing that follows is believed, since it builds on what is lost."""
    pieces = [records.start(Header(1, 5, "s"))]
    pieces += [records.puts([(i, Entry(key(i), i, i))], epoch=5) for i in range(1, 9)]
    data = bytearray(b"".join(pieces))
    at = flip % len(data)
    data[at] ^= 1 << bit
    number = next(i for i in range(len(pieces)) if at < sum(map(len, pieces[: i + 1])))
    assert list(range(1, number)) == list(replay(bytes(data)).entries)


@given(data=st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_rubbish_is_an_empty_journal(data):
    """With or without our first bytes."""
    assert {} == replay(data).entries == replay(records.MAGIC + data).entries


def test_records_of_another_file_are_not_believed():
    """Disks give old blocks back; the file's epoch seeds the checksums."""
    other = records.puts([(0, Entry(key(1), 1, 1))], epoch=6)
    assert {} == replay(records.start(Header(1, 5, "s")) + other).entries


@pytest.mark.parametrize(
    ("kind", "body"),
    [(Kind.PUT, b"short"), (Kind.FREE, b"short"), (Kind.NOTE, b"\xff\xff\xff\xffx"), (Kind.FORGET, b"\xff"), (99, b"")],
)
def test_a_record_that_makes_no_sense_ends_the_replay(kind, body):
    """Its checksum may be right all the same."""
    start = records.start(Header(1, 5, "s"))
    found = replay(start + records._record(kind, body, epoch=5) + records.note("a", b"", epoch=5))
    assert (len(start), {}) == (found.good_bytes, found.notes)


def test_a_torn_tail_is_cut_off_and_the_journal_goes_on(folder, capsys):
    """One line says how many bytes were left out."""
    journal = folder.open()
    journal.put([(0, key(1), 1)])
    journal.close()
    good = folder.file.stat().st_size
    with folder.file.open("ab") as file:
        file.write(b"torn tail")
    journal = folder.open()
    assert "left_out_bytes=9" in capsys.readouterr().err
    assert good == folder.file.stat().st_size
    journal.put([(1, key(2), 2)])
    journal.check()
    journal.close()
    again = folder.open()
    assert {0: key(1), 1: key(2)} == contents(again)
    again.close()


@pytest.mark.parametrize(("options", "why"), [({"block_bytes": 4000}, "3000"), ({"store": "t"}, "'s'")])
def test_a_journal_of_something_else_is_a_stranger(folder, options, why):
    """Another block size or another store: nothing of it is used, and it says why."""
    journal = folder.open()
    journal.put([(0, key(1), 1)])
    journal.close()
    again = folder.open(**options)
    assert why in again.stranger
    assert {} == again.entries
    again.close()
    assert folder.open(**options).stranger is None


def test_a_header_that_cannot_be_read_is_a_stranger(folder):
    """The blocks are there, but nobody knows which."""
    folder.file.write_bytes(b"what is this")
    journal = folder.open()
    assert "12 bytes" in journal.stranger
    journal.put([(0, key(1), 1)])
    journal.check()
    journal.close()


def test_dead_records_are_written_away(folder):
    """A thousand rounds on one place and one note leave a short file, and no other file."""
    journal = folder.open()
    for i in range(1000):
        journal.put([(0, key(i % 250), i)])
        journal.note("a", bytes(200))
        journal.free([0])
        assert journal.size_bytes <= 32 * KIB
    journal.put([(0, key(9), 9)])
    journal.check()
    journal.close()
    assert [JOURNAL] == [path.name for path in folder.path.iterdir()]
    again = folder.open()
    assert ({0: key(9)}, {"a": bytes(200)}) == (contents(again), again.notes)
    again.close()


def test_a_journal_that_fits_its_slots_never_breaks_its_budget(folder):
    """All slots taken, notes at their limit, both files counted while it is written anew."""
    slots = 500
    budget = budget_bytes(slots * 4096, 4096)
    journal = folder.open(budget_bytes=budget)
    rename, sizes = os.rename, []

    def watch(*args, **options):
        sizes.append(sum(path.stat().st_size for path in folder.path.iterdir()))
        rename(*args, **options)

    os.rename = watch
    try:
        for turn in range(30):
            journal.put([(i, key(i % 250), turn) for i in range(slots)])
            for name in range(10):
                journal.note(f"n{name}", bytes(budget // 8 // 12))
    finally:
        os.rename = rename
    assert len(sizes) > 3
    assert max(sizes) <= budget
    journal.check()
    journal.close()


def test_a_note_for_which_there_is_no_room_is_refused(folder):
    """Then its old version is gone too: half of the truth would be taken for all of it."""
    journal = folder.open()
    assert journal.note("a", b"old")
    assert not journal.note("a", bytes(9 * KIB))
    assert journal.note("b", bytes(7 * KIB))
    assert not journal.note("c", bytes(2 * KIB))
    assert journal.note("b", bytes(6 * KIB))
    assert journal.note("c", bytes(1 * KIB))
    assert {"b", "c"} == set(journal.notes)
    journal.check()
    journal.close()


def test_names_of_notes_may_be_anything(folder):
    """Session ids come from outside."""
    names = ["../../etc", "\0", "x" * 4096, "\ud800", "", "ü"]
    journal = folder.open(budget_bytes=1024 * KIB)
    for name in names:
        assert journal.note(name, name.encode("utf-8", "surrogatepass"))
    journal.close()
    again = folder.open(budget_bytes=1024 * KIB)
    assert {name: name.encode("utf-8", "surrogatepass") for name in names} == again.notes
    again.close()
    assert [JOURNAL] == [path.name for path in folder.path.iterdir()]


class FullDisk:
    """`os.pwrite` that has `room` bytes left, then fails with `code`."""

    def __init__(self, monkeypatch, code=errno.ENOSPC):
        self.room, self._pwrite, self._code = 0, os.pwrite, code
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd, data, offset):
        if self.room == 0:
            raise OSError(self._code, os.strerror(self._code))
        done = self._pwrite(fd, data[: self.room], offset)
        self.room -= done
        return done


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("room", [0, 1, 30])
def test_a_journal_that_cannot_be_written_is_off_and_comes_back(folder, monkeypatch, code, room):
    """Nothing raises; what was recorded before stays; afterwards all that is known is there."""
    monkeypatch.setattr(log, "_warned", set())
    journal = folder.open(retry_s=0)
    journal.put([(0, key(1), 1)])
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, code)
        disk.room = room
        journal.put([(1, key(2), 2)])
        disk.room = 0
        assert os.strerror(code) in journal.off
        assert not journal.note("a", b"1")
        journal.free([0])
        journal.settle()
        assert {code} == {error.errno for error in folder.errors}
        assert {0: key(1)} == {place: one.key for place, one in load(folder.fd).entries.items()}
        assert 0 == load(folder.fd).left_out_bytes
    journal.settle()
    assert journal.off is None
    journal.check()
    journal.close()
    again = folder.open()
    assert ({1: key(2)}, {"a": b"1"}) == (contents(again), again.notes)
    again.close()


def test_it_is_not_tried_again_at_once(folder, monkeypatch):
    """A full disk is not asked with every block."""
    journal = folder.open(retry_s=3600)
    with monkeypatch.context() as patch:
        FullDisk(patch)
        journal.put([(1, key(2), 2)])
    journal.put([(2, key(3), 3)])
    assert journal.off is not None
    assert 1 == len(folder.errors)
    journal.close()


def test_a_removed_file_is_noticed_and_made_again(folder):
    """The place where the next start looks counts, not our descriptor."""
    journal = folder.open(retry_s=0)
    journal.put([(0, key(1), 1)])
    folder.file.unlink()
    journal.put([(1, key(2), 2)])
    assert "removed" in journal.off
    journal.settle()
    assert journal.off is None
    journal.check()
    journal.close()


def test_a_removed_folder_is_not_made_again(tmp_path):
    """Whoever makes it anew owns it: we write by descriptor, never by path."""
    path = tmp_path / "store"
    path.mkdir()
    folder = Folder(path)
    journal = folder.open(retry_s=0)
    folder.file.unlink()
    path.rmdir()
    path.mkdir()
    journal.put([(0, key(1), 1)])
    journal.settle()
    assert journal.off is not None
    assert [] == list(path.iterdir())
    journal.close()
    os.close(folder.fd)


def test_half_a_new_file_is_removed_at_the_next_start(folder):
    """A crash while the journal was written anew leaves the old one."""
    journal = folder.open()
    journal.put([(0, key(1), 1)])
    journal.close()
    (folder.path / "journal.new").write_bytes(b"half")
    again = folder.open()
    assert {0: key(1)} == contents(again)
    assert [JOURNAL] == [path.name for path in folder.path.iterdir()]
    again.close()


def test_only_the_user_may_read_it(folder):
    """Notes are prompt content."""
    folder.open().close()
    assert 0o600 == folder.file.stat().st_mode & 0o777


@given(
    deeds=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 250)),
            st.tuples(st.just("free"), st.integers(0, 5), st.just(0)),
            st.tuples(st.just("note"), st.integers(0, 3), st.integers(0, 250)),
            st.tuples(st.just("forget"), st.integers(0, 3), st.just(0)),
            st.tuples(st.just("reopen"), st.just(0), st.just(0)),
        ),
        max_size=40,
    )
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_it_says_what_two_dictionaries_say(folder, deeds):
    """Over any series of deeds and starts."""
    folder.file.unlink(missing_ok=True)
    journal = folder.open()
    blocks, notes = {}, {}
    for deed, at, value in deeds:
        if deed == "put":
            journal.put([(at, key(value), value)])
            blocks[at] = key(value)
        elif deed == "free":
            journal.free([at])
            blocks.pop(at, None)
        elif deed == "note":
            journal.note(str(at), bytes([value]))
            notes[str(at)] = bytes([value])
        elif deed == "forget":
            journal.forget(str(at))
            notes.pop(str(at), None)
        else:
            journal.close()
            journal = folder.open()
        journal.check()
        assert (blocks, notes) == (contents(journal), journal.notes)
    journal.close()
