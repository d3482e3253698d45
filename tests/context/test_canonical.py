"""Canonical tools: one form in every process, an outcome for every value, and once per tool."""

import dataclasses
import datetime as dt
import enum
import json
import os
import subprocess
import sys
import time
import uuid
from decimal import Decimal
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import context
from agentkv.context import canonical
from agentkv.context.canonical import NO_PARAMETERS, canonical_tools, raw_tools_text, tools_text
from agentkv.context.plain import MAX_DEPTH, MAX_NODES, canonical_json
from agentkv.core.message import ToolSpec


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Word(str):
    """A text that shows itself as something else."""

    __slots__ = ()

    def __str__(self):
        return f"at {id(self)}"


@dataclasses.dataclass
class Point:
    x: int
    y: set


class Model:
    """As pydantic's: a class with a schema, an object with a dump."""

    @classmethod
    def model_json_schema(cls):
        return {"type": "object", "title": cls.__name__}

    def model_dump(self, *, mode):
        return {"mode": mode}


class Stranger:
    """Its repr holds an address."""


class Hostile(dict):
    def items(self):
        raise RuntimeError

    __iter__ = items


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ({"b": 1, "a": (1, 2)}, {"a": [1, 2], "b": 1}),
        ({"x", "a"}, ["a", "x"]),
        (frozenset({2, 10, 1}), [1, 10, 2]),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        ({Colour.RED: 1, None: 2, 7: 3, True: 4}, {"7": 3, "null": 2, "red": 1, "true": 4}),
        (Word("w"), "w"),
        (Decimal("1.50"), 1.5),
        (Decimal("1E+2"), 100),
        (Decimal("NaN"), "NaN"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1.0, 1.0),
        (True, True),
        (dt.date(2026, 5, 1), "2026-05-01"),
        (dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC), "2026-05-01T12:00:00+00:00"),
        (dt.time(12), "12:00:00"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (PurePosixPath("/a/b"), "/a/b"),
        (b"a\xff", "a\ufffd"),
        ("a\ud800\0", "a\ufffd\ufffd"),
        (Point(x=1, y={2, 1}), {"x": 1, "y": [1, 2]}),
        (Model, {"title": "Model", "type": "object"}),
        (Model(), {"mode": "json"}),
        (Stranger(), "Stranger"),
        (Stranger, "Stranger"),
        (len, "len"),
        (Hostile(a=1), "Hostile"),
    ],
)  # fmt: skip
def test_each_kind_of_value_has_one_outcome(value, plain):
    """As docs/prefix.md says, and nothing of it depends on the process."""
    assert {"v": plain} == canonical_json({"v": value})
    json.dumps(canonical_json({"v": value}), allow_nan=False).encode()


def test_pydantics_own_models_become_their_schema():
    """The way in which most tools are declared; fields and constraints included."""
    import pydantic

    class Arguments(pydantic.BaseModel):
        colour: Colour
        day: dt.date = pydantic.Field(default=dt.date(2026, 5, 1), description="when")

    schema = canonical_json(Arguments)
    assert {"colour", "day"} == schema["properties"].keys()
    assert {"colour": "red", "day": "2026-05-01"} == canonical_json(Arguments(colour=Colour.RED))
    assert "FieldInfo" == canonical_json(Arguments.model_fields["day"])


def test_a_cycle_becomes_a_schema_that_allows_anything():
    """Also through a list, and never a RecursionError."""
    tree = {"type": "object"}
    tree["child"] = tree
    tree["all"] = [tree, 1]
    assert {"all": [{}, 1], "child": {}, "type": "object"} == canonical_json(tree)
    (spec,) = canonical_tools([ToolSpec(name="t", parameters=tree)])
    assert {} == spec.parameters["child"]


def test_a_part_that_is_used_twice_is_no_cycle():
    """Pydantic shares objects between properties."""
    part = {"type": "string"}
    assert {"a": part, "b": part} == canonical_json({"a": part, "b": part})


def test_a_schema_of_any_depth_and_size_ends():
    """Cut off with {} behind MAX_DEPTH levels and MAX_NODES values."""
    deep: dict = {}
    for _ in range(100_000):
        deep = {"x": deep}
    plain, depth = canonical_json(deep), 0
    while plain:
        plain, depth = plain["x"], depth + 1
    assert MAX_DEPTH == depth
    wide: dict = {}
    for _ in range(60):
        wide = {"a": wide, "b": wide}  # 2**60 values, each named twice
    began_s = time.monotonic()
    assert len(json.dumps(canonical_json(wide))) < 10 * MAX_NODES
    assert time.monotonic() - began_s < 10


