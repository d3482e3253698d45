"""Summary: text and back, what weak models write, merging over many folds, and what goes first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.context.summary import Summary


def size(text):
    return len(text) // 4 + 4


FULL = Summary(
    goal="fix the parser",
    decisions=("use json, not yaml",),
    facts=("port 8080", "12 of 40 tests fail"),
    files=("src/a.py", "/etc/hosts"),
    errors=("KeyError: 'x' because the table is empty",),
    open_items=("write tests",),
)

lines = st.text(max_size=40)
items = st.lists(lines, max_size=4)
summaries = st.fixed_dictionaries({
    "goal": st.lists(lines, max_size=1), "decisions": items, "facts": items, "files": items, "errors": items,
    "open_items": items,
}).map(Summary.of)  # fmt: skip


@settings(deadline=None)
@given(summaries)
def test_a_summary_comes_back_from_its_text(summary):
    """Whatever the items are: blanks, colons, bullets, any script."""
    assert (summary or None) == Summary.parse(summary.text(), own=True)


def test_the_text_has_a_heading_for_each_section_that_is_not_empty():
    """The form that the instruction asks for."""
    assert (
        "Goal: fix the parser\nDecisions:\n- use json, not yaml\nFacts:\n- port 8080\n- 12 of 40 tests fail\nFiles:\n"
        "- src/a.py\n- /etc/hosts\nErrors:\n- KeyError: 'x' because the table is empty\nOpen items:\n- write tests"
    ) == FULL.text()
    assert "" == Summary().text()


@pytest.mark.parametrize(
    "text",
    [
        "Here is the summary:\n\n## Goal\nfix the parser\n\n## Decisions\n* use json\n\n## Open items\n1. write tests",
        "**Goal:** fix the parser\n**Key decisions:**\n- use json\n**Next steps**\n- write tests\n",
        "1. Goal: fix the parser\n2. Decisions:\n   - use json\n3. Open items:\n   - write tests",
        "- **Goal:** fix the parser\n- **Decisions:**\n  - use json\n- **TODO:** write tests",
        "```\nGoal: fix the parser\nDecisions: use json\nErrors: none\nOpen items: write tests\n```",
        '{"goal": "fix the parser", "decisions": ["use json"], "open_items": "write tests"}',
        '```json\n{"goal": "fix the parser", "decisions": ["use json"], "open items": ["write tests"], "x": {}}\n```',
        "GOAL: fix the parser\r\nDecisions:\r\n\u2022 use json\r\nTo do:\r\n+ write tests",
    ],
)
def test_other_spellings_of_the_form_are_read(text):
    """Markdown, bold, numbers, bullets of any kind, JSON."""
    expected = Summary(goal="fix the parser", decisions=("use json",), open_items=("write tests",))
    assert expected == Summary.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "   ", "I'm sorry, but I can't help with that.", "Error: 429 Too Many Requests", "Errors:\n- timeout\n- again",
        'Internal Server Error\nTraceback (most recent call last):\n  File "a.py"', "<tool_call>{}</tool_call>",
        "Goal:\nDecisions:\nFacts:\n- none", "Goal: none\nFacts: n/a", "{}", "{not json", '{"error": "overloaded"}',
        "[" * 10_000, '{"goal":' * 3_000, "Previous conversation was too long to summarize", "-" * 1_000, "\x00",
        '{"facts": [[], {}, true, null]}', "The goal: is near", "what the facts were",
    ],
)  # fmt: skip
def test_what_is_no_summary_is_none(text):
    """A refusal, an error, an empty form, broken JSON: nothing that could replace history."""
    assert Summary.parse(text) is None


def test_the_instruction_said_back_is_no_summary():
    """Small models repeat what they are told; their form without a fact holds nothing."""
    from agentkv.context.summary.prompts import INSTRUCTION

    told = Summary.parse(INSTRUCTION)
    assert told is None


@settings(deadline=None)
@given(st.text(max_size=300))
def test_reading_never_raises(text):
    """Any text is a summary or None."""
    assert Summary.parse(text) is None or isinstance(Summary.parse(text), Summary)


def test_merging_keeps_the_old_and_adds_the_new():
    """Said twice is kept once, where it stood."""
    newer = Summary(facts=("PORT 8080", "2 of 40 tests fail"), files=("src/a.py",), decisions=("use json, not yaml",))
    merged = FULL.merged(newer)
    assert ("port 8080", "12 of 40 tests fail", "2 of 40 tests fail") == merged.facts
    assert ("/etc/hosts", "src/a.py") == merged.files
    assert FULL.decisions == merged.decisions
    assert FULL.goal == merged.goal
    assert "another goal" == FULL.merged(Summary(goal="another goal")).goal


@pytest.mark.parametrize(
    "done", ["done: write tests", "Done: Write tests.", "[x] write tests", "done: write tests in b.py"]
)
def test_an_open_item_that_is_called_done_is_closed(done):
    """And the note that it is done does not stay either."""
    assert ("deploy",) == FULL.merged(Summary(open_items=(done, "deploy"))).open_items


def test_an_open_item_that_is_left_out_stays_open():
    """A model that forgets does not finish the work by that."""
    assert FULL.open_items == FULL.merged(Summary(facts=("1",))).open_items


def test_a_short_done_note_closes_no_longer_item():
    """ "done: a" does not close everything with an a in it."""
    assert ("write tests",) == FULL.merged(Summary(open_items=("done: t",))).open_items


@settings(deadline=None)
@given(summaries, summaries)
def test_merging_twice_changes_nothing_more(older, newer):
    """The same answer given again adds nothing."""
    once = older.merged(newer)
    assert once == once.merged(newer)


def test_a_summary_that_fits_is_left_as_it_is():
    """The very same object."""
    assert FULL.bounded(10_000, size) is FULL


@settings(max_examples=60, deadline=None)
@given(summaries, summaries, st.integers(0, 120))
def test_a_bounded_summary_fits_and_invents_nothing(older, newer, max_tokens):
    """Every item of it was there before."""
    whole = older.merged(newer)
    small = whole.bounded(max_tokens, size)
    assert not small or size(small.text()) <= max_tokens
    for section in ("decisions", "facts", "files", "errors", "open_items"):
        kept = getattr(small, section)
        assert list(kept) == [item for item in getattr(whole, section) if item in kept]


def crowded():
    return Summary(
        goal="g" * 40,
        decisions=tuple(f"decision {i}" for i in range(20)),
        facts=(*(f"fact {i}" for i in range(60)), *(f"plain {'x' * i}" for i in range(1, 60))),
        files=tuple(f"src/f{i}.py" for i in range(60)),
        errors=tuple(f"error {i}" for i in range(30)),
        open_items=tuple(f"item {i}" for i in range(20)),
    )


def test_plain_facts_go_first_then_errors_and_facts_of_the_middle():
    """The rule of bound.py, step by step as room gets less."""
    whole = crowded()
    small = whole.bounded(size(whole.text()) - 200, size)
    assert any(fact.startswith("plain") for fact in set(whole.facts) - set(small.facts))
    assert all(f"fact {i}" in small.facts for i in range(60))
    smaller = whole.bounded(350, size)
    assert not any(fact.startswith("plain") for fact in smaller.facts)
    assert whole.open_items == smaller.open_items
    assert whole.decisions == smaller.decisions
    assert [f"fact {i}" for i in range(8)] == list(smaller.facts[:8])
    least = whole.bounded(120, size)
    assert whole.goal == least.goal
    assert ("item 0", "item 19") == (least.open_items[0], least.open_items[-1])
    assert ("decision 0", "decision 19") == (least.decisions[0], least.decisions[-1])
    assert ("src/f0.py", "src/f59.py") == (least.files[0], least.files[-1])
    assert ("fact 0", "fact 59") == (least.facts[0], least.facts[-1])
    assert ("error 29",) == least.errors[-1:]


def test_the_goal_is_cut_before_it_goes():
    """The last that is left is the beginning of the goal."""
    small = Summary(goal="word " * 100, facts=("1",) * 5).bounded(20, size)
    assert small.goal.startswith("word word")
    assert small.goal.endswith("...")


def test_what_the_first_fold_knew_is_there_after_fifty():
    """Path, number, decision and open item of the first turn, under a bound that most of the rest does not survive."""
    summary = Summary(
        goal="migrate", decisions=("use port 5433",), facts=("invoice total 4711.50",), files=("db/schema_v2.sql",),
        open_items=("rotate the key of the old server",),
    )  # fmt: skip
    for turn in range(50):
        noise = Summary(
            decisions=(f"decision {turn}",), facts=tuple(f"row {turn}.{i}" for i in range(20)),
            files=tuple(f"log/{turn}/{i}.txt" for i in range(10)), errors=(f"error {turn}",),
            open_items=(f"look at {turn}",),
        )  # fmt: skip
        summary = summary.merged(noise).bounded(600, size)
    text = summary.text()
    assert size(text) <= 600
    for fact in ("use port 5433", "invoice total 4711.50", "db/schema_v2.sql", "rotate the key of the old server"):
        assert fact in text
    assert "decision 49" in text
