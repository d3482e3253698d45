"""A disk that fails: the caller hears of it, nothing wrong is served, and when it is well again it is used again."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import subprocess
import threading
import time

import pytest

from agentkv import log
from agentkv.clock import ManualClock
from agentkv.errors import Closed
from agentkv.kv import slab as slab_module
from agentkv.kv.breaker import Breaker
from agentkv.kv.checksums import Checksums
from agentkv.kv.slab import Slab, SlotImage
from agentkv.units import MIB

from .disk_fakes import BLOCK, SLOT, Arena, FaultyDisk, key


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.view = None


@pytest.fixture
def disk(monkeypatch):
    return FaultyDisk(monkeypatch)


@pytest.fixture
def make(tmp_path):
    """Slabs in one root, closed at the end."""
    made = []

    def one(**options):
        made.append(Slab(tmp_path / "root", options.pop("capacity_bytes", 1 * MIB), BLOCK, **{"retry_s": 0} | options))
        return made[-1]

    yield one
    for slab in made:
        slab.close()


CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("store", [None, "s"])
def test_a_write_that_fails_leaves_nothing_to_read(make, arena, disk, code, store):
    """It raises, the error is counted by name, and no slot leaks; then the next write works."""
    slab = make(store=store)
    slots = slab.reserve(2)
    disk.fail = {"write": code}
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as raised:
        slab.write(arena.images(slots))
    assert code == raised.value.errno
    assert {errno.errorcode[code]: 1} == slab.errors
    disk.heal()
    assert [False, False] == arena.load(slab, arena.images(slots))
    slab.free(slots)
    assert [True, True] == arena.load(slab, arena.store(slab, 2))
    slab.check()


@pytest.mark.parametrize("code", CODES)
def test_a_read_that_fails_is_a_miss(make, arena, disk, code):
    """Only as long as it fails."""
    slab = make()
    images = arena.store(slab, 3)
    disk.fail = {"read": code}
    assert [False] * 3 == arena.load(slab, images)
    assert 1 == slab.errors[errno.errorcode[code]]
    disk.heal()
    assert [True] * 3 == arena.load(slab, images)


@pytest.mark.parametrize("at_most", [1, 511, 4096, 5000, 8192])
@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_and_writes_go_on_where_they_stopped(make, arena, disk, at_most, direct):
    """Wherever the kernel stops, even in the middle of a sector."""
    disk.refuse_direct = not direct
    slab = make()
    disk.at_most = at_most
    images = arena.store(slab, 5)
    assert [True] * 5 == arena.load(slab, images)
    assert disk.count >= 4
    disk.heal()
    assert [True] * 5 == arena.load(slab, images)


def test_a_short_call_does_not_end_o_direct(make, arena, disk):
    """Its rest goes through the page cache; the next call does not."""
    slab = make()
    direct = [segment.direct_fd for segment in slab._segments]
    if direct == [None]:
        pytest.skip("no O_DIRECT on this file system")
    disk.at_most = 5000
    assert [True] * 5 == arena.load(slab, arena.store(slab, 5))
    assert direct == [segment.direct_fd for segment in slab._segments]


def test_a_call_that_moves_nothing_is_an_error(make, arena, disk):
    """Neither zeros nor an endless loop."""
    slab = make()
    images = arena.store(slab, 2)
    disk.ends = True
    assert [False, False] == arena.load(slab, images)
    with pytest.raises(OSError, match="ended after 0"):
        slab.write(images)
    assert {"EIO": 2} == slab.errors


def test_o_direct_refused_at_the_first_write_falls_back_for_that_file(make, arena, disk):
    """Some file systems open the file and refuse later."""
    slab = make(segment_bytes=8 * SLOT)
    images = arena.store(slab, 8)
    disk.refuse_direct = True
    more = arena.store(slab, 8, 100)
    assert [True] * 8 == arena.load(slab, more)
    disk.heal()
    assert [True] * 8 == arena.load(slab, [image._replace(view=arena.slot(i)) for i, image in enumerate(images)])
    assert all(segment.direct_fd is None for segment in list(slab._segments)[1:2])


def test_o_direct_refused_at_open(make, arena, monkeypatch):
    """As tmpfs and many network mounts do."""
    opened = os.open

    def refuse(path, flags, *args, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    slab = make(store="s")
    assert [None] == [segment.direct_fd for segment in slab._segments]
    assert [True] * 4 == arena.load(slab, arena.store(slab, 4))


def test_a_store_whose_first_page_cannot_be_read_still_opens(make, arena, disk):
    """One bad sector costs its block, not the store."""
    slab = make(store="s")
    arena.store(slab, 2)
    slab.close()
    disk.fail = {"read": errno.EIO}
    again = make(store="s")
    assert again.lasting
    assert [False, False] == arena.load(again, arena.kept(again))
    disk.heal()
    assert [True, True] == arena.load(again, arena.kept(again))


def test_a_flipped_bit_is_a_miss_and_its_neighbours_are_not(make, arena):
    """Also where the block was kept from an earlier process and nobody asked to verify."""
    slab = make(store="s")
    arena.store(slab, 3)
    slab.close()
    path = slab.path / "segment-00000"
    with path.open("r+b") as file:
        file.seek(SLOT + 100)
        file.write(b"\xee")
    again = make(store="s")
    assert [True, False, True] == arena.load(again, arena.kept(again), verify=False)
    assert 1 == again.checksum_failures


def test_a_block_in_the_wrong_place_is_a_miss(make, arena):
    """Whole, healthy, and another's."""
    slab = make(store="s")
    arena.store(slab, 2)
    slab.close()
    path = slab.path / "segment-00000"
    data = path.read_bytes()
    path.write_bytes(data[SLOT : 2 * SLOT] + data[:SLOT] + data[2 * SLOT :])
    again = make(store="s")
    assert [False, False] == arena.load(again, arena.kept(again))


