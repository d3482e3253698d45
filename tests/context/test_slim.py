"""The Slimmer: bounds, idempotence, JSON, determinism, small model, user's rules; any text at all."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.context.outputs import Outputs, reader
from agentkv.context.slim import MAX_TOKENS, Rule, Slimmer, SlimRules, default_rules
from agentkv.context.slim.clean import clean, lines_of
from agentkv.context.tokens import count_text, estimate
from agentkv.errors import ConfigError

LOG = "\n".join(
    f"2026-03-01 10:00:{n % 60:02d} INFO part {n}: wrote block {n * 31 % 977} of file-{n % 13}" for n in range(3000)
)


def slimmer(**options) -> Slimmer:
    return Slimmer(**{"outputs": Outputs(), "count": estimate, **options})


_ANY = st.characters(exclude_categories=())  # lone surrogates too
_LINES = st.one_of(
    st.text(_ANY, max_size=60),
    st.sampled_from(
        (
            "ERROR: it failed", "ok 1", "tests/a.py::test_b PASSED [ 1%]", "=== FAILURES ===", "E   assert 1 == 2", "___ test_b ___",
            "FAILED tests/a.py::test_b - assert 1", "=== 1 failed, 2 passed in 0.1s ===", "=== test session starts ===",
            "diff --git a/x b/x", "@@ -1,3 +1,3 @@", "+new", "-old", " same", "commit 0123456789abcdef0123456789abcdef01234567",
            "    subject", "a.c:3:4: warning: unused", "a.c:3:4: error: bad", "   3 | x", "      | ^", " --> a.rs:1:2",
            "src/a/b.py", "src/a/c.py", "src/a.py:12:text", "src/a.py-13-text", "-rw-r--r-- 1 root root 12 Nov 29 10:00 a.py",
            "Collecting numpy", "Successfully installed numpy-2", "10%\r20%\r100%", "\x1b[31mred\x1b[0m", "x\x1b[1Ay", "a,b,c", "1,2,3",
            "[agentkv: 1 of 2 lines left out]", '[agentkv: 1 of 2 lines left out; read_output("kabc")]', "... lines 3-9", "{", "}", "[", "]", '"', "\ud800",
            "Traceback (most recent call last):", '  File "/a/b.py", line 3, in f', "    x()", "ValueError: x", "    at a.b.C(D.java:3)", "\x00", "\u3000", "\u2028",
        )
    ),
)  # fmt: skip
_TEXTS = st.one_of(
    st.text(_ANY, max_size=400),
    st.lists(_LINES, max_size=80).map("\n".join),
    st.tuples(_LINES, st.integers(1, 400)).map(lambda pair: "\n".join([pair[0]] * pair[1])),
    st.tuples(st.text(_ANY, min_size=1, max_size=5), st.integers(1, 3000)).map(lambda pair: pair[0] * pair[1]),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=80),
    lambda children: st.lists(children, max_size=30) | st.dictionaries(st.text(max_size=12), children, max_size=12),
    max_leaves=120,
)
_COMMANDS = st.sampled_from(
    ("", "pytest -v", "make", "cat a.py", "cat -n a.py", "pip install x", "git log -p", "grep -rn x .")
)


@pytest.mark.parametrize(
    ("command", "end"), [("cat a.py", "\r"), ("cat a.py", "\r\n"), ("cat a.py", "\n"), ("make", "\r\n"), ("make", "\n")]
)
def test_what_is_kept_is_what_came(command, end):
    """Whatever its lines end with."""
    text = end.join(f"line {n} of a file that is long" for n in range(200)) + end
    slim = slimmer(max_tokens=64, small_tokens=0)
    once = slim.slim(text, tool="bash", command=command)
    assert text == slim.outputs.raw(once.handle)


@settings(max_examples=80, deadline=None)
@given(text=_TEXTS, command=_COMMANDS, limit=st.sampled_from((64, 90, 200, 1500)), small=st.sampled_from((0, 60, 160)))
def test_any_text_is_bounded_and_stays_when_it_comes_again(text, command, limit, small):
    """No text raises; what comes out is within the limit, marker included, and is its own slimmed form."""
    slim = slimmer(max_tokens=limit, small_tokens=small)
    once = slim.slim(text, tool="bash", command=command)
    assert once.kept_tokens == estimate(once.text) <= limit
    assert once.text == slimmer(max_tokens=limit, small_tokens=small).slim(once.text, tool="bash", command=command).text
    assert once.text == once.text.encode().decode()
    assert not set("\x00\x1b\b") & set(once.text)
    if once.handle is not None:
        assert text == slim.outputs.raw(once.handle)


@settings(max_examples=50, deadline=None)
@given(value=_JSON, indent=st.sampled_from((None, 2)), limit=st.sampled_from((64, 120, 400)), ascii_only=st.booleans())
def test_json_stays_json_within_the_bound(value, indent, limit, ascii_only):
    """At the top level it is the same kind of value, whatever is left out."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    slim = slimmer(max_tokens=limit, small_tokens=0)
    once = slim.slim(text)
    found = json.loads(once.text)
    if isinstance(value, dict | list):
        assert type(value) is type(found)
    assert estimate(once.text) <= limit
    assert once.text == slim.slim(once.text).text
    if once.handle is None and "\\ud" not in text:
        assert json.loads(text.encode("utf-8", "replace")) == json.loads(once.text.encode("utf-8", "replace"))


