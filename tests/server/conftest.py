"""Engines that speak from a script behind the real app, and clients of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from agentkv.engine.scripted import ScriptedEngine
from agentkv.server.app import create_app
from agentkv.server.transport import InProcess


@dataclass
class Door:
    """An engine, the app over it and an HTTP client of the app."""

    engine: ScriptedEngine
    doors: InProcess
    http: httpx2.Client

    def chat(self, **body: Any) -> httpx2.Response:
        """POST a chat; the least that is needed is filled in."""
        return self.http.post("/v1/chat/completions", json={"model": "scripted", "messages": [USER], **body})


USER = {"role": "user", "content": "hello there"}


@dataclass
class DoorFactory:
    """Makes doors and closes them."""

    opened: list[Door] = field(default_factory=list)

    def __call__(self, *answers, identify=None, caller=None, submit=None, **options) -> Door:
        engine = ScriptedEngine(answers, **options)
        app = create_app(
            submit(engine) if submit else engine.submit,
            model=engine.model,
            count_tokens=engine.count_tokens,
            caller=caller,
        )
        doors = InProcess(app, identify=identify)
        client = httpx2.Client(transport=doors.transport(httpx2), base_url="http://agentkv.local", timeout=10)
        self.opened.append(Door(engine=engine, doors=doors, http=client))
        return self.opened[-1]


@pytest.fixture
def door_of():
    """Doors over scripted engines; the test fails if a thread outlives them."""
    before = set(threading.enumerate())
    factory = DoorFactory()
    yield factory
    for door in factory.opened:
        door.http.close()
        door.doors.close()
        door.engine.close()
    assert set() == set(threading.enumerate()) - before