@pytest.mark.parametrize("size", [0, 1, SLOT, 2 * SLOT + 7, 3 * SLOT])
def test_a_truncated_segment_costs_what_was_cut(make, arena, size):
    """The blocks before the cut are there; the cut slots come back as the file grows anew."""
    slab = make(store="s")
    arena.store(slab, 4)
    slab.close()
    os.truncate(slab.path / "segment-00000", size)
    again = make(store="s")
    whole = size // SLOT
    assert [key(i) for i in range(whole)] == [one.key for one in again.kept]
    assert [True] * whole == arena.load(again, arena.kept(again))
    arena.store(again, 8, 100)
    again.check()


def test_a_missing_segment_costs_its_blocks(make, arena):
    """The others keep their places."""
    slab = make(store="s", segment_bytes=4 * SLOT)
    arena.store(slab, 4)
    arena.store(slab, 4, 10)
    arena.store(slab, 4, 20)
    slab.close()
    (slab.path / "segment-00001").unlink()
    again = make(store="s", segment_bytes=4 * SLOT)
    kept = {one.key[0] for one in again.kept}
    assert {0, 1, 2, 3, 20, 21, 22, 23} == kept
    assert [True] * 8 == arena.load(again, arena.kept(again))
    arena.store(again, 4, 30)
    again.check()


@pytest.mark.parametrize("store", [None, "s"])
def test_a_folder_that_is_deleted_under_us_costs_growth_only(make, arena, store, tmp_path):
    """What is written stays readable; nothing is made at its old path; close is quiet."""
    slab = make(store=store, segment_bytes=8 * SLOT)
    images = arena.store(slab, 4)
    shutil.rmtree(tmp_path / "root")
    assert [True] * 4 == arena.load(slab, images)
    more = arena.store(slab, 4, 10)
    assert [True] * 4 == arena.load(slab, more)
    assert [] == slab.reserve(4)
    assert "No such file" in slab.short
    assert not slab.note("a", b"x")
    assert not slab.lasting
    if store:
        assert "removed" in slab.not_lasting or "No such file" in slab.not_lasting
    slab.close()
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_journal_that_fails_does_not_touch_the_data(make, arena, monkeypatch, code):
    """Persistence is off and says why; blocks come and go; when it is well again everything is recorded."""
    slab = make(store="s")
    arena.store(slab, 2)
    with monkeypatch.context() as patch:

        def fails(*_):
            raise OSError(code, os.strerror(code))

        patch.setattr(os, "pwrite", fails)
        images = arena.store(slab, 2, 10)
        assert [True, True] == arena.load(slab, images)
        assert slab.off is None
        assert not slab.lasting
        assert os.strerror(code) in slab.stats()["not_lasting"]
        assert slab.errors[errno.errorcode[code]] >= 1
    arena.store(slab, 1, 20)
    assert slab.lasting
    slab.check()
    slab.close()
    assert {0, 1, 10, 11, 20} == {one.key[0] for one in make(store="s").kept}


