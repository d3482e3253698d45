"""The end of things: closed doors, apps that end early, a caller that would wait for itself."""

from __future__ import annotations

import threading

import httpx2
import openai
import pytest

from agentkv.errors import Closed
from agentkv.server.transport import InProcess

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hello there"}]}


class Gate:
    """Lets an engine say its first word and holds the others until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, request, index: int) -> None:
        if index > 0:
            assert self.open.wait(10), "nobody opened the gate"


def test_close_ends_open_streams_and_leaves_no_thread(door_of):
    """The reader gets a connection error, the engine a cancel; closing twice is fine, calling later is Closed."""
    gate = Gate()
    door = door_of("one two", before_chunk=gate)
    client = door.doors.openai()
    stream = iter(client.chat.completions.create(**ASK, stream=True))
    next(stream)
    door.doors.close()
    door.doors.close()
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    assert 1 == len(door.engine.cancelled)
    gate.open.set()
    assert not [thread for thread in threading.enumerate() if thread.name == "agentkv-doors"]
    with pytest.raises(Closed):
        client.chat.completions.create(**ASK)


def test_close_without_a_call_starts_nothing():
    """The loop thread starts with the first call."""
    before = threading.active_count()
    with InProcess(None):
        assert before == threading.active_count()


def test_sync_client_on_the_apps_own_thread_is_refused_not_deadlocked(door_of):
    """Waiting for one's own loop would never end."""
    door = door_of("x")

    async def app(scope, receive, send):
        door.doors.openai().chat.completions.create(**ASK)

    door.doors._app = app
    with pytest.raises(openai.APIConnectionError):
        door.doors.openai().chat.completions.create(**ASK)


@pytest.mark.parametrize("sent", [0, 1])
def test_app_that_ends_early_is_a_connection_error(door_of, sent):
    """With no head or half a body, the client learns that the response was lost."""
    door = door_of()

    async def app(scope, receive, send):
        if sent:
            await send({"type": "http.response.start", "status": 200, "headers": []})

    door.doors._app = app
    with pytest.raises(httpx2.RemoteProtocolError):
        door.http.get("/")
