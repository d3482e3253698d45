"""Chats with tools through the whole engine: what is shown, what is called, and why it ended."""

import pytest

from agentkv.core.message import Message, ToolSpec
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.errors import TemplateRejected

TOOLS = (ToolSpec(name="grep", parameters={"type": "object"}),)
CALL = '<tool_call>{"name": "grep", "arguments": {"q":  "é"}}</tool_call>'


def _chat(*turns, task="t", forced=None, tools=TOOLS, **sampling):
    return Request(
        messages=turns, tools=tools, forced_ids=forced, sampling=Sampling(**sampling), caller=Caller(task=task)
    )


USER = Message(role="user", content="Find é.")


def _forced(tiny, text):
    return (*tiny.ids(text), 257)


def test_a_call_is_taken_out_of_the_text_and_ends_the_turn(tiny, start):
    """The text before it streams; the call comes whole, with an id of its own."""
    engine = start()
    stream = engine.submit(_chat(USER, forced=_forced(tiny, f"I look. {CALL}")))
    shown = "".join(chunk.text for chunk in stream)
    generation = stream.result()
    (call,) = generation.tool_calls
    assert ("I look. ", "I look. ") == (shown, generation.text)
    assert f"I look. {CALL}" == generation.raw
    assert ("grep", '{"q":  "é"}', "tool_calls") == (call.name, call.arguments, generation.finish_reason)


def test_ids_of_calls_are_unique(tiny, start):
    """Over turns and over calls of one turn (E15)."""
    engine = start()
    ids = [
        call.id
        for _ in range(2)
        for call in engine.submit(_chat(USER, forced=_forced(tiny, CALL * 3))).result(60).tool_calls
    ]
    assert 6 == len(set(ids))


@pytest.mark.parametrize("cut", [1, 11, 30, 60])
def test_a_call_that_max_tokens_cuts_is_text(tiny, start, cut):
    """The reason is the length; nobody runs half a call (E16)."""
    engine = start()
    generation = engine.submit(_chat(USER, forced=_forced(tiny, CALL), max_tokens=cut)).result(60)
    shown = CALL.encode()[:cut].decode()
    assert ("length", (), shown) == (generation.finish_reason, generation.tool_calls, generation.text)
    whole = engine.submit(_chat(USER, forced=_forced(tiny, CALL), max_tokens=len(tiny.ids(CALL)))).result(60)
    assert 1 == len(whole.tool_calls)


def test_without_tools_a_tag_is_text(tiny, start):
    """Nobody offered a tool, so nothing is called."""
    engine = start()
    generation = engine.submit(_chat(USER, forced=_forced(tiny, CALL), tools=())).result(60)
    assert (CALL, (), "stop") == (generation.text, generation.tool_calls, generation.finish_reason)


def test_a_tool_loop_reuses_all_of_its_own_turns(tiny, start):
    """Five turns, replayed with their calls: each prompt extends the last, and its KV is found again (E4, K19)."""
    engine = start(blocks=128)
    turns = [Message(role="system", content="Be brief."), USER]
    known = 0
    for number in range(5):
        answer = f'I try {number}.\n<tool_call>{{"name":"grep", "arguments":{{"q":"\\n"}} }}</tool_call>'
        generation = engine.submit(_chat(*turns, forced=_forced(tiny, answer))).result(60)
        assert known == generation.usage.cached_tokens
        known = generation.usage.input_tokens + generation.usage.output_tokens - 1
        turns += [
            Message(role="assistant", content=generation.text, tool_calls=generation.tool_calls),
            Message(role="tool", content=f"nothing {number}", tool_call_id=generation.tool_calls[0].id),
        ]
    assert "t#1" == generation.session


def test_empty_and_missing_assistant_text_are_the_same(start):
    """A turn that only calls tools has content ""; all spellings give the same prompt (E3)."""
    engine = start()
    turns = (USER, Message(role="assistant", content=""), USER)
    assert engine.count_tokens(_chat(*turns)) == engine.count_tokens(_chat(USER, Message(role="assistant"), USER))


def test_counted_tokens_are_those_that_are_sent(tiny, start):
    """Before and after the call, chat or not."""
    engine = start()
    request = _chat(USER, max_tokens=2)
    assert engine.count_tokens(request) == engine.submit(request).result(60).usage.input_tokens
    assert 0 == engine.count_tokens(Request(prompt="abc")) - 3


def test_a_template_that_refuses_costs_nothing(start, save_tiny, tmp_path):
    """The model's own words, no session, and the next call works (E1)."""
    from agentkv.engine.local.engine import LocalEngine
    from agentkv.engine.local.loader import load_model

    template = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}<|im_start|>"
    loaded = load_model(str(save_tiny(tmp_path, template=template)), device="cpu", dtype="float32")
    with LocalEngine(loaded, device_memory=32 * loaded.geometry.block_bytes, host_memory=0) as engine:
        with pytest.raises(TemplateRejected, match="one message only"):
            engine.submit(_chat(USER, USER))
        assert 0 == engine.stats()["sessions"]
        assert engine.submit(_chat(USER, tools=(), max_tokens=2)).result(60).token_ids


def test_branches_of_a_task_have_sessions_of_their_own(start, ask):
    """Two sub-agents at once, then each goes on with its own; the last one is remembered per branch."""
    engine = start()
    first = engine.submit(ask("a" * 40, 4, task="t", branch="a"))
    second = engine.submit(ask("b" * 40, 4, task="t", branch="b"))
    sessions = [stream.result(60).session for stream in (first, second)]
    again = engine.submit(ask("b" * 40 + second.result().text + "!", 4, task="t", branch="b")).result(60)
    assert 2 == len(set(sessions))
    assert sessions[1] == again.session
    assert sessions == [engine.last_session(Caller(task="t", branch=branch)) for branch in "ab"]
    assert engine.last_session(Caller(task="t", branch="c")) is None
    named = engine.submit(ask("c", 2, task="t", session="mine")).result(60)
    assert "mine" == named.session == engine.last_session(Caller(task="t"))


def test_forgotten_sessions_do_not_pile_up(start, ask):
    """A task that never ends remembers its latest sessions only (K22)."""
    engine = start()
    for number in range(100):
        engine.submit(ask(f"{number} is the number", 1, task="endless")).result(60)
    assert engine.stats()["sessions"] <= 64
    assert engine.stats()["kv"]["sessions"] <= 64
