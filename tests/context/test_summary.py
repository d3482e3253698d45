"""Folding: early turns become a summary, and nothing that matters is lost on the way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import log
from agentkv.context.summary import SUMMARY_MARK, fold, groups, is_summary
from agentkv.core.message import Message, ToolCall
from agentkv.errors import ConfigError


def user(text):
    return Message(role="user", content=text)


def assistant(text="", *calls):
    return Message(
        role="assistant", content=text, tool_calls=tuple(ToolCall(id=c, name="t", arguments="{}") for c in calls)
    )


def result(call_id, text="result " * 20):
    return Message(role="tool", content=text, tool_call_id=call_id)


SYSTEM = Message(role="system", content="be brief")


def count(messages):
    return sum(len(message.content) // 4 + 4 for message in messages)


class Summariser:
    """Writes a short text; remembers what it was given; fails when told to."""

    def __init__(self, answer="short"):
        self.answer, self.given = answer, []

    def __call__(self, messages):
        self.given.append(list(messages))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def loop(steps, request="fix the bug in a.py"):
    """One request, then a tool loop of `steps` calls."""
    messages = [SYSTEM, user(request)]
    for i in range(steps):
        messages += [assistant(f"step {i}", f"c{i}"), result(f"c{i}")]
    return messages


def folded(messages, *, soft_tokens=100, keep_last=4, summarise=None):
    return fold(
        messages, soft_tokens=soft_tokens, keep_last=keep_last, count=count, summarise=summarise or Summariser()
    )


def assert_pairs_whole(messages):
    asked, answered = set(), []
    for message in messages:
        asked |= {call.id for call in message.tool_calls}
        if message.role == "tool":
            assert message.tool_call_id in asked
            answered.append(message.tool_call_id)
    assert asked == set(answered)


def test_below_the_soft_mark_the_very_same_object_comes_back():
    """Nothing is copied, nothing is asked."""
    messages, summariser = loop(3), Summariser()
    assert folded(messages, soft_tokens=count(messages), summarise=summariser) is messages
    assert summariser.given == []


def test_above_it_early_turns_become_one_message():
    """System, request, summary, the last messages."""
    messages = loop(20)
    shorter = folded(messages)
    assert shorter[:2] == messages[:2]
    assert shorter[2] == user(SUMMARY_MARK + "short")
    assert shorter[3:] == messages[-4:]


def test_the_request_stays_word_for_word_in_a_long_tool_loop():
    """One user message, sixty steps, folded again and again as it grows."""
    request = "fix the bug in a.py, line 12"
    messages = loop(0, request)
    for i in range(60):
        messages = [*messages, assistant(f"step {i}", f"c{i}"), result(f"c{i}")]
        messages = list(folded(messages, soft_tokens=300))
        assert user(request) in messages
        assert messages[0] == SYSTEM
        assert sum(is_summary(message) for message in messages) <= 1
        assert_pairs_whole(messages)
    assert count(messages) < 600


def test_the_newest_request_is_never_folded():
    """A second request that a long loop has left behind stays as well."""
    messages = [*loop(5), assistant("done"), user("now fix b.py"), *loop(20)[2:]]
    shorter = folded(messages)
    assert user("now fix b.py") in shorter
    assert user("fix the bug in a.py") in shorter


def test_a_turn_with_many_calls_is_kept_or_folded_whole():
    """Keep 6 of a turn with ten results: all ten stay."""
    calls = [f"c{i}" for i in range(10)]
    messages = [SYSTEM, user("go"), assistant("a", "x"), result("x", "long " * 400), assistant("b", *calls)]
    messages += [result(c) for c in calls]
    shorter = folded(messages, keep_last=6)
    assert len([message for message in shorter if message.role == "tool"]) == 10
    assert_pairs_whole(shorter)


def test_results_of_two_turns_that_interleave_stay_together():
    """The window's edge falls between them: both turns stay whole."""
    mixed = [assistant("a", "1", "2"), assistant("b", "3"), result("1"), result("3"), result("2")]
    messages = [*loop(10), *mixed]
    for keep_last in range(1, 8):
        shorter = folded(messages, keep_last=keep_last)
        assert_pairs_whole(shorter)
        assert shorter[-5:] == mixed


def test_a_call_that_was_never_answered_does_not_block_folding():
    """A cancelled tool leaves an open call behind; later turns are still folded."""
    messages = [SYSTEM, user("go"), assistant("a", "lost"), user("again"), *loop(20)[2:]]
    assert len(folded(messages)) < len(messages)


