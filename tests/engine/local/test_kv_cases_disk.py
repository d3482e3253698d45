"""Users' reports about the disk tier, through the whole engine: spoilt, full, missing and vanishing disks.

The answer is always that of a cold run; what happened is to be seen in `stats()`. The slab by itself is
`tests/kv/test_slab.py`, killed processes are `tests/kv/test_crash.py`.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time

import pytest

from agentkv import log
from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.slab import Slab
from agentkv.kv.tiers import Tiers

MIB = 1 << 20
TEXT = "The tool ran for a while. Its output follows: line one, line two, and so on until the end of the file. "


def _prompt(number, length=200):
    return (f"{number}: " + TEXT * 10)[:length]


@pytest.fixture(autouse=True)
def _warnings_anew(monkeypatch):
    """What a process warns of once, it warns of again in each test."""
    monkeypatch.setattr(log, "_warned", set())


@pytest.fixture
def small_steps(monkeypatch):
    """A slab that grows by the megabyte and tries again after a fifth of a second."""
    monkeypatch.setitem(Slab.__init__.__kwdefaults__, "segment_bytes", MIB)
    monkeypatch.setitem(Slab.__init__.__kwdefaults__, "retry_s", 0.2)
    monkeypatch.setattr("agentkv.kv.slab._SMALLEST_SEGMENT_BYTES", MIB)


# -- spoilt bytes


def _swap(slots):
    (a, at_a), (b, at_b) = slots[1], slots[-1]
    first, second = a.read_bytes()[at_a : at_a + 8192], b.read_bytes()[at_b : at_b + 8192]
    for path, at, data in ((a, at_a, second), (b, at_b, first)):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data)


def _resize(path, size):
    with path.open("r+b") as file:
        file.truncate(size)


SPOIL = {
    "head": lambda slots, flip: flip(slots[0][0], slots[0][1] + 11),
    "middle": lambda slots, flip: flip(slots[6][0], slots[6][1] + 4000),
    "tail": lambda slots, flip: flip(slots[-1][0], slots[-1][1] + 8191),
    "every block": lambda slots, flip: [flip(path, at + 5000) for path, at in slots],
    "truncated": lambda slots, _flip: _resize(slots[6][0], slots[6][1] + 100),
    "0 bytes": lambda slots, _flip: _resize(slots[0][0], 0),
    "swapped": lambda slots, _flip: _swap(slots),
    "extra bytes": lambda slots, _flip: _resize(slots[0][0], slots[0][0].stat().st_size + 77),
    "untouched": lambda _slots, _flip: None,
}


@pytest.mark.parametrize("how", SPOIL)
def test_spoilt_files_cost_a_recompute_and_are_counted(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, flip, slots_on_disk, tmp_path, how
):
    """The answer equals a cold run's, the counters tell, the bad copies are gone: the next turn is well again (K6)."""
    engine = start(host=60, disk=tmp_path, disk_memory=32 * MIB)
    first = engine.submit(ask(_prompt(0), 4, task="t")).result(60)
    park(engine, first.session, Tier.DISK)
    slots = slots_on_disk(engine, tmp_path)
    assert len(slots) >= 12
    SPOIL[how](slots, flip)
    prompt = _prompt(0) + first.text + " Go on."
    second = engine.submit(ask(prompt, 12, task="t")).result(60)
    assert tiny.greedy(prompt, 12) == list(second.token_ids)
    stats = engine.stats()["kv"]
    whole = how in {"extra bytes", "untouched"}
    assert (whole or how == "tail") == (second.usage.cached_tokens >= 192)
    assert whole == (stats["lost_on_disk"] == 0)
    if how in {"head", "middle", "tail", "swapped"}:
        assert (2 if how == "swapped" else 1) == stats["checksum_failures"]
    park(engine, first.session)
    third = engine.submit(ask(prompt + second.text, 4, task="t")).result(60)
    assert tiny.greedy(prompt + second.text, 4) == list(third.token_ids)
    assert third.usage.cached_tokens >= 208


