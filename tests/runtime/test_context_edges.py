"""What the context must not do: tell others what was told to one, lose or keep a changed value, ask or block for ever."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from pathlib import Path

import pytest

from agentkv import AgentKV, Budget, Context, Message, Request, ScriptedEngine, ToolCall, ToolSpec
from agentkv.context.memory import Memory
from agentkv.errors import ConfigError, PromptTooLong

GOAL = Message(role="user", content="Find out why tests/test_app.py fails and mend src/app.py.")
QUESTION = Message(role="user", content="On which port does the staging database blue-heron listen?")
FACT = "The staging database of the app is called blue-heron and listens on port 6543."
SUMMARY = "Goal: mend src/app.py\nDecisions:\n- keep the cache of 300 s\nOpen items:\n- run the tests"
DAY = r"Day \d+"


def day(number: int) -> Message:
    """A system message with a changing value."""
    return Message(role="system", content=f"Be careful. Day {number}.")


def turn(number: int) -> list[Message]:
    """An assistant's call and a result that no rule makes shorter."""
    call = ToolCall(id=f"c{number}", name="look", arguments="{}")
    text = "\n".join(f"def {chr(97 + number % 26)}{chr(97 + i % 26)}{i * 7 + number}(): return {i}" for i in range(30))
    return [
        Message(role="assistant", content=f"I look at file {number}.", tool_calls=(call,)),
        Message(role="tool", content=text, tool_call_id=call.id),
    ]


def turns(count: int) -> list[Message]:
    """So many of them."""
    return list(itertools.chain.from_iterable(map(turn, range(count))))


def ask(kv: AgentKV, messages: list[Message]) -> list[Message]:
    """Send, and return what reached the engine."""
    kv.submit(Request(messages=tuple(messages))).result(30)
    return list(kv.engine.requests[-1].messages)


@pytest.fixture
def memory():
    """One that knows one fact."""
    with Memory() as memory:
        memory.remember(FACT, source="ops")
        memory.flush()
        yield memory


def folding(**options) -> Context:
    """Folds early, by a function."""
    return Context(**{"soft_mark": 1200, "keep_last": 2, "summarise": lambda _messages: SUMMARY, **options})


def test_callers_of_whom_nothing_is_known_are_not_told_what_another_runtime_recalled(
    make_kv, memory, tmp_path: Path
) -> None:
    """One folder, the same words, another tenant: a memory stays with the runtime that has it."""
    assert "6543" in ask(make_kv(Context(memory=memory, folder=tmp_path)), [QUESTION])[-1].content
    assert [QUESTION] == ask(make_kv(Context(folder=tmp_path)), [QUESTION])


def test_a_finished_task_leaves_no_notes_to_another_of_its_name(make_kv, memory, tmp_path: Path) -> None:
    """What was forgotten in between is not told, in this process or in the next."""
    kv = make_kv(Context(memory=memory, folder=tmp_path, remember_tasks=False))
    with kv.task("t"):
        assert "6543" in ask(kv, [QUESTION])[-1].content
    assert 1 == memory.forget(source="ops")
    with kv.task("t"):
        assert [QUESTION] == ask(kv, [QUESTION])
    with (again := make_kv(Context(folder=tmp_path))).task("t"):
        assert [QUESTION] == ask(again, [QUESTION])


def test_what_a_task_concluded_is_told_to_tasks_of_the_same_person_only(make_kv) -> None:
    """Where a function says whose they are; one that fails costs the memories, not the call."""
    secret = Message(role="user", content="What is the code word of the vault in the cellar?")

    def owner(task: str) -> str:
        return {"a": "ann", "b": "bob"}[task[0]]

    with Memory() as memory:
        kv = make_kv(
            Context(memory=memory, memory_namespace=owner), answers=iter(["It is heron-77.", "ok", "ok", "ok"])
        )
        with kv.task("a1"):
            ask(kv, [secret])
        memory.flush()
        with kv.task("b1"):
            assert [secret] == ask(kv, [secret])
        with kv.task("a2"):
            assert "heron-77" in ask(kv, [secret])[-1].content
        with kv.task("nobody"):
            assert [secret] == ask(kv, [secret])


@pytest.mark.parametrize("first", [[], [GOAL, Message(role="assistant", content="I think")]], ids=["system", "answer"])
def test_a_changing_value_that_cannot_be_told_now_is_told_with_the_next_call(make_kv, first) -> None:
    """A prompt of a system message alone has no place for it."""
    kv = make_kv(Context(volatile=(DAY,)))
    with kv.task("t"):
        assert "Day 7" not in str(ask(kv, [day(7), *first]))
        assert ask(kv, [day(7), *first, GOAL])[-1].content.endswith("[value 1] Day 7")


