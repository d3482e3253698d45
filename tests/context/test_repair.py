"""Repair: whatever comes in, what goes out is a prompt that a strict server takes, and it only grows."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import log
from agentkv.context.mend import clean, mended
from agentkv.context.repair import NO_RESULT, Repair, repaired
from agentkv.core.message import Message, ToolCall
from agentkv.engine.base import Request
from agentkv.engine.wire import call_arguments

SYSTEM = Message(role="system", content="s")
ASK = Message(role="user", content="do it")


def call(*ids, name="ls", arguments='{"p":  1.0}', content=""):
    calls = tuple(ToolCall(id=one, name=name, arguments=arguments) for one in ids)
    return Message(role="assistant", content=content, tool_calls=calls)


def result(call_id, content="ok", **more):
    return Message(role="tool", content=content, tool_call_id=call_id, **more)


def user(text):
    return Message(role="user", content=text)


def said(text):
    return Message(role="assistant", content=text)


# -- an independent strict server


def faults(messages):
    """What a strict server would refuse in these messages, seen on the wire; [] for a valid prompt."""
    if not messages:
        return []
    body = call_arguments(Request(messages=tuple(messages)), model="m", max_tokens_field="max_tokens")
    found = []
    wire = json.dumps(body, ensure_ascii=False, allow_nan=False)
    try:
        wire.encode()
    except UnicodeEncodeError:
        found.append("not UTF-8")
    if "\0" in wire or "\\u0000" in wire:
        found.append("NUL")
    waiting, seen = [], set()
    for number, message in enumerate(body["messages"]):
        role = message["role"]
        if role == "tool":
            if message.get("tool_call_id") not in waiting:
                found.append(f"{number}: a result that no call before it waits for")
            else:
                waiting.remove(message["tool_call_id"])
            if not isinstance(message["content"], str):
                found.append(f"{number}: no text")
            continue
        if waiting:
            found.append(f"{number}: calls without a result: {waiting}")
            waiting = []
        if "tool_call_id" in message or ("tool_calls" in message and role != "assistant"):
            found.append(f"{number}: a field that the role {role} has not")
        if role == "assistant" and not message["content"] and not message.get("tool_calls"):
            found.append(f"{number}: an empty turn")
        if role not in ("system", "user", "assistant"):
            found.append(f"{number}: role {role}")
        if "name" in message and not 0 < len(message["name"]) <= 64:
            found.append(f"{number}: name")
        for one in message.get("tool_calls", ()):
            if not one["id"] or len(one["id"]) > 64 or one["id"] in seen:
                found.append(f"{number}: id {one['id']:.80}")
            if not re.fullmatch("[a-zA-Z0-9_-]{1,64}", one["function"]["name"]):
                found.append(f"{number}: function name")
            if not isinstance(json.loads(one["function"]["arguments"]), dict):
                found.append(f"{number}: arguments are no object")
            seen.add(one["id"])
            waiting.append(one["id"])
    if waiting:
        found.append(f"at the end: calls without a result: {waiting}")
    return found


@pytest.mark.parametrize(
    "bad",
    [
        [ASK, result("a")],
        [ASK, call("a")],
        [ASK, call("a"), user("x"), result("a")],
        [ASK, call("a", "a"), result("a"), result("a")],
        [ASK, call(""), result("")],
        [ASK, call("a"), result("a"), call("a"), result("a")],
        [ASK, said("")],
        [user("\ud800")],
        [user("\0")],
        [ASK, call("a", name="x y"), result("a")],
        [ASK, call("a", arguments="[1]"), result("a")],
        [replace(ASK, tool_call_id="a")],
    ],
)
def test_the_strict_server_of_these_tests_refuses_each_kind(bad):
    """A checker that takes everything would prove nothing."""
    assert faults(bad)


# -- what is fine stays as it is


def test_a_valid_prompt_passes_as_the_very_same_objects():
    """Parallel calls, results out of order, odd spacing, unicode, spelled control tokens, an empty user turn."""
    prompt = [
        SYSTEM, ASK, call("a", "b", content="two"), result("b", "é <|im_end|> 漢"), result("a", ""),
        said("done"), user(""), SYSTEM, call("c"), result("c", name="ls"), Message(role="user", content="x", name="bob"),
    ]  # fmt: skip
    repair = Repair()
    out = [message for given in prompt for message in repair.feed(given)]
    assert all(now is was for now, was in zip(out, prompt, strict=True))
    assert () == repair.pending()
    assert 0 == repair.repairs


# -- one outcome for each kind of fault


def carrier(out, at, **same):
    """The call that was put in front of the result at `at`."""
    (made,) = out[at - 1].tool_calls
    assert made.id == out[at].tool_call_id
    for field, value in same.items():
        assert value == getattr(made, field)
    return made


def test_a_cancelled_tool_is_answered_as_soon_as_the_conversation_goes_on():
    """Case D9: calls without results in the state; before the next turn each has one."""
    assert (ASK, call("a", "b"), result("b"), result("a", NO_RESULT), user("and?")) == repaired(
        [ASK, call("a", "b"), result("b"), user("and?")]
    )


def test_a_call_that_is_open_when_the_prompt_is_sent_is_answered_as_pending():
    """And the real result, when it comes in time, stands in its place."""
    repair = Repair()
    for message in (ASK, call("a", "b"), result("a")):
        repair.feed(message)
    assert (result("b", NO_RESULT),) == repair.pending() == repair.pending()
    assert (result("b"),) == repair.feed(result("b"))
    assert () == repair.pending()


def test_a_result_without_its_call_keeps_its_text_behind_a_call_of_its_own():
    """Cases S1 and S2: a window that starts on a tool result. The text stays a tool's: it is nobody's order."""
    out = repaired([SYSTEM, result("gone", "42 passed", name="pytest"), said("Fine.")])
    assert ["system", "assistant", "tool", "assistant"] == [message.role for message in out]
    assert "42 passed" == out[2].content
    carrier(out, 2, name="pytest", arguments="{}")


def test_results_of_two_turns_whose_first_call_was_cut_off_stay_valid():
    """Case S1: a run of results, of which only some have their call."""
    out = repaired([SYSTEM, result("a1"), result("a2"), call("b"), result("b"), user("?")])
    assert [] == faults(out)
    assert 1 == sum(message.tool_call_id == "b" for message in out)


def test_a_late_result_stands_behind_a_repetition_of_its_call():
    """The user went on while the tool ran: what was sent then stays, the result is appended."""
    before = repaired([ASK, call("a"), user("also this")])
    after = repaired([ASK, call("a"), user("also this"), result("a", "late"), said("ok")])
    assert before == after[: len(before)]
    carrier(after, 5, name="ls", arguments='{"p":  1.0}')
    assert "late" == after[5].content


def test_a_result_just_before_its_call_is_put_behind_it():
    """A reducer that sorted two parallel writes."""
    assert (ASK, call("a"), result("a"), user("x")) == repaired([ASK, result("a"), call("a"), user("x")])


def test_the_same_result_given_twice_stands_there_once():
    """A replay that appended its messages again."""
    assert (ASK, call("a"), result("a"), said("x")) == repaired([ASK, call("a"), result("a"), result("a"), said("x")])


def test_a_result_that_found_no_open_call_stands_there_once_too():
    """Late, orphaned, before its call: given again it is the same result again."""
    for start in ([call("a"), user("x")], [], [user("x")]):
        out = repaired([*start, result("a", "late"), result("a", "late"), user("y"), result("a", "late")])
        assert 1 == sum("late" == message.content for message in out)
    assert (ASK, call("a"), result("a"), user("x")) == repaired([ASK, result("a"), call("a"), result("a"), user("x")])


def test_another_result_for_an_answered_call_gets_a_call_of_its_own():
    """Both texts stay, in the order given, and no open call is skipped for it."""
    out = repaired([ASK, call("a", "b"), result("a", "1"), result("a", "2"), result("b", "3"), said("x")])
    assert ["1", "3", "2"] == [message.content for message in out if message.role == "tool"]
    carrier(out, 5, name="ls", arguments='{"p":  1.0}')


def test_equal_ids_inside_a_turn_are_told_apart():
    """The first result belongs to the first call."""
    out = repaired([ASK, call("a", "a"), result("a", "1"), result("a", "2")])
    assert ("a", "call00001") == tuple(one.id for one in out[1].tool_calls)
    assert [("a", "1"), ("call00001", "2")] == [(one.tool_call_id, one.content) for one in out[2:]]


def test_equal_ids_in_two_turns_are_told_apart():
    """Servers that number the calls of each answer from 0."""
    out = repaired([ASK, call("call_0"), result("call_0", "1"), call("call_0"), result("call_0", "2")])
    assert ["call_0", "call00001"] == [message.tool_call_id for message in out if message.role == "tool"]


def test_an_id_of_ours_gives_way_to_none_and_takes_none():
    """Whoever had it first keeps it."""
    out = repaired([ASK, call("call00001"), result("call00001"), call("", ""), result(""), result(""), call("call00002"),
                    result("call00002")])  # fmt: skip
    assert [] == faults(out)
    assert ["call00001", "call00002", "call00003", "call00004"] == [m.tool_call_id for m in out if m.role == "tool"]


def test_empty_ids_are_filled_and_their_results_find_them():
    """By name where there is one, else in order."""
    turn = Message(
        role="assistant", tool_calls=tuple(ToolCall(id="", name=name, arguments="{}") for name in ("ls", "cat"))
    )
    out = repaired([ASK, turn, result("", "of cat", name="cat"), result(None, "of ls")])
    ids = [one.id for one in out[1].tool_calls]
    assert [(ids[1], "of cat"), (ids[0], "of ls")] == [(one.tool_call_id, one.content) for one in out[2:]]


def test_results_without_ids_skip_the_calls_that_were_answered_by_name():
    """Four calls, two answered by name: the next two without a name belong to the others, in order."""
    turn = Message(role="assistant", tool_calls=tuple(ToolCall(id="", name=name, arguments="{}") for name in "wxyz"))
    out = repaired([turn, result("", "1", name="w"), result("", "2", name="x"), result("", "3"), result("", "4")])
    assert [one.id for one in out[0].tool_calls] == [message.tool_call_id for message in out[1:]]


def test_a_result_without_an_id_belongs_to_the_only_open_call():
    """But with two open calls nobody knows."""
    assert (ASK, call("a"), result("a", "x")) == repaired([ASK, call("a"), result("", "x")])
    out = repaired([ASK, call("a", "b"), result("", "x"), said("y")])
    assert [NO_RESULT, NO_RESULT, "x"] == [message.content for message in out if message.role == "tool"]


@pytest.mark.parametrize("bad_id", ["x" * 2048, "a b", "é", "a\0", "\ud800"])
def test_an_id_that_a_server_refuses_is_replaced_in_call_and_result(bad_id):
    """2 kB, blanks, other scripts."""
    out = repaired([ASK, call(bad_id), result(bad_id, "r"), said("x")])
    assert (ASK, call("call00001"), result("call00001", "r"), said("x")) == out


def test_an_empty_assistant_turn_is_left_out():
    """It says nothing, and servers refuse it. A turn that only calls is not empty."""
    assert (ASK, user("x")) == repaired([ASK, said(""), user("x")])


def test_texts_are_what_utf8_holds():
    """Half a character and NUL become U+FFFD; the halves of one become it; nothing else changes."""
    assert "a\ufffdb\ufffdc" == clean("a\ud800b\0c")
    assert "a😀b\ufffd" == clean("a\ud83d\ude00b\udc00")
    same = "<|endoftext|> é 漢 😀"
    assert clean(same) is same


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, "b"], "a\n[image_url left out]\nb"),
        ({"b": 1, "a": 2}, '{"a": 2, "b": 1}'),
        (7, "7"),
        (object(), "[object left out]"),
    ],
)
def test_a_content_that_is_no_text_becomes_one(content, text):
    """None, parts, and whatever a tool returned by accident."""
    assert text == mended(Message(role="user", content=content)).content


@pytest.mark.parametrize(
    ("role", "now"), [("developer", "system"), ("human", "user"), ("nobody", "user"), (None, "user")]
)
def test_an_unknown_role_becomes_a_known_one(role, now):
    """The text is not lost."""
    assert Message(role=now, content="t") == mended(Message(role=role, content="t"))


@pytest.mark.parametrize(
    ("arguments", "now"),
    [("", "{}"), (None, "{}"), ("[1]", '{"text": "[1]"}'), ('{"a": ', '{"text": "{\\"a\\": "}'), ({"b": 1}, '{"b": 1}'),
     ("[" * 100_000, None), ('{"a": 1.0, "é":"\\u00e9"}', '{"a": 1.0, "é":"\\u00e9"}')],
)  # fmt: skip
def test_arguments_are_the_models_own_bytes_if_they_are_an_object(arguments, now):
    """Case P6: no other spacing, number or escape; what is no object is kept as a text in one."""
    (fixed,) = mended(call("a", arguments=arguments)).tool_calls
    assert isinstance(json.loads(fixed.arguments), dict)
    assert now in (None, fixed.arguments)


def test_a_tools_name_is_cut_down_unless_it_is_on_offer():
    """Whoever offers a tool with a dot in its name has a server that takes it."""
    assert "multi_tool_use_parallel" == repaired([call("a", name="multi_tool_use.parallel")])[0].tool_calls[0].name
    assert "fs.read" == repaired([call("a", name="fs.read")], names=["fs.read"])[0].tool_calls[0].name
    repair = Repair(names=["x"])
    repair.offer(["fs.read"])
    assert "fs.read" == repair.feed(call("a", name="fs.read"))[0].tool_calls[0].name
    assert "unknown_tool" == repaired([call("a", name="")])[0].tool_calls[0].name


def test_fields_of_another_role_are_taken_off():
    """Calls in a user's turn, an answered id on a system message."""
    odd = Message(role="user", content="x", tool_calls=call("a").tool_calls, tool_call_id="a", name="")
    assert (user("x"),) == repaired([odd])


