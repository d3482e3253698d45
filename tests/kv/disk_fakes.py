"""Disks that fail as real ones do, and memory for blocks. Shared by the tests of the disk tier."""

from __future__ import annotations

import errno
import mmap
import os

from agentkv.kv.slab import SlotImage

SLOT = 4096
BLOCK = 3000


class Arena:
    """Page-aligned slots."""

    def __init__(self, slots=64):
        self.map = mmap.mmap(-1, slots * SLOT)
        self.view = memoryview(self.map)

    def slot(self, i):
        return self.view[i * SLOT : (i + 1) * SLOT]

    def images(self, slots, first=0):
        """Blocks whose bytes are their number, which is also their key."""
        made = []
        for i, slot in enumerate(slots):
            view = self.slot(i)
            view[:] = bytes([first + i]) * SLOT
            made.append(SlotImage(slot, key(first + i), view))
        return made

    def store(self, slab, n, first=0):
        """Write n blocks; their images."""
        images = self.images(slab.reserve(n), first)
        slab.write(images)
        return images

    def load(self, slab, images, **options):
        """Read into wiped memory: for each image True if it is right, False for a miss; wrong bytes raise."""
        for image in images:
            image.view[:] = bytes([255]) * SLOT
        good = slab.read(images, **options)
        for image, ok in zip(images, good, strict=True):
            assert not ok or bytes(image.view[:BLOCK]) == bytes([image.key[0]]) * BLOCK, "a wrong byte was served"
        return good

    def kept(self, slab):
        """What an earlier process left, as images."""
        return [SlotImage(one.slot, one.key, self.slot(i)) for i, one in enumerate(slab.kept)]


def key(i):
    return bytes([i]) * 16


class FaultyDisk:
    """`os.preadv` and `os.pwritev` of segments go through it; the attributes say what happens.

    `fail` is an errno for both or for one of "read", "write"; `at_most` cuts each call after so many bytes; `ends` lets
    calls return 0; `refuse_direct` fails calls on descriptors opened with O_DIRECT; `count` is how often each happened.
    """

    def __init__(self, monkeypatch):
        self.fail = {}
        self.at_most = None
        self.ends = False
        self.refuse_direct = False
        self.count = 0
        self._real = {"read": os.preadv, "write": os.pwritev}
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: self._call("read", fd, views, at))
        monkeypatch.setattr(os, "pwritev", lambda fd, views, at: self._call("write", fd, views, at))

    def heal(self):
        self.fail, self.at_most, self.ends, self.refuse_direct = {}, None, False, False

    def _call(self, op, fd, views, at):
        direct = self._is_direct(fd)
        if self.refuse_direct and direct:
            self.count += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        if op in self.fail:
            self.count += 1
            raise OSError(self.fail[op], os.strerror(self.fail[op]))
        if self.ends:
            self.count += 1
            return 0
        if self.at_most is not None:
            self.count += 1
            return self._real[op](fd, self._cut(views, direct), at)
        return self._real[op](fd, views, at)

    def _cut(self, views, direct):
        left = max(SLOT, self.at_most - self.at_most % SLOT) if direct else self.at_most
        cut = []
        for view in views:
            if left > 0:
                cut.append(memoryview(view)[:left])
                left -= len(view)
        return cut

    @staticmethod
    def _is_direct(fd):
        import fcntl

        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