def test_a_value_that_was_told_in_an_earlier_run_is_not_told_as_the_newest(make_kv, tmp_path: Path) -> None:
    """The same key, the same words, another day."""
    options = Context(volatile=(DAY,), folder=tmp_path)
    with (kv := make_kv(options)).task("t", final=False):
        for number in range(3):
            sent = ask(kv, [day(number), GOAL, *turns(number)])
    assert ["Day 0", "Day 1", "Day 2"] == [message.content[-5:] for message in sent[1::2]]
    with (again := make_kv(options)).task("t", final=False):
        for number in range(3):
            sent = ask(again, [day(9), GOAL, *turns(number)])
    assert sent[1].content.endswith("Day 9")
    assert turns(2) == sent[2:]


def test_a_value_whose_telling_was_folded_away_is_told_again(make_kv) -> None:
    """Else an older one, behind the request that stays, would be the newest."""
    kv = make_kv(folding(volatile=(DAY,)))
    with kv.task("t", final=False):
        for number in range(14):
            sent = ask(kv, [day(min(number, 1)), GOAL, *turns(number)])
            told = [line for message in sent for line in message.content.split("\n") if line.startswith("[value 1]")]
            assert f"[value 1] Day {min(number, 1)}" == told[-1]
    assert len(sent) < 2 + 2 * 13
    assert kv.report("t").shaping.folds >= 1


def test_the_same_call_again_is_the_same_prompt_with_memory_and_value(make_kv, memory) -> None:
    """A retry sends the same bytes, also from a view that is made anew."""
    kv = make_kv(Context(memory=memory, volatile=(DAY,)))
    with kv.task("t", final=False):
        first = ask(kv, [day(1), QUESTION])
        assert "6543" in first[1].content
        assert first[1].content.endswith("Day 1")
        assert first == ask(kv, [day(1), QUESTION])
        ask(kv, [day(1), QUESTION, *turns(1)])
        assert first == ask(kv, [day(1), QUESTION])


def test_a_memory_that_was_told_is_not_told_again_in_the_same_conversation(make_kv, memory) -> None:
    """What stands behind an earlier message is no news."""
    kv = make_kv(Context(memory=memory))
    again = Message(role="user", content="Say once more: on which port does the staging database blue-heron listen?")
    with kv.task("t", final=False):
        ask(kv, [QUESTION])
        sent = ask(kv, [QUESTION, Message(role="assistant", content="That one."), again])
    assert 1 == str(sent).count("6543")


def test_a_segment_whose_first_call_has_no_place_for_it_is_told_with_the_second(make_kv) -> None:
    """What earlier segments left is not lost."""
    kv = make_kv()
    with kv.task("t", final=False) as task:
        with task.segment("survey"):
            ask(kv, [day(1), GOAL, *turns(1)])
        with task.segment("repair"):
            ask(kv, [day(1)])
            assert "[From the segment 'survey']" in ask(kv, [day(1), GOAL])[-1].content
            third = ask(kv, [day(1), GOAL, *turns(1)])
    assert 1 == str(third).count("From the segment")


def test_what_a_segment_leaves_is_what_was_said_in_it_and_not_what_it_was_told(make_kv) -> None:
    """Else the third would hear of the first twice, and of a clock as a tool's outcome."""
    kv = make_kv(Context(volatile=(DAY,)))
    with kv.task("t", final=False) as task:
        for name in ("one", "two", "three"):
            outcome = Message(role="tool", content=f"ERROR: {name} fails", tool_call_id="c0")
            with task.segment(name) as segment:
                sent = ask(kv, [day(1), GOAL, *turns(1)[:-1], outcome])
    assert "ERROR: three fails" in segment.summary
    assert "one" not in segment.summary
    assert "Day" not in segment.summary
    assert 1 == sent[-1].content.count("- ERROR: one fails")
    assert 1 == sent[-1].content.count("- ERROR: two fails")


def test_an_extract_is_of_outcomes_and_not_of_what_was_told_behind_them(make_kv) -> None:
    """A tool's last line is its outcome, also where a note stands behind it."""
    kv = make_kv(folding(summarise="extract", volatile=(DAY,)))
    with kv.task("t", final=False):
        for number in range(14):
            sent = ask(kv, [day(number), GOAL, *turns(number)])
    assert kv.report("t").shaping.folds >= 1
    assert "ran look:" in str(sent)
    assert "ran look: [value" not in str(sent)


