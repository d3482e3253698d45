"""The app's endpoints: shapes of replies, usage, errors and who is calling."""

from __future__ import annotations

import json
import threading

import pytest

from agentkv import log
from agentkv.core.message import ToolCall
from agentkv.core.task import Caller
from agentkv.engine.scripted import Reply
from agentkv.engine.stream import Stream
from agentkv.errors import BudgetExceeded, Closed, RemoteError, RequestInvalid, TemplateRejected

CALLS = tuple(ToolCall(id=f"call_{n}", name="read", arguments=f'{{"path":  "{n}.py"}}') for n in range(3))
USER = {"role": "user", "content": "hello there"}


def events(response) -> list[dict]:
    """The chunks of a streamed reply; it must end with [DONE], once."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert ("[DONE]", 1) == (lines[-1], lines.count("[DONE]"))
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks: list[dict]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_chat_answers_in_openai_shape(door_of):
    """One choice, the text, why it ended, and the usage with its cached part."""
    door = door_of("Hello to you", "again")
    body = door.chat().json()
    assert "chat.completion" == body["object"]
    assert body["id"].startswith("chatcmpl-")
    assert [
        {
            "index": 0,
            "logprobs": None,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Hello to you", "refusal": None},
        }
    ] == body["choices"]
    assert {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    } == body["usage"]
    assert 3 == door.chat().json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("answer", ["Hello to you", "", Reply(text="I look.", tool_calls=CALLS), CALLS[0]], ids=str)
def test_stream_says_what_the_whole_reply_says(door_of, answer):
    """Text, calls, finish reason and usage are equal on both routes."""
    door = door_of(answer, answer)
    streamed = events(door.chat(stream=True, stream_options={"include_usage": True}))
    door.engine.finish_task(Caller().task)
    whole = door.chat().json()
    message = whole["choices"][0]["message"]
    assert (message["content"] or "") == joined(streamed)
    assert whole["choices"][0]["finish_reason"] == streamed[-2]["choices"][0]["finish_reason"]
    deltas = [d for chunk in streamed[:-1] for d in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert list(range(len(deltas))) == [delta.pop("index") for delta in deltas]
    assert message.get("tool_calls", []) == deltas
    assert whole["usage"] == streamed[-1]["usage"]


def test_tool_call_arguments_pass_byte_for_byte(door_of):
    """The model's own spacing is kept, and a turn of calls only has null content."""
    message = door_of(CALLS[0]).chat().json()["choices"][0]["message"]
    assert message["content"] is None
    assert '{"path":  "0.py"}' == message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("ask", [{}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}], ids=str)
