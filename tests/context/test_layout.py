"""Layout, canonical tools and the prefix watch: the beginning of a prompt stays the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentkv import context, log
from agentkv.context.canonical import canonical_tools, tools_text
from agentkv.context.layout import Layout
from agentkv.context.plain import canonical_json
from agentkv.context.prefix import PrefixWatch, find_break
from agentkv.context.segment import Place, Segment, arrange
from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.errors import ConfigError


def system(text):
    return Message(role="system", content=text)


def user(text):
    return Message(role="user", content=text)


def tool(name, **parameters):
    return ToolSpec(name=name, description=f"does {name}", parameters=parameters)


# -- order of places


def test_stable_places_come_first_whatever_the_order_of_giving():
    """Template, system, tools, summary, history, recalled, tail."""
    segments = [Segment(place=place, messages=(user(place.name),)) for place in reversed(Place)]
    names = ["TEMPLATE", "SYSTEM", "TOOLS", "SUMMARY", "HISTORY", "RECALLED", "TAIL"]
    assert [message.content for message in arrange(segments)] == names


def test_the_next_prompt_extends_the_last_while_recalled_and_tail_change():
    """What changes with each call stands at the end and breaks nothing."""
    layout = Layout()
    layout.put(Place.SYSTEM, [system("be brief")])
    layout.append(user("one"))
    first = layout.arrange(recalled=[user("memory a")], tail=[user("it is 12:00")])
    layout.append(Message(role="assistant", content="1"), user("two"))
    second = layout.arrange(recalled=[user("memory b")], tail=[user("it is 12:01")])
    assert first[:-2] == second[:2]
    assert [message.content for message in second] == ["be brief", "one", "1", "two", "memory b", "it is 12:01"]
    assert layout.breaks == 0


def test_history_and_tail_cannot_be_put():
    """Append only means that there is no way to rewrite it by accident."""
    for place in (Place.HISTORY, Place.RECALLED, Place.TAIL):
        with pytest.raises(ConfigError, match=place.name):
            Layout().put(place, [])


def test_a_clock_in_the_system_prompt_is_noticed_with_its_position():
    """The exact place, a name for the cause, and one warning for many calls."""
    layout = Layout("s")
    before = log.counters["prefix_broken"]
    for minute in range(4):
        layout.put(Place.SYSTEM, [system(f"You help. Now: 2026-05-01T12:0{minute}:00Z. Be brief.")])
        layout.arrange()
    found = layout.last_break
    assert layout.breaks == 3
    assert found is not None
    assert (found.message, found.role, found.cause) == (0, "system", "clock")
    assert found.character == len("You help. Now: 2026-05-01T12:0")
    assert (found.before[:2], found.after[:2]) == ("2:", "3:")
    assert log.counters["prefix_broken"] == before + 3


def test_a_compaction_is_declared_and_no_break():
    """The prefix changes there on purpose; afterwards it is watched again."""
    layout = Layout()
    layout.append(user("a"), user("b"))
    layout.arrange()
    layout.compact(summary=[user("summary")], history=[user("b")])
    layout.arrange()
    assert layout.breaks == 0
    layout.put(Place.SUMMARY, [user("another")])
    layout.arrange()
    assert layout.breaks == 1


def test_a_tool_found_later_is_appended_to_the_tools():
    """The known ones keep their order, whatever order they are offered in."""
    layout = Layout()
    layout.put_tools([tool("b"), tool("c")])
    layout.put_tools([tool("c"), tool("a"), tool("b")])
    assert [spec.name for spec in layout.tools] == ["b", "c", "a"]


class Growing(RuleBasedStateMachine):
    """A session that appends, recalls and compacts: no break is ever seen, and the prompt is what was given."""

    def __init__(self):
        super().__init__()
        self.layout, self.history, self.last = Layout(), [], None
        self.layout.put(Place.SYSTEM, [system("s")])

    @rule(text=st.text(max_size=5))
    def append(self, text):
        self.layout.append(user(text))
        self.history.append(user(text))

    @rule(text=st.text(max_size=5))
    def ask(self, text):
        prompt = self.layout.arrange(recalled=[user("r" + text)], tail=[user("t" + text)])
        stable = prompt[:-2]
        assert stable[-len(self.history) :] == self.history or not self.history
        if self.last is not None:
            assert stable[: len(self.last)] == self.last
        self.last = stable

    @precondition(lambda self: self.history)
    @rule(keep=st.integers(0, 3))
    def compact(self, keep):
        self.history = self.history[len(self.history) - min(keep, len(self.history)) :]
        self.layout.compact(summary=[user("sum")], history=self.history)
        self.last = None

    @invariant()
    def nothing_broke(self):
        assert self.layout.breaks == 0
        assert list(self.layout.history) == self.history


TestGrowing = Growing.TestCase


# -- the watch on prompts that others build

OLD = [system("s"), user("hello"), Message(role="assistant", tool_calls=(ToolCall(id="1", name="a", arguments="{}"),))]


def test_an_extension_is_no_break():
    """The same messages with more after them."""
    assert find_break(OLD, OLD) is None
    assert find_break(OLD, [*OLD, user("more")]) is None
    assert find_break([], OLD) is None


@pytest.mark.parametrize(
    ("new", "place"),
    [
        ([system("x"), *OLD[1:]], (0, 0, "text changed")),
        ([OLD[0], user("help"), OLD[2]], (1, 3, "text changed")),
        ([OLD[0], user("hello there"), OLD[2]], (1, 5, "text changed")),
        ([OLD[0], system("hello"), OLD[2]], (1, 0, "role changed")),
        (OLD[:2], (2, 0, "messages removed")),
        ([*OLD[:2], Message(role="assistant", tool_calls=(ToolCall(id="1", name="a", arguments="{ }"),))],
         (2, 0, "tool args re-dumped")),
    ],
)  # fmt: skip
def test_the_first_difference_is_found_and_named(new, place):
    """Message, character, cause."""
    found = find_break(OLD, new)
    assert found is not None
    assert (found.message, found.character, found.cause) == place


def test_changed_tools_break_before_every_message():
    """Index -1: they stand at the head of the prompt."""
    found = find_break(OLD, OLD, old_tools=[tool("a")], new_tools=[tool("b")])
    assert found is not None
    assert (found.message, found.cause) == (-1, "tools changed")


@given(st.text(max_size=40), st.text(max_size=40))
def test_the_position_is_that_of_a_plain_comparison(was, now):
    """The search by halves finds what a loop finds."""
    found = find_break([user(was)], [user(now)])
    if was == now:
        assert found is None
        return
    assert found is not None
    plain = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    assert found.character == plain


def test_the_watch_compares_each_prompt_with_the_one_before():
    """A rewrite once is one break, not one for every later call."""
    watch = PrefixWatch("s")
    assert watch.see([user("a")]) is None
    assert watch.see([user("b"), user("c")]) is not None
    assert watch.see([user("b"), user("c"), user("d")]) is None
    assert watch.breaks == 1


# -- canonical tools

words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
schemas = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


def shuffled(value, seed):
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: hash((item[0], seed)))
        return {key: shuffled(item, seed) for key, item in items}
    if isinstance(value, list):
        return [shuffled(item, seed) for item in value]
    return value


@given(st.dictionaries(words, st.dictionaries(words, schemas), max_size=5),
       st.randoms(), st.integers())  # fmt: skip
def test_shuffled_tools_give_the_same_bytes(specs, rng, seed):
    """Order of tools and of keys at any depth does not matter; the meaning stays."""
    tools = [ToolSpec(name=name, parameters=parameters) for name, parameters in specs.items()]
    mixed = [ToolSpec(name=t.name, parameters=shuffled(dict(t.parameters), seed)) for t in tools]
    rng.shuffle(mixed)
    assert tools_text(canonical_tools(tools)) == tools_text(canonical_tools(mixed))
    for spec in canonical_tools(mixed):
        assert spec.parameters == specs[spec.name]


def test_the_order_of_lists_is_meaning_and_stays():
    """`required` and `enum` are lists in JSON."""
    assert canonical_json({"enum": ["b", "a"]}) == {"enum": ["b", "a"]}


SCRIPT = """
from agentkv.context.canonical import canonical_tools, tools_text
from agentkv.core.message import ToolSpec
tools = [ToolSpec(name=n, parameters={"enum": {"x", "y", "z", "longer", "é"}, **{k: 1 for k in {"p", "q", "r"}}}) for n in {"b", "a", "c"}]
print(ascii(tools_text(canonical_tools(tools))))
"""


def test_tools_have_the_same_bytes_in_every_process():
    """Sets as enum values, five hash seeds, one text."""
    root = Path(context.__file__).parents[2]
    texts = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=root, env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in range(5)
    }  # fmt: skip
    assert len(texts) == 1
    (text,) = texts
    first = json.loads(eval(text).splitlines()[0])
    assert first["name"] == "a"
    assert first["parameters"]["enum"] == ["longer", "x", "y", "z", "é"]