def test_a_folded_conversation_goes_on_in_its_own_session(make_kv) -> None:
    """Else an engine, which finds sessions by their beginnings, would open another and keep the old one's KV."""
    kv = make_kv(folding())
    with kv.task("t", final=False):
        for number in range(24):
            ask(kv, [day(1), GOAL, *turns(number)])
            ask(kv, [day(2), GOAL])  # another conversation of the same branch, answered in between
    folded = [request.session for request in kv.engine.requests if request.fold]
    assert len(folded) >= 2
    assert {"t#1"} == set(folded)
    assert {None} == {request.session for request in kv.engine.requests if not request.fold}


def test_many_conversations_of_one_branch_are_all_remembered(make_kv) -> None:
    """Twenty sub-agents in one node: none is folded as if its prefix were lost anyway."""
    kv = make_kv(folding(max_payback_calls=0.01))
    with kv.task("t", final=False):
        for number in range(8):
            for agent in range(20):
                ask(kv, [day(1), Message(role="user", content=f"Part {agent} of it."), *turns(number)])
    assert 0 == kv.report("t").shaping.folds


def test_a_summariser_that_keeps_failing_is_asked_less_and_less(make_kv) -> None:
    """Its failures cost as much as answers: in 20 calls above the mark some five attempts, not 20."""
    kv = make_kv(folding(summarise="model"), answers=itertools.repeat("I cannot do that."))
    with kv.task("t", final=False):
        for number in range(26):
            sent = ask(kv, [day(1), GOAL, *turns(number)])
    assert 2 + 2 * 25 == len(sent)
    assert 2 <= kv.report("t").shaping.failed_folds <= 6


def test_a_summary_never_spends_what_the_call_itself_needs(make_kv) -> None:
    """With one call left the call is made, and the history stays; with two there is a summary."""
    for calls, purposes in ((1, ["answer"]), (2, ["summary", "answer"])):
        kv = make_kv(folding(summarise="model"), answers=itertools.repeat(SUMMARY))
        with kv.task("t", budget=Budget(model_calls=calls), final=False):
            ask(kv, [day(1), GOAL, *turns(12)])
        assert purposes == [request.purpose for request in kv.engine.requests]
        assert calls == kv.report("t").usage.calls


@pytest.mark.parametrize("answer", [SUMMARY, "I cannot do that."], ids=["summary", "failure"])
def test_calls_of_one_conversation_at_the_same_time_have_one_summary_written(make_kv, answer) -> None:
    """Five samples of one prompt are no reason for five summaries, nor for five failures."""
    asked: list[str] = []

    def summarise(_messages) -> str:
        asked.append(answer)
        time.sleep(0.1)
        return answer

    kv = make_kv(folding(summarise=summarise))
    with kv.task("t", final=False):
        request = Request(messages=(day(1), GOAL, *turns(12)))
        streams = [kv.submit(request) for _ in range(5)]
        for stream in streams:
            stream.result(30)
    assert len(asked) == (1 if answer == SUMMARY else 2), "a failure is tried once more"
    assert 1 == len({sent.messages for sent in kv.engine.requests})
    assert 1 == kv.report("t").shaping.folds + kv.report("t").shaping.failed_folds


def test_a_summarise_function_that_hangs_is_given_up(make_kv) -> None:
    """After the time for it the history stays."""
    goes_on = threading.Event()
    kv = make_kv(folding(summarise=lambda _messages: goes_on.wait(30) and SUMMARY, summary_timeout_s=0.05))
    began_s = time.monotonic()
    with kv.task("t", final=False):
        assert 2 + 2 * 12 == len(ask(kv, [day(1), GOAL, *turns(12)]))
    assert time.monotonic() - began_s < 10
    goes_on.set()
    assert 1 == kv.report("t").shaping.failed_folds


def test_much_new_text_is_not_taken_in_on_an_event_loop(make_kv) -> None:
    """`submit` returns at once, whatever a tool wrote; what is sent is the same as without a loop."""
    kv = make_kv()
    rows = [f"{n * 7919 % 100_003} {n:x} of {n * 31 % 977}: ERROR in part {n}" for n in range(40_000)]
    messages = [day(1), GOAL, *turns(1)[:-1], Message(role="tool", content="\n".join(rows), tool_call_id="c0")]

    async def main() -> float:
        began_s = time.perf_counter()
        stream = kv.submit(Request(messages=tuple(messages)))
        took_s = time.perf_counter() - began_s
        await stream.aresult()
        return took_s

    with kv.task("t", final=False):
        assert asyncio.run(main()) < 0.15
    sent = list(kv.engine.requests[-1].messages)
    assert sent == ask(make_kv(), messages)
    assert len(sent[-1].content) < 20_000


