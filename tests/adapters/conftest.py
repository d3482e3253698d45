"""Servers that these tests speak to: llama.cpp without a model (slots and files as the real one keeps them), hosted providers."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosted_servers import Hosted

from agentkv.adapters import probe
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer
from agentkv.clock import ManualClock
from agentkv.runtime.reach import Reach


class FakeLlama(StrictServer):
    """Slots hold a number of tokens; files too. `broken`: deeds that it cannot do. `saves`: with --slot-save-path.

    `hung`: (deed, slot) that is done and never answered, until `goes_on` is set.
    """

    def __init__(self, slots: int = 2) -> None:
        super().__init__(accepts=CHAT_FIELDS | {"id_slot"})
        self.slots: dict[int, int] = {}
        self.files: dict[str, int] = {}
        self.deeds: list[tuple[str, int, str]] = []
        self.broken: set[str] = set()
        self.saves = True
        self.hung: set[tuple[str, int]] = set()
        self.goes_on = threading.Event()
        self.routes = {"GET /slots": lambda _: (200, [{"id": slot} for slot in self.slots])}
        self.routes["GET /props"] = lambda _: (200, {"total_slots": len(self.slots)})
        self.restart(slots)

    def restart(self, slots: int) -> None:
        """Slots are empty, files are there."""
        self.slots = dict.fromkeys(range(slots), 0)
        for route in [route for route in self.routes if "?action=" in route]:
            del self.routes[route]
        for slot in self.slots:
            for deed in ("save", "restore", "erase"):
                self.routes[f"POST /slots/{slot}?action={deed}"] = self._deed(slot, deed)

    def turn(self, adapter, session, tokens=1000):
        """A call of the session that leaves so many tokens in its slot, if it has one; the fields that it was given."""
        fields = adapter.fields(session)
        if "id_slot" in fields:
            self.slots[fields["id_slot"]] = tokens
            adapter.ended(session, tokens=tokens, cached_tokens=None)
        return fields

    def _deed(self, slot, deed):
        def done(body):
            name = body.get("filename", "")
            self.deeds.append((deed, slot, name))
            if (deed, slot) in self.hung:
                self.goes_on.wait(60)
            if not self.saves:
                return 501, {"error": {"message": "start it with --slot-save-path"}}
            if deed in self.broken or (deed == "restore" and name not in self.files):
                return 500 if deed == "save" else 400, {"error": {"message": "unable"}}  # as the real one does
            if deed == "save":
                self.files[name] = self.slots[slot]
            elif deed == "restore":
                self.slots[slot] = self.files[name]
            else:
                self.slots[slot] = 0
            return 200, {"id_slot": slot, "n_restored": self.slots[slot], "timings": {"restore_ms": 1.0}}

        return done


@pytest.fixture
def llama():
    with FakeLlama() as server:
        yield server
        server.goes_on.set()


@pytest.fixture
def recorder():
    from recorder import Recorder  # its folder is on the path once a test has imported from it

    return Recorder()


@pytest.fixture
def clock():
    return ManualClock(10.0)


@pytest.fixture
def reach(recorder, clock):
    made = Reach(recorder, clock=clock)
    yield made
    recorder.gate.set()
    made.close()


@pytest.fixture
def hosted(monkeypatch):
    """A server at an address that counts as a provider's: `hosted.is_at("anthropic")`."""
    with Hosted() as server:

        def is_at(name):
            monkeypatch.setitem(probe.PROVIDERS, "127.0.0.1", name)

        server.is_at = is_at
        yield server