def test_usage_is_not_streamed_unasked(door_of, ask):
    """Without include_usage no chunk has usage and each has a choice."""
    chunks = events(door_of("one two").chat(stream=True, **ask))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_usage_is_streamed_once_and_last_when_asked(door_of):
    """Exactly one chunk without choices, at the end; the others say null."""
    chunks = events(door_of("one two").chat(stream=True, stream_options={"include_usage": True}))
    assert [None] * (len(chunks) - 1) == [chunk["usage"] for chunk in chunks[:-1]]
    assert ([], 2) == (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"])


def test_completions_take_a_raw_prompt(door_of):
    """Whole and streamed; 16 tokens unless more are asked for, as OpenAI has it."""
    words = " ".join(f"w{n}" for n in range(20))
    door = door_of(words, words, "short")
    body = door.http.post("/v1/completions", json={"model": "scripted", "prompt": "once upon"}).json()
    assert ("text_completion", "length", 16) == (
        body["object"],
        body["choices"][0]["finish_reason"],
        body["usage"]["completion_tokens"],
    )
    assert "once upon" == door.engine.requests[0].prompt
    ask = {"model": "scripted", "prompt": ["once upon"], "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(door.http.post("/v1/completions", json=ask))
    assert body["choices"][0]["text"] == "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert 16 == chunks[-1]["usage"]["completion_tokens"]
    short = door.http.post("/v1/completions", json={"model": "scripted", "prompt": "x", "max_tokens": 100}).json()
    assert "stop" == short["choices"][0]["finish_reason"]


def test_models_health_and_token_counts(door_of):
    """The small endpoints."""
    door = door_of()
    listed = door.http.get("/v1/models").json()
    assert ["scripted"] == [card["id"] for card in listed["data"]]
    assert listed["data"][0] == door.http.get("/v1/models/scripted").json()
    assert 404 == door.http.get("/v1/models/other").status_code
    assert {"status": "ok", "model": "scripted", "calls": 0} == door.http.get("/health").json()
    assert {"count": 4} == door.http.post("/tokenize", json={"model": "scripted", "messages": [USER]}).json()
    assert {"count": 2} == door.http.post("/tokenize", json={"model": "scripted", "prompt": "a b"}).json()
    assert 400 == door.http.post("/tokenize", json=[]).status_code


def test_wrong_path_and_method_have_the_error_shape(door_of):
    """404 and 405 too."""
    door = door_of()
    for status, response in ((404, door.http.get("/v2")), (405, door.http.get("/v1/completions"))):
        assert status == response.status_code
        assert {"message", "type", "param", "code"} == response.json()["error"].keys()


BUDGET = BudgetExceeded("task t: 12 of 10 tokens", task="t", limit="tokens", allowed=10, used=8, asked=4)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BUDGET, (429, "budget_exceeded", "tokens")),
        (TemplateRejected("roles must alternate"), (400, "template_rejected", "messages")),
        (RequestInvalid("no", param="tools", code="x"), (400, "x", "tools")),
        (RemoteError("busy", status=429), (429, "remote_error", None)),
        (RemoteError("no such key", status=401), (502, "remote_error", None)),
        (RemoteError("gone"), (502, "remote_error", None)),
        (Closed("closed"), (503, "closed", None)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_submit_become_statuses(door_of, error, expected, stream):
    """Raised before anything starts, they are statuses, streaming or not; the client is told not to retry."""

    def refusing(engine):
        def submit(request):
            raise error

        return submit

    response = door_of(submit=refusing).chat(stream=stream)
    body = response.json()["error"]
    assert (*expected, str(error)) == (response.status_code, body["code"], body["param"], body["message"])
    assert (response.status_code == 400) == ("x-should-retry" not in response.headers)


def test_too_long_prompt_names_both_numbers(door_of):
    """400 context_length_exceeded."""
    response = door_of("x", context_tokens=10).chat(max_tokens=7)
    assert (400, "context_length_exceeded") == (response.status_code, response.json()["error"]["code"])
    assert "11" in response.json()["error"]["message"]
    assert "10" in response.json()["error"]["message"]


def test_unforeseen_error_is_logged_and_told_without_its_inside(door_of):
    """500, and the secret stays in the log."""
    door = door_of(KeyError("secret path"))
    before = log.counters["server_call_failed"]
    response = door.chat()
    assert (500, "internal_error") == (response.status_code, response.json()["error"]["code"])
    assert "secret" not in response.text
    assert before + 1 == log.counters["server_call_failed"]


def test_error_in_the_middle_of_a_stream_is_an_event_and_no_done(door_of):
    """What was said stands, the error follows, and nothing pretends that the answer was whole."""

    def broken(engine):
        def submit(request):
            stream = Stream()
            inner = engine.submit(request)
            for chunk in inner:
                stream.push(chunk)
            stream.fail(RemoteError("the line broke"))
            return stream

        return submit

    lines = door_of("one two", submit=broken).chat(stream=True).text.split("\n\n")
    assert "the line broke" == json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in "".join(lines)
    assert '"content":" two"' in lines[-3]


def test_headers_name_the_task_and_the_session(door_of):
    """x-agentkv-task beats everything; UTF-8 is fine; x-agentkv-session joins a session."""
    door = door_of(*"xxx", identify=lambda: Caller(task="found", node="n"), caller=lambda: Caller(task="fallback"))
    body = {"model": "scripted", "messages": [USER]}
    door.http.post("/v1/chat/completions", json=body, headers={"x-agentkv-task": "Úkol 1".encode()})
    door.http.post("/v1/chat/completions", json=body, headers={"x-agentkv-session": "s-9"})
    first, second = door.engine.requests
    assert (Caller(task="Úkol 1"), None) == (first.caller, first.session)
    assert (Caller(task="found", node="n"), "s-9") == (second.caller, second.session)
    bad = door.http.post("/v1/chat/completions", json=body, headers={"x-agentkv-task": b"\xff"})
    assert (400, "x-agentkv-task") == (bad.status_code, bad.json()["error"]["param"])


def test_callers_nobody_knows_are_asked_for_and_else_unattributed(door_of):
    """Without header and transport, `caller()` decides; without it nobody is guessed."""
    door = door_of("x", caller=lambda: Caller(task="fallback"))
    door.chat()
    assert "fallback" == door.engine.requests[0].caller.task
    door = door_of("x")
    door.chat()
    assert Caller() == door.engine.requests[0].caller


def test_bad_requests_leave_a_running_stream_alone(door_of):
    """Ten bad requests during a good stream: it says what it says when alone."""
    gate = threading.Event()
    words = " ".join(f"w{n}" for n in range(50))
    door = door_of(words, before_chunk=lambda request, index: index < 5 or gate.wait(5))
    chunks: list[str] = []
    reader = threading.Thread(target=lambda: chunks.append(joined(events(door.chat(stream=True)))))
    reader.start()
    bad = [
        {"logit_bias": {"99999999": 300}},
        {"logit_bias": {"a": "b"}},
        {"stop": [str(n) for n in range(10_000)]},
        {"stop": ""},
        {"max_tokens": -1},
        {"max_tokens": "ten"},
        {"n": 0},
        {"temperature": [1]},
        {"messages": "hello"},
        {"seed": 2**70},
    ]
    assert [400] * 10 == [door.chat(**fields).status_code for fields in bad]
    gate.set()
    reader.join()
    assert [words] == chunks
