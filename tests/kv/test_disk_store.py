"""Stores: what one process leaves for the next, who may have it, and what is seen of it from outside."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import textwrap

import pytest

from agentkv import log
from agentkv.errors import ConfigError, DiskUnavailable
from agentkv.kv.lair import StoreBusy, folder_name, sweep
from agentkv.kv.slab import Slab
from agentkv.kv.store import default_root, drop_notes, stores
from agentkv.units import MIB

from .disk_fakes import BLOCK, SLOT, Arena, key

HOSTILE = [
    "../../x",
    "..",
    ".",
    "",
    "/etc",
    "a/b",
    "a\0b",
    "x" * 4096,
    "\ud800\udfff"[:1],
    "a\nb",
    "é",
    "s.lock",
    "hashed.1",
]


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.view = None


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def opened(root, store="s", block=BLOCK, **options):
    return Slab(root, options.pop("capacity_bytes", 1 * MIB), block, store=store, **options)


def left(root, arena, notes=("a",), **options):
    """Leave three blocks and some notes."""
    with opened(root, **options) as slab:
        arena.store(slab, 3)
        for name in notes:
            slab.note(name, f"note {name}".encode())


def test_yesterdays_blocks_and_notes_are_there(root, arena):
    """In slots that are taken; those that are not wanted are freed like any other."""
    left(root, arena)
    with opened(root) as slab:
        assert (True, "", {"a": b"note a"}) == (slab.lasting, slab.not_lasting, slab.notes)
        assert [key(i) for i in range(3)] == [one.key for one in slab.kept]
        assert 3 == slab.used
        assert [True] * 3 == arena.load(slab, arena.kept(slab))
        slab.free([slab.kept[0].slot])
        slab.check()
    with opened(root) as slab:
        assert [key(1), key(2)] == [one.key for one in slab.kept]


def test_without_a_store_nothing_lasts(root, arena):
    """And the reason says so."""
    with opened(root, store=None) as slab:
        arena.store(slab, 1)
        assert (False, {}, []) == (slab.note("a", b"x"), slab.notes, slab.kept)
        slab.forget_note("a")
        assert "no store" in slab.not_lasting
        assert ["segment-00000"] == [path.name for path in slab.path.iterdir()]
    assert [] == list(root.iterdir())


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_is_a_folder_in_the_root_like_any_other(root, arena, name, tmp_path):
    """Wherever it points to, whatever it holds, however long it is."""
    left(root, arena, store=name)
    assert [root] == list(tmp_path.iterdir())
    assert 2 == len(list(root.iterdir()))
    with opened(root, store=name) as slab:
        assert root == slab.path.parent
        assert 3 == len(slab.kept)
    (facts,) = stores(root)
    assert {"a": b"note a"} == facts.notes


def test_different_names_are_different_folders():
    """Hashed ones too."""
    names = [*HOSTILE, "s", "S", "model-1", "model-1.5", *(f"hashed.{i:032x}" for i in range(5))]
    assert len(names) == len({folder_name(name) for name in names})


def test_a_store_that_a_living_process_has_is_left_to_it(root, arena, monkeypatch, capsys):
    """The second works in private files, says why, and once only warns (K17)."""
    monkeypatch.setattr(log, "_warned", set())
    with opened(root) as first:
        arena.store(first, 2)
        with opened(root) as second, opened(root) as third:
            for other in (second, third):
                assert not other.lasting
                assert f"process {os.getpid()}" in other.not_lasting
                assert other.path != first.path
                assert not other.note("a", b"x")
                assert [True] == arena.load(other, arena.store(other, 1, 50))
        first.check()
    assert 1 == capsys.readouterr().err.count("kv_store_busy")
    assert {"store-s", "store-s.lock"} == {path.name for path in root.iterdir()}


HOLD = """
    import sys, time
    from agentkv.kv.slab import Slab
    slab = Slab(sys.argv[1], 1 << 20, 3000, store="s")
    slab.note("a", b"x")
    print(slab.lasting, flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_dead_process_is_ignored_that_of_a_living_one_respected(root):
    """Killed, not closed (K12)."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), root], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert "True" == process.stdout.readline().strip()
        with opened(root) as slab:
            assert f"process {process.pid}" in slab.not_lasting
        (facts,) = stores(root)
        assert f"process {process.pid}" == facts.held_by
        assert {"a": b"x"} == facts.notes
        with pytest.raises(StoreBusy, match=f"process {process.pid}"):
            drop_notes(facts, ["a"])
        process.kill()
        process.wait()
    with opened(root) as slab:
        assert slab.lasting
        assert {"a": b"x"} == slab.notes


def test_somebody_who_only_looks_does_not_take_the_store_away(root, arena, monkeypatch):
    """A glance at the lock lasts a moment; the start waits that long."""
    left(root, arena)
    lock = os.open(root / "store-s.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        fcntl.flock(lock, fcntl.LOCK_UN)

    monkeypatch.setattr("agentkv.kv.lair.time.sleep", sleep)
    with opened(root) as slab:
        assert slab.lasting
    assert 1 == len(waits)
    os.close(lock)


def test_another_block_size_discards_the_store(root, arena, monkeypatch, capsys):
    """Another model's blocks mean nothing here; one warning."""
    monkeypatch.setattr(log, "_warned", set())
    left(root, arena)
    with opened(root, block=9000) as slab:
        assert ([], {}, True) == (slab.kept, slab.notes, slab.lasting)
        assert slab.slots * slab.slot_bytes + slab._journal.size_bytes == slab.size_bytes <= 1 * MIB
        slab.check()
    assert 1 == capsys.readouterr().err.count("kv_store_discarded")
    with opened(root, block=9000) as slab:
        assert [] == slab.kept


def test_a_journal_that_cannot_be_read_discards_the_store(root, arena):
    """The blocks are there, but nobody knows which they are."""
    left(root, arena)
    (root / "store-s" / "journal").write_bytes(b"rubbish")
    with opened(root) as slab:
        assert ([], True) == (slab.kept, slab.lasting)
        arena.store(slab, 3)
        slab.check()


def test_a_store_without_a_journal_starts_afresh(root, arena):
    """Its files are taken over, empty."""
    left(root, arena)
    (root / "store-s" / "journal").unlink()
    with opened(root) as slab:
        assert ([], 0) == (slab.kept, slab.used)
        slab.check()


def test_only_the_user_may_read_a_store(root, arena):
    """0700 and 0600, also where somebody loosened it."""
    left(root, arena)
    (root / "store-s").chmod(0o755)
    with opened(root) as slab:
        assert 0o700 == stat.S_IMODE(slab.path.stat().st_mode)
        assert {0o600} == {stat.S_IMODE(path.stat().st_mode) for path in slab.path.iterdir()}
        assert 0o600 == stat.S_IMODE((root / "store-s.lock").stat().st_mode)


def planted(root, target, name):
    """A link at `name` in the store, in place of what was there."""
    path = root / name
    if path.is_dir():
        path.rename(target)
    else:
        target.write_bytes(path.read_bytes())
        path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["store-s", "store-s.lock", "store-s/journal", "store-s/segment-00000"])
