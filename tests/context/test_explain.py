"""Explanations: for each call where its prompt differs from the one before, why, and what that cost."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import log
from agentkv.context.breaks import Cause, find_break
from agentkv.context.explain import ADVICE, Seen, listen, message_text, seen
from agentkv.context.layout import Layout
from agentkv.context.prefix import MAX_EXPLANATIONS, PrefixWatch
from agentkv.context.segment import Place
from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.core.usage import Usage

SYSTEM = Message(role="system", content="You help. " * 20)


def words(text):
    """A counter for tests: one token per word."""
    return len(text.split())


def user(text):
    return Message(role="user", content=text)


def calls(arguments, content="", call_id="c1"):
    call = ToolCall(id=call_id, name="ls", arguments=arguments)
    return Message(role="assistant", content=content, tool_calls=(call,))


def tool(name, **parameters):
    return ToolSpec(name=name, description=f"does {name}", parameters=parameters)


def last(*prompts, watch=None, **options):
    """The explanation of the last of these prompts; each is messages, or messages and what `see` takes more."""
    watch = watch or PrefixWatch("s", count=words, **options)
    for prompt in prompts:
        messages, more = prompt if isinstance(prompt, tuple) else (prompt, {})
        watch.see(messages, **more)
    return watch.explain()[-1]


# -- a name for each kind of break


A, B, C = user("a b c"), user("d e f"), user("g h i")
RESULT = Message(role="tool", content="file", tool_call_id="c1")
THOUGHT = Message(role="assistant", content="<think>hm, 7?</think>\nIt is 7.")


@pytest.mark.parametrize(
    ("was", "now", "cause", "place"),
    [
        ([SYSTEM, user("at 12:00 go")], [SYSTEM, user("at 12:01 go")], "clock", (1, 7)),
        ([SYSTEM, user("step 1 go")], [SYSTEM, user("step 2 go")], "a changing value", (1, 5)),
        ([SYSTEM, A, B], [SYSTEM, user("a b x"), B], "text changed", (1, 4)),
        ([SYSTEM, A, B], [SYSTEM, replace(A, role="system"), B], "role changed", (1, 0)),
        ([SYSTEM, A, B], [SYSTEM, A], "messages removed", (2, 0)),
        ([SYSTEM, A, B, C], [SYSTEM, B, C], "messages removed", (1, 0)),
        ([SYSTEM, A, B], [SYSTEM, C, A, B], "message inserted", (1, 0)),
        ([A, calls('{"a": 1.0}')], [A, calls('{"a":1.0}'), RESULT], "tool args re-dumped", (1, 0)),
        ([A, calls('{"a": "\\u00e9", "b": 1}')], [A, calls('{"b": 1, "a": "é"}')], "tool args re-dumped", (1, 0)),
        ([A, calls('{"a": 1}')], [A, calls('{"a": 2}')], "tool call changed", (1, 0)),
        ([A, calls('{"a": 1}')], [A, calls('{"a": 1}', call_id="c2")], "tool call changed", (1, 0)),
        ([A, calls("{")], [A, calls("{ ")], "tool call changed", (1, 0)),
        ([A, THOUGHT, B], [A, replace(THOUGHT, content="It is 7."), B], "reasoning dropped", (1, 0)),
    ],
)
def test_each_change_of_the_messages_has_its_name_and_place(was, now, cause, place):
    """Message and character; what extends has none."""
    told = last(was, now)
    assert (cause, *place) == (told.cause, told.message, told.character)
    assert not told.extends
    assert told.advice


@pytest.mark.parametrize(
    ("was", "now", "cause"),
    [
        ([tool("a"), tool("b")], [tool("b"), tool("a")], "tool order"),
        ([tool("a", x=1, y=2)], [tool("a", y=2, x=1)], "tool order"),
        ([tool("a")], [tool("a"), tool("b")], "tools added"),
        ([tool("a")], [tool("b"), tool("a")], "tools added"),
        ([tool("a"), tool("b")], [tool("b")], "tools removed"),
        ([tool("a", x=1)], [tool("a", x=2)], "tools changed"),
        ([tool("a")], [tool("b")], "tools changed"),
        ([tool("a", x=1), tool("b")], [tool("a", x=2)], "tools changed"),
    ],
)
def test_each_change_of_the_tools_has_its_name(was, now, cause):
    """Cases P4 and P5: they stand before every message, so all of those are lost."""
    told = last(([SYSTEM, A], {"tools": was}), ([SYSTEM, A], {"tools": now}))
    assert (cause, -1, "tools") == (told.cause, told.message, told.role)
    assert told.lost_tokens >= words(SYSTEM.content)


def test_a_second_break_behind_the_first_is_named_too():
    """Who mends the tools should not have to come back for the clock."""
    watch = PrefixWatch(count=words)
    told = last(([user("at 12:00")], {"tools": [tool("a")]}), ([user("at 12:01")], {"tools": [tool("b")]}), watch=watch)
    assert ("tools changed", "clock") == (told.cause, told.also)
    assert ({"tools changed": 1, "clock": 1}, 1) == (watch.causes, watch.breaks)
    assert "tools changed (and clock), byte" in str(told)


def test_equal_tools_made_anew_are_no_break():
    """New objects, the same bytes."""
    assert last(([A], {"tools": [tool("a", x=1)]}), ([A, B], {"tools": [tool("a", x=1)]})).extends


def test_another_model_has_a_cache_of_its_own():
    """The whole prompt is computed again; back with the first model, only what that one has not seen."""
    prompts = ([A], {"model": "m"}), ([A, B], {"model": "n"}), ([A, B, C], {"model": "m"})
    assert ("model switch", 3) == (last(*prompts[:2]).cause, last(*prompts[:2]).lost_tokens)
    back = last(*prompts)
    assert ("model switch", 3) == (back.cause, back.lost_tokens)
    assert 3 == back.token


def test_what_a_model_saw_of_another_conversation_does_not_count():
    """After a declared new beginning every model starts anew."""
    watch = PrefixWatch(count=words)
    watch.see([A], model="n")
    watch.expect_break()
    assert 3 == last(([A], {"model": "m"}), ([A, B], {"model": "n"}), watch=watch).lost_tokens


@pytest.mark.parametrize(
    ("was", "now", "another"),
    [
        ("Which test failed?", "Which fruit is red?", True),
        ("You are careful. " * 9 + "Memory: tea", "You are careful. " * 9 + "Memory: likes dogs", False),
        ("Memory: tea. " + "You are careful. " * 9, "Memory: likes dogs. " + "You are careful. " * 9, False),
        ("at 12:00", "at 13:30", False),
        ("same", "same", False),
    ],
)
def test_a_first_message_that_is_mostly_the_same_is_the_same_prompt(was, now, another):
    """Case P3: memories in the system prompt are a break; another node's prompt is none."""
    watch = PrefixWatch()
    watch.see([user(was)])
    assert another == watch.is_another_prompt([user(now)])


