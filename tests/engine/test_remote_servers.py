"""The remote engine against servers that differ from the standard, fail, hang or say too little."""

from __future__ import annotations

import logging

import pytest

from agentkv.core.message import Message, ToolCall
from agentkv.core.task import Caller
from agentkv.core.usage import Usage
from agentkv.engine.base import Request, Sampling
from agentkv.errors import Closed, GenerationCancelled, RemoteError

KEY = "sk-very-secret-key"


def chunk(delta=None, finish=None, **more) -> dict:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "x", "object": "chat.completion.chunk", "choices": choices, **more}


SAID = [chunk({"content": "one"}), chunk({"content": " two"}), chunk({}, "stop")]
REPORTED = chunk(usage={"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11})


def ask(text: str = "hello there", **sampling) -> Request:
    return Request(
        messages=(Message(role="user", content=text),), caller=Caller(task="t"), sampling=Sampling(**sampling)
    )


def test_cancel_before_the_first_byte_closes_the_connection(remote_of, peculiar, until):
    """During a long prefill too."""
    server = peculiar("hang")
    stream = remote_of(server).submit(ask())
    until(lambda: server.bodies)
    stream.cancel()
    with pytest.raises(GenerationCancelled):
        stream.result(20)
    assert server.hung_up.wait(5)


def test_cancel_at_once_and_in_the_queue_is_fine(remote_of, peculiar, until):
    """A call that has not begun never goes out."""
    server = peculiar("hang", SAID)
    remote = remote_of(server, max_parallel=1)
    first = remote.submit(ask())
    until(lambda: server.bodies)
    queued = remote.submit(ask())
    queued.cancel()
    third = remote.submit(ask())
    first.cancel()
    assert "one two" == third.result(20).text
    assert 2 == len(server.bodies)
    assert third.result().timing.queued_s > 0


def test_a_call_that_was_never_sent_has_spent_nothing(remote_of, peculiar, until):
    """Cancelled before the engine's thread came to it, or while it waited for its turn: no server read it."""
    server = peculiar("hang")
    remote = remote_of(server, max_parallel=1)
    first = remote.submit(ask())
    until(lambda: server.bodies)
    for _ in range(50):
        stream = remote.submit(ask())
        stream.cancel()
        assert Usage() == stream.spent().usage
    assert first.spent().usage.input_tokens
    first.cancel()
    assert 1 == len(server.bodies)


def test_missing_usage_is_counted_here_and_said_so(remote_of, peculiar):
    """A server that streams no usage does not make a bill of zero."""
    remote = remote_of(peculiar(SAID, [*SAID, chunk(usage={"prompt_tokens": 0, "completion_tokens": 0})]), count=len)
    for _ in range(2):
        generation = remote.submit(ask("x" * 100)).result(20)
        assert generation.estimated
        assert Usage(input_tokens=108, output_tokens=7, calls=1) == generation.usage
    assert 2 == remote.stats()["estimated_calls"]


def test_server_that_rejects_the_usage_question_is_asked_once_without(remote_of, peculiar):
    """The rejection is remembered, and the answers come."""
    server = peculiar(SAID, SAID, rejects="stream_options")
    remote = remote_of(server)
    assert ["one two"] * 2 == [remote.submit(ask()).result(20).text for _ in range(2)]
    assert [True, False, False] == ["stream_options" in body for body in server.bodies]


def test_usage_question_is_kept_after_a_bad_request_for_another_reason(remote_of, peculiar):
    """A 400 that has nothing to do with it neither hides its own message nor ends the bills."""
    server = peculiar(
        (400, {"error": {"message": "too long"}}), (400, {"error": {"message": "other"}}), [*SAID, REPORTED]
    )
    remote = remote_of(server)
    with pytest.raises(RemoteError, match="too long"):
        remote.submit(ask()).result(20)
    generation = remote.submit(ask()).result(20)
    assert (False, 9) == (generation.estimated, generation.usage.input_tokens)
    server.replies = [(400, {"error": {"message": "too long again"}})]
    with pytest.raises(RemoteError, match="too long again"):
        remote.submit(ask()).result(20)
    assert 4 == len(server.bodies)


def test_only_what_was_asked_for_is_sent(remote_of, peculiar):
    """Plain endpoints reject fields they don't know: defaults stay at home."""
    server = peculiar([*SAID, REPORTED], [*SAID, REPORTED])
    remote = remote_of(server, max_tokens_field="max_completion_tokens")
    remote.submit(ask()).result(20)
    remote.submit(ask(max_tokens=5)).result(20)
    assert {"model", "messages", "stream", "stream_options", "temperature"} == server.bodies[0].keys()
    assert 5 == server.bodies[1]["max_completion_tokens"]


def parts(*calls) -> list[dict]:
    return [chunk({"tool_calls": [call]}) for call in calls]


@pytest.mark.parametrize(
    "pieces",
    [
        parts(
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}},
            {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{"}},
            {"index": 0, "function": {"arguments": ": 1}"}},
            {"index": 1, "function": {"arguments": "}"}},
        ),
        parts(
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"index": 0, "id": "b", "function": {"name": "g", "arguments": "{"}},
            {"index": 0, "function": {"arguments": "}"}},
        ),
        parts(
            {"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "b", "function": {"name": "g", "arguments": "{"}},
            {"function": {"arguments": "}"}},
        ),
    ],
    ids=["interleaved by index", "every index 0", "no index"],
)
@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
def test_tool_call_pieces_are_put_together(remote_of, pieces, finish, peculiar):
    """By index as the standard says, and right where servers get the index wrong."""
    generation = remote_of(peculiar([*pieces, chunk({}, finish), REPORTED])).submit(ask()).result(20)
    expected = (ToolCall(id="a", name="f", arguments='{"x": 1}'), ToolCall(id="b", name="g", arguments="{}"))
    assert (expected, "tool_calls") == (generation.tool_calls, generation.finish_reason)


def test_call_cut_by_the_token_limit_is_no_call(remote_of, peculiar):
    """Half an argument must not be acted on; the whole call before it stands."""
    pieces = parts(
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"index": 1, "id": "b", "function": {"name": "g", "arguments": '{"path": "/imp'}},
    )
    generation = remote_of(peculiar([*pieces, chunk({}, "length"), REPORTED])).submit(ask()).result(20)
    assert ("length", ["a"]) == (generation.finish_reason, [call.id for call in generation.tool_calls])


def test_answer_without_model_name_carries_ours(remote_of, peculiar):
    """A bill needs a name."""
    assert "scripted" == remote_of(peculiar([*SAID, REPORTED])).submit(ask()).result(20).model
    named = [{**each, "model": "their-name"} for each in SAID]
    assert "their-name" == remote_of(peculiar([*named, REPORTED])).submit(ask()).result(20).model


def test_cached_tokens_beyond_the_input_are_cut(remote_of, peculiar):
    """A server's wrong sum is no reason to lose the answer."""
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}}
    generation = remote_of(peculiar([*SAID, chunk(usage=usage)])).submit(ask()).result(20)
    assert Usage(input_tokens=5, cached_tokens=5, output_tokens=1, calls=1) == generation.usage


