"""Volatile: changing values leave the stable part of the prompt and are told at its end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.context.layout import Layout
from agentkv.context.segment import Place
from agentkv.context.volatile import NAMED, Volatile, changed_value, steady
from agentkv.core.message import Message
from agentkv.errors import ConfigError


def system(text):
    return Message(role="system", content=text)


def user(text):
    return Message(role="user", content=text)


def test_a_clock_goes_to_the_tail_and_leaves_a_mark():
    """The model still finds it, and the bytes before it stay."""
    message, told = Volatile(["clock"]).feed(system("You help. Now: 2026-05-01T12:00:00Z. Be brief."))
    assert "You help. Now: [clock 1: see the end]. Be brief." == message.content
    assert "[clock 1] 2026-05-01T12:00:00Z" == told


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is 12:03.", "12:03"),
        ("It is 9:03:01 pm, hurry", "9:03:01 pm"),
        ("On 2026-05-01 12:00:00,123 +0200 it ran", "2026-05-01 12:00:00,123 +0200"),
        ("Today is Friday, May 1, 2026.", "Friday, May 1, 2026"),
        ("Today is Friday", "Friday"),
        ("as of 1 May 2026 at 12:00 UTC", "1 May 2026 at 12:00 UTC"),
        ("date: 01/05/2026", "01/05/2026"),
        ("ts=1767225600.25", "1767225600.25"),
    ],
)
def test_the_clock_knows_how_people_and_programs_write_time(text, value):
    """The whole of it is taken, and nothing beside it."""
    message, told = steady([system(text)], ["clock"])
    assert f"[clock 1] {value}" == told
    assert text.replace(value, "[clock 1: see the end]") == message[0].content


@pytest.mark.parametrize("text", ["Use Python 3.12 and port 8080.", "May I go? 12 monkeys.", "ratio 3:4", "v1.2.3"])
def test_other_numbers_are_no_clock(text):
    """Versions, ports, ratios stay where they are."""
    given_ = system(text)
    assert ((given_,), "") == steady([given_], ["clock"])


def test_ids_counters_and_patterns_of_ones_own_are_numbered_by_kind():
    """Each in its order; a group called value says which part is taken."""
    text = "Run 0b6cd3c9-7d0c-4a3e-9a35-0a1b2c3d4e5f, step #7 of the plan. Weather: rain; 12 open."
    messages, told = steady([system(text)], ["uuid", "counter", r"Weather: (?P<value>\w+)", r"\d+(?= open)"])
    assert (
        "Run [uuid 1: see the end], step #[counter 1: see the end] of the plan. "
        "Weather: [value 1: see the end]; [value 2: see the end] open."
    ) == messages[0].content
    assert 4 == len(told.splitlines())
    assert "[value 1] rain" in told


def test_only_leading_system_messages_are_touched():
    """What a person or a tool said is history: the very same objects."""
    given_ = [system("12:00"), user("at 12:01"), system("12:02")]
    messages, told = steady(given_, ["clock"])
    assert messages[1] is given_[1]
    assert messages[2] is given_[2]
    assert "[clock 1] 12:00" == told


def test_fed_one_by_one_the_first_other_message_ends_it():
    """A system message further back is history."""
    volatile = Volatile(["clock"])
    fed = [volatile.feed(message) for message in (system("12:00"), user("at 12:01"), system("12:02"))]
    assert ["[clock 1] 12:00", "", ""] == [told for _, told in fed]
    assert "12:02" == fed[2][0].content


def test_an_empty_match_takes_nothing():
    """x* matches everywhere."""
    assert ((system("ab"),), "") == steady([system("ab")], ["x*"])


def test_several_leading_messages_are_numbered_through():
    """No mark stands for two values."""
    assert "[clock 1] 12:00\n[clock 2] 12:01" == steady([system("12:00"), system("12:01")], ["clock"])[1]


@pytest.mark.parametrize("bad", ["(", "", 7, "(?P<value>"])
def test_a_pattern_that_cannot_work_is_refused(bad):
    """With its text and the names that there are."""
    with pytest.raises(ConfigError, match="volatile="):
        Volatile([bad])


def test_a_single_text_is_not_taken_for_many_patterns():
    """volatile="clock" would be five patterns of one letter."""
    with pytest.raises(ConfigError, match="give several"):
        Volatile("clock")


@given(st.text(max_size=60), st.sampled_from([*NAMED, r"\d+", r"\w", "x*"]))
def test_nothing_is_lost(text, pattern):
    """Whatever was taken is told; put back, it is the text."""
    (message,), told = steady([system(text)], [pattern])
    back = message.content
    name = pattern if pattern in NAMED else "value"
    if told and "see the end" not in text and "[" not in text and "\n" not in text:
        for number, line in enumerate(told.split("\n"), 1):
            mark = f"[{name} {number}] "
            assert line.startswith(mark)
            back = back.replace(f"[{name} {number}: see the end]", line[len(mark) :], 1)
        assert text == back


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("Now 12:00. Go", "Now 12:01. Go", "clock"),
        ("step 7, at 12:00", "step 8, at 12:01", "clock"),
        ("step 7", "step 18", "counter"),
        ("run 0b6cd3c9-7d0c-4a3e-9a35-0a1b2c3d4e5f", "run 1b6cd3c9-7d0c-4a3e-9a35-0a1b2c3d4e5f", "uuid"),
        ("run ab12cd34", "run ff00aa99", "id"),
        ("be kind", "be brief", ""),
        ("at 12:00 be kind", "at 12:01 be brief", ""),
        ("same", "same", ""),
    ],
)
def test_what_changed_is_named(was, now, kind):
    """Only where nothing else did."""
    assert kind == changed_value(was, now)


def test_a_layout_tells_the_value_at_the_end_and_does_not_break():
    """Case P2: a clock at the head of the system prompt, four calls, no break."""
    layout = Layout(volatile=["clock"])
    for minute in range(4):
        layout.put(Place.SYSTEM, [system(f"Now: 12:0{minute}. Be brief.")])
        layout.append(user(f"question {minute}"))
        prompt = layout.arrange(tail=[user("hurry")])
        assert user(f"[clock 1] 12:0{minute}") == prompt[-1]
    assert 0 == layout.breaks
    assert system("Now: [clock 1: see the end]. Be brief.") == prompt[0]
    assert [None] * 4 == [told.cause for told in layout.explain()]