@pytest.mark.parametrize("place", [0, 6, 11])
def test_two_calls_on_a_prefix_that_rots_after_the_lookup_both_finish_without_a_retry(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, flip, slots_on_disk, tmp_path, monkeypatch, place
):
    """The block goes bad between the hit and its read: two answers of a cold run, every slot read at most once (K7)."""
    engine = start(host=60, disk=tmp_path, disk_memory=32 * MIB)
    first = engine.submit(ask(_prompt(0), 4, task="t")).result(60)
    park(engine, first.session, Tier.DISK)
    reading, go_on, reads = threading.Event(), threading.Event(), []
    read = Slab.read

    def gated(self, images, **options):
        reading.set()
        assert go_on.wait(20)
        reads.extend(image.slot for image in images)
        return read(self, images, **options)

    monkeypatch.setattr(Slab, "read", gated)
    streams = [engine.submit(ask(_prompt(0) + end, 10, task=end)) for end in (" Go on.", " Stop it.")]
    assert reading.wait(20)
    flip(slots_on_disk(engine, tmp_path)[place][0], slots_on_disk(engine, tmp_path)[place][1] + 50)
    go_on.set()
    for end, stream in zip((" Go on.", " Stop it."), streams, strict=True):
        assert tiny.greedy(_prompt(0) + end, 10) == list(stream.result(60).token_ids)
    assert len(reads) == len(set(reads)) >= 12
    stats = engine.stats()["kv"]
    assert (1, 1) == (stats["checksum_failures"], stats["lost_on_disk"])


# -- room


