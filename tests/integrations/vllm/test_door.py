"""The socket: who may come in, what a line may be, and that nothing that comes in breaks it."""

from __future__ import annotations

import json
import socket
import time

import pytest
from agentkv_vllm import door as doors
from agentkv_vllm.door import Door

from agentkv.adapters.base import Unreachable
from agentkv.adapters.vllm_door import DoorCaller
from agentkv.errors import ConfigError

HINT = {"v": "agentkv.hint/1", "id": "h1", "kind": "turn_end", "ts_ms": 5, "session": "ada"}


@pytest.fixture
def heard():
    return []


@pytest.fixture
def door(socket_path, heard):
    def hear(hint):
        heard.append(hint)
        if hint.session == "boom":
            raise RuntimeError("a listener that fails")
        return "applied", "done"

    door = Door(socket_path, hear=hear, state=lambda: {"hints": len(heard)})
    yield door
    door.close()
    assert not socket_path.exists()


@pytest.fixture
def line(door):
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(5)
        line.connect(str(door.path))
        yield line


def asked(path):
    caller = DoorCaller(path)
    try:
        return caller.state()
    finally:
        caller.close()


def answers(line, count=1):
    came = b""
    while came.count(b"\n") < count:
        more = line.recv(65536)
        if not more:
            break
        came += more
    return [json.loads(one) for one in came.splitlines()]


def test_a_hint_is_heard_and_answered(door, heard, line):
    """One line in, one line out, in the same order; a question is answered with the state."""
    assert 0o600 == door.path.stat().st_mode & 0o777
    line.sendall((json.dumps(HINT) + "\n" + json.dumps({"v": "agentkv.ask/1"}) + "\n").encode())
    hint, state = answers(line, 2)
    assert ("h1", "applied", "done") == (hint["id"], hint["outcome"], hint["detail"])
    assert {"hints": 1} == state["state"]
    assert ["ada"] == [hint.session for hint in heard]


def test_a_line_may_come_in_pieces(line, heard):
    """Byte by byte is slow, not wrong."""
    for byte in json.dumps(HINT).encode() + b"\n":
        line.sendall(bytes([byte]))
    assert "applied" == answers(line)[0]["outcome"]
    assert 1 == len(heard)


@pytest.mark.parametrize(
    "bad",
    [
        b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{}", b'{"v":"agentkv.hint/1"}', b"[" * 9000, b"NaN",
        json.dumps(HINT | {"v": "agentkv.hint/2"}).encode(), json.dumps(HINT | {"kind": "explode"}).encode(),
        json.dumps(HINT | {"session": 7}).encode(), json.dumps(HINT | {"ts_ms": -1}).encode(),
        json.dumps(HINT | {"session": "boom"}).encode(),
    ],
)  # fmt: skip
def test_what_is_no_hint_is_answered_and_the_next_one_is_heard(line, bad):
    """Nothing that comes in ends the door, nor the connection."""
    line.sendall(bad + b"\n" + json.dumps(HINT).encode() + b"\n")
    first, second = answers(line, 2)
    assert ("failed", "applied") == (first["outcome"], second["outcome"])


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd\n", "..", ".", "a/b", "a\\b", "\x00", "a\n", "%2e%2e%2fx", "\u2025\uff0fx", "run-\uff17", "a\u2028b", "x" * 10_000],
)  # fmt: skip
def test_hostile_names_come_in_as_digests(line, heard, name):
    """No session is a path, a line break, nor another one's look-alike."""
    line.sendall(json.dumps(HINT | {"session": name}).encode() + b"\n")
    answers(line)
    assert heard[0].session.startswith("x-")
    assert 34 == len(heard[0].session)


def test_a_line_without_end_is_hung_up_on(line, door):
    """After 16 KiB; others go on."""
    line.sendall(b"a" * 40_000)
    (answer,) = answers(line)
    assert "failed" == answer["outcome"]
    assert b"" == line.recv(10)
    assert {"hints": 0} == asked(door.path)


