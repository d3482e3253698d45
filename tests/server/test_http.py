"""The server on a socket: addresses, draining, too much at once, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import threading
import time

import httpx2
import openai
import psutil
import pytest

from agentkv import AgentKV, ScriptedEngine
from agentkv.errors import ConfigError
from agentkv.server.http import bind
from agentkv.server.keys import Keys
from agentkv.server.origins import checked_origins

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hello there"}]}


class Gate:
    """Lets an engine say its first word and holds the others until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, request, index: int) -> None:
        if index > 0:
            assert self.open.wait(10), "nobody opened the gate"


def until(condition, within_s: float = 20) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.005)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_public_address_needs_a_key(host):
    """Refused before anything is bound, and the sentence says what to do."""
    if host == "192.0.2.1":
        with pytest.raises(ConfigError, match="cannot be used"):
            bind(host, 0, guarded=True)
    with pytest.raises(ConfigError, match="AGENTKV_API_KEY"):
        bind(host, 0, guarded=False)


def test_loopback_needs_none():
    """By number and by name."""
    for host in ("127.0.0.1", "localhost", "127.0.0.9"):
        bind(host, 0, guarded=False).close()
    bind("0.0.0.0", 0, guarded=True).close()


PAGE = "https://app.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-agentkv-task",
}


def test_no_page_of_another_origin_may_call_unless_it_is_named(scripted_place):
    """Nothing by default: no header lets a browser hand an answer to a script, and a preflight is refused."""
    place = scripted_place("x")
    answer = place.http.post("/v1/chat/completions", json=ASK, headers={"origin": PAGE})
    asked = place.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert (200, 405) == (answer.status_code, asked.status_code)
    assert not [name for one in (answer, asked) for name in one.headers if name.startswith("access-control")]


def test_a_named_origin_may_call_and_read_our_headers(scripted_place):
    """Preflights need no key, calls do; refusals can be read too; other origins get nothing. Streams as well."""
    keys = Keys.read(None, {"AGENTKV_API_KEY": "sk-page-1234"})
    place = scripted_place("x", "y", keys=keys, allow_origins=(PAGE, "http://[::1]:3000"))
    asked = place.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert (200, PAGE) == (asked.status_code, asked.headers["access-control-allow-origin"])
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    refused = place.http.post("/v1/chat/completions", json=ASK, headers={"origin": PAGE})
    assert (401, PAGE) == (refused.status_code, refused.headers["access-control-allow-origin"])
    known = {"origin": PAGE, "authorization": "Bearer sk-page-1234"}
    for stream in (False, True):
        answer = place.http.post("/v1/chat/completions", json={**ASK, "stream": stream}, headers=known)
        assert (200, PAGE) == (answer.status_code, answer.headers["access-control-allow-origin"])
        assert "x-agentkv-session" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    other = place.http.options("/v1/chat/completions", headers={**PREFLIGHT, "origin": "https://evil.example.com"})
    assert (400, False) == (other.status_code, "access-control-allow-origin" in other.headers)


@pytest.mark.parametrize(
    "origin",
    ["", "app.example.com", "https://app.example.com/", "https://app.example.com/x", "https://App.example.com", "null"],
)
def test_what_could_never_be_an_origin_is_refused(origin):
    """A browser sends no path and no slash: the server would allow nothing, silently."""
    with pytest.raises(ConfigError, match="is no origin"):
        checked_origins([origin])
    assert ("*", "http://localhost:3000") == checked_origins(["*", "http://localhost:3000", "*"])


def test_a_taken_port_is_a_sentence():
    """With the way out; so are ports that are none and hosts that nobody knows."""
    in_use = pytest.raises(ConfigError, match="in use; choose another one with --port")
    with socket.create_server(("127.0.0.1", 0)) as taken, in_use:
        bind("127.0.0.1", taken.getsockname()[1], guarded=False)
    with pytest.raises(ConfigError, match="port=70000"):
        bind("127.0.0.1", 70_000, guarded=False)
    with pytest.raises(ConfigError, match="no address of this machine"):
        bind("no-such-host.invalid", 0, guarded=False)


def test_draining_ends_what_runs_and_refuses_what_comes(scripted_place):
    """Health says so, new calls get 503 and a time to come again, the stream under way gets all of its words."""
    gate = Gate()
    place = scripted_place("one two three", before_chunk=gate)
    stream = iter(place.openai().chat.completions.create(**ASK, stream=True))
    assert ["", "one"] == [next(stream).choices[0].delta.content for _ in range(2)]
    place.server.stop()
    until(lambda: place.http.get("/health").status_code == 503)
    time.sleep(1.5)  # longer than sockets alone are waited for
    assert {"status": "draining", "model": "scripted", "calls": 1} == place.http.get("/health").json()
    refused = place.chat()
    assert (503, "draining") == (refused.status_code, refused.json()["error"]["code"])
    assert "1" == refused.headers["retry-after"]
    gate.open.set()
    assert [" two", " three"] == [c.choices[0].delta.content for c in stream if c.choices[0].delta.content]
    place.server.__exit__()
    with pytest.raises(httpx2.ConnectError):
        place.http.get("/health")