@settings(max_examples=80, deadline=None)
@given(text=_TEXTS)
def test_a_clean_text_is_its_own_clean_form(text):
    """So a line has the same number for whoever slims and for whoever reads."""
    assert clean(text) == clean(clean(text))
    assert all(len(line) <= 1000 for line in lines_of(clean(text)))


@pytest.mark.parametrize("count", [len, lambda text: len(text.encode()), lambda _text: 1, lambda text: 3 * len(text)])
def test_any_way_of_counting_is_kept_to(count):
    """Also characters, bytes and nonsense, down to a marker of a few characters."""
    for text in (LOG, json.dumps([LOG] * 9), "x" * 5000):
        once = slimmer(count=count, max_tokens=64).slim(text)
        assert count(once.text) <= 64
        assert once.text == slimmer(count=count, max_tokens=64).slim(once.text).text


def test_a_small_text_keeps_its_bytes():
    """There is nothing to gain and a marker to pay."""
    assert "two\n  lines" == slimmer().slim("two\n  lines").text
    assert "small" == slimmer().slim("two\n  lines").rule


def test_what_is_left_out_is_told_and_can_be_read_again():
    """The last line names the number of lines and the handle; gaps name the lines to ask for."""
    slim = slimmer()
    text = LOG.replace("part 1500: wrote", "part 1500: ERROR could not write")
    once = slim.slim(text, tool="bash", command="run")
    assert once.text.endswith(f'of 3000 lines left out; read_output("{once.handle}")]')
    assert "part 1500: ERROR could not write" in once.text
    assert "1501: 2026-03-01 10:00:00 INFO part 1500: ERROR" in reader(slim.outputs)(once.handle, lines="1501")
    assert once.raw_tokens > 40 * once.kept_tokens


def test_a_gap_names_lines_as_the_reader_numbers_them():
    """Whoever follows it finds what was left out, also after cleaning and across long lines."""
    slim = slimmer(max_tokens=300)
    words = [f"word {chr(97 + n % 26)}{chr(97 + n // 26 % 26)} said" for n in range(600)]
    once = slim.slim("\x1b[1m" + "y" * 2500 + "\n" + "10%\r20%\r\n".join(words))
    gap = next(line for line in once.text.split("\n") if line.startswith("... lines "))
    first, last = map(int, gap.removeprefix("... lines ").split("-"))
    lines = once.text.split("\n")
    before = lines[lines.index(gap) - 1]
    assert slim.outputs.read(once.handle, lines=str(first - 1)).startswith(f"{first - 1}: {before[:100]}")
    assert last > first


def test_the_same_text_gives_the_same_bytes_in_every_process():
    """Whatever the hash seed: the prompt of a resumed run is the prompt that was."""
    code = (
        "from agentkv.context.outputs import Outputs\nfrom agentkv.context.slim import Slimmer\n"
        "from agentkv.context.tokens import estimate\n"
        "text = '\\n'.join(f'tests/a.py::test_{n} FAILED' for n in range(900)) + '{\"a\": 1}'\n"
        "print(Slimmer(outputs=Outputs(), count=estimate).slim(text, tool='t').text)"
    )
    printed = set()
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        printed.add(
            subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        )
    assert 1 == len(printed)