def test_answers_that_nobody_reads_are_bounded(door, monkeypatch):
    """Whoever asks and never reads is hung up on; the door's memory does not grow with it."""
    monkeypatch.setattr(doors, "_MOST_UNREAD_BYTES", 4096)
    with socket.socket(socket.AF_UNIX) as greedy:
        greedy.connect(str(door.path))
        greedy.settimeout(5)
        text = json.dumps({"v": "agentkv.ask/1"}).encode() + b"\n"
        with pytest.raises(OSError):
            for _ in range(200_000):
                greedy.sendall(text * 50)
    assert {"hints": 0} == asked(door.path)


def test_the_quietest_connection_gives_way_when_there_are_too_many(door, monkeypatch):
    """A client that keeps opening connections locks nobody out."""
    monkeypatch.setattr(doors, "MOST_CONNECTIONS", 4)
    lines = []
    try:
        for _ in range(12):
            line = socket.socket(socket.AF_UNIX)
            line.connect(str(door.path))
            lines.append(line)
        assert {"hints": 0} == asked(door.path)
        assert len(door._lines) <= 5
    finally:
        for line in lines:
            line.close()


def test_a_dead_socket_is_taken_over_a_living_one_is_not(socket_path, heard):
    """An engine that was killed leaves its file; two engines want two sockets."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path))
    door = Door(socket_path, hear=lambda _: ("applied", ""), state=dict)
    with pytest.raises(ConfigError, match="another engine"):
        Door(socket_path, hear=lambda _: ("applied", ""), state=dict)
    assert {} == asked(socket_path)
    door.close()
    door.close()


def test_what_is_no_socket_is_left_alone(socket_path):
    """A file of somebody's is never removed."""
    socket_path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        Door(socket_path, hear=lambda _: ("applied", ""), state=dict)
    assert "mine" == socket_path.read_text()


def test_the_tick_comes_when_it_asked_to_be_called_and_survives_its_own_failures(socket_path):
    """A timer without a thread of its own."""
    times = []

    def tick():
        times.append(time.monotonic())
        if len(times) == 2:
            raise RuntimeError("once")
        return 0.02 if len(times) < 4 else None

    door = Door(socket_path, hear=lambda _: ("applied", ""), state=dict, tick=tick)
    try:
        ends = time.monotonic() + 5
        while len(times) < 4 and time.monotonic() < ends:
            time.sleep(0.01)
        assert times[1] - times[0] >= 0.015
        assert times[2] - times[1] >= 0.9  # a failure is not asked for again at once
    finally:
        door.close()


def test_the_caller_opens_anew_when_the_engine_was_restarted(socket_path):
    """And says what is wrong when nobody is there."""
    caller = DoorCaller(socket_path)
    with pytest.raises(Unreachable):
        caller.state()
    for _ in range(2):
        door = Door(socket_path, hear=lambda _: ("applied", ""), state=lambda: {"a": 1})
        assert {"a": 1} == caller.state()
        door.close()
        time.sleep(0.01)
    with pytest.raises(Unreachable):
        caller.say("{}", 0.2)
    caller.close()


@pytest.mark.parametrize("said", [b"", b"<html>\n", b"[]\n", b'{"v":"other"}\n', b"x" * 400_000, b"slow"])
def test_an_answer_that_is_none_is_unreachable_in_time(socket_path, said):
    """Whatever listens there: it hangs, talks without end, or says something else."""
    import threading

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_path))
    listener.listen(4)

    def serve():
        for _ in range(2):
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                try:
                    line.recv(1000)
                    line.sendall(said)
                    if said == b"slow":
                        time.sleep(0.6)
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    caller = DoorCaller(socket_path)
    began = time.monotonic()
    with pytest.raises(Unreachable):
        caller.say(json.dumps(HINT), 0.3)
    assert time.monotonic() - began < 2
    caller.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)
