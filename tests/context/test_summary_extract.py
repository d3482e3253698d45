"""The summary without a model: what is found, what is not mistaken for it, and how long it takes."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.context.summary import SUMMARY_MARK, Summary, extract
from agentkv.core.message import Message, ToolCall


def user(text):
    return Message(role="user", content=text)


def said(text, *calls):
    return Message(role="assistant", content=text, tool_calls=calls)


def call(call_id, arguments="{}", name="shell"):
    return ToolCall(id=call_id, name=name, arguments=arguments)


def result(call_id, text):
    return Message(role="tool", tool_call_id=call_id, content=text)


CONVERSATION = [
    Message(role="system", content="You decided on 99 files in /system/prompt.py."),
    user("Port the billing module to Rust. The budget is 4711.50 EUR. Keep src/billing/api.py working."),
    said("I decided to use SQLite instead of Postgres.", call("1", '{"cmd": "pytest -q tests/billing"}')),
    result("1", "collected 12 items\nFAILED tests/billing/test_vat.py::test_round - AssertionError: 19 != 20\n1 failed, 11 passed in 3.2s"),
    said("The test fails because VAT is rounded twice.", call("2", '{"path": "src/vat.rs"}', "write_file")),
    result("2", "ok"),
    said("Still to do: document the rounding rule. Shall I also drop Python 3.9?"),
]  # fmt: skip


def test_each_section_is_found():
    """Goal, decision, number, command with outcome, paths, error with its cause, open item, unanswered question."""
    found = extract(CONVERSATION)
    assert found.goal.startswith("Port the billing module to Rust.")
    assert ("I decided to use SQLite instead of Postgres.",) == found.decisions
    assert "The budget is 4711.50 EUR." in found.facts
    assert "ran `pytest -q tests/billing`: 1 failed, 11 passed in 3.2s" in found.facts
    assert ("src/billing/api.py", "tests/billing/test_vat.py", "src/vat.rs") == found.files
    assert "FAILED tests/billing/test_vat.py::test_round - AssertionError: 19 != 20" in found.errors
    assert "The test fails because VAT is rounded twice." in found.errors
    assert ("Still to do: document the rounding rule.", "Shall I also drop Python 3.9?") == found.open_items


def test_what_the_system_says_is_no_fact():
    """System messages stay in the prompt anyway."""
    assert "/system/prompt.py" not in extract(CONVERSATION).text()


def test_a_question_that_was_answered_is_not_open():
    """Somebody else spoke after it."""
    found = extract([user("Which port?"), said("Port 8080."), said("And the host?"), user("localhost")])
    assert () == found.open_items


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("see src/a/b.py:12: error", "src/a/b.py"), ("open `/etc/hosts`.", "/etc/hosts"), ("(./run.sh)", "./run.sh"),
        ("~/notes.md", "~/notes.md"), (r"C:\work\x.csv", r"C:\work\x.csv"), ("文件 数据/报告.csv 已读", "数据/报告.csv"),
        ("edit Makefile and pyproject.toml", "pyproject.toml"), ('{"path":"lib/x.ts"}', "lib/x.ts"),
        ("a/very/deep/folder", "a/very/deep/folder"),
    ],
)  # fmt: skip
def test_paths_are_found_in_any_script(text, path):
    """Without the line number or the full stop behind them."""
    assert (path,) == extract([user(text)]).files


@pytest.mark.parametrize(
    "text", ["and/or", "3/4 of it", "v1.2.3", "https://example.org/a/b.py", "e.g. this", "1.5e3", "..."]
)
def test_what_only_looks_like_a_path_is_none(text):
    """Versions, fractions, links."""
    assert () == extract([user(text)]).files


def test_an_earlier_summary_is_carried_on():
    """Merged as any other, and a summary message among the turns is not read as speech."""
    previous = Summary(facts=("port 5433",), goal="old goal")
    found = extract([user(SUMMARY_MARK + "Facts:\n- 1"), said("Use 12 workers.")], previous)
    assert ("port 5433", "Use 12 workers.") == found.facts
    assert "old goal" == found.goal


def test_the_same_turns_give_the_same_summary():
    """No clock, no set order."""
    assert extract(CONVERSATION).text() == extract(list(CONVERSATION)).text()


def test_a_long_loop_gives_a_bounded_summary():
    """Five thousand steps with a number in every line."""
    turns = [user("go")]
    for i in range(5_000):
        turns += [said(f"step {i} in d/f{i}.py", call(f"c{i}")), result(f"c{i}", f"value {i}\nerror {i}\nTODO {i}")]
    found = extract(turns)
    counted = [len(items) for items in (found.decisions, found.facts, found.files, found.errors, found.open_items)]
    assert 320 >= sum(counted)
    assert "step 0 in d/f0.py" in found.facts


HUGE = 5_000_000
GENERATORS = {
    "one letter": lambda: "a" * HUGE,
    "slashes": lambda: "/" * HUGE,
    "a/a/a": lambda: "a/" * (HUGE // 2),
    "dots": lambda: "." * HUGE,
    "blanks": lambda: " " * HUGE,
    "newlines": lambda: "\n" * HUGE,
    "digits": lambda: "1 " * (HUGE // 2),
    "log": lambda: "2026-01-01 12:00:00 error: no such file a/b.py in x\n" * (HUGE // 52),
    "chinese": lambda: "错误。" * (HUGE // 3),
    "json": lambda: '{"cmd":"' + "\\" * HUGE,
    "questions": lambda: "? " * (HUGE // 2),
    "surrogates": lambda: "\ud800" * HUGE,
    "random": lambda: random.Random(1).randbytes(HUGE).decode("latin-1"),
    "emoji": lambda: "\U0001f600" * HUGE,
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_five_megabytes_of_anything_take_less_than_a_second(kind):
    """As what a person says, as a tool's output and as a call's arguments."""
    text = GENERATORS[kind]()
    turns = [[user(text)], [said("", call("1")), result("1", text)], [said(text, call("1", text))]]
    for messages in turns:
        started = time.process_time()
        extract(messages)
        assert time.process_time() - started < 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool", "system"]), st.text(max_size=200)), max_size=6))
def test_any_turns_give_a_summary_that_reads_back(turns):
    """Never an exception; what was found has its text."""
    found = extract([Message(role=role, content=text, tool_call_id="1") for role, text in turns])
    assert (found or None) == Summary.parse(found.text(), own=True)
