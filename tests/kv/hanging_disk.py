"""A disk that does not answer until it is told to, for tests of what others do meanwhile."""

from __future__ import annotations

import threading

from agentkv.kv.slab import Slab

from .conftest import GEOMETRY


class HangingSlab(Slab):
    """What is named in `hang` ("read", "write", "note") waits for `go`; `hanging` counts who does."""

    def __init__(self, directory, *, slots=64, store=None):
        super().__init__(directory, slots * GEOMETRY.slot_bytes, GEOMETRY.block_bytes, store=store)
        self.hang = set()
        self.hanging = threading.Semaphore(0)
        self.go = threading.Event()

    def _wait(self, op):
        if op in self.hang:
            self.hanging.release()
            assert self.go.wait(30)

    def read(self, images, *, verify=True):
        self._wait("read")
        return super().read(images, verify=verify)

    def write(self, images, **options):
        self._wait("write")
        super().write(images, **options)

    def note(self, name, payload):
        self._wait("note")
        return super().note(name, payload)

    def forget_note(self, name):
        self._wait("note")
        super().forget_note(name)