def test_a_huge_schema_is_read_in_linear_time():
    """5,000 properties."""
    huge = {"properties": {f"p{n}": {"type": "string", "enum": [str(n)]} for n in range(5000)}}
    began_s = time.monotonic()
    assert huge == canonical_json(huge)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("nothing", [None, [], "text", 7])
def test_parameters_that_are_no_schema_become_those_of_a_tool_without_any(nothing):
    """A server asks for an object."""
    (spec,) = canonical_tools([ToolSpec(name="t", description=None, parameters=nothing)])
    assert (NO_PARAMETERS, "") == (spec.parameters, spec.description)


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=4) | st.binary(max_size=3) | st.dates() | st.decimals()
    | st.sampled_from([Colour.RED, Level.HIGH, Model, Stranger, len]) | st.sets(st.integers() | st.text(max_size=2)),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3) | st.integers() | st.none(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_value_becomes_strict_json_and_stays_so(value):
    """UTF-8, no NaN; the second time nothing changes."""
    plain = canonical_json(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    assert "\ud800" not in text.encode().decode()
    assert plain == canonical_json(plain)


# -- once per tool


def many(n=30):
    return [
        ToolSpec(name=f"t{i}", description="d" * 200, parameters={"b": {"x": i}, "a": ["y"] * 20}) for i in range(n)
    ]


def test_the_same_tools_give_the_very_same_objects():
    """By identity, and by content where they were made anew."""
    tools = many()
    first = canonical_tools(tools)
    assert first is canonical_tools(tools, known=first)
    assert first is canonical_tools(reversed(many()), known=first)
    assert all(now is was for now, was in zip(canonical_tools(many()), first, strict=True))


def test_an_unchanged_list_costs_microseconds():
    """30 tools; ten times the figure is allowed to a busy machine, what serialising costs is a hundred times it."""
    tools = many()
    known = canonical_tools(tools)
    best_s = 1.0
    for _ in range(50):
        began_s = time.perf_counter()
        canonical_tools(tools, known=known)
        tools_text(known)
        best_s = min(best_s, time.perf_counter() - began_s)
    assert best_s < 150e-6


def test_what_is_remembered_is_bounded(monkeypatch):
    """A program that makes tools for ever does not grow for ever."""
    monkeypatch.setattr(canonical, "MAX_REMEMBERED", 10)
    monkeypatch.setattr(canonical, "_by_identity", {})
    monkeypatch.setattr(canonical, "_by_content", {})
    for _ in range(5):
        canonical_tools(many(8))
    assert len(canonical._by_identity) <= 10
    assert len(canonical._by_content) <= 10


def test_the_text_as_sent_shows_the_order_of_keys_and_the_fixed_one_does_not():
    """The watch must see what a server would."""
    one, other = (ToolSpec(name="t", parameters=dict(pairs)) for pairs in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)]))
    assert raw_tools_text([one]) != raw_tools_text([other])
    assert tools_text([one]) == tools_text([other])
    assert raw_tools_text(canonical_tools([other])) == tools_text([one])


SCRIPT = """
import enum, sys
from agentkv.context.canonical import canonical_tools, tools_text
from agentkv.core.message import ToolSpec
class Kind(enum.Enum):
    A = "a"
class Odd: pass
names = {"grep", "cat", "ls", "make"}
known = canonical_tools([ToolSpec(name="ls", parameters={})])
loop = {"kinds": {Kind.A, "é", None, 3}, "odd": Odd(), **{k: frozenset("xyz") for k in {"p", "q", "r"}}}
loop["self"] = loop
tools = canonical_tools([ToolSpec(name=n, parameters=loop) for n in names], known=known)
print(ascii(tools_text(tools)))
print([tool.name for tool in canonical_tools([*tools, ToolSpec(name="a_new_one", parameters={})], known=tools)])
"""


def test_shuffled_sets_enums_cycles_and_strangers_have_the_same_bytes_in_every_process():
    """Cases P4 and P5: four hash seeds, one text; a tool found later stands last."""
    root = Path(context.__file__).parents[2]
    texts = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=root, env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True, text=True, check=True, timeout=200,
        ).stdout
        for seed in range(4)
    }  # fmt: skip
    (text,) = texts
    assert "['ls', 'cat', 'grep', 'make', 'a_new_one']" == text.splitlines()[1]
    assert '"odd":"Odd"' in text