def test_another_template_is_named_wherever_it_shows():
    """The chat template of a trace, or a layout's fixed instructions."""
    assert "template" == last(([A], {"template": "x"}), ([A, B], {"template": "y"})).cause
    layout = Layout(count=words)
    layout.put(Place.TEMPLATE, [Message(role="system", content="rules one")])
    layout.append(A)
    layout.arrange()
    layout.put(Place.TEMPLATE, [Message(role="system", content="rules two")])
    layout.arrange()
    told = layout.explain()[-1]
    assert ("template", 0, 6) == (told.cause, told.message, told.character)


def test_a_declared_fold_is_explained_and_counts_as_no_break():
    """With its place and its cost; the call after it is compared with the folded prompt."""
    layout = Layout(count=words)
    layout.put(Place.SYSTEM, [SYSTEM])
    layout.append(A, B, C)
    layout.arrange()
    layout.compact(summary=[user("short")], history=[C])
    layout.arrange()
    layout.append(A)
    layout.arrange()
    folded, after = layout.explain()[1:]
    assert ("fold", 1, 40) == (folded.cause, folded.message, folded.token)
    assert 4 == folded.lost_tokens
    assert after.extends
    assert 0 == layout.breaks


def test_the_first_prompt_and_an_extension_have_no_cause():
    """The place of an extension is the old end."""
    first, second = PrefixWatch(), PrefixWatch(count=words)
    first.see([A])
    assert (None, 1, True) == (first.explain()[0].cause, first.explain()[0].call, first.explain()[0].extends)
    told = last([SYSTEM, A], [SYSTEM, A, B], watch=second)
    assert (None, 2, len(SYSTEM.content) + 5, 43) == (told.cause, told.message, told.byte, told.token)
    assert 0 == told.lost_tokens == second.lost_tokens


# -- bytes and tokens


def test_the_cost_is_what_is_computed_again():
    """From the break on, but no more than was there before or is there now."""
    told = last([SYSTEM, A, B], [SYSTEM, user("a b x"), B, C])
    assert (len(SYSTEM.content) + 4, 42, 4) == (told.byte, told.token, told.lost_tokens)
    assert 6 == told.lost_bytes


