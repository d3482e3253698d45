"""Streams that nobody reads to their end: one line on the bill, with the prompt and what was really generated."""

import threading

import pytest

from agentkv import AgentKV, Message, Request, ScriptedEngine

WORDS = "one two three four five six seven eight"
ASK = Request(messages=(Message(role="user", content="count to eight please"),))


class Gate:
    """Lets a scripted answer through word by word."""

    def __init__(self):
        self.open = threading.Semaphore(0)

    def __call__(self, _request, _number):
        self.open.acquire(timeout=0.3)

    def let(self, words):
        for _ in range(words):
            self.open.release()


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def kv(gate):
    with AgentKV.with_engine(ScriptedEngine([WORDS], before_chunk=gate)) as made:
        yield made


def lines(kv):
    prompt = kv.engine.count_tokens(ASK)
    return [(call.status, call.usage.input_tokens - prompt, call.usage.output_tokens) for call in kv.report("t").calls]


def read(stream, words):
    got = iter(stream)
    for _ in range(words):
        next(got)


def closed(kv, gate, words):
    """The reader has enough."""
    with kv.submit(ASK) as stream:
        gate.let(words)
        read(stream, words)


def cancelled(kv, gate, words):
    """Somebody else stops it."""
    stream = kv.submit(ASK)
    gate.let(words)
    read(stream, words)
    stream.cancel()


def raised(kv, gate, words):
    """The reader fails over what it read."""
    with pytest.raises(ZeroDivisionError), kv.submit(ASK) as stream:
        gate.let(words)
        read(stream, words)
        raise ZeroDivisionError


def through_a_client(kv, gate, words):
    """An OpenAI client closes its response; its first chunk holds no word."""
    answer = kv.openai().chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "count to eight please"}], stream=True
    )
    gate.let(words)
    seen = ""
    while len(seen.split()) < words:
        seen += next(answer).choices[0].delta.content or ""
    answer.close()


@pytest.mark.parametrize("words", [0, 1, 2, 5, 7])
@pytest.mark.parametrize("give_up", [closed, cancelled, raised, through_a_client])
def test_a_stream_that_is_given_up_is_billed_for_what_was_generated(kv, gate, give_up, words):
    """After any number of words, in any way: once, flagged, to the token."""
    with kv.task("t", final=False):
        give_up(kv, gate, words)
    threading.Event().wait(0.05)
    gate.let(9)
    for _ in range(100):
        if lines(kv):
            break
        threading.Event().wait(0.02)
    assert [("aborted", 0, words)] == lines(kv)


def test_a_stream_that_nobody_reads_but_nobody_stops_is_billed_whole(kv, gate):
    """The engine wrote it all."""
    with kv.task("t", final=False):
        stream = kv.submit(ASK)
        gate.let(9)
        next(iter(stream))
        stream.result(20)
    assert [("ok", 0, 8)] == lines(kv)