def test_a_drain_ends_at_its_deadline(scripted_place):
    """What has not ended by then is cancelled: the engine is told, the client sees a broken connection."""
    gate = Gate()
    place = scripted_place("one two three", before_chunk=gate, drain_s=0.2)
    stream = iter(place.openai().chat.completions.create(**ASK, stream=True))
    next(stream)
    began_s = time.monotonic()
    place.server.stop()
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    until(lambda: place.kv.engine.cancelled)
    gate.open.set()
    place.server.__exit__()
    assert time.monotonic() - began_s < 5


def test_more_calls_than_are_allowed_are_refused(scripted_place):
    """503 and a time to come again; when one ends, the next is taken."""
    gate = Gate()
    place = scripted_place("one two", "three", most_calls=1, before_chunk=gate)
    stream = iter(place.openai().chat.completions.create(**ASK, stream=True))
    next(stream)
    refused = place.chat()
    assert (503, "too_many_calls") == (refused.status_code, refused.json()["error"]["code"])
    assert 200 == place.http.get("/v1/models").status_code
    gate.open.set()
    list(stream)
    until(lambda: place.life.active == 0)
    assert 200 == place.chat().status_code


def test_a_body_that_is_too_long_is_refused(place_of):
    """413, and the server goes on."""
    place = place_of(AgentKV.with_engine(ScriptedEngine(["x"])))
    long = b'{"model": "scripted", "prompt": "' + b"x" * (65 << 20) + b'"}'
    response = place.http.post("/v1/completions", content=long)
    assert (413, "body_too_large") == (response.status_code, response.json()["error"]["code"])
    assert 200 == place.chat().status_code


def test_a_long_body_does_not_hold_up_a_stream(scripted_place):
    """It is read beside the loop: blocks of the loop are found by the gaps between a stream's words."""
    place = scripted_place(" ".join(f"w{n}" for n in range(200)), "x", latency_s=0.005)
    messages = [{"role": "user", "content": "x" * 50}] * 60_000
    body = json.dumps({"model": "scripted", "messages": messages, "unheard": 1}).encode()
    stream = iter(place.openai().chat.completions.create(**ASK, stream=True))
    next(stream)
    threads = []

    def look() -> None:
        threads.append({frame.f_code.co_name for frame in frames_of("agentkv-http")})

    sender = threading.Thread(target=lambda: place.http.post("/v1/chat/completions", content=body))
    sender.start()
    while sender.is_alive():
        look()
        time.sleep(0.002)
    sender.join()
    assert not any("read_messages" in names or "read_json" in names for names in threads)
    list(stream)


def frames_of(name: str) -> list:
    """The frames of the thread with that name."""
    ids = [thread.ident for thread in threading.enumerate() if thread.name == name]
    frame, frames = sys._current_frames().get(ids[0]), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def test_the_document_and_the_metrics_are_there(scripted_place):
    """OpenAPI 3.1; Prometheus' text with the call counted, and no task's name in it."""
    place = scripted_place("x")
    place.http.post("/v1/chat/completions", json=ASK, headers={"x-agentkv-task": "secret-task"})
    document = place.http.get("/openapi.json").json()
    assert "3.1.0" == document["openapi"]
    assert {"/v1/chat/completions", "/v1/responses", "/v1/agentkv/hints"} <= document["paths"].keys()
    metrics = place.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'agentkv_model_calls_total{model="scripted",status="ok"} 1.0' in metrics.text
    assert "secret-task" not in metrics.text


def test_the_socket_and_the_process_say_the_same(scripted_place):
    """One body through both doors: the same answer, usage, headers and errors."""
    place = scripted_place(*["Hello to you"] * 4)
    inside = place.kv.openai()
    outside = place.openai()
    for body in ({}, {"logprobs": True}):
        answers = [client.chat.completions.create(**ASK, **body).model_dump() for client in (inside, outside)]
        for answer in answers:
            answer.pop("id"), answer.pop("created"), answer["usage"].pop("prompt_tokens_details")
        assert answers[0] == answers[1]
    for bad in ({"n": 0}, {"temperature": "x"}, {"messages": []}, {"unheard": 1}, {"model": "other"}):
        told = []
        for client in (inside, outside):
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(**ASK | {k: v for k, v in bad.items() if k in ASK}, extra_body=bad)
            told.append((caught.value.status_code, caught.value.code, caught.value.param, caught.value.message))
        assert told[0] == told[1]


def footprint(place) -> tuple[int, int, int]:
    """Connections, descriptors and threads of this process; no block is pinned or anybody's alone."""
    process, device = psutil.Process(), place.kv.engine.stats()["kv"]["device"]
    assert (0, 0) == (device["pinned"], device["private"])
    return len(process.net_connections()), process.num_fds(), threading.active_count()