def test_bytes_are_utf8_and_tools_stand_first():
    """Two bytes for é; a lone surrogate does not raise."""
    was = [user("é1"), user("\ud800")]
    told = last((was, {"tools": [tool("a")]}), ([user("é2"), user("\ud800")], {"tools": [tool("a")]}))
    line = '{"description":"does a","name":"a","parameters":{}}'
    assert len(line) + 2 == told.byte


def test_the_answer_that_the_model_wrote_is_part_of_what_the_next_prompt_should_hold():
    """Case P6: arguments dumped again, reasoning dropped; a prompt without the answer lost nothing of the old one."""
    answer = calls('{"a": [1], "b":1.0}', content="<think>hm</think>ok")
    first = ([A], {"answer": answer})
    assert last(first, [A, answer, RESULT]).extends
    again = last(first, [A, calls('{"a":[1],"b":1.0}', content="<think>hm</think>ok"), RESULT])
    assert ("tool args re-dumped", 1) == (again.cause, again.message)
    assert again.lost_bytes > 0
    dropped = last(first, [A, replace(answer, content="ok"), RESULT])
    assert ("reasoning dropped", 1) == (dropped.cause, dropped.message)
    assert last(first, [A, B]).extends
    assert last(first, [A]).extends


def test_without_a_counter_tokens_follow_from_what_the_provider_counted():
    """And say that they are estimated."""
    watch = PrefixWatch()
    was, now = user("x" * 50 + "a" * 50), user("x" * 50 + "b" * 50)
    watch.see([was], usage=Usage(input_tokens=20))
    watch.see([now], usage=Usage(input_tokens=20, cached_tokens=8))
    told = watch.explain()[-1]
    assert (10, 10, True) == (told.token, told.lost_tokens, told.estimated)
    bare = last([was], [now], watch=PrefixWatch())
    assert (None, None, 50) == (bare.token, bare.lost_tokens, bare.lost_bytes)


# -- the provider's own causes


def used(tokens, cached, at_s, more=()):
    return ([SYSTEM, A, *more], {"usage": Usage(input_tokens=tokens, cached_tokens=cached), "at_s": at_s})


def test_an_expired_cache_is_not_the_prompts_fault():
    """The prompt extends, nothing was reused, and the last call was longer ago than the cache lives."""
    watch = PrefixWatch(lifetime_s=300, min_tokens=1024)
    told = last(used(2000, 0, 0), used(2100, 0, 700, [B]), watch=watch)
    assert (0, 0) == (watch.lost_tokens, watch.breaks)
    assert ("cache expired", 2000, 700.0, True) == (told.cause, told.lost_tokens, told.idle_s, told.extends)
    assert "nothing is wrong with the prompt" in told.advice


def test_expiry_is_not_blamed_on_a_break_at_the_same_call():
    """A clock ticked in the hour in which the cache expired: it would have cost nothing."""
    was, now = ([user(f"it is 12:0{minute}")] for minute in range(2))
    usage = Usage(input_tokens=2000)
    watch = PrefixWatch(count=words, lifetime_s=300)
    told = last((was, {"usage": usage, "at_s": 0}), (now, {"usage": usage, "at_s": 4000}), watch=watch)
    assert ("cache expired", "clock", False) == (told.cause, told.also, told.extends)
    assert 0 == watch.lost_tokens
    assert 1 == watch.breaks
    soon = last((was, {"usage": usage, "at_s": 0}), (now, {"usage": usage, "at_s": 40}), lifetime_s=300)
    assert ("clock", None) == (soon.cause, soon.also)


def test_a_short_prompt_is_not_cached_and_that_is_no_fault():
    """Below the provider's minimum."""
    told = last(used(900, 0, 0), used(1000, 0, 9, [B]), lifetime_s=300, min_tokens=1024)
    assert ("below minimum size", True) == (told.cause, told.extends)


def test_a_miss_within_the_lifetime_is_the_providers_once_it_is_known_to_report():
    """A provider that never reports cached tokens is not accused."""
    calls_ = [used(2000, 0, 0), used(2100, 1900, 9, [B]), used(2200, 128, 18, [B, C])]
    assert ("cache missed", 2100 - 128) == (last(*calls_).cause, last(*calls_).lost_tokens)
    assert last(used(2000, 0, 0), used(2100, 0, 9, [B])).cause is None


def test_a_reused_prompt_is_fine_whatever_the_block_size_cost():
    """More than half of it counts."""
    assert last(used(2000, 0, 0), used(2100, 1536, 999, [B]), lifetime_s=300).cause is None


# -- telling