def test_two_empty_call_ids_do_not_share_a_slot():
    """Two parallel results, both of a call without an id: each is read back as it was."""
    slim = slimmer()
    first, second = slim.slim(LOG + "\nfirst"), slim.slim(LOG + "\nsecond")
    assert first.handle != second.handle
    assert LOG + "\nfirst" == slim.outputs.raw(first.handle)
    assert LOG + "\nsecond" == slim.outputs.raw(second.handle)


def test_every_tool_may_have_its_own_bound():
    """Some tools are worth more room; some outputs are never touched."""
    slim = slimmer(tool_tokens={"search": 100}, untouched={"recipe"})
    text = " ".join(f"{n} is a number" for n in range(4000))
    assert slim.slim(text, tool="search").kept_tokens <= 100
    assert 100 < slim.slim(text, tool="other").kept_tokens <= MAX_TOKENS
    assert text == slim.slim(text, tool="recipe").text


def test_chinese_output_is_counted_as_chinese():
    """Not at four characters a token."""
    text = "".join(f"第{n}行:写入完成,共{n * 7}个记录。\n" for n in range(2000))
    once = Slimmer(outputs=Outputs(), count=count_text).slim(text)
    assert count_text(once.text) <= MAX_TOKENS
    assert "第0行" in once.text


def test_what_the_reader_answers_is_not_slimmed_again():
    """Or the agent would never get at the lines it asks for."""
    slim = slimmer(max_tokens=100)
    once = slim.slim(LOG)
    answer = slim.outputs.read(once.handle)
    assert estimate(answer) > 100
    assert answer == slim.slim(answer, tool="read_output").text
    assert estimate(slim.slim(LOG, tool="read_output").text) <= 100


def test_lone_surrogates_are_replaced_when_they_arrive():
    """The same way every time, so that a checkpoint keeps the text as it is; pairs become their character."""
    assert "a\ufffdb\ufffd" == slimmer().slim("a\ud800b\udc00").text
    assert "\U0001f600" == slimmer().slim("\ud83d\ude00").text


def test_a_rule_of_the_users_comes_first():
    """A rule is a name and two plain functions."""
    mine = Rule(
        name="orders",
        matches=lambda tool, _command, _text: tool == "orders",
        apply=lambda text, _budget: f"{text.count('#')} orders",
    )
    slim = slimmer(rules=default_rules().first(mine))
    once = slim.slim("# order\n" * 500, tool="orders")
    assert once.text.startswith("500 orders\n[agentkv: ")
    assert "orders" == once.rule
    assert "orders" != slim.slim("# order\n" * 500, tool="other").rule
    assert ("orders", *default_rules().names) == slim.rules.names


@pytest.mark.parametrize(
    "apply",
    [
        lambda _text, _budget: 1 / 0,
        lambda text, _budget: text * 3,
        lambda _text, _budget: None,
        lambda _text, _budget: "\ud800 lone",
        lambda _text, _budget: 7,
    ],
)
def test_a_rule_that_goes_wrong_costs_nobody_the_bound(apply):
    """It raises, ignores its budget, declines, or answers what is no text."""
    bad = Rule(name="bad", matches=lambda _tool, _command, _text: True, apply=apply)
    once = slimmer(rules=default_rules().first(bad)).slim(LOG)
    assert once.kept_tokens <= MAX_TOKENS
    assert once.text.encode()
    assert once.handle is not None


def test_rules_that_cannot_work_are_refused():
    """Two of one name, a name that is not there, a bound without room for a marker."""
    rule = Rule(name="json", matches=lambda *_: True, apply=lambda text, _budget: text)
    with pytest.raises(ConfigError):
        default_rules().first(rule)
    with pytest.raises(ConfigError):
        default_rules().without("nonsense")
    assert "json" not in default_rules().without("json").names
    with pytest.raises(ConfigError):
        slimmer(max_tokens=63)
    with pytest.raises(ConfigError):
        slimmer(tool_tokens={"a": 1})
    with pytest.raises(ConfigError):
        slimmer(small_tokens=-1)
    assert () == SlimRules().names


def test_without_any_rule_the_bound_still_holds():
    """A text over it then leaves nothing but a word."""
    assert "[agentkv: cut]" == slimmer(rules=()).slim(LOG).text