def test_a_counter_that_reads_its_vocabulary_first_does_not_hold_up_an_event_loop() -> None:
    """The first count of a process takes half a second; it is made on another thread."""

    class Slow(ScriptedEngine):
        read = False

        def count_text(self, text: str) -> int:
            if not self.read:
                time.sleep(0.4)
                self.read = True
            return len(text)

    async def main(kv: AgentKV) -> float:
        began_s = time.perf_counter()
        stream = kv.submit(Request(messages=(GOAL,)))
        took_s = time.perf_counter() - began_s
        await stream.aresult()
        return took_s

    with AgentKV.with_engine(Slow(["ok"])) as kv:
        assert asyncio.run(main(kv)) < 0.2
        assert (GOAL,) == kv.engine.requests[0].messages


@pytest.mark.parametrize("first", [[], [GOAL, Message(role="assistant", content="ok")]], ids=["first", "later"])
def test_a_users_message_larger_than_the_window_is_refused_and_nothing_is_cut(first) -> None:
    """A person's text is never shortened: PromptTooLong says how long it is and what fits."""
    large = Message(role="user", content="one word and another " * 2_000)
    with AgentKV.with_engine(ScriptedEngine(["ok", "ok"], context_tokens=2_000)) as kv, kv.task("t", final=False):
        with pytest.raises(PromptTooLong) as refused:
            kv.submit(Request(messages=(*first, large))).result(30)
        assert 2_000 == refused.value.limit_tokens < refused.value.needed_tokens
        assert [GOAL] == ask(kv, [GOAL]), "the task goes on"


@pytest.mark.parametrize("name", ["read_output", "other"])
def test_a_slimmed_output_names_the_reading_tool_only_to_who_has_it(make_kv, name) -> None:
    """A model that is told of a tool calls it; a loop that has none would fail."""
    kv = make_kv()
    output = Message(role="tool", content=json.dumps([{"id": n} for n in range(2_000)]), tool_call_id="c0")
    text = Message(role="tool", content="\n".join(f"{n} rows, then {n * 7}" for n in range(2_000)), tool_call_id="c0")
    tool = ToolSpec(name=name, parameters={"type": "object", "properties": {}})
    with kv.task("t", final=False):
        for result in (output, text):
            request = Request(messages=(GOAL, *turns(1)[:-1], result), tools=(tool,))
            kv.submit(request).result(30)
            told = kv.engine.requests[-1].messages[-1].content
            assert "left out" in told[-200:]
            assert (name == "read_output") == ("read_output(" in told)
            assert len(told) < 6_000
            assert result is text or json.loads(told)
            again = (GOAL, *turns(1)[:-1], Message(role="tool", content=told, tool_call_id="c0"))
            kv.submit(Request(messages=again, tools=(tool,))).result(30)
            assert told == kv.engine.requests[-1].messages[-1].content


def test_a_tools_output_larger_than_the_window_is_slimmed_and_old_turns_give_way_to_a_large_message() -> None:
    """What a tool wrote is within its bound, and what is old is folded before a call is refused."""
    output = Message(role="tool", content="row by row, word by word\n" * 20_000, tool_call_id="c0")
    large = Message(role="user", content="one word and another " * 300)
    options = Context(summarise="extract", slim_tokens=500)
    engine = ScriptedEngine(itertools.repeat("ok"), context_tokens=2_000)
    with AgentKV.with_engine(engine, context=options) as kv, kv.task("t", final=False):
        assert len(ask(kv, [GOAL, *turns(1)[:-1], output])[-1].content) < 3_000
        sent = ask(kv, [GOAL, *turns(12), large])
    assert large == sent[-1]
    assert sent[0].content.startswith(GOAL.content)
    assert len(sent) < 10


@pytest.mark.parametrize("context", [True, False, "on"])
def test_a_context_that_is_none_says_what_to_write(context) -> None:
    """`context=False` is what a model and a node take."""
    with pytest.raises(ConfigError, match="context=None to leave prompts as they are"):
        AgentKV.with_engine(ScriptedEngine(["ok"]), context=context)


def test_an_expression_that_does_not_compile_is_refused_at_once() -> None:
    """Not at each call, in the log."""
    with pytest.raises(ConfigError, match="is no pattern"):
        Context(volatile=("(",))