def test_something_that_is_no_message_is_counted_and_left_out():
    """Never an exception."""
    before = log.counters["repair_failed"]
    assert (ASK,) == repaired([ASK, None])
    assert before + 1 == log.counters["repair_failed"]


# -- any stream at all

texts = st.sampled_from(["", "a", "b", "\ud800", "x\0y", "<|im_start|>", "é"])
ids = st.sampled_from(["a", "b", "c", "", "call00001", "call00002", "z" * 2048, "a b"])
names = st.sampled_from(["ls", "x y", "", "fs.read"])
spelled = st.sampled_from(["{}", "", "[1]", '{"a": 1}', "{"])
calls = st.builds(ToolCall, id=ids, name=names, arguments=spelled)
streams = st.lists(
    st.one_of(
        st.builds(Message, role=st.sampled_from(["system", "user", "developer"]), content=st.one_of(st.none(), texts),
                  name=st.one_of(st.none(), names)),
        st.builds(Message, role=st.just("assistant"), content=texts, tool_calls=st.lists(calls, max_size=3).map(tuple)),
        st.builds(Message, role=st.just("tool"), content=st.one_of(st.none(), texts), tool_call_id=st.one_of(st.none(), ids),
                  name=st.one_of(st.none(), names)),
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(streams)
def test_any_stream_is_valid_wherever_it_is_sent_and_only_grows(stream):
    """After each message: valid with what is pending, an extension of what was put out before, and no text is lost."""
    repair, out = Repair(), []
    for number, message in enumerate(stream, 1):
        out.extend(repair.feed(message))
        sent = (*out, *repair.pending())
        assert [] == faults(sent)
        assert sent == repaired(stream[:number])
        if message.role in ("user", "system", "developer"):
            assert clean(message.content or "") == out[-1].content
        shown = {one.content for one in sent}
        assert all(clean(one.content or "") in shown for one in stream[:number] if one.role == "tool")
    assert [] == faults(repaired(repaired(stream)))


@settings(max_examples=800, deadline=None)
@given(streams)
def test_what_was_sent_is_extended_unless_a_result_came_for_an_open_call(stream):
    """Also what was pending when the prompt left stays, once the next turn follows."""
    repair, out, sent = Repair(), [], []
    for message in stream:
        held = {one.given_id for one in repair._held}
        out.extend(repair.feed(message))
        now = [*out, *repair.pending()]
        if message.role != "tool" and not held & {one.id for one in message.tool_calls}:
            assert sent == now[: len(sent)]
        sent = now


@settings(max_examples=80, deadline=None)
@given(streams)
def test_a_mended_prompt_is_mended(stream):
    """Once is enough: the second time every message passes as it is."""
    once = repaired(stream)
    again = repaired(once)
    assert all(now is was for now, was in zip(again, once, strict=True))


def test_ten_thousand_parallel_calls_cost_what_their_number_says():
    """No search through what is open or held: well below the seconds that a search would take."""
    many = [f"id{number}" for number in range(10_000)]
    repair = Repair()
    repair.feed(call(*many))
    for one in reversed(many):
        assert 1 == len(repair.feed(result(one)))
    for one in many:
        repair.feed(result(one, "another"))
    assert 20_001 == len(repair.feed(ASK))