def _du(folder):
    """Bytes that the files below a folder take."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def test_the_disk_never_takes_more_than_its_cap(tiny, start, ask, park, tmp_path):
    """Three times the cap is written; `du`, sampled all the time, stays below it, the host below its own (K8)."""
    cap = 4 * MIB
    engine = start(host=80, disk=tmp_path / "kv", disk_memory=cap)
    most, stop = [0], threading.Event()

    def sample():
        while not stop.is_set():
            most[0] = max(most[0], _du(tmp_path / "kv"))
            time.sleep(0.002)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for number in range(28):
            session = engine.submit(ask(_prompt(number, 900), 2, task=f"t{number}")).result(60).session
            park(engine, session, Tier.DISK)
    finally:
        stop.set()
        sampler.join()
    stats = engine.stats()["kv"]
    assert stats["bytes"]["write"] > 3 * cap
    assert cap // 2 < most[0] <= cap + engine.tiers.geometry.slot_bytes
    assert stats["host"]["used"] <= 80
    again = engine.submit(ask(_prompt(27, 900), 4, task="t27")).result(60)
    assert tiny.greedy(_prompt(27, 900), 4) == list(again.token_ids)
    assert again.restored_blocks >= 56


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_smaller_than_the_cap_is_used_up_and_used_again(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, small_disk, small_steps, capfd
):
    """The tier works with what there is, warns once, leaves no half file, and grows when there is room again (K10)."""
    (small_disk / "others").write_bytes(bytes(12 * MIB))
    engine = start(host=80, disk=small_disk / "kv", disk_memory=1024 * MIB)
    for number in range(12):
        prompt = _prompt(number, 900)
        first = engine.submit(ask(prompt, 2, task=f"t{number}")).result(60)
        park(engine, first.session, Tier.DISK)
        again = engine.submit(ask(prompt, 4, task=f"t{number}")).result(60)
        assert tiny.greedy(prompt, 4) == list(again.token_ids)
        assert again.restored_blocks > 50
        park(engine, again.session, Tier.DISK)
    stats = engine.stats()["kv"]["disk"]
    assert "file system" in stats["short"] or "No space" in stats["short"]
    assert 1 == capfd.readouterr().err.count("kv_disk_short")
    held = sum(path.stat().st_size for path in small_disk.rglob("segment-*"))
    assert 0 < held <= 4 * MIB
    (small_disk / "others").unlink()
    time.sleep(0.25)
    for number in range(12, 22):
        session = engine.submit(ask(_prompt(number, 900), 2, task=f"t{number}")).result(60).session
        park(engine, session, Tier.DISK)
    assert sum(path.stat().st_size for path in small_disk.rglob("segment-*")) > held
    engine.close()
    assert [] == list(small_disk.rglob("segment-*"))


# -- no disk


@pytest.mark.parametrize("kind", ["below a file", "read only"])
def test_a_folder_that_cannot_be_used_turns_the_tier_off_with_one_warning(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, tmp_path, request, capfd, kind
):
    """Two engines, one warning; `stats` gives the reason, and everything else works (K13)."""
    if kind == "below a file":
        (tmp_path / "file").write_text("mine")
        folder = tmp_path / "file" / "kv"
    else:
        folder = request.getfixturevalue("small_disk")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    for _ in range(2):
        engine = start(disk=folder, disk_memory=32 * MIB)
        first = engine.submit(ask(_prompt(0), 4, task="t")).result(60)
        park(engine, first.session)
        again = engine.submit(ask(_prompt(0) + first.text, 8, task="t")).result(60)
        assert tiny.greedy(_prompt(0) + first.text, 8) == list(again.token_ids)
        assert again.restored_blocks >= 12
        assert str(folder) in engine.stats()["disk_off"]
        assert "ot a directory" in engine.stats()["disk_off"] or "ead-only" in engine.stats()["disk_off"]
        assert not engine.residency(first.session).has_disk
    assert 1 == capfd.readouterr().err.count("disk_tier_off")


def test_a_folder_that_vanishes_costs_no_answer_and_is_told(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, tmp_path, small_steps, capfd
):
    """What was open goes on, what should have grown does not: right answers, one warning, the reason in `stats` (K13)."""
    engine = start(host=80, disk=tmp_path / "kv", disk_memory=32 * MIB)
    first = engine.submit(ask(_prompt(0), 4, task="t0")).result(60)
    park(engine, first.session, Tier.DISK)
    shutil.rmtree(tmp_path / "kv")
    texts = {f"t{i}": _prompt(i) for i in range(4)}
    for turn in range(2):
        for task, text in texts.items():
            generation = engine.submit(ask(text, 4, task=task)).result(60)
            assert tiny.greedy(text, 4) == list(generation.token_ids)
            texts[task] = text + generation.text + f" And {turn}."
            park(engine, generation.session, Tier.HOST)
    for number in range(20, 26):
        session = engine.submit(ask(_prompt(number, 700), 2, task=f"t{number}")).result(60).session
        engine.tiers.vacate(session, Tier.DEVICE)
    engine.tiers.quiesce(20)
    disk = engine.stats()["kv"]["disk"]
    reason = f"{disk['off']} {disk['short']} {engine.stats()['disk_off']}"
    assert "o such file" in reason or "vanished" in reason or "gone" in reason
    assert 1 == sum(capfd.readouterr().err.count(name) for name in ("kv_disk_short", "kv_disk_off", "disk_tier_off"))


# -- a disk that does not answer


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_disk_that_does_not_answer_delays_a_call_by_its_deadline_and_nobody_else(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, tmp_path, monkeypatch, op
):
    """The call computes again what it waited for, others never notice, `stats` tells, `close` returns (K16)."""
    monkeypatch.setitem(Tiers.__init__.__kwdefaults__, "io_deadline_s", 0.5)
    engine = start(host=60, disk=tmp_path, disk_memory=32 * MIB)
    first = engine.submit(ask(_prompt(0), 4, task="t")).result(60)
    park(engine, first.session, Tier.DISK)
    go_on, asked, real = threading.Event(), threading.Event(), getattr(Slab, op)

    def hangs(self, images, **options):
        asked.set()
        assert go_on.wait(60)
        return real(self, images, **options)

    monkeypatch.setattr(Slab, op, hangs)
    try:
        if op == "write":
            other = engine.submit(ask(_prompt(9), 4, task="w")).result(60)
            engine.apply(Move(session=other.session, action=Action.DEMOTE, to=Tier.DISK, reason="test"))
        slow = engine.submit(ask(_prompt(0) + first.text, 8, task="t"))
        assert asked.wait(10)
        for number in range(1, 4):
            generation = engine.submit(ask(_prompt(number), 6)).result(20)
            assert tiny.greedy(_prompt(number), 6) == list(generation.token_ids)
        generation = slow.result(20)
        assert tiny.greedy(_prompt(0) + first.text, 8) == list(generation.token_ids)
        assert (op == "read") == (generation.usage.cached_tokens < 192)
        assert op == "write" or "answered" in engine.stats()["kv"]["disk"]["off"]
        began_s = time.monotonic()
        engine.close()
        assert time.monotonic() - began_s < 15
    finally:
        go_on.set()