def test_a_link_where_a_file_should_be_is_not_followed(root, arena, name, tmp_path):
    """In a shared folder somebody may have put it there: nothing is read or written through it."""
    left(root, arena)
    target = tmp_path / "target"
    planted(root, target, name)
    before = {path: path.read_bytes() for path in [target, *target.rglob("*")] if path.is_file()}
    try:
        with opened(root) as slab:
            assert [] == slab.kept
            arena.store(slab, 3, 100)
    except DiskUnavailable:
        pass
    assert before == {path: path.read_bytes() for path in [target, *target.rglob("*")] if path.is_file()}


def test_another_users_folder_is_refused(root, arena, monkeypatch):
    """Its files would be theirs to read."""
    left(root, arena)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(DiskUnavailable, match="belongs to user"):
        opened(root)


def test_a_store_in_a_folder_without_room_is_refused(root):
    """A capacity that holds nothing beside the journal."""
    with pytest.raises(ConfigError, match="at least 2"):
        opened(root, capacity_bytes=64 * 1024 + SLOT)
    with opened(root) as slab:
        assert slab.lasting


def test_a_sweep_leaves_stores_alone(root, arena):
    """They are there to be found again."""
    left(root, arena)
    assert [] == sweep(root)
    assert 1 == len(stores(root))


# -- from outside


def test_stores_are_listed_with_what_is_in_them(root, arena):
    """Whatever else lies in the folder."""
    left(root, arena, store="one", notes=("a", "b"))
    left(root, arena, store="two", notes=())
    (root / "store-none").mkdir()
    (root / "store-file").touch()
    first, second = stores(root)
    assert ("one", BLOCK, 3, {"a": b"note a", "b": b"note b"}, None) == (
        first.name,
        first.block_bytes,
        first.blocks,
        first.notes,
        first.held_by,
    )
    assert ("two", {}) == (second.name, second.notes)
    assert 3 * SLOT <= first.size_bytes <= 1 * MIB
    assert [] == stores(root / "nowhere")


def test_a_dropped_note_is_gone_from_the_file(root, arena):
    """Its text too: it may be a prompt. The others stay, and so do the blocks until the next start sorts them out."""
    left(root, arena, notes=("a", "b"))
    (facts,) = stores(root)
    assert ["a"] == drop_notes(facts, ["a", "nobody"])
    assert b"note a" not in (root / "store-s" / "journal").read_bytes()
    with opened(root) as slab:
        assert {"b": b"note b"} == slab.notes
        assert 3 == len(slab.kept)


def test_with_its_last_note_the_store_goes(root, arena):
    """No block of it is needed, and they are prompt content."""
    left(root, arena, notes=("a", "b"))
    assert ["a", "b"] == drop_notes(stores(root)[0], ["a", "b"])
    assert [] == list(root.iterdir())
    with opened(root) as slab:
        assert [] == slab.kept


def test_dropping_nobodys_note_changes_nothing(root, arena):
    """Not even an empty store is removed for it."""
    left(root, arena, notes=())
    before = (root / "store-s" / "journal").read_bytes()
    assert [] == drop_notes(stores(root)[0], ["nobody"])
    assert before == (root / "store-s" / "journal").read_bytes()


def test_the_folder_for_stores_follows_the_users_cache(monkeypatch, tmp_path):
    """$AGENTKV_CACHE, as for converted models."""
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path))
    assert tmp_path / "kv" == default_root()
    monkeypatch.delenv("AGENTKV_CACHE")
    assert ("agentkv", "kv") == default_root().parts[-2:]


def test_stores_need_no_torch():
    """The command line lists sessions in a moment."""
    code = "import sys, agentkv.kv.slab, agentkv.kv.store; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
