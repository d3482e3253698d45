"""A lasting slab against two dictionaries, over any series of deeds, ends and damages."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentkv.kv.slab import Slab

from .disk_fakes import BLOCK, SLOT, Arena, key

CAPACITY = 64 * 1024 + 24 * SLOT
WIDTH = 6


class Disk(RuleBasedStateMachine):
    """`blocks` and `notes` are what must be there; `spoilt` is set while less may be, but nothing else."""

    @initialize(segment=st.integers(4, 30))
    def start(self, segment):
        self.folder = tempfile.TemporaryDirectory()
        self.arena = Arena(32)
        self.segment_bytes = segment * SLOT
        self.blocks, self.notes, self.next = {}, {}, 0
        self.open()

    def open(self):
        self.slab = Slab(self.folder.name, CAPACITY, BLOCK, segment_bytes=self.segment_bytes, retry_s=0, store="s")
        assert self.slab.lasting, self.slab.not_lasting

    def reopened(self, *, spoilt):
        """Start again; what is there must be what we know, or part of it if something was spoilt."""
        self.open()
        kept = {one.key: one.slot for one in self.slab.kept}
        assert len(kept) == len(self.slab.kept) == self.slab.used
        if not spoilt:
            assert self.blocks == kept
            assert self.notes == self.slab.notes
        good = self.arena.load(self.slab, self.arena.kept(self.slab), verify=False)
        assert spoilt or all(good)
        lost = [one for one, ok in zip(self.slab.kept, good, strict=True) if not ok]
        self.slab.free([one.slot for one in lost])
        self.blocks = {one.key: one.slot for one in self.slab.kept if one not in lost}
        self.notes = self.slab.notes

    @rule(n=st.integers(1, WIDTH))
    def write(self, n):
        images = self.arena.images(self.slab.reserve(n), self.next)
        self.slab.write(images)
        self.blocks.update({image.key: image.slot for image in images})
        self.next = (self.next + n) % 230
        for old in [k for k in self.blocks if k not in {image.key for image in images} and self._next_soon(k)]:
            self.slab.free([self.blocks.pop(old)])

    def _next_soon(self, one):
        return one in {key(self.next + i) for i in range(WIDTH)}

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data):
        for one in data.draw(st.sets(st.sampled_from(sorted(self.blocks)), min_size=1, max_size=8)):
            self.slab.free([self.blocks.pop(one)])

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def read(self, data):
        some = data.draw(st.lists(st.sampled_from(sorted(self.blocks)), min_size=1, max_size=8, unique=True))
        images = [
            i._replace(key=k) for i, k in zip(self.arena.images([self.blocks[k] for k in some]), some, strict=True)
        ]
        assert [True] * len(some) == self.arena.load(self.slab, images)

    @rule(name=st.sampled_from(["a", "b", "../c"]), size=st.integers(0, 3000))
    def note(self, name, size):
        if self.slab.note(name, bytes(size)):
            self.notes[name] = bytes(size)
        else:
            self.notes.pop(name, None)

    @rule(name=st.sampled_from(["a", "b", "../c"]))
    def forget(self, name):
        self.slab.forget_note(name)
        self.notes.pop(name, None)

    @rule()
    def compact(self):
        self.slab._journal.compact()

    @rule()
    def close(self):
        self.slab.close()
        self.reopened(spoilt=False)

    @rule()
    def kill(self):
        """Frees that nobody recorded are lost: those blocks are back, and right."""
        late = {place for place in self.slab._journal._freed if place in self.slab._journal.entries}
        back = {self.slab._journal.entries[place].key: self.slab._segments.slot(place) for place in late}
        self.slab._journal._freed.clear()
        self.slab.close()
        self.blocks = self.blocks | {one: slot for one, slot in back.items() if one not in self.blocks}
        self.reopened(spoilt=any(self.blocks[one] != slot for one, slot in back.items()))

    @rule(share=st.floats(0, 1), into=st.sampled_from(["journal", "segment-00000"]))
    def cut(self, share, into):
        """A file ends early."""
        self.slab.close()
        path = Path(self.folder.name) / "store-s" / into
        if path.exists():
            os.truncate(path, int(share * path.stat().st_size))
        self.reopened(spoilt=True)

    @rule(at=st.integers(0, 1 << 20), into=st.sampled_from(["journal", "segment-00000", "segment-00001"]))
    def flip(self, at, into):
        """A bit turns."""
        self.slab.close()
        path = Path(self.folder.name) / "store-s" / into
        if path.exists() and path.stat().st_size:
            data = bytearray(path.read_bytes())
            data[at % len(data)] ^= 4
            path.write_bytes(bytes(data))
        self.reopened(spoilt=True)

    @rule(text=st.binary(max_size=100))
    def rubbish(self, text):
        """Something is written behind the journal's end: it is left out, and nothing else is."""
        self.slab.close()
        with (Path(self.folder.name) / "store-s" / "journal").open("ab") as file:
            file.write(text)
        self.reopened(spoilt=False)

    @invariant()
    def it_adds_up(self):
        if hasattr(self, "slab"):
            self.slab.check()
            assert len(self.blocks) == self.slab.used
            assert self.notes == self.slab.notes
            assert self.slab.size_bytes <= CAPACITY
            files = list(self.slab.path.iterdir())
            assert sum(path.stat().st_size for path in files) == self.slab.size_bytes

    def teardown(self):
        if hasattr(self, "slab"):
            self.slab.close()
            self.arena.view = None
            self.folder.cleanup()


Disk.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestDisk = Disk.TestCase


class LongDisk(Disk):
    """The same for longer."""


LongDisk.TestCase.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
TestLongDisk = pytest.mark.slow(LongDisk.TestCase)
