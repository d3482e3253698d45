"""What model calls send: slim, append-only, folded when it pays, told what changes; and what the bill says of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from pathlib import Path

import pytest

from agentkv import AgentKV, Budget, BudgetExceeded, Message, Request, ScriptedEngine, ToolCall, ToolSpec
from agentkv.context.memory import Memory
from agentkv.context.options import Context
from agentkv.context.outputs import Outputs
from agentkv.context.slim import Slimmer
from agentkv.engine.script import Reply
from agentkv.errors import ConfigError, GenerationCancelled

SYSTEM = Message(role="system", content="You are a careful engineer. " * 20)
GOAL = Message(role="user", content="Find out why tests/test_app.py fails and mend src/app.py.")
SUMMARY = (
    "Goal: mend src/app.py\nDecisions:\n- keep the cache of 300 s\nFiles:\n- src/app.py\nOpen items:\n- run the tests"
)


def turn(number: int, output: str) -> list[Message]:
    """An assistant's call and its result."""
    call = ToolCall(id=f"c{number}", name="look", arguments=f'{{"at": "file{number}.py"}}')
    return [
        Message(role="assistant", content=f"I look at file {number}.", tool_calls=(call,)),
        Message(role="tool", content=output, tool_call_id=call.id),
    ]


def words(number: int, count: int = 120) -> str:
    """A tool's output that no rule makes shorter."""
    return "\n".join(
        f"def {chr(97 + number % 26)}{chr(97 + i % 26)}{i * 7 + number}(): return {i}" for i in range(count // 4)
    )


def log(lines: int = 3000) -> str:
    """A long log with one error in it."""
    rows = [f"2026-01-01 10:{i // 60 % 60:02}:{i % 60:02} worker {i % 7} handled request {i}" for i in range(lines)]
    rows[lines // 2] = "ERROR: cannot open /srv/data/users.db: permission denied"
    return "\n".join(rows)


def ask(kv: AgentKV, messages: list[Message], **options) -> list[Message]:
    """Send, and return what reached the engine."""
    kv.submit(Request(messages=tuple(messages), **options)).result(30)
    return list(kv.engine.requests[-1].messages)


def loop(kv: AgentKV, steps: int, output=words) -> list[list[Message]]:
    """A tool loop in one task; the prompts that reached the engine."""
    messages, sent = [SYSTEM, GOAL], []
    with kv.task("t", final=False):
        for number in range(steps):
            sent.append(ask(kv, messages))
            messages += turn(number, output(number))
    return sent


def extends(later: list[Message], earlier: list[Message]) -> bool:
    """True if `later` is `earlier` and more."""
    return later[: len(earlier)] == earlier


def test_a_long_output_is_slimmed_once_and_every_prompt_extends_the_last(make_kv) -> None:
    """The error stays, the rest goes, and the same bytes are sent again and again."""
    kv = make_kv()
    sent = loop(kv, 6, lambda number: log() if number == 1 else words(number))
    assert all(extends(later, earlier) for earlier, later in itertools.pairwise(sent))
    slim = sent[-1][5].content
    assert "permission denied" in slim
    assert len(slim) < len(log()) / 20
    shaping = kv.report("t").shaping
    assert (1, 0, {}) == (shaping.slimmed, shaping.folds, shaping.breaks)
    assert shaping.slim_before > 20 * shaping.slim_after
    assert "slimmed" in str(kv.report("t"))


def test_what_was_left_out_can_be_read_again(make_kv) -> None:
    """The handle in the text opens the whole output."""
    kv = make_kv()
    with kv.task("t", final=False), kv.tool("server_log") as call:
        slim = call.slim(log())
    handle = slim.rsplit('read_output("', 1)[1].split('"')[0]
    assert "handled request 2999" in kv.context.reader()(handle, lines="3000")
    assert slim == call.slim(slim)
    assert 1 == kv.report("t").shaping.slimmed


def test_a_slimmer_of_ones_own_keeps_its_own_store_and_it_is_read(make_kv) -> None:
    """The reader opens what that slimmer left out."""
    slimmer = Slimmer(outputs=Outputs(), count=len, max_tokens=2000)
    kv = make_kv(Context(slim=slimmer))
    slim = kv.context.slim(log())
    handle = slim.rsplit('read_output("', 1)[1].split('"')[0]
    assert slimmer.outputs is kv.context.outputs
    assert "handled request 2999" in kv.context.reader()(handle, lines="3000")


def test_the_callers_messages_are_not_changed_and_another_process_sends_the_same_bytes(make_kv) -> None:
    """A view: nothing of it is written back, and nothing of it depends on what happened before."""
    messages = [SYSTEM, GOAL, *turn(1, log()), *turn(2, words(2))]
    before = list(messages)
    assert ask(make_kv(), messages) == ask(make_kv(), messages)
    assert before == messages


def folding(**options) -> Context:
    """Folds early, by a function."""
    return Context(**{"soft_mark": 1200, "keep_last": 2, "summarise": lambda _messages: SUMMARY, **options})


def test_above_the_mark_old_turns_become_a_summary_and_the_request_stays_word_for_word(make_kv) -> None:
    """The goal, the system message and the last turn are there, what the summariser said is there, the rest is gone."""
    kv = make_kv(folding())
    sent = loop(kv, 14)
    last = sent[-1]
    assert SYSTEM == last[0]
    assert last[1].content.startswith(GOAL.content)
    assert "keep the cache of 300 s" in "".join(message.content for message in last)
    assert max(map(len, sent)) < 2 * 14
    assert turn(12, words(12)) == last[-2:]
    shaping = kv.report("t").shaping
    assert shaping.folds >= 1
    assert {} == shaping.breaks, "a fold is declared"
    assert "fold" in [told.cause for told in next(iter(kv.context.explain("t").values()))]


def test_folds_are_rare_and_between_them_prompts_only_grow(make_kv) -> None:
    """A fold breaks the prefix; most calls must not."""
    kv = make_kv(folding())
    sent = loop(kv, 24)
    breaks = sum(not extends(later, earlier) for earlier, later in itertools.pairwise(sent))
    assert breaks == kv.report("t").shaping.folds
    assert breaks <= 8


def test_a_resume_in_another_process_sends_the_folded_prompt_byte_for_byte(make_kv, tmp_path: Path) -> None:
    """The notebook has the fold; the summariser is not asked again."""
    kv = make_kv(folding(folder=tmp_path))
    sent = loop(kv, 14)
    messages = [SYSTEM, GOAL, *itertools.chain.from_iterable(turn(n, words(n)) for n in range(13))]
    kv.close()

    def never(_messages) -> str:
        raise AssertionError("the summariser was asked again")

    again = make_kv(folding(folder=tmp_path, summarise=never))
    with again.task("t", final=False):
        assert sent[-1] == ask(again, messages)


def test_the_model_writes_the_summary_over_its_own_prefix_and_the_task_pays_for_it(make_kv) -> None:
    """The summary call is the prompt byte for byte and one instruction; it is billed and marked."""
    kv = make_kv(folding(summarise="model"), answers=itertools.repeat(SUMMARY))
    loop(kv, 14)
    summaries = [(i, r) for i, r in enumerate(kv.engine.requests) if r.purpose == "summary"]
    assert summaries
    number, summary = summaries[0]
    before = kv.engine.requests[number - 1].messages
    assert before == summary.messages[: len(before)]
    assert "user" == summary.messages[-1].role
    bill = kv.report("t")
    assert len(summaries) == sum(call.purpose == "summary" for call in bill.calls)
    assert bill.shaping.summary_tokens > 0
    assert "t" == summary.caller.task


@pytest.mark.parametrize("waits", [False, True], ids=["before a call", "while a tool runs"])
def test_a_summary_is_rendered_as_its_conversation_is(make_kv, waits) -> None:
    """With the same variables of the template: else its prompt is another one, and it thinks where nobody wants it."""
    kv = make_kv(folding(summarise="model"), answers=itertools.repeat(SUMMARY))
    rendering = {"reasoning_effort": "none", "chat_template_kwargs": {"day": "Monday"}}
    messages = [SYSTEM, GOAL]
    with kv.task("t", final=False):
        for number in range(14):
            ask(kv, messages, **rendering)
            with kv.tool(f"tool{number}", expect_s=120) if waits else contextlib.nullcontext():
                time.sleep(0.02 * waits)
            messages += turn(number, words(number))
    assert any(request.purpose == "summary" for request in kv.engine.requests)
    assert [rendering] * len(kv.engine.requests) == [request.rendering for request in kv.engine.requests]


@pytest.mark.parametrize("answer", ["", "I cannot do that.", RuntimeError("down")], ids=["empty", "refusal", "error"])
def test_a_summariser_that_fails_leaves_the_history_as_it_is(make_kv, answer) -> None:
    """No placeholder, no error for the agent; it is told in the bill."""

    def summarise(_messages) -> str:
        if isinstance(answer, Exception):
            raise answer
        return answer

    kv = make_kv(folding(summarise=summarise))
    sent = loop(kv, 10)
    assert 2 + 2 * 9 == len(sent[-1])
    assert all(extends(later, earlier) for earlier, later in itertools.pairwise(sent))
    assert kv.report("t").shaping.failed_folds >= 1


def test_a_summary_that_the_budget_forbids_is_not_made(make_kv) -> None:
    """The summary goes through the same budget; the call itself is refused only if it does not fit."""
    kv = make_kv(folding(summarise="model"), answers=itertools.repeat(SUMMARY))
    messages = [SYSTEM, GOAL, *itertools.chain.from_iterable(turn(n, words(n)) for n in range(12))]
    with kv.task("t", budget=Budget(model_calls=1), final=False):
        ask(kv, messages[:2])
        with pytest.raises(BudgetExceeded):
            ask(kv, messages)
    assert 1 == len(kv.engine.requests)


def test_an_event_loop_goes_on_while_a_fold_is_made(make_kv) -> None:
    """`submit` returns at once; the summary is written on a thread."""

    def slow(_messages) -> str:
        time.sleep(0.4)
        return SUMMARY

    kv = make_kv(folding(summarise=slow))
    messages = [SYSTEM, GOAL, *itertools.chain.from_iterable(turn(n, words(n)) for n in range(12))]

    async def main() -> int:
        beats = 0

        async def heart() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        beating = asyncio.create_task(heart())
        with kv.task("t", final=False):
            await kv.submit(Request(messages=tuple(messages))).aresult()
        beating.cancel()
        return beats

    assert asyncio.run(main()) >= 10
    assert len(kv.engine.requests[-1].messages) < len(messages)


def test_a_call_cancelled_while_its_fold_is_made_never_starts(make_kv) -> None:
    """The consumer hears of it at once."""
    going_on = threading.Event()

    def slow(_messages) -> str:
        going_on.wait(10)
        return SUMMARY

    kv = make_kv(folding(summarise=slow))
    messages = [SYSTEM, GOAL, *itertools.chain.from_iterable(turn(n, words(n)) for n in range(12))]
    with kv.task("t", final=False):
        stream = kv.submit(Request(messages=tuple(messages)))
        stream.cancel()
        with pytest.raises(GenerationCancelled):
            stream.result(20)
        going_on.set()
    time.sleep(0.1)
    assert [] == [request for request in kv.engine.requests if request not in kv.engine.cancelled]


def test_a_fold_is_made_while_a_tool_runs_and_takes_effect_with_the_next_call(make_kv) -> None:
    """Where tools tell their waits and the forecast leaves time, no call waits for a summary."""
    made = threading.Event()
    threads: list[str] = []

    def summarise(_messages) -> str:
        threads.append(threading.current_thread().name)
        made.set()
        return SUMMARY

    kv = make_kv(folding(summarise=summarise))
    messages, lengths = [SYSTEM, GOAL], []
    with kv.task("t", final=False):
        for number in range(12):
            lengths.append(len(ask(kv, messages)))
            before = made.is_set()
            with kv.tool(f"tool{number}", expect_s=120):
                if not before:
                    made.wait(0.1)
            messages += turn(number, words(number))
    assert "agentkv-fold" == threads[0]
    assert min(lengths[6:]) < max(lengths)
    assert kv.report("t").shaping.folds >= 1


def test_a_clock_in_the_system_message_is_told_at_the_end_and_breaks_nothing(make_kv) -> None:
    """The beginning stays the same; what was told once stays where it was told."""
    kv = make_kv(Context(volatile=(r"The time is \d\d:\d\d\.",)))
    sent, messages = [], [GOAL]
    with kv.task("t", final=False):
        for number in range(4):
            system = Message(role="system", content=f"Be careful. The time is 10:0{number}. Be brief.")
            sent.append(ask(kv, [system, *messages]))
            messages += turn(number, words(number))
    assert all(extends(later, earlier) for earlier, later in itertools.pairwise(sent))
    assert "10:0" not in sent[-1][0].content
    assert "The time is 10:03." in sent[-1][-1].content
    assert {} == kv.report("t").shaping.breaks


def test_tools_are_sent_in_one_form_and_order(make_kv) -> None:
    """However the caller orders them; a new one comes last."""
    kv = make_kv()
    one, two, new = (
        ToolSpec(name=name, parameters={"type": "object", "properties": {"b": {}, "a": {}}}) for name in "bca"
    )
    with kv.task("t", final=False):
        ask(kv, [SYSTEM, GOAL], tools=(two, one))
        ask(kv, [SYSTEM, GOAL, *turn(1, "x")], tools=(one, new, two))
    assert ["b", "c"] == [tool.name for tool in kv.engine.requests[0].tools]
    assert ["b", "c", "a"] == [tool.name for tool in kv.engine.requests[1].tools]


def test_what_opts_out_is_sent_as_it_is(make_kv) -> None:
    """By request, by node, or altogether."""
    messages = [SYSTEM, GOAL, *turn(1, log())]
    kv = make_kv()
    assert messages == ask(kv, messages, as_is=True)

    @kv.node(context=False)
    def node() -> list[Message]:
        return ask(kv, messages)

    assert messages == node()
    assert messages != ask(kv, messages)
    off = AgentKV.with_engine(ScriptedEngine(["ok"]), context=None)
    with off:
        assert messages == ask(off, messages)
        assert log() == off.context.slim(log())


def test_memories_are_told_behind_the_users_message_and_stay_there(make_kv) -> None:
    """Retrieved, judged, injected at the tail; billed."""
    with Memory() as memory:
        memory.remember("The staging database of the app is called blue-heron and listens on port 6543.")
        memory.flush()
        kv = make_kv(Context(memory=memory))
        question = Message(role="user", content="On which port does the staging database blue-heron listen?")
        with kv.task("t", final=False):
            first = ask(kv, [SYSTEM, question])
            second = ask(kv, [SYSTEM, question, *turn(1, "x")])
    assert "6543" in first[-1].content
    assert first[-1].content.startswith(question.content)
    assert extends(second, first)
    shaping = kv.report("t").shaping
    assert 1 == shaping.retrievals
    assert shaping.recalled_tokens > 0


def test_what_a_task_concluded_is_remembered_when_it_ends(make_kv) -> None:
    """Episodic memory: asked, concluded; recalled by the next task that needs it."""
    with Memory() as memory:
        kv = make_kv(Context(memory=memory), answers=iter(["The login test failed because the clock jumped.", "ok"]))
        with kv.task("one"):
            ask(kv, [SYSTEM, Message(role="user", content="Why does the login test fail?")])
        memory.flush()
        with kv.task("two"):
            told = ask(kv, [SYSTEM, Message(role="user", content="The login test fails again. Why?")])
    assert "because the clock jumped" in told[-1].content
    assert "Asked: Why does the login test fail?" in told[-1].content


def test_a_segment_has_a_session_of_its_own_and_leaves_only_a_summary(make_kv) -> None:
    """The next segment is told what the last one found; the summary is on the scope."""
    kv = make_kv()
    with kv.task("t", final=False) as task:
        with task.segment("survey") as survey:
            ask(kv, [SYSTEM, GOAL, *turn(1, "ERROR: src/app.py line 42 fails")])
            inside = kv.engine.last_session(kv.caller())
        with task.segment("repair") as repair:
            told = ask(kv, [SYSTEM, GOAL])
            assert inside != kv.engine.last_session(kv.caller())
        outside = ask(kv, [SYSTEM, GOAL])
    assert "src/app.py line 42 fails" in survey.summary
    assert survey.summary in told[-1].content
    assert [SYSTEM, GOAL] == outside
    assert "Goal" in repair.summary


def test_a_segment_without_a_name_is_refused(make_kv) -> None:
    """Names travel in branch names."""
    with make_kv().task("t") as task:
        for name in ("", "a|b"):
            with pytest.raises(ConfigError, match="segment"):
                task.segment(name)


def test_a_cut_is_proposed_before_the_budget_ends(make_kv) -> None:
    """Prompts grow, the budget is known."""
    kv = make_kv(Context(summarise=None))
    with kv.task("t", budget=Budget(tokens=4000), final=False):
        messages = [SYSTEM, GOAL]
        for number in range(4):
            ask(kv, messages)
            messages += turn(number, words(number))
        cut = kv.propose_cut("t")
    assert cut is not None
    assert "budget" == cut.wall
    assert kv.propose_cut("unknown") is None


def test_a_tool_call_that_nobody_answered_gets_a_result_before_the_next_message(make_kv) -> None:
    """A cancelled tool must not make the history invalid for ever."""
    kv = make_kv()
    sent = ask(kv, [SYSTEM, GOAL, turn(1, "")[0], Message(role="user", content="Go on.")])
    assert ["system", "user", "assistant", "tool", "user"] == [message.role for message in sent]
    assert "c1" == sent[3].tool_call_id


@pytest.mark.parametrize(
    "options",
    [{"slim_tokens": 0}, {"soft_mark": 0}, {"window_tokens": 0}, {"summarise": "gpt"}, {"fallback": "x"}, {"volatile": "clock"}],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options) -> None:
    """With the option's name in the message."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        Context(**options)


def test_parallel_calls_of_one_branch_each_get_their_own_messages(make_kv) -> None:
    """The same beginning, different ends, many threads: nobody gets another's prompt."""
    kv = make_kv(answers=(Reply(text="ok") for _ in itertools.count()))
    errors: list[str] = []

    def work(number: int) -> None:
        with kv.task("t", final=False):
            for step in range(10):
                end = Message(role="user", content=f"worker {number} step {step}")
                stream = kv.submit(Request(messages=(SYSTEM, GOAL, end)))
                stream.result(20)
        errors.extend(
            "lost" for step in range(10) if f"worker {number} step {step}" not in sent_texts()
        )  # fmt: skip

    def sent_texts() -> set[str]:
        return {request.messages[-1].content for request in list(kv.engine.requests)}

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == errors
    assert all(3 == len(request.messages) for request in kv.engine.requests)
