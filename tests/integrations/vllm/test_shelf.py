"""Blocks on disk: what was written is what is read, what is doubtful is gone, and room is made by the order."""

from __future__ import annotations

import mmap

import pytest
from agentkv_vllm.shelf import Shelf

from agentkv.errors import ConfigError

PAGE = 4096


@pytest.fixture
def memory():
    memory = mmap.mmap(-1, 64 * PAGE)
    view = memoryview(memory)
    return [view[PAGE * n : PAGE * (n + 1)] for n in range(64)]


@pytest.fixture
def shelf(tmp_path, sessions):
    shelf = Shelf(tmp_path / "kv", 8 * PAGE, PAGE, sessions)
    yield shelf
    shelf.check()
    shelf.close()
    shelf.close()
    assert [] == [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > PAGE]


def key(number):
    return number.to_bytes(36, "big")


def write(shelf, memory, *numbers):
    for place, number in enumerate(numbers):
        memory[place][:] = bytes([number]) * PAGE
    return shelf.write([(key(number), memory[place]) for place, number in enumerate(numbers)])


def read(shelf, memory, *numbers):
    assert len(numbers) == len(shelf.pin([key(number) for number in numbers]))
    return shelf.read([(key(number), memory[40 + place]) for place, number in enumerate(numbers)])


def test_what_was_written_is_what_is_read(shelf, memory):
    """Whole blocks; what is there already is not written again."""
    assert 3 == write(shelf, memory, 1, 2, 3)
    assert 2 == write(shelf, memory, 3, 4)
    assert [True, True] == read(shelf, memory, 4, 1)
    assert (b"\x04" * PAGE, b"\x01" * PAGE) == (bytes(memory[40]), bytes(memory[41]))
    assert not shelf.has(key(9))
    assert 4 == shelf.stats()["blocks"]


def test_bytes_that_changed_on_disk_are_a_miss(shelf, memory):
    """A checksum that does not fit is never a wrong token: the block is gone."""
    write(shelf, memory, 1, 2)
    slot = shelf._order.copies[key(1)].number
    memory[50][:] = b"?" * PAGE
    from agentkv.kv.slab import SlotImage

    sums = dict(shelf._slab._sums)
    shelf._slab.write([SlotImage(slot, key(1), memory[50])])
    shelf._slab._sums.update(sums)
    assert [True, False] == read(shelf, memory, 2, 1)
    assert not shelf.has(key(1))
    assert shelf.has(key(2))


def test_room_is_made_by_the_order(shelf, memory, sessions, wired):
    """Whoever is back last loses its end first; what is being read stays."""
    for name, numbers, p10 in (("soon", (1, 2), 5), ("late", (3, 4, 5), 500)):
        sessions.begins(name)
        sessions.holds(name, [(0, place, key(number)) for place, number in enumerate(numbers)])
        sessions.ends(name)
        sessions.hear(wired("tool_start", name, p10=p10))
        write(shelf, memory, *numbers)
    shelf.pin([key(5)])
    assert 5 == write(shelf, memory, 11, 12, 13, 14, 15)
    assert [1, 2, 5] == [number for number in range(1, 6) if shelf.has(key(number))]
    assert [True] == shelf.read([(key(5), memory[45])])


def test_more_than_fits_keeps_the_beginning(shelf, memory):
    """Nothing that is part of the same prompt pushes another part of it out."""
    assert 8 == write(shelf, memory, *range(1, 13))
    assert list(range(1, 9)) == [number for number in range(1, 13) if shelf.has(key(number))]
    assert 8 == write(shelf, memory, *range(1, 10))
    assert not shelf.has(key(9))


def test_what_a_session_gave_up_is_freed_unless_it_is_being_read(shelf, memory, sessions, wired):
    """Slots come back at once; a pinned one when it is done and room is needed."""
    sessions.begins("ada")
    sessions.holds("ada", [(0, place, key(number)) for place, number in enumerate((1, 2))])
    write(shelf, memory, 1, 2, 3)
    shelf.pin([key(2)])
    sessions.hear(wired("session_end", "ada"))
    shelf.give_up()
    assert [2, 3] == [number for number in (1, 2, 3) if shelf.has(key(number))]
    assert [True] == shelf.read([(key(2), memory[45])])


def test_a_disk_that_fails_stores_nothing_and_breaks_nothing(shelf, memory, monkeypatch):
    """The failed blocks are not there; once it works again others are."""

    def fails(images, **_):
        raise OSError(5, "broken")

    write(shelf, memory, 1)
    with monkeypatch.context() as broken, pytest.raises(OSError):
        broken.setattr(shelf._slab, "write", fails)
        write(shelf, memory, 2, 3)
    assert [1] == [number for number in (1, 2, 3) if shelf.has(key(number))]
    shelf.check()
    assert 2 == write(shelf, memory, 2, 3)
    assert [True, True] == read(shelf, memory, 2, 3)


def test_a_block_must_fill_pages(tmp_path, sessions):
    """O_DIRECT wants it so."""
    with pytest.raises(ConfigError):
        Shelf(tmp_path, 8 * PAGE, 1000, sessions)


def test_what_a_folded_prompt_left_behind_stays_until_room_is_needed(shelf, memory, sessions):
    """Its session goes on; somebody may begin with the same text again."""
    sessions.begins("ada")
    sessions.holds("ada", [(0, 1, key(1)), (0, 2, key(2))])
    write(shelf, memory, 1, 2)
    sessions.holds("ada", [(0, 2, key(3))])
    shelf.give_up()
    assert shelf.has(key(2))


def test_two_writers_of_one_block_leave_no_slot_behind(shelf, memory, monkeypatch):
    """What was set aside for a block that another thread has written meanwhile is free again."""
    real = shelf._slab.reserve

    def meanwhile(count):
        monkeypatch.setattr(shelf._slab, "reserve", real)
        write(shelf, memory, 1)
        return real(count)

    monkeypatch.setattr(shelf._slab, "reserve", meanwhile)
    assert 1 == write(shelf, memory, 1)
    shelf.check()