@pytest.mark.parametrize("seed", [1])
def test_hang_ups_at_any_point_leave_nothing_behind(engine_place, seed):
    """Streams and whole answers closed at random moments, malformed bodies between: blocks, threads, descriptors are back."""
    place = engine_place(blocks=128)
    model = place.kv.engine.model
    rng = random.Random(seed)

    async def one(client: httpx2.AsyncClient, number: int) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": f"call {number} " * rng.randrange(1, 20)}]}
        body |= {"max_tokens": rng.randrange(1, 40), "stream": rng.random() < 0.7}
        kind = rng.random()
        content = json.dumps(body).encode()
        if kind < 0.2:
            content = content[: rng.randrange(len(content))]
        try:
            async with asyncio.timeout(rng.uniform(0.001, 0.3) if 0.2 <= kind < 0.6 else 30):
                async with client.stream("POST", "/v1/chat/completions", content=content) as response:
                    async for _ in response.aiter_bytes():
                        pass
                    assert (400 if kind < 0.2 else 200) == response.status_code
        except TimeoutError:
            assert kind >= 0.2, "a bad body hangs"

    async def all_of_them() -> None:
        async with httpx2.AsyncClient(base_url=place.url, timeout=30, trust_env=False) as client:
            await asyncio.gather(*(one(client, number) for number in range(24)))

    place.chat()
    asyncio.run(all_of_them())
    until(lambda: place.life.active == 0 and not idle(place))
    time.sleep(0.3)
    before = footprint(place)
    for _ in range(3):
        asyncio.run(all_of_them())
    until(lambda: place.life.active == 0 and not idle(place))
    time.sleep(0.3)
    place.kv.engine.tiers.check()
    after = footprint(place)
    assert before[0] >= after[0] - 2
    assert before[1] >= after[1] - 3
    assert before[2] >= after[2] - 8  # the loop's pool of workers may still have grown; it is bounded
    place.kv.finish("unattributed")
    assert 128 == place.kv.engine.stats()["kv"]["device"]["free"]
    assert 200 == place.chat().status_code


def idle(place) -> bool:
    stats = place.kv.engine.stats()
    return bool(stats["running"] + stats["loading"] + stats["waiting"])


def test_32_streams_at_once_on_the_engine(engine_place):
    """Every stream gets its own answer, the same that it gets alone."""
    place = engine_place(blocks=512)
    model, results = place.kv.engine.model, {}

    async def one(client: openai.AsyncOpenAI, number: int) -> None:
        ask = [{"role": "user", "content": f"Number {number % 4}."}]
        text = ""
        async for chunk in await client.chat.completions.create(
            model=model, messages=ask, max_tokens=12, temperature=0, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        results[number] = text

    async def all_of_them() -> None:
        async with openai.AsyncOpenAI(base_url=f"{place.url}/v1", api_key="x", max_retries=0, timeout=200) as client:
            await asyncio.gather(*(one(client, number) for number in range(32)))

    asyncio.run(all_of_them())
    assert 32 == len(results)
    for number in range(4):
        assert 1 == len({results[n] for n in range(number, 32, 4)})


def test_two_event_loops_use_one_server(scripted_place):
    """And one AgentKV: clients on loops of their own, side by side."""
    place = scripted_place(*["hello"] * 40)
    errors: list[BaseException] = []

    def work() -> None:
        async def calls() -> None:
            outside = openai.AsyncOpenAI(base_url=f"{place.url}/v1", api_key="x", max_retries=0)
            async with place.kv.async_openai() as inside, outside:
                for client in (inside, outside) * 5:
                    assert "hello" == (await client.chat.completions.create(**ASK)).choices[0].message.content

        try:
            asyncio.run(calls())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == errors


@pytest.mark.parametrize("where", ["a thread", "the server's own loop"])
def test_closing_with_streams_under_way_ends_them_all(engine_place, where):
    """Wherever it comes from: every stream ends with a typed error event, no thread hangs, the server lives."""
    place = engine_place(blocks=256)
    model, lasts = place.kv.engine.model, []
    started = threading.Semaphore(0)

    def read() -> None:
        body = {"model": model, "messages": ASK["messages"], "max_tokens": 800, "stream": True, "seed": 1}
        with httpx2.stream("POST", f"{place.url}/v1/chat/completions", json=body, timeout=200) as response:
            lines = []
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 5:
                    started.release()
        lasts.append(next(line for line in reversed(lines) if line))

    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert started.acquire(timeout=30)
    if where == "a thread":
        place.kv.close()
    else:
        place.server._loop.call_soon_threadsafe(place.kv.close)
    for reader in readers:
        reader.join(30)
    ended = [json.loads(last.removeprefix("data: "))["error"]["code"] for last in lasts if "[DONE]" not in last]
    assert {"closed"} >= set(ended)
    assert 6 == len(lasts)
    assert ended, "none was under way any more: the test shows nothing"
    assert 503 == place.chat().status_code


def test_closing_the_engine_under_the_server_is_told(scripted_place):
    """Calls that come after are 503 and typed; the server itself lives."""
    place = scripted_place("x")
    place.kv.close()
    response = place.chat()
    assert (503, "closed") == (response.status_code, response.json()["error"]["code"])
    assert 200 == place.http.get("/health").status_code
