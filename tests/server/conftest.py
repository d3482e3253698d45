"""Engines that speak from a script behind the real app, and clients of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest

from agentkv import AgentKV, Context
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model
from agentkv.engine.scripted import ScriptedEngine
from agentkv.runtime.serving import Served
from agentkv.server.admission import Life
from agentkv.server.app import create_app
from agentkv.server.http import HttpServer, bind
from agentkv.server.keys import Keys
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


class Place:
    """An AgentKV behind a real socket: its kv, its url, plain HTTP and openai clients of it."""

    def __init__(
        self,
        kv: AgentKV,
        *,
        keys: Keys | None = None,
        most_calls: int = 1024,
        drain_s: float = 5.0,
        allow_origins: tuple[str, ...] = (),
    ) -> None:
        self.kv = kv
        self.life = Life(most_calls=most_calls)
        self._served = Served(kv, keys=keys, life=self.life, allow_origins=allow_origins)
        sock = bind("127.0.0.1", 0, guarded=keys is not None)
        self.server = HttpServer(self._served.app, sock, life=self.life, drain_s=drain_s)
        self.url = self.server.url
        self.server.__enter__()
        self.http = httpx2.Client(base_url=self.url, timeout=30, trust_env=False)
        self._clients: list[Any] = []

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30, **options)
        self._clients.append(client)
        return client

    def chat(self, **body: Any) -> httpx2.Response:
        """POST a chat; the least that is needed is filled in."""
        base = {"model": self.kv.engine.model, "messages": [USER], "max_tokens": 8}
        return self.http.post("/v1/chat/completions", json={**base, **body})

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.http.close()
        self.server.__exit__()
        self._served.close()
        self.kv.close()


@pytest.fixture
def place_of():
    """`place_of(kv)`: an AgentKV on a socket, closed after the test."""
    places: list[Place] = []

    def make(kv: AgentKV, **options: Any) -> Place:
        places.append(Place(kv, **options))
        return places[-1]

    yield make
    for place in places:
        place.close()


@pytest.fixture
def scripted_place(place_of):
    """`scripted_place("answer", ...)`: a script on a socket."""

    def make(
        *answers: Any,
        keys: Keys | None = None,
        most_calls: int = 1024,
        drain_s: float = 5.0,
        allow_origins: tuple[str, ...] = (),
        **options: Any,
    ) -> Place:
        kv = AgentKV.with_engine(ScriptedEngine(answers, **options))
        return place_of(kv, keys=keys, most_calls=most_calls, drain_s=drain_s, allow_origins=allow_origins)

    return make


@pytest.fixture(scope="session")
def folder_of(models, tmp_path_factory):
    """`folder_of(template=..., seed=...)`: the folder of a tiny model that is made once."""
    made: dict[str, Any] = {}

    def find(family: str = "llama", **switches: Any) -> Any:
        name = repr((family, sorted(switches.items())))
        if name not in made:
            made[name] = models.save(tmp_path_factory.mktemp("model"), family, **switches)
        return made[name]

    return find


@pytest.fixture
def engine_place(place_of, folder_of):
    """`engine_place(template=...)`: the real embedded engine with a tiny model, on a socket."""

    def make(*, blocks: int = 256, context: Context | None = None, keys: Keys | None = None, **switches: Any) -> Place:
        loaded = load_model(str(folder_of(**switches)), device="cpu", dtype="float32")
        size = blocks * loaded.geometry.block_bytes
        engine = LocalEngine(loaded, device_memory=size, host_memory=blocks * loaded.geometry.slot_bytes)
        return place_of(AgentKV.with_engine(engine, ledger="memory", context=context), keys=keys)

    return make


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread():
    """Tiny matrices are slower on many threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