def test_each_error_is_logged_once_and_counted_always(make, arena, disk, monkeypatch, capsys):
    """A disk that dies must not fill another one with log lines."""
    monkeypatch.setattr(log, "_warned", set())
    slab = make()
    images = arena.store(slab, 2)
    for code in (errno.EIO, errno.ESTALE):
        disk.fail = {"read": code}
        for _ in range(5):
            arena.load(slab, images)
    assert {"EIO": 5, "ESTALE": 5} == slab.errors
    lines = capsys.readouterr().err
    assert (1, 1) == (lines.count("kv_disk_error_eio"), lines.count("kv_disk_error_estale"))


@pytest.mark.parametrize("broken", [False, True])
def test_nobody_reads_the_memory_once_a_write_has_ended(tmp_path, disk, monkeypatch, broken):
    """Large blocks are hashed while they are written; success or failure, the caller may then reuse the memory."""
    slow, running = Checksums.of, []

    def of(self, image):
        running.append(threading.current_thread().name)
        time.sleep(0.05)
        found = slow(self, image)
        running.pop()
        return found

    monkeypatch.setattr(Checksums, "of", of)
    size = 1 * MIB
    with Slab(tmp_path, 8 * size, size, retry_s=0) as slab, mmap.mmap(-1, size) as memory:
        view = memoryview(memory)
        (slot,) = slab.reserve(1)
        image = SlotImage(slot, key(1), view)
        if broken:
            disk.fail = {"write": errno.EIO}
            with pytest.raises(OSError, match="Input/output"):
                slab.write([image])
        else:
            slab.write([image])
            assert [True] == slab.read([image])
        assert [] == running
        del image
        view.release()


# -- the pause after failures


def test_the_pause_doubles_until_a_write_goes_through():
    """5, 10, 20 s; then it starts again at 5."""
    clock = ManualClock()
    breaker = Breaker(5.0, clock.now_s)
    for pause_s in (5, 10, 20):
        breaker.failed("Input/output error", full=False)
        clock.advance(pause_s - 0.1)
        assert "Input/output error" in breaker.off
        assert not breaker.probe()
        clock.advance(0.2)
        assert breaker.off is None
        assert breaker.probe()
    breaker.worked()
    assert breaker.off is None
    breaker.failed("x", full=False)
    clock.advance(5.1)
    assert breaker.off is None


def test_only_one_write_tries_whether_it_works_again():
    """The others hear that the disk is off until that is known, or has taken too long."""
    clock = ManualClock()
    breaker = Breaker(5.0, clock.now_s)
    breaker.failed("x", full=False)
    clock.advance(5.1)
    assert [True, False, False] == [breaker.probe() for _ in range(3)]
    assert breaker.off is not None
    clock.advance(5.1)
    assert [True, False] == [breaker.probe() for _ in range(2)]
    breaker.worked()
    assert [True, True] == [breaker.probe() for _ in range(2)]


def test_a_full_disk_is_asked_again_after_the_same_pause():
    """Space comes back without notice."""
    clock = ManualClock()
    breaker = Breaker(5.0, clock.now_s)
    for _ in range(6):
        breaker.failed("No space left on device", full=True)
        clock.advance(5.1)
        assert breaker.probe()


def test_writes_that_fail_together_count_once():
    """Four writers are one disk."""
    clock = ManualClock()
    breaker = Breaker(5.0, clock.now_s)
    for _ in range(4):
        breaker.failed("x", full=False)
    clock.advance(5.1)
    assert breaker.off is None


