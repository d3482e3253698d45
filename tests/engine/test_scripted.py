"""The engine for users' tests: it answers from a script, and its bills look real."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest

from agentkv.clock import ManualClock
from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.core.residency import Action, Move, Outcome, Tier
from agentkv.core.task import Caller
from agentkv.core.usage import Usage
from agentkv.engine.base import Request, Sampling, TieredEngine
from agentkv.engine.scripted import Reply, ScriptedEngine
from agentkv.errors import Closed, ConfigError, GenerationCancelled, PromptTooLong, RequestInvalid

CALL = ToolCall(id="call_1", name="pytest", arguments='{"path": "tests"}')


def ask(text: str = "hello there", *, task: str = "t", branch: str = "", **sampling) -> Request:
    return Request(
        messages=(Message(role="user", content=text),),
        caller=Caller(task=task, branch=branch),
        sampling=Sampling(**sampling),
    )


@pytest.fixture
def engine_of():
    """Engines that are closed at the end of the test, which must leave no thread behind."""
    engines = []

    def make(*answers, **options) -> ScriptedEngine:
        engines.append(ScriptedEngine(answers, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    assert [] == [thread for thread in threading.enumerate() if thread.name == "agentkv-scripted"]


def test_answers_come_in_the_order_of_submission(engine_of):
    """One answer per call, in order, even when the results are read in another."""
    engine = engine_of("one", "two", "three")
    streams = [engine.submit(ask()) for _ in range(3)]
    assert ["three", "two", "one"] == [stream.result(20).text for stream in reversed(streams)]


def test_stream_comes_word_by_word_and_joins_to_the_text(engine_of):
    """Chunks are words with the blanks before them; nothing is lost at either end."""
    engine = engine_of("  two  words\nand a tail \n")
    stream = engine.submit(ask())
    chunks = [chunk.text for chunk in stream]
    assert ["  two", "  words", "\nand", " a", " tail", " \n"] == chunks
    generation = stream.result(20)
    assert "".join(chunks) == generation.text == generation.raw
    assert (6, 6, "stop") == (len(generation.token_ids), generation.usage.output_tokens, generation.finish_reason)


def test_callable_sees_the_request(engine_of):
    """An answer may be made from the request."""
    engine = engine_of(lambda request: request.messages[-1].content.upper())
    assert "HI" == engine.submit(ask("hi")).result(20).text


def test_exception_fails_the_call_and_not_the_engine(engine_of):
    """A scripted exception reaches that caller only."""
    engine = engine_of(KeyError("lost"), "fine")
    with pytest.raises(KeyError, match="lost"):
        engine.submit(ask()).result(20)
    assert "fine" == engine.submit(ask()).result(20).text


def test_scripted_refusal_is_raised_by_submit(engine_of):
    """RequestInvalid comes before anything is started, as from every engine."""
    engine = engine_of(RequestInvalid("no"), "fine")
    with pytest.raises(RequestInvalid, match="no"):
        engine.submit(ask())
    assert 0 == engine.stats()["calls"]


def test_script_that_has_ended_says_so(engine_of):
    """A call too many is refused with its number."""
    engine = engine_of("one")
    engine.submit(ask()).result(20)
    with pytest.raises(RequestInvalid, match="call 2 has no answer"):
        engine.submit(ask())


def test_endless_script_is_read_lazily():
    """itertools.repeat answers every call."""
    engine = ScriptedEngine(itertools.repeat("ok"))
    assert ["ok"] * 5 == [engine.submit(ask()).result(20).text for _ in range(5)]
    engine.close()


@pytest.mark.parametrize("answers", ["text", lambda request: "text"])
def test_one_answer_instead_of_a_list_is_a_mistake(answers):
    """A lone str would be read letter by letter; it is refused."""
    with pytest.raises(ConfigError, match=r"itertools\.repeat"):
        ScriptedEngine(answers)


def test_tool_calls_come_with_the_generation(engine_of):
    """Text first, then the calls, and the finish reason says so."""
    engine = engine_of(CALL, Reply(text="I look.", tool_calls=(CALL, replace(CALL, id="call_2"))))
    generation = engine.submit(ask()).result(20)
    assert ("", (CALL,), "tool_calls") == (generation.text, generation.tool_calls, generation.finish_reason)
    generation = engine.submit(ask()).result(20)
    assert ("I look.", 2) == (generation.text, len(generation.tool_calls))
    assert generation.usage.output_tokens > 2


def test_max_tokens_cuts_at_every_position_and_never_leaves_half_a_tool_call(engine_of):
    """Until the call is whole, the answer ends with `length` and holds no call."""
    reply = Reply(text="I look.", tool_calls=(CALL,))
    whole = engine_of(reply).submit(ask()).result(20)
    for limit in range(1, len(whole.token_ids)):
        cut = engine_of(reply).submit(ask(max_tokens=limit)).result(20)
        assert ("length", (), limit) == (cut.finish_reason, cut.tool_calls, cut.usage.output_tokens)
        assert whole.raw.startswith(cut.raw)
    full = engine_of(reply).submit(ask(max_tokens=len(whole.token_ids))).result(20)
    assert ("tool_calls", (CALL,)) == (full.finish_reason, full.tool_calls)


def test_stop_ends_the_text_before_the_first_stop_string(engine_of):
    """Over word borders too, in the stream as in the result; what follows is never said."""
    engine = engine_of(Reply(text="one two three four", tool_calls=(CALL,)))
    stream = engine.submit(ask(stop=("four", "o th")))
    assert "one tw" == "".join(chunk.text for chunk in stream)
    generation = stream.result(20)
    assert ("one tw", "stop", ()) == (generation.text, generation.finish_reason, generation.tool_calls)


def test_growing_context_is_cached_up_to_the_new_part(engine_of):
    """Turn two reuses turn one's prompt and answer; only the new message is computed."""
    engine = engine_of("first answer here", "second")
    one = engine.submit(ask("a b c")).result(20)
    messages = (
        Message(role="user", content="a b c"),
        Message(role="assistant", content=one.text),
        Message(role="user", content="d e"),
    )
    two = engine.submit(Request(messages=messages, caller=Caller(task="t"))).result(20)
    assert Usage(input_tokens=5, cached_tokens=0, output_tokens=3, calls=1) == one.usage
    # <user> a b c <assistant> first answer here | <user> d e <assistant>
    assert Usage(input_tokens=12, cached_tokens=8, output_tokens=1, calls=1) == two.usage


