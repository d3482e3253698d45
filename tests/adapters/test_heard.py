"""What the answers of people's own clients say of cached tokens: heard in passing, whole and streamed, or not at all."""

from __future__ import annotations

import asyncio
import gzip
import json

import openai
import pytest

from agentkv import AgentKV, ScriptedEngine
from agentkv.adapters.heard import HEAD_BYTES, TAIL_BYTES, Heard
from agentkv.adapters.llamacpp import LlamaCpp

MESSAGES = [{"role": "user", "content": "hello " * 500}]
USAGE = {
    "prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105, "prompt_tokens_details": {"cached_tokens": 96},
}  # fmt: skip
TIMINGS = {"cache_n": 96, "prompt_n": 4, "predicted_n": 5}
LONG = "a" * (HEAD_BYTES + TAIL_BYTES)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A loaded machine is slow to say what it is."""
    monkeypatch.setattr("agentkv.adapters.found.PROBE_S", 20.0)


def sse(*events):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7, 1000, 10**7])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (json.dumps({"usage": USAGE, "id": "c"}), (105, 96)),
        (json.dumps({"usage": USAGE, "id": "c"}, indent=2), (105, 96)),
        (json.dumps({"timings": TIMINGS}), (105, 96)),
        (json.dumps({"choices": [{"message": {"content": LONG}}], "usage": USAGE}), (105, 96)),
        (json.dumps({"choices": [{"message": {"content": json.dumps({"usage": {"prompt_tokens": 1}})}}]}), None),
        (sse({"choices": [{"delta": {"content": "ü" * 30}}]}, {"choices": [], "timings": TIMINGS}), (105, 96)),
        (sse({"type": "response.completed", "response": {"text": LONG, "usage": {
            "input_tokens": 100, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 0}}}}), (105, 0)),
        (sse(
            {"type": "message_start", "message": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 96}}},
            {"type": "content_block_delta", "delta": {"text": LONG}},
            {"type": "message_delta", "usage": {"output_tokens": 5}},
        ), (105, 96)),
        (json.dumps({"usage": {"prompt_tokens": 100, "completion_tokens": 5}}), (105, None)),
        (json.dumps({"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": None}}}), (105, None)),
        (json.dumps({"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": -7}}}), (105, None)),
        (json.dumps({"usage": None}), None),
        ('{"usage": {"prompt_tokens": 1', None),
        ('{"usage": ' + '{"a":' * 5000, None),
        ("<html>", None),
        ("", None),
        ("\x00\ud7ff\x80" * 9, None),
    ],
    ids=lambda value: repr(value)[:24] if isinstance(value, str) else "",
)  # fmt: skip
def test_an_answer_says_how_much_was_cached(text, told, size):
    """In whatever pieces it comes; what is not said is not made up, and a text about usage is none."""
    heard, body = Heard(), text.encode()
    for start in range(0, len(body), size):
        heard.take(body[start : start + size])
        assert heard.held <= HEAD_BYTES + TAIL_BYTES + max(size, 0)
    usage = heard.usage()
    assert told == (None if usage is None else (usage.tokens, usage.cached_tokens))


# -- on a server


@pytest.fixture
def ended(monkeypatch):
    """What the adapter is told of each call that is over."""
    told, before = [], LlamaCpp.ended

    def noted(self, session, *, tokens, cached_tokens):
        told.append((session, tokens, cached_tokens))
        before(self, session, tokens=tokens, cached_tokens=cached_tokens)

    monkeypatch.setattr(LlamaCpp, "ended", noted)
    return told


@pytest.fixture
def kv():
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as made:
        yield made


def answers(llama, **report):
    """The server's chats report this."""
    message = {"role": "assistant", "content": "ok"}
    llama.routes["POST /v1/chat/completions"] = lambda _: (
        200,
        {
            "id": "c", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], **report,
        },
    )  # fmt: skip


def chat(kv, llama, *, asynchronous=False, stream=False):
    shared = {"base_url": llama.url, "api_key": "k", "max_retries": 0}
    if not asynchronous:
        with openai.OpenAI(http_client=kv.http_client(), **shared) as client:
            answer = client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
            return list(answer) if stream else answer

    async def run():
        async with openai.AsyncOpenAI(http_client=kv.async_http_client(), **shared) as client:
            answer = await client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
            return [chunk async for chunk in answer] if stream else answer

    return asyncio.run(run())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("report", [{"usage": USAGE}, {"timings": TIMINGS}], ids=["usage", "timings"])
def test_the_adapter_hears_what_a_whole_answer_says(kv, llama, ended, report, asynchronous):
    """The client reads the answer as ever."""
    answers(llama, **report)
    with kv.task("a", final=False):
        assert "ok" == chat(kv, llama, asynchronous=asynchronous).choices[0].message.content
    assert [("a", 105, 96)] == ended


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_adapter_hears_what_a_stream_says(kv, llama, ended, asynchronous):
    """In its last chunks, which pass as they come."""
    with kv.task("a", final=False):
        chunks = chat(kv, llama, asynchronous=asynchronous, stream=True)
    ((session, tokens, cached),) = ended
    assert ("a", None) == (session, cached)  # this one tells its usage, and nothing of a cache
    assert chunks[-1].usage.total_tokens == tokens


def test_a_server_that_restarted_is_noticed_by_the_next_call(kv, llama):
    """Its slots are empty: what was believed to be in them is not believed any more."""
    answers(llama, usage=USAGE)
    with kv.task("a", final=False):
        chat(kv, llama)
    with kv.task("b", final=False):
        chat(kv, llama)
    (way,) = kv._doors.ways()._ways.values()
    pool = way.found._adapter._pool
    assert all(held.sure for held in pool.sessions.values())
    answers(llama, usage=USAGE | {"prompt_tokens_details": {"cached_tokens": 0}})
    with kv.task("a", final=False):
        chat(kv, llama)
    assert [False] == [held.sure for session, held in pool.sessions.items() if session == "b"]


def test_a_packed_stream_and_a_refusal_say_nothing(kv, llama, ended, monkeypatch):
    """They reach the client as they are."""
    packed = gzip.compress(sse({"choices": [], "usage": USAGE}).encode())

    def raw(http, _status, _kind, _body):
        http.send_response(200)
        http.send_header("content-type", "text/event-stream")
        http.send_header("content-encoding", "gzip")
        http.send_header("content-length", str(len(packed)))
        http.end_headers()
        http.wfile.write(packed)

    with kv.task("a", final=False):
        chat(kv, llama)  # it is known from now on
        ended.clear()
        monkeypatch.setattr("agentkv.adapters.strict._raw", raw)
        assert 105 == chat(kv, llama, stream=True)[-1].usage.total_tokens
        monkeypatch.undo()
    assert [("a", None)] == [(session, cached) for session, _, cached in ended]