def test_the_pause_has_an_end():
    """A disk that was away for a night is back within five minutes."""
    clock = ManualClock()
    breaker = Breaker(5.0, clock.now_s)
    for _ in range(100):
        breaker.failed("x", full=False)
        clock.advance(300.1)
        assert breaker.off is None


def test_while_it_is_off_nothing_is_reserved_but_reads_work(make, arena, disk):
    """Read-only, and `off` says so."""
    slab = make(retry_s=3600)
    images = arena.store(slab, 2)
    slots = slab.reserve(1)
    disk.fail = {"write": errno.EIO}
    with pytest.raises(OSError, match="Input"):
        slab.write(arena.images(slots, 9))
    disk.heal()
    assert [] == slab.reserve(1)
    assert "read-only" in slab.off
    assert [True, True] == arena.load(slab, images)


@pytest.mark.parametrize(("code", "pause"), [(errno.ENOSPC, "0.05 s"), (errno.EDQUOT, "0.05 s"), (errno.EIO, "0.1 s")])
def test_a_full_disk_is_asked_more_often_than_a_broken_one(make, arena, disk, code, pause):
    """`off` says when; the second failure in a row doubles the pause of a broken disk only (K10)."""
    slab = make(retry_s=0.05)
    disk.fail = {"write": code}
    for _ in range(2):
        while not (slots := slab.reserve(1)):
            time.sleep(0.01)
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            slab.write(arena.images(slots))
        off = slab.off
        slab.free(slots)
    assert f"tried again {pause} after failure 2" in off
    disk.heal()
    while not (slots := slab.reserve(1)):
        time.sleep(0.01)
    slab.write(arena.images(slots))
    assert slab.off is None


# -- limits


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here; a fake with the same behaviour is tested in test_slab.py")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize("store", [None, "s"])
def test_a_cap_beyond_the_free_space_pauses_with_one_warning(small_disk, monkeypatch, capsys, store):
    """64 MiB of disk, a cap of 1 GiB, others have 40 MiB: it takes what there is, leaves some to others, and grows
    when they are gone. No half files (K10).
    """
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(slab_module, "_SMALLEST_SEGMENT_BYTES", MIB)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(40 * MIB))
    block = 256 * 1024
    view = memoryview(bytearray(block))
    with Slab(small_disk / "kv", 1024 * MIB, block, segment_bytes=16 * MIB, retry_s=0, store=store) as slab:
        for i in range(200):
            for slot in slab.reserve(1):
                slab.write([SlotImage(slot, key(i), view)])
        first = slab.slots
        assert 16 * MIB <= first * block <= 24 * MIB
        assert "to spare" in slab.short
        assert os.statvfs(small_disk).f_bavail * 4096 >= 0.04 * 64 * MIB
        assert 1 == capsys.readouterr().err.count("kv_disk_short")
        assert {} == slab.errors
        ballast.unlink()
        for i in range(200):
            for slot in slab.reserve(1):
                slab.write([SlotImage(slot, key(i), view)])
        assert slab.slots > 2 * first
        slab.check()
        names = sorted(path.name for path in slab.path.glob("segment-*"))
        assert sum((slab.path / name).stat().st_size for name in names) == slab.slots * block


def test_the_files_stay_within_the_cap(make, arena, tmp_path):
    """Ten times the cap is written, with notes; measured throughout, journal and half files included (K8)."""
    slab = make(store="s", capacity_bytes=2 * MIB, segment_bytes=64 * SLOT)
    most, stop = [0], threading.Event()

    def measure():
        while not stop.is_set():
            size = 0
            for path in slab.path.iterdir():
                try:
                    size += path.stat().st_blocks * 512
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], size)

    watcher = threading.Thread(target=measure)
    watcher.start()
    written, order = 0, []
    while written < 20 * MIB:
        images = arena.images(slab.reserve(16), written % 200)
        if len(images) < 16:
            slab.free(order[:32])
            order = order[32:]
        slab.write(images)
        order += [image.slot for image in images]
        written += len(images) * SLOT
        slab.note(f"n{written % 7}", bytes(900))
    stop.set()
    watcher.join()
    assert MIB < most[0] <= 2 * MIB + SLOT
    assert slab.size_bytes <= 2 * MIB
    slab.check()