def test_tool_call_turn_is_reused_as_well(engine_of):
    """An assistant turn of tool calls, sent back as it was, is a cached prefix."""
    engine = engine_of(CALL, "done")
    one = engine.submit(ask("go")).result(20)
    messages = (
        Message(role="user", content="go"),
        Message(role="assistant", tool_calls=one.tool_calls),
        Message(role="tool", content="3 passed", tool_call_id="call_1"),
    )
    two = engine.submit(Request(messages=messages, caller=Caller(task="t"))).result(20)
    assert one.usage.total_tokens == two.usage.cached_tokens


def test_same_prompt_again_computes_its_last_token(engine_of):
    """A prompt is never cached whole: something has to yield the first output token."""
    engine = engine_of("x", "x")
    engine.submit(ask("a b c")).result(20)
    again = engine.submit(ask("a b c")).result(20)
    assert (5, 4) == (again.usage.input_tokens, again.usage.cached_tokens)


def test_other_tasks_share_nothing(engine_of):
    """The cached prefix is the task's own, and ends with it."""
    engine = engine_of("x", "x", "x")
    engine.submit(ask(task="t")).result(20)
    assert 0 == engine.submit(ask(task="u")).result(20).usage.cached_tokens
    engine.finish_task("t")
    assert 0 == engine.submit(ask(task="t")).result(20).usage.cached_tokens