def test_each_cause_and_place_is_told_once_and_all_are_counted(monkeypatch):
    """No prompt text in any line."""
    lines = []
    monkeypatch.setattr(log, "_write", lambda event, fields: lines.append((event, fields)))
    watch = PrefixWatch("s", count=words)
    before = log.counters["prefix_broken"]
    for minute in range(5):
        watch.see([user(f"SECRET at 12:0{minute}"), A])
    watch.see([user("SECRET at 12:04"), B])
    assert [("prefix_broken", "clock", 0), ("prefix_broken", "text changed", 1)] == [
        (event, fields["cause"], fields["message"]) for event, fields in lines
    ]
    assert "SECRET" not in repr(lines)
    assert before + 5 == log.counters["prefix_broken"]
    assert {"clock": 4, "text changed": 1} == watch.causes
    assert 4 * 3 + 3 == watch.lost_tokens


def test_every_cause_has_its_advice():
    """A new cause without one would be a name that helps nobody."""
    assert set(Cause.__args__) == set(ADVICE)


def test_an_explanation_in_words_and_json_keeps_the_text_to_itself():
    """Text only where asked for."""
    told = last([user("SECRET 1")], [user("SECRET 2")])
    assert (
        "call 2: a changing value, byte 7 (token 1) in message 0 (user), character 7; 1 tokens computed again"
        == str(told)
    )
    assert "SECRET" not in json.dumps(told.to_json())
    assert "before" not in told.to_json()
    assert "1" == told.to_json(text=True)["before"]
    assert "call 1: first prompt" == str(last([A]))
    assert "call 2: extends the prompt before at byte 5" == str(last([A], [A, B]))


def test_only_the_last_explanations_are_kept():
    """A session of a year does not grow."""
    watch = PrefixWatch()
    for _ in range(MAX_EXPLANATIONS + 5):
        watch.see([A])
    assert (MAX_EXPLANATIONS, MAX_EXPLANATIONS + 5) == (len(watch.explain()), watch.explain()[-1].call)


def test_listeners_hear_every_call_and_cannot_break_it():
    """Nested, from any caller; one that raises is counted."""
    heard: list[Seen] = []
    seen(session="s", messages=[A])
    before = log.counters["prefix_listener_failed"]
    with listen(heard.append), listen(lambda _call: 1 / 0):
        seen(session="s", task="t", model="m", messages=[A], tools=[tool("a")], usage=Usage(input_tokens=1), at_s=2.0)
    seen(session="s", messages=[A])
    (call,) = heard
    assert ("s", "t", "m", (A,), 2.0, None) == (
        call.session,
        call.task,
        call.model,
        call.messages,
        call.at_s,
        call.answer,
    )
    assert before + 1 == log.counters["prefix_listener_failed"]


# -- any prompts

messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant"]),
    content=st.sampled_from(["", "a", "b c", "é 12:00", "é 12:01", "step 1"]),
    tool_calls=st.lists(st.builds(ToolCall, id=st.just("1"), name=st.just("x"), arguments=st.sampled_from(["{}", "{ }"])),
                        max_size=1).map(tuple),
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.lists(st.lists(messages, min_size=1, max_size=5), min_size=2, max_size=6))
def test_places_and_sizes_are_those_of_a_plain_comparison(prompts):
    """The slow way: join all text and compare character by character."""
    watch = PrefixWatch(count=len)
    for number, prompt in enumerate(prompts):
        watch.see(prompt)
        told = watch.explain()[-1]
        now = "".join(map(message_text, prompt))
        assert (len(now.encode()), len(now)) == (told.prompt_bytes, told.prompt_tokens)
        if number == 0:
            continue
        old = prompts[number - 1]
        same = next(
            (at for at, (x, y) in enumerate(zip(old, prompt, strict=False)) if x != y), min(len(old), len(prompt))
        )
        assert (same == len(old)) == (told.cause is None)
        texts = [message_text(side[same]) if same < len(side) else "" for side in (old, prompt)]
        shared = next((at for at, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), min(map(len, texts)))
        before = "".join(map(message_text, prompt[:same]))
        if told.cause is not None:
            assert (same, len(before) + shared) == (told.message, told.token)
            was = "".join(map(message_text, old))
            assert max(0, min(len(was), len(now)) - told.token) == told.lost_tokens
        assert (find_break(old, prompt) is None) == (told.cause is None)


def test_a_long_prompt_that_extends_is_compared_in_well_below_a_millisecond():
    """10,000 messages: three times the bound is allowed to a busy machine; a loop in Python would take ten times it."""
    prompt = [user(f"message number {number}") for number in range(10_000)]
    watch = PrefixWatch()
    watch.see(prompt)
    best_s = 1.0
    for number in range(20):
        prompt.append(user(f"more {number}"))
        now_s = time.perf_counter()
        assert watch.see(prompt) is None
        best_s = min(best_s, time.perf_counter() - now_s)
    assert best_s < 1e-3