def test_a_store_above_the_cap_shrinks_at_the_start(make, arena):
    """The files with the most blocks stay (K8)."""
    slab = make(store="s", capacity_bytes=2 * MIB, segment_bytes=64 * SLOT)
    images = arena.store(slab, 64)
    others = arena.images(slab.reserve(64), 64)
    slab.write(others)
    third = arena.images(slab.reserve(64), 128)
    slab.write(third)
    slab.free([image.slot for image in images[:60]] + [image.slot for image in third[20:]])
    slab.close()
    again = make(store="s", capacity_bytes=64 * SLOT + 16 * SLOT + 64 * 1024 + 320 * 100, segment_bytes=64 * SLOT)
    assert again.size_bytes <= 64 * SLOT + 16 * SLOT + 64 * 1024 + 320 * 100
    assert {*range(64, 128), *range(128, 144)} <= {one.key[0] for one in again.kept}
    again.check()
    files = [path.stat().st_size for path in again.path.iterdir()]
    assert sum(files) == again.size_bytes


# -- forked children


def in_child(deed):
    """Exit code of a forked child that does `deed`."""
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            code = deed()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("store", [None, "s"])
def test_a_forked_child_neither_uses_nor_removes_its_parents_files(make, arena, store):
    """Using it raises, closing it does nothing, and the parent goes on."""
    slab = make(store=store)
    images = arena.store(slab, 2)

    def deed():
        for use in (
            lambda: slab.reserve(1),
            lambda: slab.write(images),
            lambda: slab.read(images),
            lambda: slab.free([0]),
            lambda: slab.note("a", b""),
            lambda: slab.forget_note("a"),
        ):
            try:
                use()
            except Closed as error:
                if "forked" not in str(error):
                    return 1
            else:
                return 2
        slab.close()
        return 0

    assert 0 == in_child(deed)
    assert slab.path.exists()
    assert [True, True] == arena.load(slab, images)
    slab.check()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_hold_its_parents_lock(make):
    """Else a worker that outlives its parent would keep everybody out."""
    slab = make(store="s")
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(told, 1)
        os._exit(0)
    slab.close()
    try:
        assert make(store="s").lasting
    finally:
        os.write(tell, b"x")
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tell)


def test_after_close_every_use_is_refused(make, arena):
    """In words, not with an index error."""
    slab = make()
    images = arena.store(slab, 1)
    slab.close()
    for use in (lambda: slab.reserve(1), lambda: slab.write(images), lambda: slab.read(images), lambda: slab.free([0])):
        with pytest.raises(Closed, match="closed"):
            use()


@pytest.mark.parametrize("stuck", ["pwritev", "pwrite", "posix_fallocate"])
def test_close_returns_though_a_thread_hangs_in_the_disk(make, arena, monkeypatch, stuck):
    """A dead mount holds a block's write, the journal's or a file's making; what ends late does no harm (K16)."""
    slab = make(store="s", segment_bytes=8 * SLOT)
    slots = slab.reserve(4)
    inside, release, errors = threading.Event(), threading.Event(), []
    real = getattr(os, stuck)

    def hang(*args):
        inside.set()
        release.wait(20)
        return real(*args)

    def work():
        try:
            slab.write(arena.images(slots))
            slab.reserve(8)
        except (OSError, Closed) as error:
            errors.append(error)

    monkeypatch.setattr(os, stuck, hang)
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(5)
    started_s = time.monotonic()
    slab.close()
    assert time.monotonic() - started_s < 5
    release.set()
    thread.join(5)
    assert not thread.is_alive()
    monkeypatch.undo()
    with make(store="s") as again:
        assert all(arena.load(again, arena.kept(again)))


def test_many_threads_at_once(make):
    """Four writers and eight readers, growing files: every byte right, no slot lost."""
    slab = make(store="s", capacity_bytes=4 * MIB, segment_bytes=128 * SLOT)
    failures = []
    until_s = time.monotonic() + 0.5

    def run(number):
        arena = Arena(8)
        try:
            while time.monotonic() < until_s:
                images = arena.store(slab, 8, number * 8)
                assert [True] * len(images) == arena.load(slab, images)
                slab.free([image.slot for image in images])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failures
    assert 0 == slab.used
    slab.check()