def test_each_branch_has_its_own_session(engine_of):
    """Sub-agents have sessions of their own; an explicit session wins."""
    engine = engine_of(*"xxxx")
    assert engine.last_session(Caller(task="t")) is None
    assert "t#1" == engine.submit(ask()).result(20).session
    assert "t#2" == engine.submit(ask(branch="sub")).result(20).session
    assert "t#1" == engine.submit(ask()).result(20).session
    assert "t#2" == engine.last_session(Caller(task="t", branch="sub"))
    assert "mine" == engine.submit(replace(ask(), session="mine")).result(20).session
    assert "mine" == engine.last_session(Caller(task="t"))
    engine.finish_task("t")
    assert engine.last_session(Caller(task="t")) is None


def test_first_word_is_out_before_the_last_is_made(engine_of):
    """A stream can be held between two words."""
    gate = threading.Event()
    engine = engine_of("one two", before_chunk=lambda request, index: index == 0 or gate.wait(5))
    stream = engine.submit(ask())
    chunks = iter(stream)
    assert "one" == next(chunks).text
    assert not stream.ended
    gate.set()
    assert [" two"] == [chunk.text for chunk in chunks]


def test_cancel_ends_the_call_and_is_recorded(engine_of):
    """Nothing is produced after a cancel, and the test can see it."""
    engine = engine_of("one two three", latency_s=30)
    request = ask()
    stream = engine.submit(request)
    stream.cancel()
    with pytest.raises(GenerationCancelled):
        stream.result(20)
    engine.close()
    assert [request] == engine.cancelled
    assert {"calls": 1, "running": 0, "cancelled": 1} == {
        name: engine.stats()[name] for name in ("calls", "running", "cancelled")
    }


def test_latency_advances_a_manual_clock_and_sleeps_nowhere(engine_of):
    """Timing is exact on a manual clock."""
    engine = engine_of("one two three", latency_s=60, clock=ManualClock())
    timing = engine.submit(ask()).result(20).timing
    assert (60, 120, 180) == (timing.ttft_s, timing.decode_s, timing.total_s)


def test_prompt_longer_than_the_context_is_refused_with_both_numbers(engine_of):
    """Prompt plus output, before the script moves on."""
    engine = engine_of("x", context_tokens=10)
    with pytest.raises(PromptTooLong) as caught:
        engine.submit(ask("a b c", max_tokens=6))
    assert (11, 10) == (caught.value.needed_tokens, caught.value.limit_tokens)
    assert "x" == engine.submit(ask("a b c", max_tokens=5)).result(20).text


def test_tools_count_as_input(engine_of):
    """What the model would read is counted."""
    engine = engine_of()
    tool = ToolSpec(name="pytest", description="run the tests", parameters={"type": "object"})
    assert engine.count_tokens(replace(ask(), tools=(tool,))) > engine.count_tokens(ask())


def test_close_ends_what_runs_and_refuses_what_comes(engine_of):
    """A closed engine raises Closed from the running stream and from submit; closing twice is fine."""
    engine = engine_of("one", "two", latency_s=30)
    stream = engine.submit(ask())
    engine.close()
    engine.close()
    with pytest.raises(Closed):
        stream.result(20)
    with pytest.raises(Closed):
        engine.submit(ask())


def test_it_is_a_tiered_engine_without_tiers(engine_of):
    """Moves get a receipt that nothing was done."""
    engine: TieredEngine = engine_of()
    receipts = []
    move = Move(session="t#1", action=Action.WRITE, to=Tier.HOST, reason="a test")
    assert engine.apply(move, receipts.append) is False
    assert [Outcome.NOTHING] == [receipt.outcome for receipt in receipts]
    assert engine.residency("t#1") is None


def test_sixteen_threads_get_sixteen_answers(engine_of):
    """Concurrent calls neither mix nor lose answers, and the totals add up."""
    engine = engine_of(*[f"answer {number}" for number in range(160)])
    texts, lock = [], threading.Lock()

    def work(task: str) -> None:
        for _ in range(10):
            text = engine.submit(ask(task=task)).result(20).text
            with lock:
                texts.append(text)

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(f"answer {number}" for number in range(160)) == sorted(texts)
    assert 320 == engine.stats()["output_tokens"]