@pytest.mark.parametrize(
    "answer", [RuntimeError("no model"), TimeoutError(), "", "  \n", None, 7, "much longer than before " * 1000]
)
def test_a_summary_that_fails_changes_nothing_and_is_counted(answer):
    """The history is the same object, and the next turn tries again."""
    messages = loop(20)
    before = log.counters["summary_failed"]
    assert folded(messages, summarise=Summariser(answer)) is messages
    assert log.counters["summary_failed"] == before + 1
    assert folded(messages) is not messages


def test_an_interrupt_in_the_summariser_passes():
    """KeyboardInterrupt is no failed summary."""
    with pytest.raises(KeyboardInterrupt):
        folded(loop(20), summarise=Summariser(KeyboardInterrupt()))


def test_folding_twice_folds_nothing_more():
    """What is folded already is not summarised again, and no message appears twice."""
    once = folded(loop(20), soft_tokens=10)
    summariser = Summariser()
    assert folded(once, soft_tokens=10, summarise=summariser) is once
    assert summariser.given == []


def test_the_old_summary_is_handed_to_the_next_one():
    """First in line, so that facts from the first turn can be carried on."""
    once = folded(loop(20), summarise=Summariser("path a.py, line 12"))
    summariser = Summariser("path a.py, line 12; more")
    again = folded([*once, *loop(20)[2:]], summarise=summariser)
    assert summariser.given[0][0].content == SUMMARY_MARK + "path a.py, line 12"
    assert [is_summary(message) for message in again].count(True) == 1


def test_a_fold_waits_until_it_pays():
    """A window above the mark does not fold one turn at a time: each fold would break the prefix."""
    window = [assistant("w", "w"), result("w", "x" * 4000)]
    messages = [SYSTEM, user("go"), assistant("a", "1"), result("1", "y" * 40), *window]
    summariser = Summariser()
    assert folded(messages, soft_tokens=800, keep_last=2, summarise=summariser) is messages
    assert summariser.given == []


def test_numbers_below_zero_are_refused():
    """keep_last=-1 would be a silent loss of memory."""
    with pytest.raises(ConfigError):
        folded(loop(1), keep_last=-1)


histories = st.lists(st.sampled_from(["user", "assistant", "call", "two calls", "open call", "system"]), max_size=30)


def history(kinds):
    messages = [SYSTEM]
    for n, kind in enumerate(kinds, 1):
        if kind == "user":
            messages.append(user(f"request {n}"))
        elif kind == "assistant":
            messages.append(assistant("said " * 10 + str(n)))
        elif kind == "system":
            messages.append(Message(role="system", content=f"note {n}"))
        elif kind == "open call":
            messages.append(assistant("", f"open{n}"))
        elif kind == "call":
            messages += [assistant("", f"{n}"), result(f"{n}")]
        else:
            messages += [assistant("", f"{n}a", f"{n}b"), result(f"{n}b"), result(f"{n}a")]
    return messages


@settings(max_examples=200, deadline=None)
@given(histories, st.integers(0, 300), st.integers(0, 10))
def test_any_history_keeps_pairs_requests_system_and_order(kinds, soft_tokens, keep_last):
    """Every tool result has its call and every answered call its result; what must stay stays, in order."""
    messages = history(kinds)
    shorter = folded(messages, soft_tokens=soft_tokens, keep_last=keep_last)
    if shorter is messages:
        return
    kept = [message for message in shorter if not is_summary(message)]
    assert len(shorter) == len(kept) + 1
    assert len(shorter) < len(messages) + 1
    assert count(shorter) < count(messages)
    answered = {message.tool_call_id for message in messages if message.role == "tool"}
    for message in kept:
        for call in message.tool_calls:
            assert (call.id in answered) == any(other.tool_call_id == call.id for other in kept)
        if message.role == "tool":
            assert any(call.id == message.tool_call_id for other in kept for call in other.tool_calls)
    requests = [message for message in messages if message.role == "user"]
    for must in [*requests[:1], *requests[-1:], *(message for message in messages if message.role == "system")]:
        assert must in kept
    window = messages[len(messages) - min(keep_last, len(messages)) :]
    assert all(message in kept for message in window)
    positions = [messages.index(message) for message in kept]
    assert positions[: len(positions)] == sorted(positions) or kept[0].role == "system"


@settings(deadline=None)
@given(histories)
def test_groups_lose_nothing(kinds):
    """Put together again they are the messages."""
    messages = history(kinds)
    assert [message for group in groups(messages) for message in group] == messages