def test_stream_that_breaks_off_is_an_error(remote_of, peculiar):
    """Half an answer never passes for a whole one."""
    stream = remote_of(peculiar(SAID[:1])).submit(ask())
    with pytest.raises(RemoteError, match="broke off"):
        stream.result(20)
    assert ["one"] == [stream._chunks[0].text]


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_errors_carry_the_status_and_the_servers_words(remote_of, status, peculiar):
    """What the server said, where, and with which status."""
    remote = remote_of(peculiar(*[(status, {"error": {"message": "because"}})] * 2))
    with pytest.raises(RemoteError, match="because") as caught:
        remote.submit(ask()).result(20)
    assert status == caught.value.status
    assert "127.0.0.1" in str(caught.value)
    assert 1 == remote.stats()["failed"]


def test_error_event_in_the_stream_is_an_error(remote_of, peculiar):
    """After the head there is no status any more."""
    remote = remote_of(peculiar([SAID[0], {"error": {"message": "out of memory"}}]))
    with pytest.raises(RemoteError, match="out of memory"):
        remote.submit(ask()).result(20)


def test_nobody_there_is_an_error_without_a_status(remote_of, peculiar):
    """A refused connection."""
    remote = remote_of(peculiar(), base_url="http://127.0.0.1:9/v1")
    with pytest.raises(RemoteError) as caught:
        remote.submit(ask()).result(20)
    assert caught.value.status is None


def test_slow_server_times_out(remote_of, peculiar):
    """The limit is the engine's own option."""
    remote = remote_of(peculiar("hang"), timeout_s=0.1)
    with pytest.raises(RemoteError, match=r"(?i)timed out"):
        remote.submit(ask()).result(20)


def test_key_is_sent_and_never_told(remote_of, monkeypatch, caplog, capfd, peculiar):
    """From the argument or the environment; not in errors, logs or repr."""
    caplog.set_level(logging.DEBUG)
    server = peculiar(*[(401, {"error": {"message": f"wrong key {KEY}"}})] * 2)
    remote = remote_of(server, api_key=KEY)
    with pytest.raises(RemoteError) as caught:
        remote.submit(ask()).result(20)
    assert f"Bearer {KEY}".encode() == server.headers[0][b"authorization"]
    assert "wrong key ***" in str(caught.value)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("agentkv")]
    assert KEY not in repr(remote) + repr(caught.value.__cause__) + str(remote.stats()) + str(ours)
    assert KEY not in "".join(capfd.readouterr())
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    remote = remote_of(server)
    with pytest.raises(RemoteError):
        remote.submit(ask()).result(20)
    assert b"Bearer from-the-environment" == server.headers[1][b"authorization"]


def test_close_ends_running_calls_and_refuses_new_ones(remote_of, peculiar, until):
    """The caller hears Closed, the server a hang-up; closing twice is fine."""
    server = peculiar("hang")
    remote = remote_of(server)
    stream = remote.submit(ask())
    until(lambda: server.bodies)
    remote.close()
    remote.close()
    with pytest.raises(Closed):
        stream.result(20)
    assert server.hung_up.wait(5)
    with pytest.raises(Closed):
        remote.submit(ask())
    assert 0 == remote.stats()["running"]