class Model:
    """A small model that counts how often it is asked."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = 0

    def __call__(self, text, max_tokens):
        self.asked += 1
        assert estimate(text) <= max_tokens
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_small_model_is_asked_once_and_its_answer_kept(tmp_path):
    """A second process with the same folder gives the same bytes without asking."""
    model = Model("all parts were written")
    text = slimmer(outputs=Outputs(tmp_path), compress=model).slim(LOG)
    assert text.text.startswith("all parts were written\n[agentkv: ")
    assert "repeats+compress" == text.rule
    other = Model("something else")
    assert text == slimmer(outputs=Outputs(tmp_path), compress=other).slim(LOG)
    assert (1, 0) == (model.asked, other.asked)


@pytest.mark.parametrize("answer", [RuntimeError("down"), "", "   ", "x " * 9000, None])
def test_a_small_model_that_fails_leaves_what_the_rules_made(tmp_path, answer):
    """And it stays so, also when the model works again later: the bytes of one output never change."""
    expected = slimmer(outputs=Outputs(tmp_path)).slim(LOG).text
    assert expected == slimmer(outputs=Outputs(tmp_path), compress=Model(answer)).slim(LOG).text
    assert expected == slimmer(outputs=Outputs(tmp_path), compress=Model("now it works")).slim(LOG).text


def test_a_small_model_is_not_asked_about_json_or_small_texts():
    """JSON must stay JSON, and a small text has nothing to gain."""
    model = Model("prose")
    slim = slimmer(compress=model)
    slim.slim(json.dumps([{"n": n} for n in range(5000)]))
    slim.slim("small")
    assert 0 == model.asked


_LETTERS = "ABCDEFGHIJKLMNOPqrstuvwxyz0123456789+/"
_HUGE = {
    "one line": lambda size: "a" * size,
    "newlines": lambda size: "\n" * size,
    "carriage returns": lambda size: "a\rb\n" * (size // 4),
    "json": lambda size: json.dumps([{"id": n, "name": f"n{n}", "v": n * 1.5} for n in range(size // 45)]),
    "nested json": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "objects": lambda size: '{"a":[' * (size // 12) + "]}" * (size // 12),
    "cjk": lambda size: "漢字かな交じり文。" * (size // 9),
    "base64": lambda size: "".join(random.Random(7).choices(_LETTERS, k=size)),
    "escapes": lambda size: "\x1b]0;" * (size // 4),
    "cursor": lambda size: "error\x1b[1A\n" * (size // 10),
    "surrogates": lambda size: "a\ud800" * (size // 2),
    "quotes": lambda size: '"' * size,
    "frames": lambda size: "    at " * (size // 7),
    "errors": lambda size: "error: x\n" * (size // 9),
    "hits": lambda size: "src/a.py:1:x\n" * (size // 13),
    "slashes": lambda size: "a/" * (size // 2),
    "blanks": lambda size: " " * size + "x",
    "nul": lambda size: "\0a" * (size // 2),
}


@pytest.mark.parametrize("kind", list(_HUGE))
def test_a_fifth_of_a_megabyte_of_anything_is_quick(kind):
    """Time grows with the text and no faster: four times the text takes less than twelve times as long."""

    def passed_s(size):
        text = _HUGE[kind](size)
        started_s = time.thread_time()
        assert slimmer().slim(text).kept_tokens <= MAX_TOKENS
        return time.thread_time() - started_s

    passed_s(50_000)
    least = min(passed_s(50_000) for _ in range(3))
    assert min(passed_s(200_000) for _ in range(2)) < 12 * max(least, 0.005)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(_HUGE))
def test_five_megabytes_of_anything_take_a_second_or_two(kind):
    """Of this thread's time, on a slow machine; `benchmarks/context.py` has the figure."""
    text = _HUGE[kind](5_000_000)
    started_s = time.thread_time()
    slimmer(count=count_text).slim(text)
    assert time.thread_time() - started_s < 3.0


def test_the_example_prints_what_its_docstring_says():
    """A made-up log, and one that is piped in."""
    example = str(Path(__file__).parents[2] / "examples" / "slim_output.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, example]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=200)
    assert "1235: 10:20:34 step 1234: ERROR part-2.bin: checksum differs" in done.stdout
    done = subprocess.run(
        [*argv, "-", "ls"], env=env, input="short", capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("short\n")
